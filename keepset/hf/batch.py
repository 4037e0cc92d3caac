"""Several caches in one call of the model: `go_together` feeds each of them its own row of tokens."""

from __future__ import annotations

from collections import defaultdict
from collections.abc import Callable, Mapping, Sequence
from functools import partial
from typing import Any, TypeVar

import torch
from jaxtyping import Float, Int
from torch import Tensor
from transformers import DynamicCache, PreTrainedModel
from transformers.cache_utils import Cache as TransformersCache
from transformers.cache_utils import DynamicLayer

from keepset.errors import KeepsetError
from keepset.hf.attention import NAME, AttentionInput, BatchedAttention, set_pending_attention, uncompiled
from keepset.hf.cache import Cache
from keepset.hf.forwards import DecoderCall, Forwards
from keepset.hf.layer import LogicalLayer
from keepset.hf.model_support import caches_latents, readers_of
from keepset.hf.store import EntryStore
from keepset.kernels.attention import append_entries, ragged_attention
from keepset.kernels.dispatch import upload

Made = TypeVar("Made")


def can_go_together(model: PreTrainedModel) -> bool:
    """Return whether caches of this model may share a call.

    All of its layers must be keepset's and hold keys and values of their own. And the model must not rotate
    tokens by the longest request of a call, as some ways to extend a model's context do.
    """
    config = model.config.get_text_config(decoder=True)
    layers = DynamicCache(config=config).layers
    rotations = {str(getattr(module, "rope_type", "")) for module in model.modules()}
    by_the_longest = any(kind in rotation for rotation in rotations for kind in ("dynamic", "longrope"))
    shares = bool(readers_of(config)) or caches_latents(config)
    return all(type(layer) is DynamicLayer for layer in layers) and not (by_the_longest or shares)


def go_together(
    model: PreTrainedModel, caches: Sequence[Cache], tokens: Int[Tensor, "rows n"]
) -> tuple[Float[Tensor, "rows vocabulary"], dict[int, Exception]]:
    """Feed each cache its row of tokens in one call of the model.

    The model's products are computed for all rows at once, and so is attention over the entries of all caches; a GPU
    needs as many launches as for one row. Each cache has its events at its own points. It selects and stores what it
    would alone, but a product of many rows is rounded a little differently from that of one row. So in half precision
    another token may win where two are almost equally likely.

    Args:
        model: whose caches these are.
        caches: each with the whole prompt of one request, without padding; lengths and recipes may differ.
        tokens: one row for each cache.

    Returns:
        The logits after each row's newest token, and by row the error of each cache that failed. A cache that failed
        cannot be used any more. If the call itself fails, no cache can.
    """
    lengths = torch.cat([cache.progress.lengths.to(tokens.device) for cache in caches if cache.progress is not None])
    positions = lengths[:, None] + torch.arange(tokens.shape[1], device=tokens.device)
    batch = _Batch(caches, positions)
    offsets = [cache.position_offsets for cache in caches]
    ids = positions
    if any(isinstance(offset, Tensor) for offset in offsets):
        ids = ids + torch.cat([positions.new_zeros(1, 1) + offset for offset in offsets])
    output = model(tokens, position_ids=ids, past_key_values=batch, use_cache=True, logits_to_keep=1)
    return output.logits[:, -1], batch.errors


class _Batch(Forwards, TransformersCache):
    """Stands for all the caches in one call of the model."""

    def __init__(self, caches: Sequence[Cache], positions: Int[Tensor, "rows n"]) -> None:
        super().__init__(layers=[LogicalLayer() for _ in caches[0].layers])
        self._caches, self._attending = caches, False
        self._positions, self._lengths = positions, positions[:, -1] + 1
        self.errors: dict[int, Exception] = {}

    def begin_forward(self, call: DecoderCall) -> None:
        self._of_each(lambda row, cache: cache.begin_forward(call))

    def end_forward(self) -> None:
        self._of_each(lambda row, cache: cache.end_forward())

    @uncompiled
    def update(
        self, key_states: Tensor, value_states: Tensor, layer_idx: int, *args: Any, **kwargs: Any
    ) -> tuple[Tensor, Tensor]:
        if self._attending:
            raise KeepsetError(f"The model's attention implementation is not {NAME!r} any more: leave it as it was.")
        self._attending = True
        set_pending_attention(partial(self._attend, layer_idx), key_states, value_states)
        return key_states, value_states

    def _attend(self, index: int, new: AttentionInput) -> Tensor:
        self._attending = False
        device = new.query.device
        stores = self._of_each(lambda row, cache: cache.managed_layers[index].make_room(new.length))
        positions, lengths = self._positions.to(device), self._lengths.to(device)
        batched = BatchedAttention(_attend_together(stores, new, positions), positions, lengths)
        self._of_each(lambda row, cache: cache.attend(cache.managed_layers[index], new.row(row, batched)))
        return batched.output

    def _of_each(self, make: Callable[[int, Cache], Made]) -> dict[int, Made]:
        """Return a result for each cache that has not failed, by row; a failure does not affect other caches."""
        by_row: dict[int, Made] = {}
        for row, cache in enumerate(self._caches):
            if row not in self.errors:
                try:
                    by_row[row] = make(row, cache)
                except Exception as error:
                    self.errors[row] = error
        return by_row


def _attend_together(
    stores: Mapping[int, EntryStore], new: AttentionInput, positions: Int[Tensor, "rows n"]
) -> Float[Tensor, "rows n query_heads value_dim"]:
    """Store new tokens and attend from each row to its own store.

    Args:
        stores: entries by row.
        new: tokens of all rows.
        positions: their positions.

    Returns:
        Attention's output; zero in rows without a store.
    """
    _, query_heads, n, _ = new.query.shape
    by_kind: dict[tuple[torch.dtype, torch.dtype], dict[int, EntryStore]] = defaultdict(dict)
    for row, store in stores.items():
        by_kind[store.heads.keys.dtype, store.heads.dtype][row] = store
    if len(by_kind) != 1:  # no row, or some are in other bits or another precision, which are attended to separately
        output = new.value.new_zeros(len(new.query), n, query_heads, new.value.shape[-1])
        return sum((_attend_together(rows, new, positions) for rows in by_kind.values()), output)
    row_indices = None if len(stores) == len(new.query) else upload(list(stores), new.query.device)
    rows = slice(None) if row_indices is None else row_indices
    ((_, dtype),) = by_kind
    query, key, value = (part[rows].to(dtype) for part in (new.query, new.key, new.value))
    at = positions[rows]
    append_entries([store.heads for store in stores.values()], key, value, at)
    for store in stores.values():
        store.count_appended(n)
    attended = ragged_attention(query, [s.heads for s in stores.values()], new.softmax, at if n > 1 else None)
    attended = attended.to(new.value.dtype)
    if row_indices is None:
        return attended
    return attended.new_zeros(len(new.query), *attended.shape[1:]).index_copy(0, row_indices, attended)
