"""What keepset adds to an attention layer of vLLM, whichever its backend: a mixin for the backend's own class."""

from __future__ import annotations

import copy
from dataclasses import replace
from typing import Any, ClassVar

from torch import Tensor
from vllm.forward_context import get_forward_context

from keepset.errors import UnsupportedEngineError
from keepset.paged.engine import LayerAdapter, Pages
from keepset.paged.pages import StridedPages
from keepset.paged.per_head import PerHeadBatch
from keepset.vllm.engine_context import active


class KeepImpl:
    """Attends to what is kept, and compresses right after.

    What is not overridden suits backends that keep an entry's numbers in order: those for GPUs.
    """

    num_heads: int
    num_kv_heads: int
    num_queries_per_kv: int
    scale: float
    per_head_changes: ClassVar[dict[str, Any]] = {}
    """What the backend's metadata say, besides lengths and tables, where heads are requests."""

    def __init__(self, *args: Any, **kwargs: Any) -> None:
        super().__init__(*args, **kwargs)
        context = active()
        assert context is not None
        self._context = context
        self._pages: tuple[Tensor, Pages] | None = None
        self._one_head: Any = None

    def fused_output_quant_supported(self, quant_key: Any) -> bool:
        """No: attention of heads that are requests has no scales for its output."""
        return False

    def fused_rope_kvcache_supported(self) -> bool:
        """No: what writes to the cache is `do_kv_cache_update`."""
        return False

    def make_pages(self, layer: Any, kv_cache: Tensor) -> Pages:
        """The layer's cache as sub-pages."""
        return StridedPages(kv_cache)

    def pages(self, layer: Any, kv_cache: Tensor) -> Pages:
        """The same, made once."""
        if self._pages is None or self._pages[0] is not kv_cache:
            self._pages = kv_cache, self.make_pages(layer, kv_cache)
        return self._pages[1]

    def do_kv_cache_update(
        self, layer: Any, key: Tensor, value: Tensor, kv_cache: Tensor, slot_mapping: Tensor
    ) -> None:
        """Writes new entries; where heads have tables of their own, each head's to its own place."""
        metadata: Any = get_forward_context().attn_metadata
        known = metadata.get(layer.layer_name) if isinstance(metadata, dict) else None
        step = self._context.step(layer.layer_name, known)
        if step is None or step.plan.per_head is None:
            if step is not None and step.plan.slot_mapping.data_ptr() != slot_mapping.data_ptr():
                raise UnsupportedEngineError("This vLLM writes to the cache by slots that keepset did not see.")
            super().do_kv_cache_update(layer, key, value, kv_cache, slot_mapping)  # type: ignore[misc]
            return
        slots = step.plan.per_head.batch(step.places[layer.layer_name]).slot_mapping
        tokens = slots.shape[0] // self.num_kv_heads
        if tokens < len(key):  # a step that is filled up to a size
            key, value = key[:tokens], value[:tokens]
        self.pages(layer, kv_cache).write(key.flatten(0, 1), value.flatten(0, 1), slots)

    def attend_per_head(
        self, layer: Any, queries: Tensor, kv_cache: Tensor, metadata: Any, batch: PerHeadBatch, output: Tensor
    ) -> None:
        """Attention where each KV head is a request with one KV head, by the backend's own way.

        Of its metadata there is one object a step, which the layers fill in one after another: to make it anew for
        each would take longer than all else that they do here.
        """
        if self._one_head is None:
            self._one_head = copy.copy(self)
            self._one_head.num_kv_heads, self._one_head.num_heads = 1, self.num_queries_per_kv
        step = self._context.step(layer.layer_name, metadata)
        assert step is not None
        if step.per_head_metadata is None:
            step.per_head_metadata = replace(
                metadata,
                num_actual_tokens=batch.num_tokens,
                max_query_len=batch.max_query_len,
                query_start_loc=batch.query_start_loc,
                max_seq_len=batch.max_seq_len,
                scheduler_metadata=None,
                **self.per_head_changes,
            )
        vars(step.per_head_metadata).update(seq_lens=batch.seq_lens, block_table=batch.block_table)
        blocks, heads, size, width = kv_cache.shape
        folded = kv_cache.view(blocks * heads, 1, size, width)
        forward = super(KeepImpl, self._one_head).forward  # type: ignore[misc]
        forward(layer, queries, queries, queries, folded, step.per_head_metadata, output)

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
        """vLLM's attention; then what the step's plan says."""
        step = self._context.step(layer.layer_name, attn_metadata)
        if step is not None and step.plan.per_head is not None:
            per_head = step.plan.per_head
            batch, buffer = per_head.batch(step.places[layer.layer_name]), per_head.output_buffer(output)
            self.attend_per_head(layer, per_head.split(query), kv_cache, attn_metadata, batch, buffer)
            per_head.merge(buffer, output)
        else:
            super().forward(layer, query, key, value, kv_cache, attn_metadata, output, *args, **kwargs)  # type: ignore[misc]
        if step is not None and step.plan.records:
            step.group.record(step.places[layer.layer_name], step.plan, query)
        if (projection := self._context.projections.get(layer.layer_name)) is not None:
            projection.hidden = None
        return output


# Not a base class: a protocol's `__init__` would not go on to the backend's.
_adapter: type[LayerAdapter] = KeepImpl


class TritonMixin(KeepImpl):
    """On Triton no request's entries are split up: the buffers for that are of the layer's real heads."""

    per_head_changes: ClassVar = {"seq_threshold_3D": 0}
