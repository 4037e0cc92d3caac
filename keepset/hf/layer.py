"""`LayerState`: one layer of a cache, from the input of its attention to the observation at its next event.

The lengths that it reports to transformers are logical: they count tokens. It stores only the entries that are kept.
"""

from __future__ import annotations

import copy
from collections.abc import Callable, Hashable, Mapping, Sequence
from functools import partial
from typing import Any

import torch
from jaxtyping import Float, Int
from torch import Tensor
from transformers.cache_utils import DynamicLayer
from transformers.integrations.sdpa_attention import sdpa_attention_forward

from keepset.core.feature import Accumulators, Chunk, Feature, Needs, RequestKeys
from keepset.core.features.runtime_features import RecentQueries
from keepset.core.keep_set import LayerKeepSet
from keepset.core.observation import Observation
from keepset.hf.attention import AttentionInput, KeepsetLength, joined, uncompiled
from keepset.hf.query_recorder import QueryRecorder, QueryWindow
from keepset.hf.store import EntryStore, StoredObservation
from keepset.kernels.attention import ragged_attention
from keepset.kernels.columns import attention_with_lse
from keepset.kernels.softmax import softmax_attention

Collected = tuple[dict[str, Any], Mapping[Feature[Any], Any]]
"""A layer's inputs to an event: arguments of an `Observation`, and features."""


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
        prompt: collects until the prompt is complete, if the prompt is compressed.
        decoding: collects for the events after the prompt, if the recipe has any.
        after_event: tokens that came after the newest event in the same call; stored once all layers have chosen.
        seconds: time that each kind of feature took over the prompt, once that is observed.
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
        self.prompt: PromptPhase | None = None
        self.decoding: DecodingPhase | None = None
        self.after_event: AttentionInput | None = None
        self._read_by: list[AttentionInput] = []
        self.seconds: Mapping[Hashable, float] = {}

    @property
    def nbytes(self) -> int:
        """Bytes allocated for this layer's entries, and for the next event's other inputs."""
        recorded = 0 if self.decoding is None else self.decoding.recorder.nbytes
        return recorded + (0 if self.store is None else self.store.nbytes)

    @property
    def nbytes_states(self) -> int:
        """Bytes of the layer's states, which are no entries and never compressed."""
        return 0

    def copy_states(self, other: Any) -> None:
        """Take over the states of another layer, which are no entries."""

    def looks_at(self, new: AttentionInput) -> bool:
        """Return whether an event will look at these tokens' queries, or lies among the tokens."""
        if self.prompt is not None:
            return True
        return self.decoding is not None and self.decoding.looks_at(new)

    def attend(
        self, new: AttentionInput
    ) -> tuple[Float[Tensor, "batch n query_heads value_dim"], AttentionInput | None]:
        """Store new tokens and attend over all that is kept.

        Args:
            new: the tokens, after the cache has added positions and lengths.

        Returns:
            Attention's output, and the tokens up to the event that they reach, or None. If there is such an event,
            `observe` and `keep` have to follow. If other layers read these entries, the event waits for the last of
            them.
        """
        self.logical = new.end
        if new.batched is None and self.store is not None:
            room = 0 if self.decoding is None else self.decoding.next - new.start
            rows = None if new.real is None else new.real.indices
            self.store.append(new.key, new.value, new.positions, rows, room)
        output = self._attended(new) if new.batched is None else new.batched.output
        if self.readers:
            self._read_by = [new]
            return output, None
        return output, self._up_to_event(new)

    @property
    def has_readers_left(self) -> bool:
        """Return whether a layer that reads these entries has not attended to the newest tokens yet."""
        return bool(self._read_by)

    def attend_shared(
        self, reader: AttentionInput
    ) -> tuple[Float[Tensor, "batch n query_heads value_dim"], AttentionInput | None]:
        """Attend from another layer's queries of the newest tokens over all that is kept.

        Returns:
            As `attend`. The tokens up to an event have the queries of all layers that read these entries.
        """
        new = self._read_by[0].read_by(reader)
        self._read_by.append(new)
        output = self._attended(new)
        if len(self._read_by) <= self.readers:
            return output, None
        everybody, self._read_by = self._read_by, []
        return output, self._up_to_event(joined(everybody))

    def _attended(self, new: AttentionInput) -> Float[Tensor, "batch n query_heads value_dim"]:
        """Return attention's output for new tokens, and store them unless they are the first."""
        if self.store is None:
            return self._attend_first(new)
        at = new.positions if new.positions.shape[1] > 1 else None
        return new.finished(ragged_attention(new.query, [self.store.attended], new.softmax, at))

    def _up_to_event(self, new: AttentionInput) -> AttentionInput | None:
        """Store first tokens, collect an event's inputs, and return the tokens up to the event that is reached.

        No gradient flows through collected inputs or an event.
        """
        if self.store is None and (self.prompt is None or new.real is not None):
            self.store = _packed(new, self.store_type)
        up_to_event = None
        with torch.no_grad():
            if self.prompt is not None:
                self.prompt.add(new, self.store)
                if self.decoding is not None:
                    self.decoding.recorder.record(new, None, self.decoding.next)
                up_to_event = new if new.end >= self.prompt.length else None
            elif self.decoding is not None and self.store is not None and self.decoding.looks_at(new):
                up_to_event, self.after_event = self.decoding.add(new, self.store)
        if up_to_event is None and self.store is None:
            self.store = _packed(new, self.store_type)
        return up_to_event

    def observe(self, up_to_event: AttentionInput, features: Mapping[Feature[Any], Any], **others: Any) -> Observation:
        """Return the observation of an event. The layer then holds no entries until `keep` gives it some.

        Args:
            up_to_event: the tokens up to the event, from `attend`.
            features: features that do not come from this layer's tokens.
            others: arguments of the `Observation` that the cache knows, not the layer.
        """
        store, self.store = self.store, None
        observation: Callable[..., Observation] = Observation
        if self.prompt is not None:
            own, collected = self.prompt.collected(up_to_event, store)
            self.seconds, self.prompt = self.prompt.seconds, None
        else:
            assert self.decoding is not None and store is not None
            own, collected = self.decoding.collected(up_to_event, store)
            observation = partial(StoredObservation, store)
        key, value = self.store_type.stored(up_to_event.key[0, 0, 0], up_to_event.value[0, 0, 0])
        return observation(
            **own,
            **others,
            lengths=up_to_event.lengths,
            layer=self.index,
            features={**features, **collected},
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
        """Store exactly the kept entries of an observation; `append_after_event` follows once all layers have."""
        others = {"positions": observation.positions.int(), **kept.state}
        if isinstance(observation, StoredObservation):
            self.store = observation.store.kept(others, kept.indices, kept.heads)
        else:
            keys, values = self.store_type.stored(observation.keys, observation.values)
            self.store = self.store_type.pack({"keys": keys, "values": values, **others}, kept.indices, kept.heads)
        if kept.values is not None:
            self.store.replace_values(kept.values)
        if kept.bits is not None:
            self.store.quantize(kept.bits)

    def append_after_event(self) -> None:
        """Store the tokens after an event, which did not see them."""
        if self.after_event is not None:
            assert self.store is not None
            after = self.after_event
            self.store.append(after.key, after.value, after.positions, after.real_indices)
            if self.decoding is not None:
                self.decoding.recorder.record(after, self.store, self.decoding.next)
            self.after_event = None

    def make_room(self, n: int) -> EntryStore:
        """Return the store with free places for `n` tokens, for a caller that stores and attends to them itself."""
        assert self.store is not None
        self.store.make_room(n, 0 if self.decoding is None else self.decoding.next - self.logical)
        return self.store

    def can_take_back(self, removed: int) -> bool:
        """Return whether the newest `removed` tokens can be forgotten."""
        decoding = self.decoding
        return decoding is None or decoding.recorder.can_take_back(self.logical - removed, decoding.next)

    def take_back(self, removed: int, per_request: list[int], lengths: Int[Tensor, " batch"]) -> None:
        """Forget the newest tokens: `removed` with padding, `per_request` without; `lengths` are left."""
        if self.store is not None:
            self.store.crop(per_request)
            self.logical -= removed
            if self.decoding is not None:
                self.decoding.recorder.crop(self.logical, lengths, self.store)

    def reorder_cache(self, beam_idx: Int[Tensor, " rows"]) -> None:
        """Make the batch consist of these requests."""
        if self.store is not None:
            self.store.reorder(beam_idx.tolist())
            if self.decoding is not None:
                self.decoding.recorder.reorder(beam_idx)

    def fork(self) -> LayerState:
        """Return an independent copy."""
        copied = copy.copy(self)
        copied.store = None if self.store is None else self.store.fork()
        copied.prompt = None if self.prompt is None else self.prompt.fork()
        copied.decoding = None if self.decoding is None else self.decoding.fork()
        return copied

    def _attend_first(self, new: AttentionInput) -> Tensor:
        """Attend from the first tokens to themselves, and keep the log-sum-exp if that saves work."""
        n, plain, (query, key, value) = new.length, new.softmax.plain, new.as_made
        whole = new.valid is None and (new.mask is None or not new.mask.shows_later)
        if whole and not (plain and (self.prompt is None or not self.prompt.needs.log_sum_exp)):
            rows = zip(query, key, value, strict=True)
            parts = [attention_with_lse(q, k, v, new.softmax) for q, k, v in rows]
            new.lse = [lse for _, lse in parts]
            return torch.stack([output for output, _ in parts]).transpose(1, 2).contiguous()
        matrix = None if new.mask is None or new.mask.matrix is None else new.mask.matrix[:, :, :n, :n]
        if not plain:
            return softmax_attention(query, key, value, new.softmax, matrix, matrix is None)[0]
        # Causal, whatever the module's attribute says: some modules say False and rely on the mask.
        return sdpa_attention_forward(new.module, query, key, value, matrix, 0.0, new.softmax.scaling, True)[0]


class PromptPhase:
    """Collects a method's inputs over the prompt, in one forward or in chunks. The prompt's end is an event.

    Args:
        needs: the method's inputs besides the entries.
        length: tokens of the prompt, padding included.
    """

    def __init__(self, needs: Needs, length: int) -> None:
        self.needs, self.length = needs, length
        self._window, self._accumulators = QueryWindow(), Accumulators(needs)

    @property
    def seconds(self) -> Mapping[Hashable, float]:
        """Time that each kind of feature took to collect."""
        return self._accumulators.seconds

    def add(self, new: AttentionInput, store: EntryStore | None) -> None:
        """Take in one chunk of the prompt.

        Args:
            new: the tokens of the chunk.
            store: the entries so far, these tokens among them; None if the chunk is all of them.
        """
        if not self.needs:
            return
        if size := self.needs.window:
            with self._accumulators.timed(RecentQueries):
                recent = new if new.real is not None else new.tokens(slice(max(new.length - size, 0), None))
                self._window.add(recent, size)
                self._window.keep(size)
        if not self._accumulators:
            return
        start, on_host = None if new.padded else new.start, None if new.real is None else new.real.positions
        chunk = Chunk(
            queries=new.query,
            entries=partial(_entry_rows, new, store),
            positions=new.positions,
            valid=new.valid,
            softmax=new.softmax,
            lse=new.lse,
            source=new.layer_input,
            start=start,
            host_positions=on_host,
        )
        self._accumulators.add(chunk)

    def collected(self, up_to_event: AttentionInput, store: EntryStore | None) -> Collected:
        """Return the inputs of the event at the prompt's end.

        Args:
            up_to_event: the newest tokens of the prompt.
            store: the entries of the prompt; None if `up_to_event` has all of them.
        """
        if store is None:
            entries: dict[str, Any] = {"keys": up_to_event.key, "values": up_to_event.value}
        else:
            state, exists = store.padded()
            if not exists.shape[-1]:  # for prompts without tokens, so that no method gets empty tensors
                state = {
                    name: column.new_zeros(*column.shape[:2], 1, *column.shape[3:]) for name, column in state.items()
                }
                exists = exists.new_zeros(*exists.shape[:2], 1)
            entries = {name: state.pop(name) for name in ("keys", "values", "positions")}
            entries |= {"state": state, "valid": exists, "count": store.entries}
        features = self._accumulators.values(up_to_event.lengths, entries["keys"].shape[2])
        return entries | self._window.newest(self.needs.window), features

    def fork(self) -> PromptPhase:
        """Return an independent copy."""
        copied = copy.copy(self)
        copied._window, copied._accumulators = self._window.fork(), self._accumulators.fork()
        return copied


class DecodingPhase:
    """Collects for the events after the prompt, which come at fixed intervals of tokens, given or generated.

    Attention sees the entries from before the newest event that a forward reaches. Padding between events counts as
    tokens, so a padded request has fewer queries in a window.

    Args:
        needs: the method's inputs besides the entries.
        every: tokens from one event to the next.
        next_event: logical length of the first event.

    Attributes:
        next: logical length of the next event; every token so far lies before it.
        recorder: records the queries before it.
    """

    def __init__(self, needs: Needs, every: int, next_event: int) -> None:
        self._newest, self._every = needs.newest, every
        self.next, self.recorder = next_event, QueryRecorder(needs, every)
        self._span = max(self.recorder.reach, 1)

    def looks_at(self, new: AttentionInput) -> bool:
        """Return whether the next event will look at these tokens' queries, or lies among the tokens."""
        return new.end > self.next - self._span or (self._newest > 0 and new.padded)

    def add(self, new: AttentionInput, store: EntryStore) -> tuple[AttentionInput | None, AttentionInput | None]:
        """Take in the tokens of one forward, once its attention is done. Entries beyond an event leave the store.

        Args:
            new: the tokens.
            store: the entries, including those of these tokens.

        Returns:
            The tokens up to the newest event that they reach, and those beyond it. Older events are skipped.
        """
        if new.end < self.next:
            self.recorder.record(new, store, self.next)
            return None, None
        point = new.end - (new.end - self.next) % self._every
        up_to_event, after = new.split(point)
        if after is not None:
            store.crop((after.lengths - up_to_event.lengths).tolist())
        if self.next < point:  # inputs that were collected for skipped events are not needed
            self.recorder.forget(store)
            self.next = point
        self.recorder.record(up_to_event, store, point)
        self.recorder.add_up(up_to_event, store, point, point, up_to_event.lengths)
        return up_to_event, after

    def collected(self, up_to_event: AttentionInput, store: EntryStore) -> Collected:
        """Return the inputs of an event, and begin the interval to the next one.

        Args:
            up_to_event: the newest tokens before the event.
            store: the entries, whose keys and values are read in place.
        """
        state = store.other_columns
        entries = {"positions": state.pop("positions"), "valid": store.exists, "count": store.entries, "state": state}
        queries, features = self.recorder.take(up_to_event, state)  # takes its columns out of the state
        self.next += self._every
        return entries | queries, features

    def fork(self) -> DecodingPhase:
        """Return an independent copy."""
        copied = copy.copy(self)
        copied.recorder = self.recorder.fork()
        return copied


def _packed(new: AttentionInput, store_type: type[EntryStore]) -> EntryStore:
    """Return a store of all tokens that are not padding."""
    batch, kv_heads, n, _ = new.key.shape
    rows = new.real_indices or [torch.arange(n, device=new.key.device)] * batch
    positions = new.positions.int()[:, None].expand(-1, kv_heads, -1)
    keys, values = store_type.stored(new.key, new.value)
    columns = {"keys": keys, "values": values, "positions": positions}
    return store_type.packed_by(columns, [row for row in rows for _ in range(kv_heads)])


def _entry_rows(new: AttentionInput, store: EntryStore | None) -> RequestKeys:
    """Return every request's keys without holes, and which of a chunk's queries are real."""
    keys, counts = (new.key, new.counts) if store is None else (store.keys, store.counts[:: store.kv_heads])
    own: Sequence[Tensor | slice] = new.real_indices or [slice(None)] * len(keys)
    return [(row[:, :count], real) for row, count, real in zip(keys, counts, own, strict=True)]
