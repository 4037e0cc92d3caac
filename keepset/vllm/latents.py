"""Layers of models that cache latents (MLA, DeepSeek): a mixin for vLLM's backends of them, and their pages.

Such a layer stores for each token one row for all heads: a latent, from which every head's key and value are made, and
the rotated part of the key. A query that is mapped to the latents (absorbed) has the same product with the row as with
the key. So methods see one KV head, whose keys are the rows and whose values are the latents. vLLM computes attention,
or keepset if layers keep different numbers of entries.
"""

from __future__ import annotations

from collections.abc import Sequence
from typing import Any

import torch
from jaxtyping import Float, Int, Shaped
from torch import Tensor
from vllm import _custom_ops as ops

from keepset.kernels.paged import append_to_pages, paged_attention
from keepset.paged.pages import StridedPages
from keepset.vllm.attention import CompressedImpl
from keepset.vllm.engine_context import CurrentStep, PlannedStep


class LatentPages(StridedPages):
    """Pages of rows of a latent and a rotated part. A key is the row, and a value is the latent.

    Args:
        caches: the caches of all layers with the same block tables.
        place: the index of the layer's cache among them.
        latent: numbers of a latent.
    """

    def __init__(
        self, caches: Sequence[Shaped[Tensor, "blocks 1 block_size row"]], layer_index: int, latent: int
    ) -> None:
        super().__init__(caches, layer_index)
        self.head_dim, self.value_dim = caches[layer_index].shape[3], latent
        self.entry_sizes = latent, self.head_dim - latent

    def read_keys(self, subpages: Int[Tensor, "*rows pages"]) -> Shaped[Tensor, "*rows entries row"]:
        return self.read_rows(subpages)

    def read(
        self, subpages: Int[Tensor, "*rows pages"]
    ) -> tuple[Shaped[Tensor, "*rows entries row"], Shaped[Tensor, "*rows entries latent"]]:
        rows = self.read_rows(subpages)
        return rows, rows[..., : self.value_dim]

    def write(
        self, keys: Shaped[Tensor, "n row"], values: Shaped[Tensor, "n latent"], slots: Int[Tensor, " n"]
    ) -> None:
        """Write row `i` to `slots[i]`; values are parts of the rows.

        Args:
            keys: the rows, with a latent and a rotated part.
            values: the latents; not read.
            slots: the slot of each row.
        """
        first, second = keys.chunk(2, -1)
        super().write(first, second, slots)

    def take(self, slots: Int[Tensor, " n"]) -> tuple[Shaped[Tensor, "n row"], Shaped[Tensor, "n latent"]]:
        rows = torch.cat(super().take(slots), -1)
        return rows, rows[:, : self.value_dim]


