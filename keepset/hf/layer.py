"""`KeepLayer`: one layer of the cache. What it tells transformers is logical, what it stores is physical."""

from __future__ import annotations

import copy
from dataclasses import replace
from typing import Any

import torch
from jaxtyping import Float, Int
from torch import Tensor
from transformers.cache_utils import DynamicLayer, LinearAttentionAndFullAttentionLayer, LinearAttentionLayer
from transformers.integrations.sdpa_attention import sdpa_attention_forward

from keepset.core.keep_set import LayerKeepSet
from keepset.core.observation import Observation
from keepset.hf.dynamo import uncompiled
from keepset.hf.forward import Forward
from keepset.hf.mask import KeepsetLength
from keepset.hf.phases import DecodingPhase, LayerEvent, PromptPhase
from keepset.hf.store import EntryStore
from keepset.hf.stored_observation import StoredObservation
from keepset.kernels.attention import ragged_attention
from keepset.kernels.columns import attention_with_lse


class LogicalLayer(DynamicLayer):
    """A cache layer that tells transformers how many tokens there were, whatever it holds of them.

    Attributes:
        logical: tokens so far, dropped ones and padding included: what masks and positions count.
    """

    supports_early_init = False
    logical = 0

    @uncompiled
    def get_seq_length(self) -> int:
        return KeepsetLength(self.logical)

    def update(self, key_states: Tensor, value_states: Tensor, *args: Any, **kwargs: Any) -> tuple[Tensor, Tensor]:
        """The new keys and values alone: what else there is, the attention function gets from the layer."""
        return key_states, value_states


class KeepLayer(LogicalLayer):
    """A layer that stores what it is told to keep, and attends over it.

    Attributes:
        store: the entries; None before the first, and while an event of them is undecided.
        prompt: collects until the prompt is complete.
        decoding: collects for the events after it, where the recipe has such.
    """

    def __init__(self, index: int) -> None:
        super().__init__()
        self.index = index
        self.reset()

    def reset(self) -> None:
        self.logical = 0
        self.store: EntryStore | None = None
        self.prompt: PromptPhase | None = None
        self.decoding: DecodingPhase | None = None
        self._beyond: Forward | None = None

    @property
    def nbytes(self) -> int:
        """Bytes allocated for this layer's entries, and for what the next event looks at beside them."""
        beside = 0 if self.decoding is None else self.decoding.passing.nbytes
        return beside + (0 if self.store is None else self.store.nbytes)

    @property
    def nbytes_states(self) -> int:
        """Bytes of what the layer holds that is no entry and is never compressed."""
        return 0

    @property
    def phase(self) -> PromptPhase | DecodingPhase | None:
        """What is under way; None when nothing more is compressed."""
        return self.decoding if self.prompt is None else self.prompt

    def attend(self, forward: Forward) -> tuple[Float[Tensor, "batch n query_heads value_dim"], LayerEvent | None]:
        """Stores the new entries and attends over all that are kept; gives the event that is reached by that.

        Who chooses calls `keep` then: until it does, the layer holds nothing.
        """
        self.logical = forward.end
        if forward.call.joint is not None:
            output = forward.call.joint.output
        elif self.store is None:
            output, forward = self._attend_first(forward)
        else:
            real = None if forward.real is None else forward.real.indices
            self.store.append(forward.key, forward.value, forward.positions, real, self._room(forward.start))
            at = forward.positions if forward.length > 1 else None
            output = ragged_attention(forward.query, [self.store.heads], forward.call.scaling, at)
        event = None
        if self.prompt is not None:
            event = self.prompt.take(forward, self.store)
            if self.decoding is not None:
                self.decoding.record(forward, None)
        elif self.decoding is not None:
            self.store = self.store or forward.pack()
            event = self.decoding.take(forward, self.store)
        if event is not None:
            self.store, self.prompt, self._beyond = None, None, event.beyond
        elif self.store is None:
            self.store = forward.pack()
        return output, event

    def make_room(self, n: int) -> EntryStore:
        """The store, with free places for `n` tokens, for whoever stores and attends them (`Joint`)."""
        assert self.store is not None
        self.store.make_room(n, self._room(self.logical))
        return self.store

    def keep(self, observation: Observation, kept: LayerKeepSet) -> None:
        """Store exactly these entries of the observed ones; `append_after_event` follows once all layers have."""
        others = {"positions": observation.positions.int(), **kept.state}
        if isinstance(observation, StoredObservation):
            self.store = observation.store.kept(others, kept.indices, kept.heads)
        else:
            columns = {"keys": observation.keys, "values": observation.values, **others}
            self.store = EntryStore.pack(columns, kept.indices, kept.heads)
        if kept.values is not None:
            self.store.replace_values(kept.values)
        if kept.int8:
            self.store.quantize()

    def append_after_event(self) -> None:
        """Stores the tokens after an event that nobody looked at."""
        if self._beyond is not None:
            assert self.store is not None
            beyond, real = self._beyond, None if self._beyond.real is None else self._beyond.real.indices
            self.store.append(beyond.key, beyond.value, beyond.positions, real)
            if self.decoding is not None:
                self.decoding.record(beyond, self.store)
            self._beyond = None

    def can_take_back(self, removed: int) -> bool:
        """Whether the newest tokens, so many, can be forgotten."""
        decoding = self.decoding
        return decoding is None or decoding.passing.taken_back(self.logical - removed, decoding.next)

    def take_back(self, removed: int, per_request: list[int], lengths: Int[Tensor, " batch"]) -> None:
        """Forgets the newest tokens, so many of each request; `lengths` is what they have then."""
        if self.store is not None:
            self.store.crop(per_request)
            self.logical -= removed
            if self.decoding is not None:
                self.decoding.passing.crop(self.logical, lengths, self.store)

    def reorder_cache(self, beam_idx: Int[Tensor, " rows"]) -> None:
        """Make the batch consist of these requests."""
        if self.store is not None:
            self.store.reorder(beam_idx.tolist())
            if self.decoding is not None:
                self.decoding.passing.reorder(beam_idx)

    def fork(self) -> KeepLayer:
        """An independent copy."""
        copied = copy.copy(self)
        copied.store = None if self.store is None else self.store.fork()
        copied.prompt = None if self.prompt is None else self.prompt.fork()
        copied.decoding = None if self.decoding is None else self.decoding.fork()
        return copied

    def _room(self, start: int) -> int:
        """Tokens from `start` to the next event; 0 where there is none."""
        return 0 if self.decoding is None else self.decoding.next - start

    def _attend_first(self, forward: Forward) -> tuple[Tensor, Forward]:
        """Attention of the first tokens over themselves, and their log-sum-exp where it saves work."""
        n, scaling, mask = forward.length, forward.call.scaling, forward.call.mask
        if self.prompt is not None and self.prompt.needs.log_sum_exp and forward.valid is None:
            rows = zip(forward.query, forward.key, forward.value, strict=True)
            parts = [attention_with_lse(q, k, v, scaling) for q, k, v in rows]
            output = torch.stack([output for output, _ in parts]).transpose(1, 2).contiguous()
            return output, replace(forward, lse=[lse for _, lse in parts])
        matrix = None if mask is None or mask.matrix is None else mask.matrix[:, :, :n, :n]
        output, _ = sdpa_attention_forward(
            forward.call.module, forward.query, forward.key, forward.value, matrix, 0.0, scaling
        )
        return output, forward


