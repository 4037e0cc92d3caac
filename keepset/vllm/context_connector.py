"""`ContextConnector`: lets requests begin with saved contexts, through vLLM's interface for caches from elsewhere.

A request that names a context has only its question as a prompt. Placeholder tokens, as many as the context has, are
put in front, and vLLM is told that a connector has their cache. So vLLM allocates blocks, waits until they are filled,
and caches full ones under hashes that begin with the context's digest. Later requests find them like any cached prefix,
and only their own last blocks are filled.

A file can be gone when it is to be read, because another server has saved a newer version since. A request whose prompt
was found to begin with the context is then computed like any other. One that has named it ends with an error.
"""

from __future__ import annotations

from dataclasses import dataclass, field
from pathlib import Path
from typing import Any, NamedTuple

import torch
from vllm.config import VllmConfig
from vllm.distributed.kv_transfer.kv_connector.v1.base import KVConnectorRole, KVConnectorTransferResults
from vllm.logger import init_logger
from vllm.v1.core.sched.output import SchedulerOutput
from vllm.v1.kv_cache_interface import KVCacheConfig
from vllm.v1.outputs import KVConnectorOutput
from vllm.v1.request import Request, RequestStatus

from keepset.errors import KeepsetError
from keepset.paged.contexts import ContextPlacement
from keepset.vllm import stats
from keepset.vllm.connector import BlockCountConnector, EmptiedBlockCounts, StepMessage, hash_again
from keepset.vllm.context_transfer import ContextLoader, ContextSaver, LoadJob, SaveJob, at_rest
from keepset.vllm.contexts import ContextLibrary, OwnedContexts, SavedContext, check_save, queries_before
from keepset.vllm.engine_context import active
from keepset.vllm.manager import KeepManager
from keepset.vllm.request_options import RequestOptions
from keepset.vllm.settings import contexts_of, save_limit_of

logger = init_logger(__name__)

_PLACEMENTS = 1024
"""How many contexts' placements are cached."""


@dataclass
class ContextLoads(StepMessage):
    """A message to the workers that also names contexts to load and to save.

    Attributes:
        jobs, saves: the contexts.
        question: the number of the scheduler's question whether weights were changed; None if it knows.
    """

    jobs: list[LoadJob] = field(default_factory=list)
    saves: list[SaveJob] = field(default_factory=list)
    question: int | None = None


class _Asked(NamedTuple):
    """A request's context, its placement, whether it was found by the prompt's tokens, and the request's own salt."""

    context: SavedContext
    placement: ContextPlacement
    found: bool
    salt: str | None


