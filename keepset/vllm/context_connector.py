"""`ContextConnector`: lets requests begin with saved contexts, by vLLM's way to get a prompt's cache from elsewhere.

A request that names a context has only its question as a prompt. It is given as many tokens in front as the context
has, which nobody looks at; vLLM is told that a connector has their cache. So it allocates blocks, waits until they are
filled, and caches those that are full under hashes that begin with the context's digest. Who comes later finds them as
it finds any prefix, and only its own last blocks are filled for it.
"""

from __future__ import annotations

from dataclasses import dataclass, field
from typing import Any, NamedTuple

import torch
from vllm.config import VllmConfig
from vllm.distributed.kv_transfer.kv_connector.v1.base import KVConnectorRole, KVConnectorTransferResults
from vllm.logger import init_logger
from vllm.v1.core.sched.output import SchedulerOutput
from vllm.v1.kv_cache_interface import KVCacheConfig
from vllm.v1.outputs import KVConnectorOutput
from vllm.v1.request import Request

from keepset.errors import KeepsetError
from keepset.paged.contexts import ContextPlacement
from keepset.vllm import stats
from keepset.vllm.connector import BlockCountConnector, ExpectedEvents
from keepset.vllm.context_loader import ContextLoader, LoadJob
from keepset.vllm.contexts import Context, ContextLibrary
from keepset.vllm.engine_context import active
from keepset.vllm.manager import KeepManager
from keepset.vllm.settings import KEY, contexts_of
from keepset.vllm.wishes import wishes_of

logger = init_logger(__name__)


@dataclass
class ContextLoads(ExpectedEvents):
    """To the workers: contexts to load, and requests that cannot have the one that they name."""

    jobs: list[LoadJob] = field(default_factory=list)
    refused: set[str] = field(default_factory=set)


class _Asked(NamedTuple):
    """A request's context, and where it lies."""

    context: Context
    placement: ContextPlacement


class ContextConnector(BlockCountConnector):
    """The connector."""

    def __init__(self, vllm_config: VllmConfig, role: KVConnectorRole, kv_cache_config: KVCacheConfig) -> None:
        super().__init__(vllm_config, role, kv_cache_config)
        folder = contexts_of(vllm_config)
        assert folder is not None
        self._asked: dict[str, _Asked | None] = {}  # None of a request that cannot have what it names
        self._placements: dict[str, ContextPlacement] = {}
        self._loading: dict[str, str] = {}
        self._to_load: list[LoadJob] = []
        self._refused: set[str] = set()
        self._loader: ContextLoader | None = None
        self._failed: set[str] = set()
        self._library = ContextLibrary(folder, vllm_config)

    # --- in processes that compute

    def register_kv_caches(self, kv_caches: dict[str, torch.Tensor]) -> None:
        self._cache = next(iter(kv_caches.values()))

    def start_load_kv(self, forward_context: Any, **kwargs: Any) -> None:
        metadata, context = self._connector_metadata, active()
        assert isinstance(metadata, ContextLoads) and context is not None
        if self._loader is None:
            self._loader = ContextLoader(context, self._cache)
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
        said = (parameters.extra_args or {}).get(KEY) if parameters is not None else None
        try:
            if said is not None:
                self._ask(request, wishes_of(said).context)
            elif request.prompt_token_ids and not _objection(request):
                context = self._library.beginning(request.prompt_token_ids)
                if context is not None:
                    self._begin(request, context)
        except KeepsetError as error:
            logger.error("Request %s: %s", request.request_id, error)
            if said is not None:
                self._asked[request.request_id] = None

    def _ask(self, request: Request, name: str) -> None:
        """Makes a context part of a request's prompt, which is a question to it."""
        context, question = self._library.named(name), request.prompt_token_ids
        if question is None or (objection := _objection(request)):
            raise KeepsetError(f"A question to a context is {objection or 'tokens, not embeddings'}.")
        opening = context.contents.opening
        if opening and question[: len(opening)] == opening:
            question = context.contents.joint + question[len(opening) :]
        longest = self._vllm_config.model_config.max_model_len
        if not question or context.tokens + len(question) >= longest:
            raise KeepsetError(
                f"Context {context.name!r} has {context.tokens} tokens and the question {len(question)}: there must be "
                f"one at least, and with an answer no more than the {longest} that this server takes."
            )
        # Any tokens will do for the context's: nobody computes them.
        request.prompt_token_ids = [0] * context.tokens + question
        request._all_token_ids[:] = request.prompt_token_ids
        request.num_prompt_tokens = len(request.prompt_token_ids)
        self._begin(request, context)

    def _begin(self, request: Request, context: Context) -> None:
        """Has the context's blocks found by its digest, which takes the place of its tokens in their hashes."""
        if context.digest not in self._placements:
            spec: Any = self._manager.kv_cache_spec
            self._placements[context.digest] = self._placed(context, spec.block_size, spec.num_kv_heads)
        placement = self._placements[context.digest]
        tokens = request._all_token_ids[: context.tokens]
        request._all_token_ids[: context.tokens] = [0] * context.tokens
        request.cache_salt = f"keepset {context.digest} {request.cache_salt or ''}"
        request.block_hashes = []
        request.update_block_hashes()
        request._all_token_ids[: context.tokens] = tokens
        self._manager.begin(request.request_id, request.block_hashes, placement)
        self._asked[request.request_id] = _Asked(context, placement)

    def _placed(self, context: Context, block_size: int, kv_heads: int) -> ContextPlacement:
        ranks = self._vllm_config.parallel_config.tensor_parallel_size
        if context.counts.shape[1] != ranks * kv_heads:
            raise KeepsetError(
                f"Context {context.name!r} cannot be served: its layers have {context.counts.shape[1]} KV heads, which "
                f"{ranks} processes with {kv_heads} each do not divide."
            )
        return ContextPlacement.of(context.counts, context.tokens, block_size, ranks)

    def get_num_new_matched_tokens(self, request: Request, num_computed_tokens: int) -> tuple[int | None, bool]:
        name = request.request_id
        if name not in self._asked:
            return 0, False
        asked = self._asked[name]
        if asked is None:
            return request.num_tokens - num_computed_tokens, True
        # While the first of them is loaded, others wait for its pages.
        missing = num_computed_tokens < asked.placement.own * self._manager.block_size
        if missing and asked.context.digest in self._loading:
            return None, False
        return asked.placement.tokens - num_computed_tokens, True

    def update_state_after_alloc(self, request: Request, blocks: Any, num_external_tokens: int) -> None:
        name = request.request_id
        if name not in self._asked or not num_external_tokens:
            return
        asked = self._asked[name]
        if asked is None:
            self._refused.add(name)
            return
        context, placement = asked
        whole = num_external_tokens > placement.tokens - placement.own * self._manager.block_size
        if whole:
            self._loading[context.digest] = name
        stats.context_used(context.name, whole)
        table = blocks.get_block_ids()[0]
        self._to_load.append(LoadJob(name, context.path, context.digest, placement, context.counts, table, whole))

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


def _objection(request: Request) -> str:
    """Why a request cannot begin with a context, if it cannot."""
    reasons = {
        "of the model itself, without LoRA": request.lora_request is not None,
        "text alone": bool(request.mm_features),
        "tokens whose log-probabilities are not asked for": request.skip_reading_prefix_cache,
    }
    return next((reason for reason, applies in reasons.items() if applies), "")
