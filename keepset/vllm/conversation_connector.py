"""`ConversationConnector`: lets requests go on with what the turn before has left in the pages.

vLLM is told that a connector has the cache of the prompt's beginning. The scheduler gives the request the pages of the
conversation in place of new ones, so nothing is loaded. The layers must know of it before its first step is planned:
they are told a step earlier, drop what does not stay, and report which pages are empty. Only then the request begins.

A conversation whose pages are given away is written to a file, if there is a folder: the workers copy its pages before
the step in which they are written to. A turn that goes on with it waits until all processes have read it.
"""

from __future__ import annotations

import json
from collections import defaultdict
from collections.abc import Iterator, Mapping, Sequence
from concurrent.futures import Future, wait
from dataclasses import dataclass, field
from functools import cached_property
from typing import Any, NamedTuple

import torch
from vllm.config import VllmConfig
from vllm.distributed.kv_transfer.kv_connector.v1.base import KVConnectorMetadata, KVConnectorRole
from vllm.logger import init_logger
from vllm.tokenizers import cached_tokenizer_from_config
from vllm.v1.core.sched.output import SchedulerOutput
from vllm.v1.kv_cache_interface import KVCacheConfig
from vllm.v1.outputs import KVConnectorOutput
from vllm.v1.request import Request, RequestStatus

from keepset.contexts.fingerprint import CHANGED
from keepset.core.roles import user_mark
from keepset.errors import KeepsetError
from keepset.paged.eviction import RequestPlan
from keepset.paged.turns import EndedTurn, NextTurn, begin_turn, choose_what_stays, forget_turns
from keepset.recording import RecordedFeatures
from keepset.vllm import stats
from keepset.vllm.connector import BlockCountConnector, EmptiedBlockCounts, StepMessage, hash_again
from keepset.vllm.contexts import EVERYBODY
from keepset.vllm.conversation import ComingTurn, Conversation, metadata_of
from keepset.vllm.conversations import Conversations
from keepset.vllm.engine_context import EngineContext, active
from keepset.vllm.manager import KeepManager
from keepset.vllm.page_files import PageFiles, ProcessPages
from keepset.vllm.questions import question_of
from keepset.vllm.request_options import NO_CONTEXTS, RequestOptions
from keepset.vllm.settings import spills_of
from keepset.vllm.spilled import FilePages, Spill, SpilledBytes, folder_of, identity_of, in_order, remove, stored_files
from keepset.vllm.window_pages import CopiedPages, WindowPages, copy_pages

logger = init_logger(__name__)

_PATIENCE = 0.01
"""Seconds for which a step without tokens waits for files, so that the engine's idle loop leaves time for reading."""


@dataclass
class TurnMessage(StepMessage):
    """A message to the workers that also names turns.

    Attributes:
        left: turns that have ended.
        coming: turns that begin with a later step.
        abandoned: the newest pages of turns that had ended earlier, with which none goes on; for each group.
        windows: pages of layers with windows that are copied before this step.
        spills: conversations that are written to files before this step.
        reading: by request, the pages that are read from a file before its turn begins.
        deleted: files that are deleted.
        is_early: whether this step is not planned yet when the workers get the message.
    """

    left: list[EndedTurn] = field(default_factory=list)
    coming: list[NextTurn] = field(default_factory=list)
    abandoned: list[list[int]] = field(default_factory=list)
    windows: list[CopiedPages] = field(default_factory=list)
    spills: list[Spill] = field(default_factory=list)
    reading: dict[str, FilePages] = field(default_factory=dict)
    deleted: list[str] = field(default_factory=list)
    is_early: bool = True


class Read(NamedTuple):
    """A turn whose conversation is being read from a file, with its pages and what the file holds."""

    coming: NextTurn
    pages: FilePages
    tensors: Future[dict[str, torch.Tensor]]


class Turn(NamedTuple):
    """A request that goes on with a conversation.

    Attributes:
        begun: what it has begun with.
        prompt: the prompt that the client has sent.
    """

    begun: Conversation
    prompt: list[int] | None


