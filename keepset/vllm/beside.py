"""Other KV connectors beside keepset: they see only those tokens of a request whose pages no compression writes to.

Connectors that cache prefixes elsewhere, such as vLLM's `OffloadingConnector`, file pages under hashes of tokens. That
is correct only for the first pages of a prompt, until its first compression (plain pages). So each connector runs as a
subclass, which sees only these tokens of every request. This module has the subclasses under the names of vLLM's
classes; a configuration chooses them by `"kv_connector_module_path": "keepset.vllm.beside"`.
"""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import replace
from functools import cache
from typing import Any

import torch
from vllm.config import VllmConfig
from vllm.distributed.kv_transfer.kv_connector.factory import KVConnectorFactory
from vllm.distributed.kv_transfer.kv_connector.v1.base import KVConnectorMetadata, KVConnectorRole, SupportsHMA
from vllm.v1.core.sched.output import SchedulerOutput
from vllm.v1.kv_cache_interface import KVCacheConfig
from vllm.v1.request import Request

from keepset.errors import UnsupportedEngineError
from keepset.vllm.engine_context import active
from keepset.vllm.manager import KeepManager
from keepset.vllm.settings import BESIDE

_MORE = 2
"""Tokens that a request shows behind its plain pages: connectors look for one token less than a prompt has, and some
for two less. They fill no page."""


