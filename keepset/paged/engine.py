"""What an engine with a paged cache must provide to run keepset: the interfaces of its adapter.

docs/engines.md says when each is called. vLLM's adapter (`keepset.vllm`) is written against them.
"""

from __future__ import annotations

from typing import Any, Protocol, runtime_checkable

import torch
from jaxtyping import Float, Int, Shaped
from torch import Tensor

from keepset.core.shapes import HiddenStates, Queries
from keepset.paged.fp8 import EightBits
from keepset.paged.step import StepBatch, StepPlan


@runtime_checkable
class Pages(Protocol):
    """One layer's cache, by sub-pages, in each process that computes.

    A block is `kv_heads` sub-pages, one of each head: sub-page `block * kv_heads + head`, and its slot
    `subpage * block_size + offset`. Numbers go on into the caches of the layers that follow among those with the same
    block tables, around in a circle: pages that requests share are dealt out through all of them.
    """

    @property
    def slots(self) -> int:
        """Entries that there is room for."""

    @property
    def head_dim(self) -> int:
        """Numbers of a key, and of a value."""

    @property
    def dtype(self) -> torch.dtype:
        """Of keys and values."""

    @property
    def entry_bytes(self) -> int:
        """Of an entry's key and value."""

    @property
    def eight_bits(self) -> EightBits | None:
        """How the cache's numbers are read, where they are of 8 bits."""

    @property
    def device(self) -> torch.device:
        """Where the cache lies."""

    @property
    def block_size(self) -> int:
        """Entries of a sub-page."""

    def read_keys(self, subpages: Int[Tensor, "*rows pages"]) -> Float[Tensor, "*rows entries head_dim"]:
        """Keys alone, in their own type."""

    def read(
        self, subpages: Int[Tensor, "*rows pages"]
    ) -> tuple[Shaped[Tensor, "*rows entries head_dim"], Shaped[Tensor, "*rows entries head_dim"]]:
        """Whole sub-pages, each row's pages joined.

        Args:
            subpages: their numbers, in the order of the entries.

        Returns:
            Keys and values as they lie in the cache, `entries` being `pages * block_size`. What lies beyond a head's
            own entries is whatever the page held before.
        """

    def write(
        self, keys: Shaped[Tensor, "n head_dim"], values: Shaped[Tensor, "n head_dim"], slots: Int[Tensor, " n"]
    ) -> None:
        """Puts entry `i` at `slots[i]`.

        Args:
            keys, values: after rotation, as they lie in the cache.
            slots: distinct and inside the cache: kernels check neither.
        """


@runtime_checkable
class StepAdapter(Protocol):
    """Between the engine's metadata of a step and keepset's, for a group of layers that share block tables."""

    def batch(self, metadata: Any) -> StepBatch:
        """The step as the engine scheduled it.

        Args:
            metadata: the engine's, with lengths and tables as if nothing had ever been dropped.

        Returns:
            The same in keepset's words; without requests for a dummy run.

        Raises:
            UnsupportedEngineError: the engine does not say what keepset needs to know.
        """

    def planned(self, metadata: Any, plan: StepPlan) -> Any:
        """The engine's metadata for what the layers really hold.

        Args:
            metadata: the engine's, as `batch` was given it.
            plan: the step's.

        Returns:
            The same with what `plan.shifted` says instead, where it says anything.
        """


@runtime_checkable
class LayerAdapter(Protocol):
    """One attention layer of the engine, in each process that computes.

    `layer`, `kv_cache` and `metadata` are whatever the engine gives its attention.
    """

    def pages(self, layer: Any, kv_cache: Any) -> Pages:
        """The layer's cache as sub-pages.

        Args:
            layer, kv_cache: the engine's.
        """


@runtime_checkable
class QueryProjection(Protocol):
    """How a layer makes queries of hidden states; only recipes that look at hidden states need it."""

    hidden: Float[Tensor, "tokens hidden"] | None
    """What entered the layer's attention in the forward under way."""

    def queries(self, hidden: HiddenStates) -> Queries:
        """Queries that the layer makes of other hidden states.

        Args:
            hidden: as they enter the layer's attention, after its norm.

        Returns:
            The queries before rotation, after whatever norm the layer gives them.
        """


@runtime_checkable
class SchedulerAdapter(Protocol):
    """The blocks of one group of layers, in the process that schedules."""

    def release(self, request_id: str, blocks: int) -> None:
        """Gives a request's first `blocks` blocks back to the pool, and keeps the others at their logical places.

        Args:
            request_id: the engine's name of it.
            blocks: from the request's first one on; those that went before are among them.
        """
