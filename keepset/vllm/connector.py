"""`BlockCountConnector`: messages between the scheduler and the layers, through vLLM's interface of KV connectors.

Most recipes need no message, because lengths determine how many entries they drop. For the others, the workers report
to the scheduler how many blocks were emptied.

The scheduler tells the workers which requests have their own budgets. Layers identify requests by their pages, so such
a request gets its first page a step before it begins, and the message names this page. No keys and values are moved.
"""

from __future__ import annotations

import math
import secrets
from collections.abc import Mapping
from dataclasses import dataclass, field
from functools import cached_property
from typing import Any, TypeVar

from vllm.config import VllmConfig
from vllm.distributed.kv_transfer.kv_connector.v1.base import (
    KVConnectorBase_V1,
    KVConnectorMetadata,
    KVConnectorRole,
    KVConnectorTransferResults,
    KVConnectorWorkerMetadata,
    SupportsHMA,
)
from vllm.logger import init_logger
from vllm.v1.core.sched.output import SchedulerOutput
from vllm.v1.kv_cache_interface import KVCacheConfig
from vllm.v1.outputs import KVConnectorOutput
from vllm.v1.request import Request

from keepset.core.budget import Ranges, runs
from keepset.errors import KeepsetError, UnsupportedEngineError
from keepset.paged.eviction import RequestPlan
from keepset.paged.layer_group import LayerGroup
from keepset.paged.layout_table import RequestKey
from keepset.recipe import Recipe
from keepset.vllm import stats
from keepset.vllm.compat import drafted_tokens
from keepset.vllm.engine_context import EngineContext, active
from keepset.vllm.manager import KeepManager
from keepset.vllm.recipe_support import rotates
from keepset.vllm.request_options import SIGNING_KEY, RequestOptions, from_signed, has_key, parse_options
from keepset.vllm.settings import KEY, is_compressed, is_signed, recipe_of
from keepset.vllm.spec import KeepSpec

logger = init_logger(__name__)

Part = TypeVar("Part")

PlanAndPages = tuple[RequestPlan, list[int]]
"""How a request is compressed, and its first page in each group of compressed layers."""


@dataclass
class StepMessage(KVConnectorMetadata):
    """The scheduler's message to the workers with each step: facts about requests that only the scheduler knows.

    Attributes:
        keys: the requests that reach an event, by the page that holds their newest token.
        begin: requests with plans of their own that begin with the next step.
        ended: requests that have ended or were preempted.
        refused: requests whose options cannot be granted.
    """

    keys: dict[int, RequestKey] = field(default_factory=dict)
    begin: dict[str, PlanAndPages] = field(default_factory=dict)
    ended: set[str] = field(default_factory=set)
    refused: set[str] = field(default_factory=set)


@dataclass
class EmptiedBlockCounts(KVConnectorWorkerMetadata):
    """A message to the scheduler: how many leading blocks a request's layers no longer use.

    All processes that have layers of a group report an event in the same step.

    Attributes:
        blocks: the numbers of blocks.
        weights: if the scheduler has asked, by the number of its question and by process: a digest of weights that were
            changed since they were loaded; "" for others.
        lost: requests whose context a process could not load, and whose tokens can be computed instead.
        turns: requests that can go on with a conversation, and for each process that tells how many leading blocks of
            each group of layers are empty then; no numbers if the conversation is lost.
        written: files of conversations, and for each process that tells their bytes; negative if it could not write.
    """

    blocks: dict[RequestKey, int] = field(default_factory=dict)
    weights: dict[tuple[int, int], str] = field(default_factory=dict)
    lost: set[str] = field(default_factory=set)
    turns: dict[str, list[list[int]]] = field(default_factory=dict)
    written: dict[str, list[int]] = field(default_factory=dict)

    def aggregate(self, other: KVConnectorWorkerMetadata) -> EmptiedBlockCounts:
        assert isinstance(other, EmptiedBlockCounts)
        blocks, other_blocks = self.blocks, other.blocks
        shared = {key: min(blocks[key], other_blocks[key]) for key in blocks.keys() & other_blocks.keys()}
        return EmptiedBlockCounts(
            blocks | other_blocks | shared,
            self.weights | other.weights,
            self.lost | other.lost,
            _of_both(self.turns, other.turns),
            _of_both(self.written, other.written),
        )


def _of_both(told: Mapping[str, list[Part]], others: Mapping[str, list[Part]]) -> dict[str, list[Part]]:
    """Return what two groups of processes have told, by name."""
    return {name: [*told.get(name, []), *others.get(name, [])] for name in (*told, *others)}