class ContextConnector(BlockCountConnector):
    """The KV connector of engines with a folder of contexts."""

    def __init__(self, vllm_config: VllmConfig, role: KVConnectorRole, kv_cache_config: KVCacheConfig) -> None:
        super().__init__(vllm_config, role, kv_cache_config)
        folder = contexts_of(vllm_config)
        assert folder is not None
        self._asked: dict[str, _Asked] = {}
        self._placements: dict[str, ContextPlacement] = {}
        self._loading: dict[str, str] = {}
        self._to_load: list[LoadJob] = []
        self._loader: ContextLoader | None = None
        self._saver: ContextSaver | None = None
        self._limit = save_limit_of(vllm_config)
        self._saves: dict[str, tuple[OwnedContexts, Path]] = {}
        self._to_save: list[SaveJob] = []
        self._library = ContextLibrary(folder, vllm_config)
        self._question, self._answered = 0, True
        self._under_way: set[str] = set()  # when the connector was reset
        self._to_find: dict[str, str] = {}
        self._unread: set[str] = set()  # in a process that computes, until it tells the scheduler
        self._lost: set[str] = set()
        self._anew: set[str] = set()
        if self._limit is not None and role == KVConnectorRole.SCHEDULER:
            OwnedContexts.clear_unfinished(folder)

    # --- in processes that compute

    def register_kv_caches(self, kv_caches: dict[str, torch.Tensor]) -> None:
        self._cache, context = next(iter(kv_caches.values())), active()
        assert context is not None and context.weights is not None
        context.weights.begin()

    def start_load_kv(self, forward_context: Any, **kwargs: Any) -> None:
        super().start_load_kv(forward_context, **kwargs)
        metadata, context = self._message, active()
        assert isinstance(metadata, ContextLoads) and context is not None
        if self._loader is None or self._saver is None:
            self._loader, self._saver = ContextLoader(context, self._cache), ContextSaver(context)
        idle = forward_context.attn_metadata is None
        # Saving comes first, because freed blocks may be given to other requests in this step.
        self._saver.start(metadata.saves, idle)
        self._loader.start(metadata.jobs, idle, metadata.ended)

    def get_transfer_results(self, finished_req_ids: set[str]) -> KVConnectorTransferResults:
        assert self._loader is not None and self._saver is not None
        done, failed = self._loader.finish()
        for job, sentence in failed:
            if job.found:
                logger.warning("Request %s is computed without its context: %s", job.request, sentence)
                self._unread.add(job.request)
            else:
                logger.error("Request %s: %s", job.request, sentence)
                self._failed.add(job.request)
        results = super().get_transfer_results(finished_req_ids)
        results.finished_recving |= done | self._unread
        results.finished_sending |= self._saver.finish()
        return results

    def build_connector_worker_meta(self) -> EmptiedBlockCounts | None:
        """Return what the scheduler must know after a step."""
        report, metadata, context = super().build_connector_worker_meta(), self._message, active()
        if self._unread:
            report = report or EmptiedBlockCounts()
            report.lost, self._unread = self._unread, set()
        if isinstance(metadata, ContextLoads) and metadata.question is not None:
            assert context is not None and context.weights is not None
            report = report or EmptiedBlockCounts()
            process = metadata.question, self._vllm_config.parallel_config.rank
            report.weights[process] = context.weights.change()
        return report

    # --- in the process that schedules

    def reset_cache(self) -> bool:
        """Forget placements and what was read of files, and ask the workers whether weights were changed.

        Until they have answered, requests that may begin with a context wait, and nothing is saved.
        """
        self._placements.clear()
        self._library.forget(self._library.changed)
        self._question, self._answered, self._under_way = self._question + 1, False, set(self._known)
        return True

    def _answer(self, changed: str) -> None:
        """Take in whether weights were changed: contexts that were built before are then served no more."""
        self._answered = True
        if changed == self._library.changed:
            return
        self._library.forget(changed)
        for name in self._under_way:
            self._saves.pop(name, None)  # entries of both
        for name, context_request in self._asked.items():
            known_request, context = self._known[name], context_request.context
            sentence = self._library.objection(context.name, context.contents)
            if sentence and not known_request.denied:
                logger.error("Request %s: %s", name, sentence)
                stats.refused(known_request.ticket, sentence)
                known_request.denied, known_request.request.skip_reading_prefix_cache = True, False

    def _grant(self, request: Request, options: RequestOptions) -> None:
        if options.save is not None:
            check_save(self._limit, options.save, _objection(request))
        if options.context is not None:
            self._ask(request, options)
        elif not self._compress(request, options):
            self._find(request, options.owner)
        if options.save is not None:
            owned = OwnedContexts(self._library.folder, options.owner)
            self._saves[request.request_id] = owned, owned.unfinished(options.save)

    def _find(self, request: Request, owner: str) -> None:
        """Make a request begin with the context that its prompt begins with, if there is one.

        Args:
            request: vLLM's request.
            owner: the client whose contexts may be used.
        """
        if not request.prompt_token_ids or _objection(request):
            return
        if not self._answered:
            self._to_find[request.request_id] = owner
            return
        context = self._library.beginning(request.prompt_token_ids, owner)
        try:
            if context is not None:
                self._begin(request, context, found=True)
        except KeepsetError as error:
            logger.error("Request %s: %s", request.request_id, error)

    def _ask(self, request: Request, options: RequestOptions) -> None:
        """Put the tokens of a context in front of a request's prompt, which is a question about it.

        Args:
            request: vLLM's request, whose prompt is changed.
            options: what its client asks for; names the context.
        """
        assert options.context is not None
        context, prompt = self._library.named(options.context, options.owner), request.prompt_token_ids
        if objection := _objection(request):
            raise KeepsetError(f"A question to a context is {objection}.")
        assert prompt is not None
        question, begins = self._library.question(context, prompt)
        if not begins:
            if options.save is not None:
                raise KeepsetError(
                    f"A request that only names context {context.name!r} cannot be saved, because the server does not "
                    "know the context's text: send the whole text, and then the question."
                )
            # The context's tokens may be any, because they are not computed.
            request.prompt_token_ids = [0] * context.tokens + question
            request._all_token_ids[:] = request.prompt_token_ids
            request.num_prompt_tokens = len(request.prompt_token_ids)
            stats.in_front(options.ticket, context.tokens, request.num_prompt_tokens)
        self._begin(request, context, found=False)

    def _begin(self, request: Request, context: SavedContext, found: bool) -> None:
        """File the context's blocks under its digest, which replaces its tokens in the hashes.

        Args:
            request: vLLM's request.
            context: the context.
            found: whether the prompt begins with the context's text; else the client has named the context.
        """
        if len(self._placements) > _PLACEMENTS:
            self._placements.clear()
        if context.digest not in self._placements:
            spec: Any = self._manager.kv_cache_spec
            self._placements[context.digest] = self._placed(context, spec.block_size, spec.num_kv_heads)
        placement = self._placements[context.digest]
        tokens, salt = request._all_token_ids[: context.tokens], request.cache_salt
        request._all_token_ids[: context.tokens] = [0] * context.tokens
        hash_again(request, f"keepset {self._salt} {context.digest} {salt or ''}")
        request._all_token_ids[: context.tokens] = tokens
        self._manager.begin(request.request_id, request.block_hashes, placement, context.plan)
        self._asked[request.request_id] = _Asked(context, placement, found, salt)
        if context.owner:
            OwnedContexts(self._library.folder, context.owner).touch(context.path)

    def _compute(self, name: str) -> None:
        """Make a request that begins with a context begin with nothing, because no blocks of it could be filled."""
        request, context_request = self._known[name].request, self._asked.pop(name)
        hash_again(request, context_request.salt)
        assert self._kv_cache_manager is not None
        self._kv_cache_manager.free(request)
        self._manager.leave(name)
        request.num_computed_tokens = 0
        self._anew.add(name)  # ranks that could read the file forget it

    def _placed(self, context: SavedContext, block_size: int, kv_heads: int) -> ContextPlacement:
        ranks = self._vllm_config.parallel_config.tensor_parallel_size
        if context.counts.shape[1] != ranks * kv_heads:
            raise KeepsetError(
                f"Context {context.name!r} cannot be served: its layers have {context.counts.shape[1]} KV heads, which "
                f"{ranks} processes with {kv_heads} each do not divide."
            )
        shared = context.recipe is None
        return ContextPlacement.of(context.counts, context.tokens, block_size, ranks, shared)

    def get_num_new_matched_tokens(self, request: Request, num_computed_tokens: int) -> tuple[int | None, bool]:
        name = request.request_id
        if not self._answered and (name in self._to_find or (name in self._asked and not self._known[name].denied)):
            return None, False
        if name in self._to_find:
            try:
                self._find(request, self._to_find.pop(name))
            except Exception:  # as for a new request
                logger.exception("Request %s begins with no context.", name)
            if name in self._asked:  # in the next step vLLM looks for its pages
                return None, False
        context_request = self._asked.get(name)
        if context_request is None or self._known[name].denied:
            return super().get_num_new_matched_tokens(request, num_computed_tokens)
        # While one request loads the context, others wait for its pages.
        missing = (
            context_request.placement.shared
            and num_computed_tokens < context_request.placement.own * self._manager.block_size
        )
        if missing and context_request.context.digest in self._loading:
            return None, False
        return context_request.placement.tokens - num_computed_tokens, True

    def update_state_after_alloc(self, request: Request, blocks: Any, num_external_tokens: int) -> None:
        super().update_state_after_alloc(request, blocks, num_external_tokens)
        name = request.request_id
        if name not in self._asked or self._known[name].denied or not num_external_tokens:
            return
        context, placement, found, _ = self._asked[name]
        whole = not placement.shared
        if num_external_tokens > placement.tokens - placement.own * self._manager.block_size:
            whole = True
            self._loading[context.digest] = name
        stats.context_used(context.title, whole)
        table = blocks.get_block_ids()[0]
        self._to_load.append(LoadJob(name, context, placement, table, whole, found))

    def build_connector_meta(self, scheduler_output: SchedulerOutput) -> ContextLoads:
        expected = super().build_connector_meta(scheduler_output)
        loads = ContextLoads(**vars(expected), jobs=self._to_load, saves=self._to_save)
        loads.question = None if self._answered else self._question
        loads.ended |= self._anew
        self._to_load, self._to_save, self._anew = [], [], set()
        return loads

    def update_connector_output(self, connector_output: KVConnectorOutput) -> None:
        super().update_connector_output(connector_output)
        report = connector_output.kv_connector_worker_meta
        report = report if isinstance(report, EmptiedBlockCounts) else EmptiedBlockCounts()
        weights = report.weights
        if changes := [weights[process] for process in sorted(weights) if process[0] == self._question]:
            self._answer(" ".join(changes).strip())
        finished = connector_output.finished_recving or set()
        self._loading = {digest: name for digest, name in self._loading.items() if name not in finished}
        self._lost |= report.lost  # by one rank, while others may still read
        for name in self._lost & finished & self._asked.keys():
            self._compute(name)
        self._lost -= finished

        for name in connector_output.finished_sending or ():
            owned, path = self._saves.pop(name)
            try:
                if path.is_file() and self._limit is not None:
                    owned.commit(path, self._limit, self._used)
            except (KeepsetError, OSError) as error:
                logger.error("Request %s: not saved: %s", name, error)

    def request_finished_all_groups(self, request: Request, block_ids: Any) -> tuple[bool, dict[str, Any] | None]:
        saves = self._save(request)
        self._to_find.pop(request.request_id, None)
        context_request, known_request = self._asked.pop(request.request_id, None), self._known.get(request.request_id)
        if (
            context_request
            and known_request
            and request.status == RequestStatus.FINISHED_ERROR
            and not known_request.denied
        ):
            is_there, name = context_request.context.path.is_file(), repr(context_request.context.name)
            gone = f"Context {name} was replaced or deleted before it was loaded: ask again."
            stats.refused(
                known_request.ticket, f"Context {name} cannot be loaded: build it again." if is_there else gone
            )
        if context_request is not None and context_request.context.owner:
            OwnedContexts(self._library.folder, context_request.context.owner).sweep(self._limit, self._used)
        self._loading = {digest: name for digest, name in self._loading.items() if name != request.request_id}
        super().request_finished_all_groups(request, block_ids)
        return saves, None

    def _save(self, request: Request) -> bool:
        """Return whether a request's blocks must be kept until they are saved."""
        name, length = request.request_id, request.num_computed_tokens
        if name not in self._saves:
            return False
        ended = request.status in (RequestStatus.FINISHED_STOPPED, RequestStatus.FINISHED_LENGTH_CAPPED)
        if not ended or not self._answered or not 0 < length <= request.num_tokens or self._known[name].denied:
            del self._saves[name]
            return False
        context_request, request_recipe = self._asked.get(name), self._known[name].plan.recipe
        recipe = None if request_recipe is None else str(request_recipe)
        recipe = recipe if context_request is None else context_request.context.contents.header.recipe
        blocks = [block.block_id for block in self._manager.req_to_blocks[name]]
        model, tokens = self._vllm_config.model_config.model, list(request.all_token_ids[:length])
        path = self._saves[name][1]
        rests = at_rest(recipe, length > request.num_prompt_tokens)
        next_event = None
        if rests.schedule.every is not None:  # the count goes on, but the file has no queries that were recorded
            due = self._manager.next_event(request, length)
            next_event = max(length + rests.schedule.every if due is None else due, length + queries_before(rests))
        fingerprint = self._library.fingerprint
        self._to_save.append(SaveJob(name, path, str(rests), model, fingerprint, tokens, next_event, blocks))
        return True

    @property
    def _used(self) -> set[Path]:
        """The files that requests still load from."""
        return {context_request.context.path for context_request in self._asked.values()}

    @property
    def _manager(self) -> KeepManager:
        (manager,) = self._managers
        return manager


def _objection(request: Request) -> str:
    """Return the condition that a request fails, so that it cannot begin with a context; "" if it fails none."""
    reasons = {
        "tokens, not embeddings": request.prompt_embeds is not None,
        "of the model itself, without LoRA": request.lora_request is not None,
        "text alone": bool(request.mm_features),
        "tokens whose log-probabilities are not asked for": request.skip_reading_prefix_cache,
    }
    return next((reason for reason, applies in reasons.items() if applies), "")