class PlainRequest:
    """A request as another connector sees it. All other attributes are those of vLLM's request.

    Args:
        request: vLLM's request.
        limit: function that returns how many of its first tokens are plain; None for all, answer included.
        hash_size: tokens per hash of a block.
    """

    def __init__(self, request: Request, limit: Callable[[Request], int | None], hash_size: int) -> None:
        self._request, self._limit, self._hash_size = request, limit, hash_size

    def __getattr__(self, name: str) -> Any:
        return getattr(self._request, name)

    @property
    def limit(self) -> int | None:
        """How many of the first tokens are plain now."""
        return self._limit(self._request)

    def close(self) -> None:
        """Fix the current limit, because the request ends and its blocks are freed."""
        limit = self.limit
        self._limit = lambda _: limit

    @property
    def num_prompt_tokens(self) -> int:
        return self._shown(self._request.num_prompt_tokens)

    @property
    def num_tokens(self) -> int:
        return self._shown(self._request.num_tokens)

    @property
    def num_computed_tokens(self) -> int:
        return self._shown(self._request.num_computed_tokens)

    @property
    def prompt_token_ids(self) -> list[int]:
        return (self._request.prompt_token_ids or [])[: self.num_prompt_tokens]

    @property
    def all_token_ids(self) -> list[int]:
        return list(self._request.all_token_ids[: self.num_tokens])

    @property
    def block_hashes(self) -> list[Any]:
        limit = self.limit
        return self._request.block_hashes[: None if limit is None else limit // self._hash_size]

    def _shown(self, tokens: int) -> int:
        limit = self.limit
        return tokens if limit is None else min(tokens, limit + _MORE)


class PlainPrefixes:
    """A mixin for vLLM's connectors, by which they store and load only plain pages."""

    def __init__(self, vllm_config: VllmConfig, role: KVConnectorRole, kv_cache_config: KVCacheConfig) -> None:
        super().__init__(vllm_config, role, kv_cache_config)  # type: ignore[call-arg]
        self._views: dict[str, PlainRequest] = {}
        self._holding: set[str] = set()

    # --- in processes that compute

    def start_load_kv(self, forward_context: Any, **kwargs: Any) -> None:
        """Start to load pages, after events that still read them; steps without tokens do not execute events."""
        if forward_context.attn_metadata is None and (context := active()) is not None:
            context.events.run()
        super().start_load_kv(forward_context, **kwargs)  # type: ignore[misc]

    # --- in the process that schedules

    def on_new_request(self, request: Request) -> None:
        super().on_new_request(self._view(request))  # type: ignore[misc]

    def get_num_new_matched_tokens(self, request: Request, num_computed_tokens: int) -> tuple[int | None, bool]:
        """Return how many plain tokens can be loaded after those that are cached."""
        view = self._view(request)
        tokens, later = super().get_num_new_matched_tokens(view, num_computed_tokens)  # type: ignore[misc]
        if tokens is None:
            return None, False
        limit = view.limit
        if tokens <= 0 or (limit is not None and num_computed_tokens + tokens > limit):
            return 0, False
        return tokens, later

    def update_state_after_alloc(self, request: Request, blocks: Any, num_external_tokens: int) -> None:
        self._holding.add(request.request_id)
        super().update_state_after_alloc(self._view(request), blocks, num_external_tokens)  # type: ignore[misc]

    def build_connector_meta(self, scheduler_output: SchedulerOutput) -> KVConnectorMetadata:
        """Return the connector's message to its workers.

        A request whose pages are freed is reported as preempted. So the connector finishes storing them before this
        step writes to its pages.
        """
        freed = {name for name in self._holding if self._manager.is_released(name)}
        self._holding -= freed
        preempted = (scheduler_output.preempted_req_ids or set()) | freed
        new = []
        for request in scheduler_output.scheduled_new_reqs:
            after = request.num_computed_tokens + scheduler_output.num_scheduled_tokens[request.req_id]
            view = self._views[request.req_id]
            new.append(replace(request, prompt_token_ids=view.prompt_token_ids[:after]))
        seen = replace(scheduler_output, scheduled_new_reqs=new, preempted_req_ids=preempted)
        return super().build_connector_meta(seen)  # type: ignore[misc, no-any-return]

    def request_finished_all_groups(
        self, request: Request, block_ids: tuple[list[int], ...]
    ) -> tuple[bool, dict[str, Any] | None]:
        """Forget a request, whose pages are freed next; the connector sees only its plain pages."""
        view = self._view(request)
        view.close()
        del self._views[request.request_id]
        self._holding.discard(request.request_id)
        limit = view.limit
        plain = block_ids[0][: None if limit is None else limit // self._manager.block_size]
        return super().request_finished(view, plain)  # type: ignore[misc, no-any-return]

    def _view(self, request: Request) -> PlainRequest:
        if request.request_id not in self._views:
            hash_size = self._manager.block_pool.hash_block_size
            self._views[request.request_id] = PlainRequest(request, self._plain_tokens, hash_size)
        return self._views[request.request_id]

    def _plain_tokens(self, request: Request) -> int | None:
        """Return how many of a request's first tokens are plain; None for all."""
        return self._manager.plain_tokens(request)

    @property
    def _manager(self) -> KeepManager:
        """The manager of the only group of layers."""
        coordinator = self._kv_cache_manager.coordinator  # type: ignore[attr-defined]
        (manager,) = coordinator.single_type_managers
        assert isinstance(manager, KeepManager)
        return manager


class PlainChunks(PlainPrefixes):
    """A mixin like `PlainPrefixes` for LMCache's connector, which stores chunks of tokens by the end of a step.

    Raises:
        UnsupportedEngineError: LMCache is configured to store incomplete chunks.
    """

    def __init__(self, vllm_config: VllmConfig, role: KVConnectorRole, kv_cache_config: KVCacheConfig) -> None:
        super().__init__(vllm_config, role, kv_cache_config)
        if not self._lmcache_engine._discard_partial_chunks:  # type: ignore[attr-defined]
            raise UnsupportedEngineError(
                "Beside keepset LMCache may store only whole chunks, because the last one would have tokens behind a "
                "request's plain pages; leave LMCache's save_unfull_chunk out."
            )

    def start_load_kv(self, forward_context: Any, **kwargs: Any) -> None:
        """Load pages, after events that still read them, because LMCache writes to pages in its own stream."""
        loads = [request.load_spec for request in self._get_connector_metadata().requests]  # type: ignore[attr-defined]
        if any(spec is not None and spec.can_load for spec in loads) and torch.cuda.is_available():
            torch.cuda.current_stream().synchronize()
        super().start_load_kv(forward_context, **kwargs)

    def get_num_new_matched_tokens(self, request: Request, num_computed_tokens: int) -> tuple[int | None, bool]:
        if not request.skip_reading_prefix_cache:
            return super().get_num_new_matched_tokens(request, num_computed_tokens)
        # vLLM loads nothing for this request, and LMCache must know that, because it would expect the load.
        nothing = PlainRequest(request, lambda _: 0, 1)
        return super(PlainPrefixes, self).get_num_new_matched_tokens(nothing, num_computed_tokens)  # type: ignore[misc, no-any-return]

    def _plain_tokens(self, request: Request) -> int | None:
        """Return how many of a request's first tokens were plain; for LMCache it is an error if they become fewer.

        When their pages are freed, these tokens are already stored, and later ones are never plain.
        """
        return self._manager.shareable_tokens(request)


@cache
def _beside(name: str) -> type:
    connector = KVConnectorFactory.get_connector_class_by_name(name)
    plain = PlainChunks if name == "LMCacheConnectorV1" else PlainPrefixes
    return type(name, (plain, connector, SupportsHMA), {"__module__": __name__})


def __getattr__(name: str) -> type:
    if name not in BESIDE:
        raise AttributeError(f"{__name__} has no {name}: it has {', '.join(BESIDE)}.")
    return _beside(name)