@dataclass
class KnownRequest:
    """Everything that the connector knows of one request, in the process that schedules.

    Attributes:
        request: vLLM's request.
        plan: how it is compressed.
        has_own: whether that is not the engine's way.
        ticket: the front end's ticket for it; "" if it has none.
        denied: whether its options cannot be granted, so that it ends with an error.
        next_event: the first event in any group of layers after the step before; infinite if there is none.
        preemptions: how often the request had been preempted when that was known: then its events come again.
    """

    request: Request
    plan: RequestPlan
    has_own: bool = False
    ticket: str = ""
    denied: bool = False
    next_event: float = 0
    preemptions: int = 0


def images_of(request: Request) -> Ranges | None:
    """Return the token ranges of a request's images and videos; None if its prompt consists of embeddings."""
    if request.prompt_embeds is not None:
        return None
    token_indices: list[int] = []
    for feature in request.mm_features:
        if feature.modality in ("image", "video"):
            first, is_embed = feature.mm_position.offset, feature.mm_position.is_embed
            offsets = range(feature.mm_position.length) if is_embed is None else is_embed.nonzero()[:, 0].tolist()
            token_indices += [first + offset for offset in offsets]
    return runs(sorted(token_indices))


def hash_again(request: Request, salt: str | None) -> None:
    """Hash a request's blocks with another salt, from which it depends who may share them.

    Args:
        request: vLLM's request, which is changed.
        salt: the salt; None for blocks that any request without a salt may share.
    """
    request.cache_salt, request.block_hashes = salt, []
    request.update_block_hashes()


