"""Mixins for the attention layers of vLLM's backends: `CompressedAttentionImpl`, and their common base."""

from __future__ import annotations

from collections.abc import Sequence
from typing import Any

import torch
from jaxtyping import Float
from torch import Tensor
from vllm.forward_context import get_forward_context

from keepset.errors import UnsupportedEngineError
from keepset.kernels.entry_format import Mixing
from keepset.kernels.paged import append_to_pages, paged_attention
from keepset.kernels.softmax import Softmax
from keepset.paged.engine import LayerAdapter
from keepset.paged.pages import Pages, StridedPages
from keepset.vllm.compat import fill_scales, softcap_of
from keepset.vllm.engine_context import CurrentStep, PlannedStep, active
from keepset.vllm.formats import format_of, own_mixing

_NOTHING = CurrentStep()
"""That of layers of no group."""


class CompressedImpl:
    """The base of the layers of all backends: their pages, and the recording of queries for later events."""

    num_heads: int
    num_kv_heads: int
    head_size: int
    scale: float

    unrotated = 0
    """How many of a query's first numbers are not rotated."""

    def __init__(self, *args: Any, **kwargs: Any) -> None:
        super().__init__(*args, **kwargs)
        context = active()
        assert context is not None
        self._context = context
        self._pages: tuple[Tensor, Pages] | None = None
        self._neighbours: Sequence[Any] = ()
        self._place = 0
        self._current = _NOTHING

    @property
    def softmax(self) -> Softmax:
        """The layer's softmax; its sinks are set when weights are loaded."""
        return Softmax(self.scale, softcap_of(self), getattr(self, "sinks", None))

    def fused_output_quant_supported(self, quant_key: Any) -> bool:
        """Return False: keepset's own attention has no scales for its output."""
        return False

    def fused_rope_kvcache_supported(self) -> bool:
        """Return False: the cache is written by `do_kv_cache_update`."""
        return False

    def make_pages(self, layer: Any, caches: Sequence[Tensor]) -> Pages:
        """Return a layer's cache as sub-pages, given the caches of all layers that share block tables.

        Args:
            layer: vLLM's attention layer.
            caches: vLLM's cache tensor of every layer that shares the block tables, this layer's among them.
        """
        raise NotImplementedError

    def pages(self, layer: Any, kv_cache: Tensor) -> Pages:
        """Return the layer's cache as sub-pages; those of all layers that share block tables are made at once.

        Args:
            layer: vLLM's attention layer.
            kv_cache: vLLM's cache tensor of the layer.
        """
        if self._pages is None or self._pages[0] is not kv_cache:
            caches = [kv_cache if neighbour is layer else neighbour.kv_cache for neighbour in self._neighbours]
            for neighbour, cache in zip(self._neighbours, caches, strict=True):
                if neighbour is layer or neighbour.impl._pages is None:
                    fill_scales(neighbour, cache)  # pages may be written to through another layer's
                    neighbour.impl._pages = cache, neighbour.impl.make_pages(neighbour, caches)
        assert self._pages is not None
        return self._pages[1]

    def belong_to(self, layers: Sequence[Any], layer_index: int, current: CurrentStep) -> None:
        """Note the layer of this implementation, whose cache is about to be made; forget an earlier cache.

        Args:
            layers: vLLM's layers that share block tables.
            layer_index: the index of the layer among them, which is its place in the group.
            current: has the step that the layers compute next.
        """
        self._pages, self._neighbours, self._place, self._current = None, layers, layer_index, current

    def planned(self, layer: Any, metadata: Any) -> PlannedStep | None:
        """Return the step that a layer computes; None without metadata, and for layers that are not compressed.

        Args:
            layer: vLLM's layer.
            metadata: the metadata that vLLM passes to the layer; None in a run without metadata.

        Raises:
            UnsupportedEngineError: this is not the metadata that was made for the layer.
        """
        if metadata is None:
            return None
        if self._current is _NOTHING and layer.layer_name not in self._context.layers:
            return None
        step = self._current.planned
        if step is None or step.metadata is not metadata:
            raise UnsupportedEngineError("This vLLM passes its layers other metadata than keepset has made.")
        return step

    def queries_of(self, rows: Float[Tensor, "n numbers"]) -> Float[Tensor, "n query_heads head_dim"]:
        """Return the layer's queries by head, as methods see them."""
        return rows.unflatten(-1, (-1, self.head_size))

    def _whole(self, layer: Any, query: Tensor) -> Tensor:
        """Return queries in the model's dtype: some backends get them in 8 bits.

        Args:
            layer: vLLM's attention layer, which has the scale of 8-bit queries.
            query: the queries, `[tokens, query_heads, head_dim]`.
        """
        if query.dtype.itemsize > 1:
            return query
        return query.to(self._context.dtype) * layer._q_scale.to(self._context.dtype)

    def step_to_write(self, layer: Any, slot_mapping: Tensor) -> PlannedStep | None:
        """Return the step whose entries vLLM writes; None if the layer is not compressed, or the run has no metadata.

        Args:
            layer: vLLM's layer.
            slot_mapping: the slots that vLLM writes to.

        Raises:
            UnsupportedEngineError: the slots are not in the tensor that the plan has changed.
        """
        metadata: Any = get_forward_context().attn_metadata
        layer_metadata = metadata.get(layer.layer_name) if isinstance(metadata, dict) else None
        step = self.planned(layer, layer_metadata)
        if step is not None and step.plan.has_plain and step.slots != slot_mapping.data_ptr():
            raise UnsupportedEngineError("This vLLM writes to the cache by slots that keepset did not plan.")
        return step

    def record(self, layer: Any, step: PlannedStep | None, queries: Tensor) -> None:
        """Run the step's planned work for this layer, after its attention.

        Args:
            layer: vLLM's layer.
            step: the step; None if the layer is not compressed, or the run has no metadata.
            queries: queries of the step after rotation, `[tokens, query_heads, head_dim]`.
        """
        if step is not None and step.plan.in_layers:
            layer_index = self._place
            step.group.record(range(layer_index, layer_index + 1), step.plan, self._whole(layer, queries)[None])
        if step is not None and step.plan.dummy:
            self._context.buffers.leave(layer.layer_name, self._whole(layer, queries))
        if (projection := self._context.projections.get(layer.layer_name)) is not None:
            projection.hidden = None


