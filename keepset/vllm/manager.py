"""`KeepManager`: the scheduler's side. Frees the pages that a compression has emptied, and admits accordingly."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass
from typing import Any

from vllm.v1.core.kv_cache_utils import KVCacheBlock
from vllm.v1.core.single_type_kv_cache_manager import FullAttentionManager
from vllm.v1.request import Request

from keepset.errors import UnsupportedEngineError
from keepset.paged.admission import Admission
from keepset.paged.contexts import ContextPlacement
from keepset.paged.engine import SchedulerAdapter
from keepset.paged.eviction_schedule import EvictionSchedule
from keepset.recipe import Recipe
from keepset.vllm import stats


@dataclass
class RunningRequest:
    """A request that runs.

    Attributes:
        prompt, length: tokens of its prompt, and those processed so far.
        due: tokens from which on there is something to free again; None where there never is.
        schedule: when it is compressed.
        freed: blocks that were.
    """

    prompt: int
    length: int
    schedule: EvictionSchedule
    due: int | None = 0
    freed: int = 0


class KeepManager(FullAttentionManager, SchedulerAdapter):
    """Block tables stay indexed by logical position; blocks that a compression emptied become null blocks.

    So everything else in the scheduler, from positions to preemption, stays as vLLM has it: for its bookkeeping
    a compressed request looks like one with a sliding window.
    """

    supports_fine_grained_hash_lookup = False
    """No copies of parts of pages: they would be made before a step is planned, while what it frees is still read."""

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
        self._prefixes: dict[Any, ContextPlacement] = kv_cache_spec.contexts
        self._contexts: dict[str, tuple[ContextPlacement, Any]] = {}
        self._coming: tuple[str, RunningRequest] | None = None
        self._own: dict[str, EvictionSchedule] = {}
        self._from: dict[str, int] = {}  # tokens that count as the prompts of requests that go on compressing
        self._reserved: dict[str, KVCacheBlock] = {}

    def schedule_of(self, request_id: str) -> EvictionSchedule:
        """When a request is compressed."""
        return self._own.get(request_id, self.schedule)

    def settle(self, request_id: str, recipe: Recipe | None) -> None:
        """A request that is new is compressed by this recipe of the same method; None: not at all."""
        self._own[request_id] = self.schedule.under(recipe)

    def due(self, request: Request, before: int, after: int) -> int:
        """The event that a request has in a step from `before` to `after` tokens; 0 where there is none."""
        prompt = self._from.get(request.request_id, request.num_prompt_tokens)
        return self.schedule_of(request.request_id).due(prompt, before, after)

    def reserve(self, request_id: str) -> int:
        """The first block of a request that waits, which is known before it runs; there must be one."""
        (self._reserved[request_id],) = self.block_pool.get_new_blocks(1)
        return self._reserved[request_id].block_id

    def withdraw(self, request_id: str) -> None:
        """Frees the block, if the request has not begun with it."""
        if (block := self._reserved.pop(request_id, None)) is not None:
            self.block_pool.free_blocks([block])

    def is_reserved(self, request_id: str) -> bool:
        """Whether the request has not begun with it."""
        return request_id in self._reserved

    def remove_skipped_blocks(
        self, request_id: str, processed_computed_tokens: int, num_prompt_tokens: int | None = None
    ) -> None:
        """Frees what was emptied by the tokens that have been fully processed: never what a step in flight reads."""
        if num_prompt_tokens is None:
            return
        known = self._requests.get(request_id)
        if known is None:
            known = RunningRequest(num_prompt_tokens, processed_computed_tokens, self.schedule_of(request_id))
            if request_id not in self.req_to_blocks:  # unless it gets blocks, it does not run
                self._coming = request_id, known
                return
            self._requests[request_id] = known
        if known.prompt != num_prompt_tokens:
            raise UnsupportedEngineError(
                "keepset cannot serve requests whose prompt grows while they run (streaming input)."
            )
        known.length, schedule = processed_computed_tokens, known.schedule
        if self._admission is not None:
            self._admission.update(request_id, known.prompt, known.length, schedule)
        if known.due is not None and known.length >= known.due:
            self.release(request_id, schedule.freed(known.prompt, known.length))
            known.due = schedule.next_event(known.prompt, known.length)

    def release(self, request_id: str, blocks: int) -> None:
        if blocks > 0:
            before = self.block_pool.get_num_free_blocks()
            self._remove_blocks_in_range(request_id, 0, blocks)
            freed = self.block_pool.get_num_free_blocks() - before
            self._requests[request_id].freed += freed
            stats.count(blocks_freed=freed)

    def get_num_blocks_to_allocate(self, request_id: str, num_tokens: int, *args: Any, **kwargs: Any) -> int:
        """As vLLM counts; a request that waits must also leave the room that those which run will grow into."""
        needed = super().get_num_blocks_to_allocate(request_id, num_tokens, *args, **kwargs)
        needed -= self.is_reserved(request_id)
        # Of a context's tokens most have no block.
        if self._admission is None or not kwargs.get("apply_admission_cap") or request_id in self._contexts:
            return needed
        held, schedule = lambda name: len(self.req_to_blocks[name]), self.schedule_of(request_id)
        return self._admission.required_blocks(num_tokens, needed, held, schedule)

    def allocate_new_blocks(self, request_id: str, *args: Any, **kwargs: Any) -> list[KVCacheBlock]:
        """As vLLM does; from now on the request runs."""
        if self._coming is not None and self._coming[0] == request_id:
            self._requests[request_id] = footprint = self._coming[1]
            self._coming = None
            if self._admission is not None:
                self._admission.update(request_id, footprint.prompt, footprint.length, footprint.schedule)
        if (reserved := self._reserved.pop(request_id, None)) is None:
            return super().allocate_new_blocks(request_id, *args, **kwargs)
        self.req_to_blocks[request_id].append(reserved)
        if self.records_new_block_ids:
            self.new_block_ids.append(reserved.block_id)
        return [reserved, *super().allocate_new_blocks(request_id, *args, **kwargs)]

    def pop_blocks_for_free(self, request_id: str) -> list[KVCacheBlock]:
        """Forgets a request that ended, was aborted, or was preempted."""
        footprint = self._requests.pop(request_id, None)
        if self._admission is not None:
            self._admission.remove(request_id)
        if footprint is not None and self.kv_cache_group_id == 0:
            dropped = footprint.schedule.dropped(footprint.prompt, footprint.length)
            stats.ended(request_id, footprint.prompt, footprint.length, dropped, footprint.freed)
        return super().pop_blocks_for_free(request_id)

    def forget(self, request_id: str) -> None:
        """A request is gone for good; the last one of a context takes with it what was known of that."""
        self._own.pop(request_id, None)
        self._from.pop(request_id, None)
        _, first = self._contexts.pop(request_id, (None, None))
        if first is not None and all(first != other for _, other in self._contexts.values()):
            self._prefixes.pop(first, None)

    def begin(
        self,
        request_id: str,
        block_hashes: Sequence[Any],
        placement: ContextPlacement,
        recipe: Recipe | None,
        prompt: int,
    ) -> None:
        """A request that waits begins with a context, whose blocks have these hashes.

        It is compressed further by the recipe, if there is one, from so many tokens on.
        """
        self._contexts[request_id] = placement, block_hashes[0] if placement.own else None
        self._own[request_id] = self.schedule.under(recipe, counted=False)
        self._from[request_id] = prompt
        if placement.own:
            self._prefixes[block_hashes[0]] = placement

    def cache_blocks(self, request: Request, num_tokens: int, *args: Any, **kwargs: Any) -> None:
        """Offers to other requests only blocks that no compression of this one writes to."""
        if request.request_id in self._contexts:
            placement, _ = self._contexts[request.request_id]
            if not placement.shared:
                return
            super().cache_blocks(request, min(num_tokens, placement.own * self.block_size), *args, **kwargs)
            return
        if request.request_id in self._own:  # its tokens' hashes say nothing of its budget
            return
        if num_tokens >= request.num_prompt_tokens:
            # Preempted from here on, it starts again. Looking up then how much of its prompt may be shared needs
            # the prompt's length, which a lookup is not told; so it is not made.
            request.skip_reading_prefix_cache = True
        untouched = self.schedule.untouched(request.num_prompt_tokens)
        offered = num_tokens if untouched is None else min(num_tokens, untouched)
        super().cache_blocks(request, offered, *args, **kwargs)

    @classmethod
    def find_longest_cache_hit(cls, *, max_length: int, kv_cache_spec: Any, **others: Any) -> Any:  # type: ignore[override]
        """Shares only blocks that this request's own compression will not write to, and a context's with all."""
        hashes, placement = others["block_hashes"], None
        if kv_cache_spec.contexts and len(hashes):
            placement = kv_cache_spec.contexts.get(hashes[0])
        if placement is not None:
            pool, blocks = others["block_pool"], [others["block_pool"].null_block] * placement.first
            for block_hash in hashes[placement.first : placement.own]:
                cached = pool.get_cached_block(block_hash, others["kv_cache_group_ids"])
                if not cached:
                    break
                blocks += cached
            return (blocks,), len(blocks) * kv_cache_spec.block_size
        prompt = max_length + 1  # vLLM recomputes a prompt's last token, whatever is cached
        shareable = kv_cache_spec.schedule.shareable(prompt)
        length = max_length if shareable is None else min(max_length, shareable)
        return super().find_longest_cache_hit(max_length=length, kv_cache_spec=kv_cache_spec, **others)