class LatentImpl(CompressedImpl):
    """Attends to the kept entries, and records absorbed queries for later events.

    A step's first tokens attend to rows of the cache (`forward_mqa`). The others, parts of prompts, attend to keys and
    values that are made for them (`forward_mha`, which vLLM calls first). Tokens of compressed requests are among the
    first.
    """

    kv_lora_rank: int
    qk_nope_head_dim: int

    def __init__(self, *args: Any, **kwargs: Any) -> None:
        super().__init__(*args, **kwargs)
        self._layer: Any = None
        self._of_prompts: Tensor | None = None

    @property
    def num_queries_per_kv(self) -> int:
        """The number of query heads of the layer, which all share one row for each entry."""
        return self.num_heads

    def belong_to(self, layers: Sequence[Any], layer_index: int, current: CurrentStep) -> None:
        super().belong_to(layers, layer_index, current)
        self._layer = layers[layer_index]  # vLLM does not pass it to all methods

    @property
    def unrotated(self) -> int:  # type: ignore[override]
        """The numbers of a latent, which are not rotated."""
        return self.kv_lora_rank

    def queries_of(self, rows: Float[Tensor, "n numbers"]) -> Float[Tensor, "n query_heads row"]:
        return self._absorbed(rows.unflatten(-1, (self.num_heads, -1)))

    def make_pages(self, layer: Any, caches: Sequence[Tensor]) -> LatentPages:
        return LatentPages([cache.unsqueeze(1) for cache in caches], self._place, self.kv_lora_rank)

    def do_kv_cache_update(self, latents: Tensor, rotated: Tensor, kv_cache: Tensor, slots: Tensor, *args: Any) -> None:
        """Write new rows of a latent and a rotated part, by vLLM's method or to the layer's own slots.

        Raises:
            UnsupportedEngineError: the slots are not those of the plan.
        """
        step = self.step_to_write(self._layer, slots)
        if step is None or step.plan.has_plain:
            super().do_kv_cache_update(latents, rotated, kv_cache, slots, *args)  # type: ignore[misc]
        if step is not None and (ragged := step.plan.ragged) is not None:
            assert ragged.tokens is not None
            first, second = torch.cat([latents, rotated.flatten(1)], -1)[:, None].chunk(2, -1)
            append_to_pages(first, second, kv_cache.unsqueeze(1), ragged.tokens, ragged.of_layer(self._place))

    def forward_mha(
        self,
        q: Tensor,
        latents: Tensor,
        rotated: Tensor,
        kv_cache: Tensor,
        attn_metadata: Any,
        *args: Any,
        **kwargs: Any,
    ) -> None:
        """Run vLLM's attention for tokens of prompts, and record their queries or, if other tokens follow, keep them.

        Queries, `[tokens, query_heads, head_dim]`, are rotated. `attn_metadata` is the result of `KeepBuilder.build`.
        """
        super().forward_mha(q, latents, rotated, kv_cache, attn_metadata, *args, **kwargs)  # type: ignore[misc]
        step = self.planned(self._layer, attn_metadata)
        if step is not None and (step.plan.in_layers or step.plan.dummy):
            self._of_prompts = self._absorbed(q)
            if not attn_metadata.num_decode_tokens:
                self._finish(attn_metadata)

    def forward_mqa(
        self, q: Tensor | tuple[Tensor, Tensor], kv_cache: Tensor, attn_metadata: Any, layer: Any
    ) -> tuple[Tensor, Tensor | None]:
        """Attend to rows in the cache, and record the queries of the step.

        Queries, `[tokens, query_heads, ...]`, are absorbed; they may come in two parts.

        Returns:
            The attention over latents, `[tokens, query_heads, latent]`, and its log-sum-exp if vLLM's backend has it.
        """
        step = self.planned(layer, attn_metadata)
        attended: Tensor | None = None
        lse: Tensor | None = None
        if step is None or step.plan.has_plain:
            attended, lse = super().forward_mqa(q, kv_cache, attn_metadata, layer)  # type: ignore[misc]
        if step is not None and (step.plan.ragged is not None or step.plan.in_layers or step.plan.dummy):
            queries = torch.cat(q, -1) if isinstance(q, tuple) else q
            if step.plan.ragged is not None:
                if attended is None:
                    attended = queries.new_zeros(*queries.shape[:2], self.kv_lora_rank)
                self._attend_ragged(layer, step, queries, kv_cache, attended)
            self._finish(attn_metadata, queries)
        assert attended is not None
        return attended, lse

    def _attend_ragged(self, layer: Any, step: PlannedStep, queries: Tensor, kv_cache: Tensor, output: Tensor) -> None:
        """Compute the attention of tokens if the layer has its own entries.

        Args:
            layer: vLLM's attention layer.
            step: the step that is under way.
            queries: absorbed queries, `[tokens, query_heads, row]`.
            kv_cache: vLLM's cache tensor of the layer.
            output: is overwritten with the attention over latents, `[tokens, query_heads, latent]`.
        """
        ragged, layer_index, pages = step.plan.ragged, self._place, self.pages(layer, kv_cache)
        assert ragged is not None and ragged.tokens is not None and isinstance(pages, LatentPages)
        tokens, layout, size = ragged.tokens, ragged.of_layer(layer_index), self.kv_lora_rank
        paged_attention(queries, pages.caches, layer_index, tokens, layout, self.softmax, output, value_dim=size)

    def _finish(self, metadata: Any, *first: Tensor) -> None:
        """Record the queries of a step: `first`, those of its first tokens, and the kept ones of prompts.

        Args:
            metadata: the result of `KeepBuilder.build`.
            *first: absorbed queries, `[tokens, query_heads, row]`; none if the step has only prompts.
        """
        queries = [*first, *([] if self._of_prompts is None else [self._of_prompts])]
        self._of_prompts = None
        step = self.planned(self._layer, metadata)
        self.record(self._layer, step, torch.cat(queries) if len(queries) > 1 else queries[0])

    def _absorbed(self, queries: Float[Tensor, "n query_heads head_dim"]) -> Float[Tensor, "n query_heads row"]:
        """Return queries of heads as absorbed queries."""
        by_head, rotated = queries.split([self.qk_nope_head_dim, queries.shape[-1] - self.qk_nope_head_dim], -1)
        absorbed = queries.new_empty(*queries.shape[:2], self.kv_lora_rank)
        by_head, into = by_head.transpose(0, 1), absorbed.transpose(0, 1)
        if self._layer.is_amx_bmm_enabled:  # vLLM has packed the matrices
            ops.bmm_cpu(into, by_head, self._w_uk_packed, True, self._w_scale)  # type: ignore[attr-defined]
        else:
            torch.bmm(by_head, self._layer.W_UK_T, out=into)
        return torch.cat([absorbed, rotated], -1)
