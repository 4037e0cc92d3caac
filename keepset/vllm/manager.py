"""`KeepManager`: vLLM's manager of blocks in the scheduler. It also frees the blocks that events have emptied."""

from __future__ import annotations

import math
from collections.abc import Callable, Sequence
from dataclasses import dataclass
from typing import Any, NamedTuple
from weakref import WeakKeyDictionary

from vllm.v1.core.block_pool import BlockPool
from vllm.v1.core.kv_cache_utils import KVCacheBlock
from vllm.v1.core.single_type_kv_cache_manager import FullAttentionManager
from vllm.v1.request import Request

from keepset.errors import UnsupportedEngineError
from keepset.paged.admission import Admission
from keepset.paged.contexts import ContextPlacement
from keepset.paged.engine import SchedulerAdapter
from keepset.paged.eviction import EvictionSchedule, RequestPlan
from keepset.vllm import stats
from keepset.vllm.compat import hide_answer

_reporting: WeakKeyDictionary[BlockPool, int] = WeakKeyDictionary()
"""For each pool, the group of layers that reports when a request ends: the first compressed one."""


@dataclass
class RunningRequest:
    """A running request.

    Attributes:
        prompt, length: tokens of its prompt, and tokens that were processed.
        schedule: the schedule of its events.
        next_release: number of tokens from which on blocks can be freed; infinite if there never are any.
        freed: number of freed blocks.
        is_hidden: whether other requests cannot find the blocks of its answer.
        is_offered: whether other requests have been offered all blocks that they may share.
    """

    prompt: int
    length: int
    schedule: EvictionSchedule
    next_release: float = 0
    freed: int = 0
    is_hidden: bool = False
    is_offered: bool = False


class PlannedRequest(NamedTuple):
    """A request that is compressed by a plan of its own.

    Attributes:
        plan: how it is compressed.
        schedule: the schedule of its events.
        placement: the context's place in its blocks.
        first_hash: the hash of its first block, if it identifies the context's blocks.
    """

    plan: RequestPlan
    schedule: EvictionSchedule
    placement: ContextPlacement | None = None
    first_hash: Any = None


