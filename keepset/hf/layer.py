"""`LayerState`: one layer of a cache, from the input of its attention to the observation at its next event.

The lengths that it reports to transformers are logical: they count tokens. It stores only the entries that are kept.
"""

from __future__ import annotations

import copy
from collections.abc import Callable, Mapping, Sequence
from functools import partial
from typing import Any

import torch
from jaxtyping import Bool, Float, Int
from torch import Tensor
from transformers.cache_utils import DynamicLayer
from transformers.integrations.sdpa_attention import sdpa_attention_forward

from keepset.core.feature import Feature, Needs
from keepset.core.keep_set import LayerKeepSet
from keepset.core.observation import Observation
from keepset.hf.attention import AttentionInput, KeepsetLength, joined, uncompiled
from keepset.hf.query_recorder import Collector
from keepset.hf.store import EntryStore, StoredObservation
from keepset.kernels.attention import ragged_attention
from keepset.kernels.columns import attention_with_lse
from keepset.kernels.softmax import softmax_attention


class LogicalLayer(DynamicLayer):
    """A cache layer that tells transformers how many tokens there were, whatever it still holds.

    Attributes:
        logical: tokens so far, including dropped ones and padding, as masks and positions count them.
    """

    supports_early_init = False
    logical = 0

    @uncompiled
    def get_seq_length(self) -> int:
        return KeepsetLength(self.logical)