class BlockCountConnector(KVConnectorBase_V1, SupportsHMA):
    """The KV connector of recipes whose counts come from the data, and of requests with their own budgets."""

    requires_kv_delivery = False
    keeps_conversations = False
    """Whether requests may be turns of conversations."""

    def __init__(self, vllm_config: VllmConfig, role: KVConnectorRole, kv_cache_config: KVCacheConfig) -> None:
        super().__init__(vllm_config, role, kv_cache_config)
        if recipe_of(vllm_config) is None:
            raise UnsupportedEngineError(
                'keepset\'s connector needs a recipe: give additional_config {"keepset": "..."}.'
            )
        self._message: KVConnectorMetadata | None = None
        self._known: dict[str, KnownRequest] = {}
        self._recipe = recipe_of(vllm_config) if is_compressed(vllm_config) else None
        self._beginning: dict[str, PlanAndPages] = {}
        self._waiting: set[str] = set()
        self._refused: set[str] = set()
        self._failed: set[str] = set()
        self._signed = is_signed(vllm_config)
        self._salt = secrets.token_hex(16)  # so no client can name the hashes of a context's pages
        if self._signed and role == KVConnectorRole.SCHEDULER and not has_key():
            raise UnsupportedEngineError(
                f"This engine takes only signed requests, and has no key in {SIGNING_KEY}: start the server with "
                "keepset serve, which makes a key."
            )

    def _nothing(self, *args: Any, **kwargs: Any) -> None:
        """Do nothing, because no keys and values are moved."""

    wait_for_layer_load = save_kv_layer = wait_for_save = _nothing

    # --- in processes that compute

    def bind_connector_metadata(self, connector_metadata: KVConnectorMetadata) -> None:
        """Keep the step's message where vLLM does not look: it calls a connector with metadata twice a layer."""
        self._message = connector_metadata

    def clear_connector_metadata(self) -> None:
        self._message = None

    def start_load_kv(self, forward_context: Any, **kwargs: Any) -> None:
        """Note which requests begin with their own budgets, and which end."""
        metadata, context = self._message, active()
        assert isinstance(metadata, StepMessage) and context is not None
        self._failed |= metadata.refused
        if not (metadata.ended or metadata.begin):
            return
        for number, group in self._groups(context).items():
            group.planner.requests.end(metadata.ended)
            for name, (plan, pages) in metadata.begin.items():
                group.planner.requests.begin(pages[number], 0, name, plan)

    def _groups(self, context: EngineContext) -> dict[int, LayerGroup]:
        """Return this process's groups of compressed layers by number; another stage may have all layers of one."""
        kept = [group for group in self._kv_cache_config.kv_cache_groups if isinstance(group.kv_cache_spec, KeepSpec)]
        return {number: context.groups[g.layer_names[0]] for number, g in enumerate(kept) if g.layer_names}

    def get_transfer_results(self, finished_req_ids: set[str]) -> KVConnectorTransferResults:
        """Return refused requests as requests whose caches could not be fetched, so that vLLM ends them."""
        failed, self._failed = self._failed, set()
        return KVConnectorTransferResults(set(), set(failed), failed)

    def build_connector_worker_meta(self) -> EmptiedBlockCounts | None:
        """Return how many blocks events emptied; every rank reports an event in the same step.

        Events are executed here, after a step, if vLLM writes to pages between two steps, as it does beside recurrent
        layers.
        """
        metadata, context = self._message, active()
        assert context is not None
        if isinstance(metadata, StepMessage):
            context.emptied_blocks.expect(metadata.keys)
        if self._kv_cache_config.needs_kv_cache_zeroing:  # before the next step clears or copies pages
            context.events.run()
        blocks = context.emptied_blocks.drain()
        return EmptiedBlockCounts(blocks) if blocks else None

    # --- in the process that schedules

    def on_new_request(self, request: Request) -> None:
        """Note the options of a request. If they cannot be granted, only this request ends with an error."""
        shared = None if self._recipe is None else self._recipe.located(())
        known_request = self._known[request.request_id] = KnownRequest(request, RequestPlan(shared))
        if drafted_tokens(self._vllm_config):
            self._managers[0].watch_drafts(request)
        try:
            options = self._options(request)
            known_request.ticket = options.ticket
            if (options.conversation is not None or options.forget) and not self.keeps_conversations:
                raise KeepsetError("This server keeps no conversations: start it with turns=True in its recipe.")
            self._grant(request, options)
        except Exception as error:  # no option and no broken file may stop other requests
            is_known = isinstance(error, KeepsetError)
            logger.error("Request %s: %s", request.request_id, error, exc_info=not is_known)
            self._deny(known_request, str(error) if is_known else "The server cannot do this; its log says why.")
        for manager in self._managers:  # the last token of an answer is never fed
            manager.expect(request.request_id, request.num_prompt_tokens + request.max_tokens - 1)

    def _deny(self, known_request: KnownRequest, why: str) -> None:
        """Make a request end with an error, and tell the front end why, if it has asked.

        Args:
            known_request: the request, which is marked as denied.
            why: the reason, one sentence.
        """
        stats.refused(known_request.ticket, why)
        known_request.denied = True
        known_request.request.skip_reading_prefix_cache = False  # else vLLM would not ask for its tokens

    def _options(self, request: Request) -> RequestOptions:
        """Return a request's options. Behind a front end that signs, only signed options count."""
        parameters = request.sampling_params
        value = (parameters.extra_args or {}).get(KEY) if parameters is not None else None
        if value is None:
            return RequestOptions()
        return from_signed(value) if self._signed else parse_options(value)

    def _grant(self, request: Request, options: RequestOptions) -> None:
        """Prepare a request's options. Raises KeepsetError if they cannot be granted.

        Args:
            request: vLLM's request.
            options: what its client asks for.
        """
        if options.context is not None:
            raise KeepsetError(f"There is no context {options.context!r}: this engine has no folder of contexts.")
        if options.save is not None:
            raise KeepsetError("This engine saves no contexts: it has no folder for them.")
        self._compress(request, options)

    def _compress(self, request: Request, options: RequestOptions) -> bool:
        """Compress a request by its own recipe if it needs one; return whether it does.

        Args:
            request: vLLM's request.
            options: what its client asks for.

        Raises:
            KeepsetError: the recipe cannot be used for the request.
        """
        images, engine = images_of(request), self._recipe
        model = self._vllm_config.model_config
        if options.kinds and not model.is_multimodal_model:
            raise KeepsetError(
                f"{KEY}: protect has {options.kinds[0]!r}, and this server's model takes no images: give ranges of "
                "tokens, such as [[0, 512]]."
            )
        located = engine is not None and bool(engine.budget.kinds) and images != ()
        request_recipe = options.recipe(engine, images) if options.is_own or located else None
        recipe = request_recipe if options.is_own else engine
        if images and recipe is not None and model.uses_mrope and rotates(recipe):
            raise KeepsetError(
                f"{recipe.method.name} rotates by one position for each token, and this model gives those of an image "
                'positions along several axes: send the image with "off": true, or without this recipe.'
            )
        if options.is_own or located:
            self._settle(request, request_recipe)
        return options.is_own or located

    def _settle(self, request: Request, recipe: Recipe | None) -> None:
        """Compress a request by its own recipe; None for no compression.

        Args:
            request: vLLM's request.
            recipe: the recipe; None for no compression.
        """
        known_request = self._known[request.request_id]
        known_request.plan, known_request.has_own = RequestPlan(recipe), True
        for manager in self._managers:
            manager.settle(request.request_id, known_request.plan)
        # It may not share pages with requests that have another budget.
        hash_again(request, f"keepset {self._salt} {request.request_id}")
        request.skip_reading_prefix_cache = False

    def get_num_new_matched_tokens(self, request: Request, num_computed_tokens: int) -> tuple[int | None, bool]:
        """Return how many tokens the connector loads; None makes a request wait for a step.

        For a refused request it is all remaining tokens, so that vLLM ends it.
        """
        name, known_request = request.request_id, self._known[request.request_id]
        if known_request.denied:
            return request.num_tokens - num_computed_tokens, True
        if not known_request.has_own or self._managers[0].is_reserved(name):
            return 0, False
        # One at a time, so that unused reserved blocks do not keep other requests out.
        if not self._beginning and self._managers[0].block_pool.get_num_free_blocks() >= len(self._managers):
            self._beginning[name] = known_request.plan, [manager.reserve(name) for manager in self._managers]
        return None, False

    def update_state_after_alloc(self, request: Request, blocks: Any, num_external_tokens: int) -> None:
        if num_external_tokens and self._known[request.request_id].denied:
            self._refused.add(request.request_id)

    def build_connector_meta(self, scheduler_output: SchedulerOutput) -> StepMessage:
        """Return the step's message to the workers: which requests reach an event, begin or have ended."""
        ended = scheduler_output.finished_req_ids | (scheduler_output.preempted_req_ids or set())
        # A request that could have begun but has not gives its block back and waits without one.
        managers = self._managers
        late = {name for name in self._waiting if managers[0].is_reserved(name)} if self._waiting else set()
        for manager in managers:
            for name in late:
                manager.withdraw(name)
        expected = StepMessage(begin=self._beginning, ended=ended | late, refused=self._refused)
        self._waiting, self._beginning, self._refused = set(self._beginning), {}, set()
        for name, tokens in scheduler_output.num_scheduled_tokens.items():
            known_request = self._known[name]
            request = known_request.request
            before, after = request.num_computed_tokens, request.num_computed_tokens + tokens
            if after >= known_request.next_event or request.num_preemptions != known_request.preemptions:
                self._expect_events(request, before, after, expected)
                events = [manager.next_event(request, after) for manager in managers]
                known_request.next_event = min((event for event in events if event is not None), default=math.inf)
                known_request.preemptions = request.num_preemptions
        return expected

    def _expect_events(self, request: Request, before: int, after: int, expected: StepMessage) -> None:
        """Add the events that a step brings due for a request to the message to the workers.

        Args:
            request: vLLM's request.
            before: its tokens before the step.
            after: its tokens after the step.
            expected: the message, which is changed.
        """
        for group, manager in enumerate(self._managers):
            if manager.due(request, before, after):
                page = manager.req_to_blocks[request.request_id][(after - 1) // manager.block_size].block_id
                expected.keys[page] = (request.request_id, request.num_preemptions, group)

    def update_connector_output(self, connector_output: KVConnectorOutput) -> None:
        """Free emptied blocks, unless the request has ended or was preempted since, so that its blocks are gone."""
        freed = connector_output.kv_connector_worker_meta
        if not isinstance(freed, EmptiedBlockCounts):
            return
        for (name, preemptions, group), blocks in freed.blocks.items():
            known_request = self._known.get(name)
            if (
                known_request
                and known_request.request.num_preemptions == preemptions
                and not known_request.request.is_finished()
            ):
                self._managers[group].release(name, blocks)

    def request_finished_all_groups(self, request: Request, block_ids: Any) -> tuple[bool, dict[str, Any] | None]:
        """Forget a request. Its blocks may be freed at once."""
        self._known.pop(request.request_id, None)
        for manager in self._managers:
            manager.forget(request.request_id)
        return False, None

    @cached_property
    def _managers(self) -> list[KeepManager]:
        """The managers of the groups of compressed layers."""
        assert self._kv_cache_manager is not None
        managers = self._kv_cache_manager.coordinator.single_type_managers
        return [manager for manager in managers if isinstance(manager, KeepManager)]
