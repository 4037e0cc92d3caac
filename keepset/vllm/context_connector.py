"""`ContextConnector`: lets requests begin with saved contexts, by vLLM's way to get a prompt's cache from elsewhere.

A request that names a context has only its question as a prompt. It is given as many tokens in front as the context
has, which nobody looks at; vLLM is told that a connector has their cache. So it allocates blocks, waits until they are
filled, and caches those that are full under hashes that begin with the context's digest. Who comes later finds them as
it finds any prefix, and only its own last blocks are filled for it.
"""

from __future__ import annotations

from dataclasses import dataclass, field
from typing import Any

import torch
from vllm.config import VllmConfig
from vllm.distributed.kv_transfer.kv_connector.v1.base import KVConnectorRole, KVConnectorTransferResults
from vllm.logger import init_logger
from vllm.v1.core.sched.output import SchedulerOutput
from vllm.v1.kv_cache_interface import KVCacheConfig
from vllm.v1.outputs import KVConnectorOutput
from vllm.v1.request import Request

from keepset.errors import KeepsetError
from keepset.vllm.connector import BlockCountConnector, ExpectedEvents
from keepset.vllm.context_loader import ContextLoader, LoadJob
from keepset.vllm.contexts import Context, ContextLibrary, context_named_by
from keepset.vllm.engine_context import active
from keepset.vllm.manager import KeepManager
from keepset.vllm.settings import contexts_of

logger = init_logger(__name__)


@dataclass
class ContextLoads(ExpectedEvents):
    """To the workers: contexts to load, and requests that cannot have the one that they name."""

    jobs: list[LoadJob] = field(default_factory=list)
    refused: set[str] = field(default_factory=set)


@dataclass
class _Asked:
    """A request's context, or why it cannot have it."""

    context: Context | None
    sentence: str = ""


class ContextConnector(BlockCountConnector):
    """The connector."""

    def __init__(self, vllm_config: VllmConfig, role: KVConnectorRole, kv_cache_config: KVCacheConfig) -> None:
        super().__init__(vllm_config, role, kv_cache_config)
        folder = contexts_of(vllm_config)
        assert folder is not None
        self._asked: dict[str, _Asked] = {}
        self._loading: dict[str, str] = {}
        self._to_load: list[LoadJob] = []
        self._refused: set[str] = set()
        self._loader: ContextLoader | None = None
        self._failed: set[str] = set()
        spec: Any = kv_cache_config.kv_cache_groups[0].kv_cache_spec
        if role == KVConnectorRole.SCHEDULER:
            self._library = ContextLibrary(folder, vllm_config, spec.layers, spec.num_kv_heads, spec.block_size)

    # --- in processes that compute

    def register_kv_caches(self, kv_caches: dict[str, torch.Tensor]) -> None:
        self._device = next(iter(kv_caches.values())).device

    def start_load_kv(self, forward_context: Any, **kwargs: Any) -> None:
        metadata, context = self._connector_metadata, active()
        assert isinstance(metadata, ContextLoads) and context is not None
        if self._loader is None:
            self._loader = ContextLoader(context, self._device)
        self._loader.start(metadata.jobs, forward_context.attn_metadata is None)
        self._failed |= metadata.refused

    def get_transfer_results(self, finished_req_ids: set[str]) -> KVConnectorTransferResults:
        assert self._loader is not None
        done, failed = self._loader.finish()
        for name, sentence in failed.items():
            logger.error("Request %s: %s", name, sentence)
        failures, self._failed = self._failed | failed.keys(), set()
        return KVConnectorTransferResults(set(), done | failures, failures)

    # --- in the process that schedules

    def on_new_request(self, request: Request) -> None:
        super().on_new_request(request)
        parameters = request.sampling_params
        try:
            name = context_named_by(None if parameters is None else parameters.extra_args)
            if name is None:
                return
            context = self._library.named(name)
            self._begin(request, context)
            self._asked[request.request_id] = _Asked(context)
        except KeepsetError as error:
            logger.error("Request %s: %s", request.request_id, error)
            self._asked[request.request_id] = _Asked(None, str(error))

    def _begin(self, request: Request, context: Context) -> None:
        """Puts the context in front of a request's prompt."""
        tokens, longest = context.placement.tokens, self._vllm_config.model_config.max_model_len
        if request.prompt_token_ids is None:
            raise KeepsetError(f"A question to context {context.name!r} must be tokens, not embeddings.")
        if tokens + request.num_prompt_tokens >= longest:
            raise KeepsetError(
                f"Context {context.name!r} has {tokens} tokens and the question {request.num_prompt_tokens}: with an "
                f"answer that is more than the {longest} that this server takes."
            )
        if request.skip_reading_prefix_cache:
            raise KeepsetError(
                f"There are no log-probabilities of the tokens of context {context.name!r}: ask for none."
            )
        # Any token will do: none of them is computed, and the hash of the first block says whose they are.
        request.prompt_token_ids = [0] * tokens + list(request.prompt_token_ids)
        request._all_token_ids[:0] = [0] * tokens
        request.num_prompt_tokens += tokens
        request.cache_salt = f"keepset {context.digest} {request.cache_salt or ''}"
        request.block_hashes = []
        request.update_block_hashes()
        self._manager.begin(request.request_id, request.block_hashes, context.placement)

    def get_num_new_matched_tokens(self, request: Request, num_computed_tokens: int) -> tuple[int | None, bool]:
        asked = self._asked.get(request.request_id)
        if asked is None:
            return 0, False
        if asked.context is None:
            return request.num_tokens - num_computed_tokens, True
        placement = asked.context.placement
        # While the first of them is loaded, others wait for its pages.
        if num_computed_tokens < placement.own * self._manager.block_size and asked.context.digest in self._loading:
            return None, False
        return placement.tokens - num_computed_tokens, True

    def update_state_after_alloc(self, request: Request, blocks: Any, num_external_tokens: int) -> None:
        asked = self._asked.get(request.request_id)
        if asked is None or not num_external_tokens:
            return
        if asked.context is None:
            self._refused.add(request.request_id)
            return
        context = asked.context
        whole = num_external_tokens > context.placement.tokens - context.placement.own * self._manager.block_size
        if whole:
            self._loading[context.digest] = request.request_id
        table = blocks.get_block_ids()[0]
        self._to_load.append(
            LoadJob(request.request_id, context.path, context.digest, context.placement, context.counts, table, whole)
        )

    def build_connector_meta(self, scheduler_output: SchedulerOutput) -> ContextLoads:
        expected = super().build_connector_meta(scheduler_output)
        loads = ContextLoads(expected.keys, self._to_load, self._refused)
        self._to_load, self._refused = [], set()
        return loads

    def update_connector_output(self, connector_output: KVConnectorOutput) -> None:
        super().update_connector_output(connector_output)
        finished = connector_output.finished_recving or set()
        self._loading = {digest: name for digest, name in self._loading.items() if name not in finished}

    def request_finished_all_groups(self, request: Request, block_ids: Any) -> tuple[bool, dict[str, Any] | None]:
        self._asked.pop(request.request_id, None)
        self._manager.forget(request.request_id)
        self._loading = {digest: name for digest, name in self._loading.items() if name != request.request_id}
        return super().request_finished_all_groups(request, block_ids)

    @property
    def _manager(self) -> KeepManager:
        (manager,) = self._managers
        assert isinstance(manager, KeepManager)
        return manager