class LayerState(LogicalLayer):
    """A layer that stores what it is told to keep, attends over it, and collects the inputs of the next event.

    Attributes:
        index: the layer's index in the model.
        store: the entries; None before the first, and while an event chooses among them.
        collector: collects the next event's other inputs.
        after_event: tokens that came after the newest event in the same call; stored once all layers have chosen.
        readers: how many later layers of the model attend to this layer's entries and store none.
    """

    readers = 0
    store_type: type[EntryStore] = EntryStore
    """What holds the entries."""

    def __init__(self, index: int) -> None:
        super().__init__()
        self.index = index
        self.reset()

    def reset(self) -> None:
        self.logical = 0
        self.store: EntryStore | None = None
        self.collector = Collector(Needs())
        self.after_event: AttentionInput | None = None
        self._newest: AttentionInput | None = None
        self._read_by: list[AttentionInput] = []

    @property
    def nbytes(self) -> int:
        """Bytes allocated for this layer's entries, and for the next event's other inputs."""
        return self.collector.nbytes + (0 if self.store is None else self.store.nbytes)

    @property
    def prompt(self) -> int | None:
        """The tokens of a prompt that is compressed, until it is complete."""
        return self.collector.prompt

    @property
    def nbytes_states(self) -> int:
        """Bytes of the layer's states, which are no entries and never compressed."""
        return 0

    def copy_states(self, source: Any) -> None:
        """Take over the states of another layer, which are no entries."""

    def attend(
        self, new: AttentionInput
    ) -> tuple[Float[Tensor, "batch n query_heads value_dim"], AttentionInput | None]:
        """Store new tokens and attend over all that is kept.

        Args:
            new: the tokens, after the cache has added positions and lengths. If other layers read these entries, the
                calls that follow are theirs, whose queries attend while nothing is stored.

        Returns:
            Attention's output, and the tokens up to the event that they reach, or None. If there is such an event,
            `observe` and `keep` have to follow. If other layers read these entries, the event waits for the last of
            them, and the tokens have the queries of all of them.
        """
        store = self.store
        if self._read_by:
            new = self._read_by[0].read_by(new)
        else:
            self.logical = new.end
            if store is not None and new.batched is None:
                rows = None if new.real is None else new.real.indices
                store.append(new.key, new.value, new.positions, rows, self.collector.next - new.start)
        if new.batched is not None:
            output = new.batched.output
        elif store is None:
            output = self._attend_first(new)
        else:
            at = new.positions if new.positions.shape[1] > 1 else None
            output = new.finished(ragged_attention(new.query, [store.attended], new.softmax, at))
        if self.readers:
            self._read_by = [*self._read_by, new]  # a fork may have the same list
            if len(self._read_by) <= self.readers:
                return output, None
            new, self._read_by = joined(self._read_by), []
        collector = self.collector
        if collector.turns:
            self._newest = new.newest
        within_prompt = store is None or collector.prompt is not None
        if not within_prompt and new.cache_valid is None and new.end <= collector.next - collector.span:
            return output, None
        return output, self._up_to_event(new)

    @property
    def has_readers_left(self) -> bool:
        """Return whether a layer that reads these entries has not attended to the newest tokens yet."""
        return bool(self._read_by)

    def _up_to_event(self, new: AttentionInput) -> AttentionInput | None:
        """Store first tokens, collect an event's inputs, and return the tokens up to the event that is reached.

        No gradient flows through collected inputs or an event.
        """
        if self.store is None and (self.collector.prompt is None or new.real is not None):
            self.store = _packed(new, self.store_type)
        with torch.no_grad():
            up_to_event, self.after_event = self.collector.add(new, self.store)
        if up_to_event is None and self.store is None:
            self.store = _packed(new, self.store_type)
        return up_to_event

    def end_turn(
        self, lengths: Int[Tensor, " batch"], valid: Bool[Tensor, "batch logical"] | None
    ) -> AttentionInput | None:
        """End a turn between two forwards, so that an event can follow at the present length.

        Args:
            lengths: tokens of each request.
            valid: which tokens of the cache are no padding; None if all are.

        Returns:
            The tokens up to the event: the newest one. None if the layer has seen none.
        """
        if self._newest is None or self.store is None:
            return None
        last = copy.copy(self._newest)  # tokens may have been taken back since, and requests reordered
        last.positions, last.cache_valid = (lengths - 1)[:, None].to(last.key.device), valid
        last.start, last.end = self.logical - 1, self.logical
        self.collector.end_turn(last, self.store)
        return last

    def leave_out(self, spans: Sequence[tuple[int, int]]) -> None:
        """Drop the entries at some spans of positions, `(first, end)` without `end`; lengths stay."""
        if self.store is not None:
            self.store.leave_out(spans)

    def observe(
        self, up_to_event: AttentionInput, features: Mapping[Feature[Any], Any], **cache_parts: Any
    ) -> Observation:
        """Return the observation of an event. The layer then holds no entries until `keep` gives it some.

        Args:
            up_to_event: the tokens up to the event, from `attend`.
            features: features that do not come from this layer's tokens.
            cache_parts: arguments of the `Observation` that the cache knows, not the layer.
        """
        store, self.store = self.store, None
        observation: Callable[..., Observation] = Observation
        if self.collector.prompt is None:
            assert store is not None
            observation = partial(StoredObservation, store)
        parts = self.collector.collected(up_to_event, store)
        key, value = self.store_type.stored(up_to_event.key[0, 0, 0], up_to_event.value[0, 0, 0])
        return observation(
            **{**parts, "features": {**features, **parts["features"]}},
            **cache_parts,
            lengths=up_to_event.lengths,
            layer=self.index,
            softmax=up_to_event.softmax,
            entry_bytes=key.nbytes + value.nbytes,
            entry_sizes=(len(key), len(value)),
        )

    def held(self, up_to_event: AttentionInput) -> list[list[int]]:
        """Return how many entries each head of each request holds at an event that `attend` has returned."""
        if self.store is None:
            return [[count] * up_to_event.key.shape[1] for count in up_to_event.counts]
        counts, heads = self.store.counts, self.store.kv_heads
        return [counts[first : first + heads] for first in range(0, len(counts), heads)]

    def keep(self, observation: Observation, kept: LayerKeepSet) -> None:
        """Store exactly the kept entries of an observation.

        Args:
            observation: what the layer has shown at the event.
            kept: what stays of it; `append_after_event` follows once all layers have theirs.
        """
        columns = {"positions": observation.positions.int(), **kept.state}
        if isinstance(observation, StoredObservation):
            self.store = observation.store.kept(columns, kept.indices, kept.heads)
        else:
            keys, values = self.store_type.stored(observation.keys, observation.values)
            self.store = self.store_type.pack({"keys": keys, "values": values, **columns}, kept.indices, kept.heads)
        if kept.values is not None:
            self.store.replace_values(kept.values)
        if kept.bits is not None:
            self.store.quantize(kept.bits)

    def append_after_event(self, length: int) -> None:
        """Store the tokens after the event at this logical length, which did not see them."""
        after = self.after_event
        if after is None or after.start != length:  # those of a later event wait with it
            return
        assert self.store is not None
        self.store.append(after.key, after.value, after.positions, after.real_indices)
        self.collector.record(after, self.store)
        self.after_event = None

    def make_room(self, n: int) -> EntryStore:
        """Return the store with free places for `n` tokens, for a caller that stores and attends to them itself."""
        assert self.store is not None
        self.store.make_room(n, self.collector.next - self.logical)
        return self.store

    def can_take_back(self, removed: int) -> bool:
        """Return whether the newest `removed` tokens can be forgotten."""
        return self.collector.can_take_back(self.logical - removed)

    def take_back(self, removed: int, per_request: list[int] | None, lengths: Int[Tensor, " batch"]) -> None:
        """Forget the newest tokens.

        Args:
            removed: how many, with padding.
            per_request: how many of each request, without padding; None if heads do not have entries of all of them.
            lengths: tokens of each request that are left.
        """
        if self.store is not None:
            if per_request is None:
                self.store.crop_to(lengths)
            else:
                self.store.crop(per_request)
            self.logical -= removed
            self.collector.crop(self.logical, lengths, self.store)

    def reorder_cache(self, beam_idx: Int[Tensor, " rows"]) -> None:
        """Make the batch consist of these requests."""
        if self.store is not None:
            self.store.reorder(beam_idx.tolist())
            self.collector.reorder(beam_idx)

    def fork(self) -> LayerState:
        """Return an independent copy."""
        copied = copy.copy(self)
        copied.store = None if self.store is None else self.store.fork()
        copied.collector = self.collector.fork()
        return copied

    def _attend_first(self, new: AttentionInput) -> Tensor:
        """Attend from the first tokens to themselves, and keep the log-sum-exp if that saves work."""
        n, plain, (query, key, value) = new.length, new.softmax.plain, new.as_made
        whole = new.valid is None and (new.mask is None or not new.mask.shows_later)
        if whole and not (plain and (self.prompt is None or not self.collector.needs.log_sum_exp)):
            rows = zip(query, key, value, strict=True)
            parts = [attention_with_lse(q, k, v, new.softmax) for q, k, v in rows]
            new.lse = [lse for _, lse in parts]
            return torch.stack([output for output, _ in parts]).transpose(1, 2).contiguous()
        matrix = None if new.mask is None or new.mask.matrix is None else new.mask.matrix[:, :, :n, :n]
        if not plain:
            return softmax_attention(query, key, value, new.softmax, matrix, matrix is None)[0]
        # Causal, whatever the module's attribute says: some modules say False and rely on the mask.
        return sdpa_attention_forward(new.module, query, key, value, matrix, 0.0, new.softmax.scaling, True)[0]


def _packed(new: AttentionInput, store_type: type[EntryStore]) -> EntryStore:
    batch, kv_heads, n, _ = new.key.shape
    rows = new.real_indices or [torch.arange(n, device=new.key.device)] * batch
    positions = new.positions.int()[:, None].expand(-1, kv_heads, -1)
    keys, values = store_type.stored(new.key, new.value)
    columns = {"keys": keys, "values": values, "positions": positions}
    return store_type.packed_by(columns, [row for row in rows for _ in range(kv_heads)])