class CompressedAttentionImpl(CompressedImpl):
    """Attends to the kept entries, and records queries for later events.

    These methods are for backends that store an entry's numbers in order, as those for GPUs do. `CPUMixin` and
    `RowsMixin` override them for others.
    """

    num_queries_per_kv: int

    def __init__(self, *args: Any, **kwargs: Any) -> None:
        super().__init__(*args, **kwargs)
        self._is_plain = False

    def belong_to(self, layers: Sequence[Any], layer_index: int, current: CurrentStep) -> None:
        super().belong_to(layers, layer_index, current)
        layer = layers[layer_index]
        self._is_plain = self.mixing(layer) is None and layer.layer_name not in self._context.projections

    def make_pages(self, layer: Any, caches: Sequence[Tensor]) -> Pages:
        return StridedPages(caches, self._place, format_of(layer, self._context.dtype))

    def mixing(self, layer: Any) -> Mixing | None:
        """Return how to mix the inputs of vLLM's backend if pages hold mixed rows; None if nothing is mixed.

        Attention of mixed queries, keys and values is the mixed output of the same attention.
        """
        return own_mixing(layer.kv_cache_dtype, self.head_size)

    def do_kv_cache_update(
        self, layer: Any, key: Tensor, value: Tensor, kv_cache: Tensor, slot_mapping: Tensor
    ) -> None:
        """Write new entries, `[tokens, kv_heads, head_dim]`; if heads have their own pages, to each head's own slots.

        Raises:
            UnsupportedEngineError: the slots are not those of the plan.
        """
        planned = self._current.planned if self._is_plain else None
        if planned is not None and planned.is_plain and planned.slots == slot_mapping.data_ptr():
            super().do_kv_cache_update(layer, key, value, kv_cache, slot_mapping)  # type: ignore[misc]
            return
        step = self.step_to_write(layer, slot_mapping)
        if step is None or step.plan.has_plain:
            mixing = self.mixing(layer)
            rows = (key, value) if mixing is None else (mixing.mixed(key), mixing.mixed(value))
            super().do_kv_cache_update(layer, *rows, kv_cache, slot_mapping)  # type: ignore[misc]
        if step is not None and step.plan.ragged is not None:
            self.append_ragged(layer, step, key, value, kv_cache)

    def append_ragged(self, layer: Any, step: PlannedStep, key: Tensor, value: Tensor, kv_cache: Tensor) -> None:
        """Write each head's new entries, `[tokens, kv_heads, head_dim]`, to the head's own slots.

        Args:
            layer: vLLM's attention layer.
            step: the step that is under way.
            key: the new keys, after rotation.
            value: the new values.
            kv_cache: vLLM's cache tensor of the layer.
        """
        ragged = step.plan.ragged
        assert ragged is not None and ragged.tokens is not None
        tokens, pages = ragged.tokens, self.pages(layer, kv_cache)
        append_to_pages(key, value, kv_cache, tokens, ragged.of_layer(self._place), pages.format)

    def attend_ragged(self, layer: Any, step: PlannedStep, query: Tensor, kv_cache: Tensor, output: Tensor) -> None:
        """Write the attention of rotated queries, `[tokens, query_heads, head_dim]`, over their own heads' entries.

        Args:
            layer: vLLM's attention layer.
            step: the step that is under way.
            query: the step's queries.
            kv_cache: vLLM's cache tensor of the layer.
            output: is overwritten with the attention, `[tokens, query_heads, head_dim]`.
        """
        ragged = step.plan.ragged
        assert ragged is not None and ragged.tokens is not None
        tokens, layout, bias = ragged.tokens, ragged.of_layer(self._place), step.group.columns.bias
        pages = self.pages(layer, kv_cache)
        assert isinstance(pages, StridedPages)
        paged_attention(query, pages.caches, self._place, tokens, layout, self.softmax, output, bias, pages.format)

    def forward(
        self,
        layer: Any,
        query: Tensor,
        key: Tensor,
        value: Tensor,
        kv_cache: Tensor,
        attn_metadata: Any,
        output: Tensor,
        *args: Any,
        **kwargs: Any,
    ) -> Tensor:
        """Run vLLM's attention, then the step's planned work for this layer; return `output`.

        Queries, `[tokens, query_heads, head_dim]`, are rotated. The new keys and values are in the cache already.
        `attn_metadata` is the result of `KeepBuilder.build`.
        """
        planned = self._current.planned if self._is_plain else None
        if planned is not None and planned.is_plain and planned.metadata is attn_metadata:
            inputs = query, key, value, kv_cache, attn_metadata, output
            return super().forward(layer, *inputs, *args, **kwargs)  # type: ignore[misc, no-any-return]
        step = self.planned(layer, attn_metadata)
        if step is None or step.plan.has_plain:
            mixing, mixed, attended = self.mixing(layer), query, output
            if mixing is not None:  # also without metadata, when vLLM measures how much memory a step takes
                mixed, attended = mixing.mixed_queries(query), torch.empty_like(output)
            super().forward(layer, mixed, key, value, kv_cache, attn_metadata, attended, *args, **kwargs)  # type: ignore[misc]
            if mixing is not None:
                mixing.unmixed(attended, output)
        if step is not None and step.plan.ragged is not None:
            self.attend_ragged(layer, step, self._whole(layer, query), kv_cache, output)
        self.record(layer, step, query)
        return output


# Not a base class, because a protocol's `__init__` would not call the backend's.
_adapter: type[LayerAdapter] = CompressedImpl