class ConversationConnector(BlockCountConnector):
    """The KV connector of recipes that compress conversations between turns."""

    keeps_conversations = True

    def __init__(self, vllm_config: VllmConfig, role: KVConnectorRole, kv_cache_config: KVCacheConfig) -> None:
        super().__init__(vllm_config, role, kv_cache_config)
        self._begun: dict[str, list[list[int]]] = {}  # in a process that computes, until it tells the scheduler
        # Requests that may be turns, and the names of their conversations; of these, the ones that go on with one.
        self._talking: dict[str, str | None] = {}
        self._owners: dict[str, str] = {}  # of what requests leave when they end; without one they leave nothing
        self._salts: dict[str, str | None] = {}  # that their clients give
        self._turns: dict[str, Turn] = {}
        self._coming: dict[str, ComingTurn] = {}
        self._left: list[tuple[Conversation, EndedTurn]] = []
        self._to_begin: list[NextTurn] = []
        self._to_read: dict[str, FilePages] = {}
        self._windows: list[CopiedPages] = []
        self._caches: dict[str, torch.Tensor] = {}  # in a process that computes
        self._spills = spills_of(vllm_config)
        self._files: PageFiles | None = None
        self._identity: dict[str, Any] = {}
        self._reading: list[Read] = []  # in a process that computes
        # Of several processes: what some have told of a turn or a file, until all have.
        self._told: defaultdict[str, list[Any]] = defaultdict(list)
        self._are_filed = self._spills is None
        if self._spills is not None and role == KVConnectorRole.WORKER:
            self._files = PageFiles(folder_of(self._spills), vllm_config.parallel_config.rank)
        elif self._spills is not None:
            self._identity = identity_of(vllm_config, kv_cache_config)
        self._user_mark: list[int] = []
        if role == KVConnectorRole.SCHEDULER and self._recipe is not None and self._recipe.budget.protects_system:
            self._user_mark = user_mark(tokenizer_of(vllm_config))

    # --- in processes that compute

    def register_kv_caches(self, kv_caches: dict[str, torch.Tensor]) -> None:
        self._caches = kv_caches

    def handle_preemptions(self, kv_connector_metadata: KVConnectorMetadata) -> None:
        """Copy the pages of conversations that this step writes to."""
        metadata = kv_connector_metadata
        assert isinstance(metadata, TurnMessage)
        if not metadata.spills or self._files is None:
            return
        context = active()
        assert context is not None
        if metadata.is_early:
            context.events.run()
        groups, pages = self._groups(context), self._pages_of(context)
        for spill in metadata.spills:
            if spill.chooses:
                choose_what_stays(list(groups.values()), spill.pages.ended.of_groups(list(groups)))
            try:
                self._files.write(spill.pages.file, pages.read(spill.pages), spill.metadata)
            except KeyError:
                self._files.fail(spill.pages.file)

    def _pages_of(self, context: EngineContext) -> ProcessPages:
        return ProcessPages(self._groups(context), self._kv_cache_config, self._caches)

    def start_load_kv(self, forward_context: Any, **kwargs: Any) -> None:
        metadata, context = self._message, active()
        assert isinstance(metadata, TurnMessage) and context is not None
        is_idle = forward_context.attn_metadata is None
        if metadata.windows:  # of turns that begin with this step, before which vLLM then calls
            copy_pages(metadata.windows, self._kv_cache_config, self._caches)
        if metadata.abandoned:
            forget_turns(self._groups(context), metadata.abandoned)
        if metadata.reading or metadata.deleted:
            self._use_files(metadata)
        if self._reading and is_idle:
            wait([read.tensors for read in self._reading], _PATIENCE)
        if metadata.left or metadata.coming or self._reading:
            if is_idle:  # else events of earlier steps are over
                context.events.run()
            self._turn(context, metadata)
        super().start_load_kv(forward_context, **kwargs)

    def _use_files(self, metadata: TurnMessage) -> None:
        """Begin to read files and to delete others, in this order."""
        assert self._files is not None
        for coming in metadata.coming:
            if (pages := metadata.reading.get(coming.name)) is not None:
                self._reading.append(Read(coming, pages, self._files.read(pages.file)))
        for file in metadata.deleted:
            self._files.delete(file)

    def _turn(self, context: EngineContext, metadata: TurnMessage) -> None:
        """Choose what stays of turns that have ended, and make coming ones go on with what ended ones have left.

        Args:
            context: has the groups of layers.
            metadata: the step's message, with turns that have ended and turns that begin.
        """
        groups = self._groups(context)
        here = list(groups.values())
        for left in metadata.left:
            choose_what_stays(here, left.of_groups(list(groups)))
        in_pages = [coming for coming in metadata.coming if coming.name not in metadata.reading]
        for coming in [*self._arrived(context), *in_pages]:
            try:
                emptied = dict(zip(groups, begin_turn(here, coming.of_groups(list(groups))), strict=True))
                self._begun[coming.name] = [
                    [emptied.get(number, len(blocks)) for number, blocks in enumerate(coming.blocks)]
                ]
            except RuntimeError as error:
                self._give_up(coming, error)

    def _arrived(self, context: EngineContext) -> Iterator[NextTurn]:
        """Yield turns whose conversations were read, once these are in the pages."""
        done = [read for read in self._reading if read.tensors.done()]
        self._reading = [read for read in self._reading if not read.tensors.done()]
        for coming, pages, tensors in done:
            try:
                self._pages_of(context).write(pages, tensors.result())
            except KeepsetError as error:
                self._give_up(coming, error)
            else:
                yield coming

    def _give_up(self, coming: NextTurn, why: Exception) -> None:
        """Tell the scheduler that a turn cannot go on with its conversation.

        Args:
            coming: the turn.
            why: the reason.
        """
        logger.error("Request %s is computed without its conversation: %s", coming.name, why)
        self._begun[coming.name] = [[]]

    def build_connector_worker_meta(self) -> EmptiedBlockCounts | None:
        """Return what the scheduler must know after a step."""
        report = super().build_connector_worker_meta()
        if self._begun:
            report = report or EmptiedBlockCounts()
            report.turns, self._begun = self._begun, {}
        if self._files is not None and (written := self._files.written()):
            report = report or EmptiedBlockCounts()
            report.written = written
        return report

    def shutdown(self) -> None:
        """Wait until all files are written."""
        if self._files is not None:
            self._files.close()
        super().shutdown()

    # --- in the process that schedules

    @cached_property
    def _conversations(self) -> Conversations:
        """The conversations that may go on."""
        assert self._kv_cache_manager is not None
        recipe = self._recipe
        assert recipe is not None
        managers = self._kv_cache_manager.coordinator.single_type_managers
        others = {number: manager for number, manager in enumerate(managers) if not isinstance(manager, KeepManager)}
        looks_at = RecordedFeatures.of(recipe.method.traits.needs, None, turns=True)
        conversations = Conversations(
            self._kv_cache_manager.block_pool,
            self._managers[0].block_size,
            self._vllm_config.model_config.max_model_len,
            max(looks_at.newest, looks_at.summed()),
            WindowPages(others),
            every=recipe.schedule.every,
            user_mark=self._user_mark,
            files=None if self._spills is None else SpilledBytes(self._spills),
        )
        if self._spills is not None:
            stored = stored_files(folder_of(self._spills), self._identity)
            conversations.find_files(stored, len(self._managers))
        return conversations

    def on_new_request(self, request: Request) -> None:
        """Note the options of a request, or answer the question that the front end has sent in its place."""
        question = question_of(request.kv_transfer_params)
        if not self._are_filed and question is None:
            self._conversations.file_alike(request, self._salt_of)
            self._are_filed = True
        super().on_new_request(request)
        if question is not None and question.delete is not None:
            stats.answer(question.ticket, self._delete(question.owner, question.delete))
        elif question is not None:
            own = [one for one in self._conversations.all() if one.owner == question.owner and one.turn is None]
            stats.answer(question.ticket, [self._listed(one) for one in own])

    def _listed(self, conversation: Conversation) -> dict[str, Any]:
        """Return what an owner is told of a conversation."""
        return {
            "id": conversation.name,
            "object": "conversation",
            "tokens": len(conversation.ids) - conversation.hidden,
            "held": self._held(conversation),
            "place": "memory" if conversation.file is None else "disk",
            "bytes": self._bytes(conversation),
        }

    def _held(self, conversation: Conversation) -> int:
        """Return for how many entries per KV head a conversation's pages have room."""
        groups = len(self._managers)
        held = sum(total - empty for empty, total in conversation.spans[:groups])
        return held * self._managers[0].block_size // groups

    def _bytes(self, conversation: Conversation) -> int:
        """Return the bytes of a conversation's files, or of its pages if it has none yet."""
        files = self._conversations.files
        if files is not None and conversation.file is not None and (written := files.of(conversation.file)):
            return written
        groups = in_order(self._kv_cache_config.kv_cache_groups)
        page_bytes = [group.kv_cache_spec.page_size_bytes * len(group.layer_names) for group in groups]
        held = [total - empty for empty, total in conversation.spans]
        processes = self._vllm_config.parallel_config.tensor_parallel_size
        return processes * sum(number * size for number, size in zip(held, page_bytes, strict=True))

    def _delete(self, owner: str, name: str | None) -> bool:
        """Delete a conversation, and what its running turns would leave; return whether there was any.

        Args:
            owner: whose it is.
            name: its name; without one nothing is deleted.
        """
        if name is None:
            return False
        coming = [one.conversation for one in self._coming.values()]
        known = [one for one in [*self._conversations.all(), *coming] if (one.owner, one.name) == (owner, name)]
        for conversation in known:
            if self._spills is not None and conversation.file is not None:  # the workers may do nothing for long
                remove(folder_of(self._spills), conversation.file)
            self._conversations.delete(conversation)
        waiting = [one for one, whose in self._owners.items() if (whose, self._talking[one]) == (owner, name)]
        for request in waiting:
            del self._owners[request]
        return bool(known or waiting)

    def reset_cache(self) -> bool:
        """Forget conversations, because weights may have changed."""
        self._conversations.clear()
        self._are_filed = True
        # What is written from now on is of no use to an engine that loads the weights from their files.
        self._identity = self._identity | {CHANGED: "perhaps"}
        return True

    def _salt_of(self, owner: str, salt: str | None) -> str | None:
        """Return the salt of hashes of an owner's conversations.

        Args:
            owner: the owner.
            salt: the salt that the client gives.
        """
        return salt if owner == EVERYBODY else f"keepset {self._salt} {json.dumps([owner, salt])}"

    def _grant(self, request: Request, options: RequestOptions) -> None:
        if options.context is not None or options.save is not None:
            raise KeepsetError(NO_CONTEXTS)
        super()._grant(request, options)
        name, talks = options.conversation or request.session_id, not self._known[request.request_id].has_own
        talks &= not (request.prompt_embeds is not None or request.mm_features or request.skip_reading_prefix_cache)
        if (options.conversation is not None or options.forget) and not talks:
            raise KeepsetError(
                "A turn of a conversation is text, without log-probabilities of its prompt and with the server's own "
                "recipe: leave conversation and forget, or these, out."
            )
        if options.forget:
            self._delete(options.owner, name)
            request.skip_reading_prefix_cache = True  # so it goes on with nothing
        if talks:
            self._owners[request.request_id] = options.owner
            self._talking[request.request_id] = name
            self._salts[request.request_id] = request.cache_salt
            if options.owner != EVERYBODY:
                hash_again(request, self._salt_of(options.owner, request.cache_salt))

    def get_num_new_matched_tokens(self, request: Request, num_computed_tokens: int) -> tuple[int | None, bool]:
        name = request.request_id
        if name not in self._talking or self._known[name].denied:
            return super().get_num_new_matched_tokens(request, num_computed_tokens)
        if (coming := self._coming.get(name)) is not None:
            coming.is_waiting = coming.is_ready
            return (coming.message.tokens if coming.is_ready else None), False
        if (turn := self._turns.get(name)) is not None:  # it was preempted, and its conversation is gone
            self._conversations.forget(turn.begun)
            if turn.begun.left_out:  # its prompt was put together from the conversation
                why = "The conversation's pages were needed by others: send the request again."
                self._deny(self._known[name], why)
                return request.num_tokens, True
            self._leave(name)
        return (None if self._take(request) else 0), False

    def _take(self, request: Request) -> bool:
        """Make a waiting request go on with its conversation, if there are one and room; return whether it will."""
        if request.skip_reading_prefix_cache:
            return False
        name, conversations = request.request_id, self._conversations
        called, plan = self._talking[name], RequestPlan(self._recipe, after_context=True)
        found = conversations.find(request, called)
        if found is None:
            coming = conversations.begin_alike(request, called, plan)
        elif found[0].is_arriving:
            return True  # in a step or two it is clear what another request has begun with
        else:
            coming = conversations.take(found[0], request, found[1], plan)
        if coming is None:
            return False
        coming.conversation.owner = self._owners.get(name, EVERYBODY)
        if not coming.message.compact:  # what would stay need not be chosen
            self._left = [left for left in self._left if left[0] is not coming.conversation]
        self._coming[name] = coming
        self._to_begin.append(coming.message)
        if coming.read is not None:
            self._to_read[name] = coming.read
        return True

    def _leave(self, name: str) -> None:
        """Compute a request like any other."""
        turn, known_request = self._turns.pop(name), self._known[name]
        if turn.begun.left_out:
            self._say(known_request.request, turn.prompt)
        known_request.plan, known_request.has_own = RequestPlan(self._recipe), False
        for manager in self._managers:
            manager.leave(name)

    def _say(self, request: Request, ids: list[int] | None) -> None:
        """Give a waiting request another prompt: a conversation's own tokens, or again those that the client sent.

        Args:
            request: vLLM's request, which is changed.
            ids: token ids of the prompt.
        """
        assert ids is not None
        request.prompt_token_ids, request.num_prompt_tokens = ids, len(ids)
        request._all_token_ids[:] = ids
        for manager in self._managers:
            manager.expect(request.request_id, len(ids) + request.max_tokens - 1)

    def update_state_after_alloc(self, request: Request, blocks: Any, num_external_tokens: int) -> None:
        super().update_state_after_alloc(request, blocks, num_external_tokens)
        coming = self._coming.pop(request.request_id, None) if num_external_tokens else None
        if coming is None:
            self._tell(request)
            return
        self._windows += self._conversations.begin_windows(coming.conversation)
        hidden = coming.conversation.hidden
        left_out = sum(end - first for first, end in coming.message.left_out)
        stats.count(turns=int(not coming.begins), tokens_reused=num_external_tokens - hidden, tokens_left_out=left_out)
        if hidden and request.prefill_stats:  # the client has not sent these
            request.prefill_stats.set(request.num_prompt_tokens - hidden, 0, num_external_tokens - hidden)
        self._tell(request, coming)

    def _tell(self, request: Request, coming: ComingTurn | None = None) -> None:
        """Tell the front end what a request that begins has of its conversation.

        Args:
            request: vLLM's request.
            coming: the turn that it is; None if it goes on with no conversation.
        """
        figures, known_request = request.prefill_stats, self._known[request.request_id]
        if figures is None or request.num_preemptions or known_request.denied:
            return
        reused = held = figures.num_cached_tokens
        dropped = 0
        if coming is not None:
            held, message = self._held(coming.conversation), coming.message
            left_out = sum(end - first for first, end in message.left_out)
            dropped = left_out if coming.is_copy else message.ended.said - reused
        stats.turn(
            known_request.ticket, computed=figures.num_computed_tokens, reused=reused, dropped=dropped, held=held
        )

    def build_connector_meta(self, scheduler_output: SchedulerOutput) -> TurnMessage:
        message = TurnMessage(**vars(super().build_connector_meta(scheduler_output)))
        # A turn that could have begun but has not gives its pages back, and waits without them.
        for name in [name for name, coming in self._coming.items() if coming.is_waiting]:
            self._conversations.give_back(self._coming.pop(name))
            self._leave(name)
            message.ended.add(name)
        if self._spills is not None:
            self._spill(message, scheduler_output)
        message.left = [turn for conversation, turn in self._left if not conversation.is_lost]
        message.coming, self._left, self._to_begin = self._to_begin, [], []
        message.abandoned, self._conversations.abandoned = self._conversations.abandoned, []
        message.windows, self._windows = self._windows, []
        return message

    def _spill(self, message: TurnMessage, scheduler_output: SchedulerOutput) -> None:
        """Tell the workers which files are written, read and deleted.

        Args:
            message: the step's message, which is changed.
            scheduler_output: the step.
        """
        conversations, config = self._conversations, self._vllm_config
        # Runner V2 has planned a step when it hands the message over. Queries of a turn that has just ended are lost.
        message.is_early = not (config.use_v2_model_runner and scheduler_output.total_num_scheduled_tokens)
        just_left = [conversation for conversation, _ in self._left]
        for conversation, pages in conversations.to_spill:
            chooses = conversation in just_left
            if chooses and not message.is_early:
                conversations.lose(conversation)
            elif not conversation.is_lost:
                metadata = {"identity": self._identity, **metadata_of(conversation)}
                message.spills.append(Spill(pages, chooses, metadata))
        spilled = [conversation for conversation, _ in conversations.to_spill]
        self._left = [left for left in self._left if left[0] not in spilled]
        message.reading, self._to_read = self._to_read, {}
        message.deleted, conversations.to_delete, conversations.to_spill = conversations.to_delete, [], []

    def update_connector_output(self, connector_output: KVConnectorOutput) -> None:
        report = connector_output.kv_connector_worker_meta
        if isinstance(report, EmptiedBlockCounts):
            for file, sizes in self._of_all(report.written):
                self._conversations.written(file, sizes)
            for name, by_process in self._of_all(report.turns):
                self._arrive(name, [min(emptied) for emptied in zip(*by_process, strict=False)])
        super().update_connector_output(connector_output)

    def _of_all(self, told: Mapping[str, list[Any]]) -> Iterator[tuple[str, list[Any]]]:
        """Yield what all processes have told, in this step or before, by name."""
        for name, by_process in told.items():
            self._told[name] += by_process
            if len(self._told[name]) >= self._vllm_config.parallel_config.world_size:
                yield name, self._told.pop(name)

    def _arrive(self, name: str, emptied: Sequence[int]) -> None:
        """Take in that a turn can begin.

        Args:
            name: its request.
            emptied: how many leading blocks of each group are empty; none if a process has lost the conversation.
        """
        coming = self._coming[name]
        self._conversations.arrive(coming, emptied)
        if not coming.is_ready:
            del self._coming[name]
            if coming.is_copy and name in self._known:
                self._known[name].request.skip_reading_prefix_cache = True  # it is not tried again
        elif coming.is_given_up:
            self._conversations.give_back(self._coming.pop(name))
        else:
            known_request = self._known[name]
            self._turns[name] = Turn(coming.conversation, known_request.request.prompt_token_ids)
            known_request.plan, known_request.has_own = coming.message.plan, True
            if coming.conversation.left_out:
                self._say(known_request.request, coming.ids)
            for manager, blocks in zip(self._managers, coming.conversation.blocks, strict=True):
                manager.adopt(name, blocks, coming.message.plan)

    def request_finished_all_groups(self, request: Request, block_ids: Any) -> tuple[bool, dict[str, Any] | None]:
        """Leave a request's pages to the next turn of its conversation, and forget it."""
        name, tokens = request.request_id, request.num_computed_tokens
        if (coming := self._coming.get(name)) is not None:
            if coming.is_ready:
                self._conversations.give_back(self._coming.pop(name))
            else:
                coming.is_given_up = True
        elif (
            name in self._owners
            and not self._known[name].denied
            and request.status != RequestStatus.FINISHED_ERROR
            and self._managers[0].block_size <= tokens <= request.num_tokens
        ):
            blocks = [manager.req_to_blocks[name] for manager in self._managers]
            begun = self._turns[name].begun if name in self._turns else None
            conversation = self._conversations.leave(request, self._talking[name], tokens, blocks, begun)
            conversation.owner, conversation.salt = self._owners[name], self._salts[name]
            if request.lora_request is not None:
                conversation.adapter = request.lora_request.lora_name, request.lora_request.lora_path
            self._left.append((conversation, conversation.ended))
            for manager, of_group in zip(self._managers, conversation.blocks, strict=True):
                stays = [block for block in of_group if not block.is_null]
                manager.leave_to_pool(name, stays, self._conversations.reused)
        elif name in self._turns:
            self._conversations.forget(self._turns[name].begun)
        self._turns.pop(name, None)
        self._talking.pop(name, None)
        self._owners.pop(name, None)
        self._salts.pop(name, None)
        return super().request_finished_all_groups(request, block_ids)


def tokenizer_of(config: VllmConfig) -> Any:
    """Return the tokenizer of a server's model.

    Args:
        config: vLLM's configuration.

    Raises:
        KeepsetError: the server has none.
    """
    if config.model_config.skip_tokenizer_init:
        raise KeepsetError(
            "protect='system' finds a user's message by the model's tokenizer, and this engine has none: leave "
            "skip_tokenizer_init out, or protect ranges of tokens."
        )
    return cached_tokenizer_from_config(config.model_config)
