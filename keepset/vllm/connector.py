"""`BlockCountConnector`: tells the scheduler how many blocks were emptied, where only the data say so.

Most recipes need no message: what they drop follows from lengths. Where it does not, the number must get from the
processes that compute to the one that schedules. vLLM's way for that is a KV connector; this one moves no keys and
values, only those numbers.
"""

from __future__ import annotations

from dataclasses import dataclass, field
from typing import Any

from vllm.config import VllmConfig
from vllm.distributed.kv_transfer.kv_connector.v1.base import (
    KVConnectorBase_V1,
    KVConnectorMetadata,
    KVConnectorRole,
    KVConnectorWorkerMetadata,
    SupportsHMA,
)
from vllm.v1.core.sched.output import SchedulerOutput
from vllm.v1.kv_cache_interface import KVCacheConfig
from vllm.v1.outputs import KVConnectorOutput
from vllm.v1.request import Request

from keepset.errors import UnsupportedEngineError
from keepset.paged.page_tables import RequestKey
from keepset.vllm.engine_context import active
from keepset.vllm.manager import KeepManager
from keepset.vllm.settings import recipe_of


@dataclass
class ExpectedEvents(KVConnectorMetadata):
    """To the workers: whose event it is, by the id of the page that holds the request's newest token."""

    keys: dict[int, RequestKey] = field(default_factory=dict)


@dataclass
class FreedBlockCounts(KVConnectorWorkerMetadata):
    """To the scheduler: leading blocks that a request's layers do not use any more."""

    blocks: dict[RequestKey, int] = field(default_factory=dict)

    def aggregate(self, other: KVConnectorWorkerMetadata) -> FreedBlockCounts:
        assert isinstance(other, FreedBlockCounts)
        both = self.blocks.keys() & other.blocks.keys()
        return FreedBlockCounts({key: min(self.blocks[key], other.blocks[key]) for key in both})


class BlockCountConnector(KVConnectorBase_V1, SupportsHMA):
    """The connector."""

    requires_kv_delivery = False

    def __init__(self, vllm_config: VllmConfig, role: KVConnectorRole, kv_cache_config: KVCacheConfig) -> None:
        super().__init__(vllm_config, role, kv_cache_config)
        if recipe_of(vllm_config) is None:
            raise UnsupportedEngineError(
                'keepset\'s carrier needs a recipe: give additional_config {"keepset": "..."}.'
            )
        self._requests: dict[str, Request] = {}

    def _nothing(self, *args: Any, **kwargs: Any) -> None:
        """No keys and values come or go."""

    start_load_kv = wait_for_layer_load = save_kv_layer = wait_for_save = update_state_after_alloc = _nothing

    def get_num_new_matched_tokens(self, request: Request, num_computed_tokens: int) -> tuple[int | None, bool]:
        return 0, False

    # --- in processes that compute

    def build_connector_worker_meta(self) -> FreedBlockCounts | None:
        """What the events before this step emptied; every rank reports every event."""
        metadata, context = self._connector_metadata, active()
        assert context is not None
        if isinstance(metadata, ExpectedEvents):
            context.freed_blocks.expect(metadata.keys)
        blocks = context.freed_blocks.drain()
        return FreedBlockCounts(blocks) if blocks else None

    # --- in the process that schedules

    def on_new_request(self, request: Request) -> None:
        self._requests[request.request_id] = request

    def build_connector_meta(self, scheduler_output: SchedulerOutput) -> ExpectedEvents:
        """Which of the scheduled requests reach an event."""
        expected = ExpectedEvents()
        for name, tokens in scheduler_output.num_scheduled_tokens.items():
            request = self._requests[name]
            before, after = request.num_computed_tokens, request.num_computed_tokens + tokens
            for group, manager in enumerate(self._managers):
                if isinstance(manager, KeepManager) and manager.schedule.due(request.num_prompt_tokens, before, after):
                    page = manager.req_to_blocks[name][(after - 1) // manager.block_size].block_id
                    expected.keys[page] = (name, request.num_preemptions, group)
        return expected

    def update_connector_output(self, connector_output: KVConnectorOutput) -> None:
        """Frees what was emptied, unless the request ended or was preempted since: then its blocks are gone."""
        freed = connector_output.kv_connector_worker_meta
        if not isinstance(freed, FreedBlockCounts):
            return
        for (name, preemptions, group), blocks in freed.blocks.items():
            request = self._requests.get(name)
            if request is not None and request.num_preemptions == preemptions and not request.is_finished():
                self._managers[group].release(name, blocks)

    def request_finished_all_groups(self, request: Request, block_ids: Any) -> tuple[bool, dict[str, Any] | None]:
        """Forgets a request; its blocks may go at once."""
        self._requests.pop(request.request_id, None)
        return False, None

    @property
    def _managers(self) -> Any:
        assert self._kv_cache_manager is not None
        return self._kv_cache_manager.coordinator.single_type_managers