class KeepManager(FullAttentionManager, SchedulerAdapter):
    """vLLM's manager of blocks, which also frees the blocks that events have emptied.

    Block tables stay indexed by logical position, and empty blocks become null blocks. To the rest of the scheduler a
    compressed request looks like one with a sliding window, so positions, preemption and the like do not change.
    """

    supports_fine_grained_hash_lookup = False
    """No copies of parts of pages: vLLM would copy into a freed page before the pending event has read it."""

    def __init__(self, kv_cache_spec: Any, **kwargs: Any) -> None:
        super().__init__(kv_cache_spec, **kwargs)
        self.schedule: EvictionSchedule = kv_cache_spec.schedule  # of a KeepSpec, which names this class
        every = self.schedule.recipe.schedule.every
        self._admission = (
            None
            if every is None
            else Admission(self.schedule, kv_cache_spec.tokens_per_step, kv_cache_spec.steps_ahead)
        )
        self._requests: dict[str, RunningRequest] = {}
        self._went_on: list[tuple[str, int]] = []
        self._reports = _reporting.setdefault(self.block_pool, self.kv_cache_group_id) == self.kv_cache_group_id
        self._hides = self._reports and not kv_cache_spec.alone
        self._prefixes: dict[Any, ContextPlacement] = kv_cache_spec.contexts
        self._coming: tuple[str, RunningRequest] | None = None
        self._own: dict[str, PlannedRequest] = {}
        self._drafting: dict[str, Request] = {}
        self._most: dict[str, int] = {}
        self._reserved: dict[str, KVCacheBlock] = {}
        self._adopted: dict[str, Sequence[KVCacheBlock]] = {}
        self._left: dict[str, tuple[list[KVCacheBlock], Callable[[KVCacheBlock], None]]] = {}

    def schedule_of(self, request_id: str) -> EvictionSchedule:
        """Return the schedule of a request's events."""
        return self._own[request_id].schedule if request_id in self._own else self.schedule

    def settle(self, request_id: str, plan: RequestPlan) -> None:
        """Compress a new request by a plan of its own.

        Args:
            request_id: the request.
            plan: how it is compressed.
        """
        self._own[request_id] = PlannedRequest(plan, self.schedule.of_plan(plan))

    def expect(self, request_id: str, most: int) -> None:
        """Note that a new request never has more than `most` tokens whose keys and values are computed.

        Args:
            request_id: the request.
            most: the number of tokens.
        """
        self._most[request_id] = most

    def watch_drafts(self, request: Request) -> None:
        """Make a new request's drafts end before its events; one manager does so for all groups of layers."""
        self._drafting[request.request_id] = request

    def new_step_starts(self) -> None:
        """Remove drafts that would trigger an event, because they may be rejected."""
        super().new_step_starts()
        self._catch_up()
        for name, request in self._drafting.items():
            if request.spec_token_ids:
                schedule, length = self.schedule_of(name), request.num_tokens
                most = schedule.draftable(request.num_prompt_tokens, request.num_computed_tokens)
                if most is not None:
                    request.spec_token_ids = request.spec_token_ids[: max(most - length, 0)]

    def adopt(self, request_id: str, blocks: Sequence[KVCacheBlock], plan: RequestPlan) -> None:
        """Make a waiting request go on in the pages of a conversation.

        Args:
            request_id: the waiting request.
            blocks: the conversation's blocks by logical position, with a reference for the request.
            plan: how it is compressed further.
        """
        self.settle(request_id, plan)
        self._adopted[request_id] = blocks

    def leave_to_pool(
        self, request_id: str, blocks: list[KVCacheBlock], on_reuse: Callable[[KVCacheBlock], None]
    ) -> None:
        """Make blocks of a request that ends stay as they are until vLLM needs them for something else.

        Args:
            request_id: the request, which vLLM frees next.
            blocks: those of its blocks that hold a conversation.
            on_reuse: called when one of them is given away.
        """
        self._left[request_id] = blocks, on_reuse

    def _catch_up(self) -> Admission | None:
        """Tell the forecast which requests went on; return it, if there is one."""
        if self._admission is not None:
            self._admission.go_on(self._went_on)
        self._went_on = []
        return self._admission

    def due(self, request: Request, before: int, after: int) -> int:
        """Return the event that a step from `before` to `after` tokens triggers for a request; 0 if it triggers none.

        Args:
            request: the request.
            before: its tokens before the step.
            after: its tokens after the step.
        """
        return self.schedule_of(request.request_id).due(self._prompt_of(request), before, after)

    def next_event(self, request: Request, length: int) -> int | None:
        """Return the first event of a request after `length` tokens; None if there is none.

        Args:
            request: vLLM's request.
            length: tokens of the request.
        """
        return self.schedule_of(request.request_id).next_event(self._prompt_of(request), length)

    def _prompt_of(self, request: Request) -> int:
        """Return how many tokens count as a request's prompt."""
        planned = self._own.get(request.request_id)
        return request.num_prompt_tokens if planned is None or planned.plan.prompt is None else planned.plan.prompt

    def reserve(self, request_id: str) -> int:
        """Take a free block as the first of a waiting request, and return its id; there must be a free block."""
        (self._reserved[request_id],) = self.block_pool.get_new_blocks(1)
        return self._reserved[request_id].block_id

    def withdraw(self, request_id: str) -> None:
        """Free the reserved block of a request that has not begun with it."""
        if (block := self._reserved.pop(request_id, None)) is not None:
            self.block_pool.free_blocks([block])

    def is_reserved(self, request_id: str) -> bool:
        """Return whether a request has a reserved block, and has not begun with it."""
        return request_id in self._reserved

    def remove_skipped_blocks(
        self, request_id: str, processed_computed_tokens: int, num_prompt_tokens: int | None = None
    ) -> None:
        """Free the blocks that events of finished steps have emptied. No step in flight reads them.

        Args:
            request_id: the request.
            processed_computed_tokens: tokens whose steps have finished.
            num_prompt_tokens: tokens of its prompt; None in calls that free nothing.
        """
        if num_prompt_tokens is None:
            return
        running = self._requests.get(request_id)
        if running is None:
            running = RunningRequest(num_prompt_tokens, processed_computed_tokens, self.schedule_of(request_id))
            if request_id not in self.req_to_blocks:  # it does not run until it gets blocks
                self._coming = request_id, running
                return
            self._start(request_id, running)
        elif running.prompt != num_prompt_tokens:
            raise UnsupportedEngineError(
                "keepset cannot serve requests whose prompt grows while they run (streaming input)."
            )
        else:
            running.length = processed_computed_tokens
            self._went_on.append((request_id, processed_computed_tokens))
        if running.length >= running.next_release:
            self.release(request_id, running.schedule.freed(running.prompt, running.length))
            event = running.schedule.next_event(running.prompt, running.length)
            running.next_release = math.inf if event is None else event

    def _start(self, request_id: str, running: RunningRequest) -> None:
        self._requests[request_id] = running
        if (admission := self._catch_up()) is not None:
            most = self._most.get(request_id)
            admission.update(request_id, running.prompt, running.length, running.schedule, most)

    def release(self, request_id: str, blocks: int) -> None:
        if blocks > 0:
            before = self.block_pool.get_num_free_blocks()
            self._remove_blocks_in_range(request_id, 0, blocks)
            freed = self.block_pool.get_num_free_blocks() - before
            self._requests[request_id].freed += freed
            stats.count(blocks_freed=freed)

    def get_num_blocks_to_allocate(self, request_id: str, num_tokens: int, *args: Any, **kwargs: Any) -> int:
        """Return how many blocks a request needs. A waiting request also needs room for the growth of running ones."""
        if request_id in self._requests:  # vLLM's answer, sooner: a running request only grows
            return max(-(-num_tokens // self.block_size) - len(self.req_to_blocks[request_id]), 0)
        if (adopted := self._adopted.get(request_id)) is not None:
            return max(-(-num_tokens // self.block_size) - len(adopted), 0)
        needed = super().get_num_blocks_to_allocate(request_id, num_tokens, *args, **kwargs)
        needed -= self.is_reserved(request_id)
        planned = self._own.get(request_id)
        begins_with_context = planned is not None and planned.placement is not None  # most tokens have no block
        if not kwargs.get("apply_admission_cap") or begins_with_context or (admission := self._catch_up()) is None:
            return needed
        blocks_of, schedule = lambda name: len(self.req_to_blocks[name]), self.schedule_of(request_id)
        return admission.required_blocks(num_tokens, needed, blocks_of, schedule, self._most.get(request_id))

    def allocate_external_computed_blocks(self, request_id: str, *args: Any, **kwargs: Any) -> None:
        """Give a request the pages that it adopts, or new ones, as vLLM does."""
        if (adopted := self._adopted.pop(request_id, None)) is None:
            super().allocate_external_computed_blocks(request_id, *args, **kwargs)
        else:
            self.req_to_blocks[request_id].extend(adopted)

    def allocate_new_blocks(self, request_id: str, num_tokens: int, *args: Any, **kwargs: Any) -> list[KVCacheBlock]:
        """Allocate blocks as vLLM does, after the reserved one; from now on the request runs."""
        if request_id in self._requests and len(self.req_to_blocks[request_id]) * self.block_size >= num_tokens:
            return []
        if self._coming is not None and self._coming[0] == request_id:
            self._start(*self._coming)
            self._coming = None
        if (reserved := self._reserved.pop(request_id, None)) is None:
            return super().allocate_new_blocks(request_id, num_tokens, *args, **kwargs)
        self.req_to_blocks[request_id].append(reserved)
        if self.records_new_block_ids:
            self.new_block_ids.append(reserved.block_id)
        return [reserved, *super().allocate_new_blocks(request_id, num_tokens, *args, **kwargs)]

    def pop_blocks_for_free(self, request_id: str) -> list[KVCacheBlock]:
        """Return the blocks of a request that ended, was aborted or was preempted, and forget it."""
        running = self._requests.pop(request_id, None)
        if (admission := self._catch_up()) is not None:
            admission.remove(request_id)
        if running is not None and self._reports:
            dropped = running.schedule.dropped(running.prompt, running.length)
            stats.ended(request_id, running.prompt, running.length, dropped, running.freed)
        blocks = super().pop_blocks_for_free(request_id)
        if (left := self._left.pop(request_id, None)) is None:
            return blocks
        stays, on_reuse = left
        self.block_pool.unpin_blocks(reversed(stays), on_reuse)
        block_ids = {block.block_id for block in stays}
        return [block for block in blocks if block.block_id not in block_ids]

    def forget(self, request_id: str) -> None:
        """Forget an ended request."""
        self._drafting.pop(request_id, None)
        self._most.pop(request_id, None)
        self.leave(request_id)

    def leave(self, request_id: str) -> None:
        """Forget how a request is compressed differently from others, and its context if no other request has it."""
        self._adopted.pop(request_id, None)
        planned = self._own.pop(request_id, None)
        first = None if planned is None else planned.first_hash
        if first is not None and all(first != remaining.first_hash for remaining in self._own.values()):
            self._prefixes.pop(first, None)

    def begin(
        self,
        request_id: str,
        block_hashes: Sequence[Any],
        placement: ContextPlacement,
        plan: RequestPlan,
    ) -> None:
        """Make a waiting request begin with a context.

        Args:
            request_id: the waiting request.
            block_hashes: hashes of its blocks.
            placement: the context's place in its blocks.
            plan: how it is compressed further.
        """
        first = block_hashes[0] if placement.own else None
        self._own[request_id] = PlannedRequest(plan, self.schedule.of_plan(plan), placement, first)
        if first is not None:
            self._prefixes[first] = placement

    def cache_blocks(self, request: Request, num_tokens: int, *args: Any, **kwargs: Any) -> None:
        """Offer to other requests only those blocks to which no compression of this request writes."""
        if not num_tokens:  # also after its context could not be loaded, when it has no blocks
            return
        running = self._requests[request.request_id]
        if running.is_offered:
            return
        if (planned := self._own.get(request.request_id)) is not None:
            # Hashes of a request's tokens do not depend on its budget, but those of a context begin with its digest.
            if planned.placement is not None and planned.placement.shared:
                super().cache_blocks(request, min(num_tokens, planned.placement.own * self.block_size), *args, **kwargs)
            return
        if num_tokens >= request.num_prompt_tokens:
            # If it is preempted after this it starts again, and its prompt then includes the answer. How much may be
            # shared depends on the prompt's length, which a lookup does not know, so no lookup is made.
            request.skip_reading_prefix_cache = True
        untouched = self.schedule.untouched(request.num_prompt_tokens)
        if self._hides and untouched is not None and not running.is_hidden:
            running.is_hidden = True
            hide_answer(request)
        offered = num_tokens if untouched is None else min(num_tokens, untouched)
        super().cache_blocks(request, offered, *args, **kwargs)
        running.is_offered = num_tokens >= request.num_prompt_tokens and offered == untouched

    @classmethod
    def find_longest_cache_hit(cls, *, max_length: int, kv_cache_spec: Any, **arguments: Any) -> Any:  # type: ignore[override]
        """Return the cached blocks of a prompt's beginning: a context's, or those that its compression does not change.

        `max_length` is the tokens of the prompt but the last.
        """
        hashes = arguments["block_hashes"]
        placement = kv_cache_spec.contexts.get(hashes[0]) if len(hashes) else None
        if placement is not None:
            pool, blocks = arguments["block_pool"], [arguments["block_pool"].null_block] * placement.first
            for block_hash in hashes[placement.first : placement.own]:
                cached = pool.get_cached_block(block_hash, arguments["kv_cache_group_ids"])
                if not cached:
                    break
                blocks += cached
            return (blocks,), len(blocks) * kv_cache_spec.block_size
        prompt = max_length + 1  # vLLM always recomputes a prompt's last token
        shareable = kv_cache_spec.schedule.shareable(prompt)
        length = max_length if shareable is None else min(max_length, shareable)
        return super().find_longest_cache_hit(max_length=length, kv_cache_spec=kv_cache_spec, **arguments)