class HybridKeepLayer(LinearAttentionLayer, KeepLayer):  # type: ignore[override]
    """A layer whose attention is compressed, beside convolutional and recurrent states that stay as they are.

    Args:
        index: of the layer.
        like: transformers' own layer, which is empty.
    """

    is_compileable = False

    def __init__(self, index: int, like: LinearAttentionAndFullAttentionLayer) -> None:
        vars(self).update(vars(like))
        KeepLayer.__init__(self, index)

    @property
    def nbytes_states(self) -> int:
        states = [*self.conv_states.values(), *self.recurrent_states.values()]
        return sum(state.nbytes for state in states if state is not None)

    def reset(self) -> None:
        LinearAttentionLayer.reset(self)
        KeepLayer.reset(self)

    def reorder_cache(self, beam_idx: Tensor) -> None:
        LinearAttentionLayer.reorder_cache(self, beam_idx)  # type: ignore[arg-type]
        KeepLayer.reorder_cache(self, beam_idx)

    def fork(self) -> KeepLayer:
        copied = super().fork()
        vars(copied).update(states_of(self))
        return copied


def states_of(layer: LinearAttentionLayer, requests: slice = slice(None)) -> dict[str, Any]:
    """Return a copy of the states of some requests, and of what is noted about them, as a layer's attributes."""

    def copied(value: Any) -> Any:
        return value[requests].clone() if isinstance(value, Tensor) else value

    noted = {name: {key: copied(each) for key, each in x.items()} for name, x in vars(layer).items() if type(x) is dict}
    return {**noted, "device": layer.device, "dtype": layer.dtype}
