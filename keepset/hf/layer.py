"""`KeepLayer`: one layer of the cache. What it tells transformers is logical, what it stores is physical."""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import replace
from typing import Any, Protocol, runtime_checkable

import torch
from torch import Tensor, nn
from transformers.cache_utils import CacheLayerMixin
from transformers.integrations.sdpa_attention import sdpa_attention_forward

from keepset.core.keep_set import LayerKeepSet
from keepset.core.observation import Observation
from keepset.core.schedule import Schedule
from keepset.core.statistics import Statistics
from keepset.errors import KeepsetError
from keepset.hf.accumulate import Accumulators, Chunk
from keepset.hf.attention import hand_over
from keepset.hf.attention_hooks import LayerInput, Rotation
from keepset.hf.decoding import Decoding
from keepset.hf.forward import Forward
from keepset.hf.mask import KeepsetLength, MaskRule, token_positions
from keepset.hf.padding import Padding
from keepset.hf.progress import Progress
from keepset.hf.projection import output_projection
from keepset.hf.store import EntryStore
from keepset.hf.window import QueryWindow
from keepset.kernels.attention import ragged_attention
from keepset.kernels.columns import causal_attention


@runtime_checkable
class Owner(Protocol):
    """What a layer asks of its cache."""

    needs: Needs
    schedule: Schedule
    prompt_length: int | None
    compressed_layers: tuple[int, ...]
    statistics: Mapping[str, Statistics]

    def updating(self) -> None:
        """A layer takes new tokens; its attention follows."""

    def attended(self) -> None:
        """The layer's attention is done."""

    def layer_input(self, module: nn.Module, query: Tensor) -> LayerInput:
        """The input of the attention module under way."""

    def rotation(self, module: nn.Module) -> Rotation | None:
        """How the attention module under way rotates its queries, where somebody looks at that."""

    def observed(self, layer: KeepLayer, observation: Observation) -> None:
        """An event has been reached in the layer, whose entries are in its hands."""

    def forwarded(self) -> None:
        """The last layer is done with a forward."""


class KeepLayer(CacheLayerMixin):
    """A cache layer that keeps what it is told to.

    Logical length is how many tokens have passed, padding included: what masks and positions count.
    The prompt is compressed in the very forward that completes it: with `prompt_length` the one that
    reaches it, else the first. What follows is compressed in the forward that reaches an event point of the
    schedule, the tokens beyond that point left out.

    Attributes:
        logical: logical length.
        prompt: length of the prompt, once its first forward has begun.
        compressed_at: the newest event's length.
    """

    is_sliding = False
    is_compileable = False
    is_croppable = True
    supports_early_init = False

    def __init__(self, owner: Owner, index: int) -> None:
        super().__init__()
        self.owner, self.index = owner, index
        self.reset()

    def reset(self) -> None:
        """Forgets everything."""
        self.store: EntryStore | None = None
        self.incoming: tuple[Tensor, Tensor] | None = None
        self.logical = 0
        self.prompt: int | None = None
        self.compressed_at: int | None = None
        self.is_initialized = False
        self._lengths: Tensor | None = None
        self._prompts: Tensor | None = None
        self._padding = Padding()
        self._collector: Accumulators | None = None
        self._decoding: Decoding | None = None
        self._beyond: Forward | None = None
        self._held: dict[str, Tensor] | None = None
        self.collected_seconds: dict[str, float] = {}

    def lazy_initialization(self, key_states: Tensor, value_states: Tensor) -> None:
        """Notes type and device."""
        self.dtype, self.device = key_states.dtype, key_states.device
        self._lengths = torch.zeros(key_states.shape[0], dtype=torch.long, device=self.device)
        self.is_initialized = True

    # --- transformers' side: everything logical

    def get_seq_length(self) -> int:
        """Tokens so far, dropped ones and padding included."""
        return KeepsetLength(self.logical)

    def get_mask_sizes(self, query_length: int) -> tuple[int, int]:
        """Logical length after the next `query_length` tokens, and offset."""
        return self.logical + query_length, 0

    def get_max_length(self) -> int:
        """No limit."""
        return -1

    def update(self, key_states: Tensor, value_states: Tensor, *args: Any, **kwargs: Any) -> tuple[Tensor, Tensor]:
        """Hands itself to the attention function, which stores the new entries and attends."""
        if not self.is_initialized or self._lengths is None:
            self.lazy_initialization(key_states, value_states)
        elif len(self._lengths) != len(key_states):
            raise KeepsetError(
                f"The cache holds {len(self._lengths)} requests, and the input has {len(key_states)}: call "
                "cache.batch_repeat_interleave(...) first, as for beams or several answers to one question."
            )
        self.owner.updating()
        self.incoming = key_states, value_states
        hand_over(self)
        return key_states, value_states

    def reorder_cache(self, beam_idx: Tensor) -> None:
        """Makes the batch consist of these rows."""
        if self.store is None or self._lengths is None:
            return
        if self._collector is not None:
            raise KeepsetError("A batch cannot be reordered before its prompt is complete.")
        rows = beam_idx.to(self.device)
        if rows.dtype == torch.bool:
            rows = rows.nonzero()[:, 0]
        self.store.reorder(rows.tolist())
        self._lengths = self._lengths[rows]
        self._prompts = None if self._prompts is None else self._prompts[rows]
        self._padding.reorder(rows)
        if self._decoding is not None:
            self._decoding.window.reorder(rows)

    def batch_select_indices(self, indices: Tensor) -> None:
        """Keeps only these rows of the batch."""
        self.reorder_cache(indices)

    def batch_repeat_interleave(self, repeats: int) -> None:
        """Repeats every row of the batch."""
        if self._lengths is not None:
            rows = torch.arange(self._lengths.shape[0], device=self.device)
            self.reorder_cache(rows.repeat_interleave(repeats))

    def crop(self, tokens_to_remove: int) -> None:
        """Takes back the newest tokens; a positive number is the length to crop to, as in transformers."""
        if tokens_to_remove > 0:
            tokens_to_remove = max(self.logical - tokens_to_remove, 0)
        removed = abs(tokens_to_remove)
        if not removed or self.store is None or self._lengths is None:
            return
        if removed > self.logical - (self.compressed_at or 0):
            raise KeepsetError(
                f"Only the {self.logical - (self.compressed_at or 0)} tokens after the compression can be taken "
                f"back, not {removed}: assisted generation needs keepset.Cache(..., prompt_length=...), because "
                "it drafts tokens together with the prompt."
            )
        per_row = self._padding.take_back(removed, len(self._lengths), self.device)
        self.store.crop(per_row.tolist())
        self._lengths = self._lengths - per_row
        self._prompts = None if self._prompts is None else self._prompts.minimum(self._lengths)
        self.logical -= removed
        if self._decoding is not None:
            self._decoding.window.crop(self._lengths)

    # --- keepset's side

    @property
    def nbytes(self) -> int:
        """Bytes allocated for this layer's entries, and for queries that the next event looks at."""
        held = 0 if self._held is None else sum(c.numel() * c.element_size() for c in self._held.values())
        held += 0 if self._decoding is None else self._decoding.window.nbytes
        return held + (self.store.nbytes if self.store is not None else 0)

    def attend(
        self,
        module: nn.Module,
        query: Tensor,
        key: Tensor,
        value: Tensor,
        rule: MaskRule | None,
        scaling: float,
        position_ids: Tensor | None,
    ) -> Tensor:
        """Stores the new entries, attends over all that are kept, and compresses when an event is reached."""
        self.incoming = None
        self.owner.attended()
        assert self._lengths is not None
        n = query.shape[2]
        valid = None if rule is None else rule.valid
        if self.store is not None and n > 1 and self.index == self.owner.compressed_layers[0]:
            _check_new(position_ids, self._lengths, valid)
        positions = token_positions(self._lengths, valid, n)
        forward = Forward(module, query, key, value, positions, valid, scaling)
        self._lengths = positions[:, -1] + 1
        self.logical += n
        self._padding.note(valid, n, before=self.logical - n)

        first, lse = self.store is None, None
        if self.prompt is None:
            self._begin(n)
        assert self.prompt is not None
        if (left := self.prompt - (self.logical - n)) > 0:
            self._prompts = positions[:, min(left, n) - 1] + 1
        if self.owner.needs.hidden_states and self._is_concerned(self.logical):
            forward = replace(forward, rotation=self.owner.rotation(module))
        if first:
            output, lse = self._attend_first(forward, rule)
        else:
            self._append(forward)
            output = self._attend_store(forward)
        if self.compressed_at is None and self.owner.schedule.prefill:
            drafts = self._watch(forward, first, lse)
            if drafts is not None:
                output = torch.cat([output[:, : n - drafts.shape[1]], drafts], 1)
        else:
            self.store = forward.pack() if first else self.store
            self._decode(forward, forward.query)
        if self.index == self.owner.compressed_layers[-1]:
            self.owner.forwarded()
        return output

    def execute(self, kept: LayerKeepSet) -> None:
        """Keeps exactly these entries of the observed ones, and frees the rest."""
        assert self._held is not None
        self.store = EntryStore.pack({**self._held, **kept.state}, kept.indices, kept.counts)
        self._held = None
        if self._beyond is not None:
            beyond, self._beyond = self._beyond, None
            self._append(beyond)

    def adopt(self, observation: Observation, watched: KeepLayer) -> None:
        """Takes over the entries that another layer has observed, to be executed like its own."""
        self.lazy_initialization(observation.keys, observation.values)
        self.logical, self.prompt, self.compressed_at = watched.logical, watched.prompt, watched.compressed_at
        self._lengths, self._padding = observation.lengths, watched._padding.copy()
        self._prompts = observation.prompts
        self._held = {
            "keys": observation.keys,
            "values": observation.values,
            "positions": observation.positions.int(),
        }

    def fork(self, owner: Owner) -> KeepLayer:
        """An independent copy for another cache."""
        twin = KeepLayer(owner, self.index)
        twin.__dict__.update({**self.__dict__, "owner": owner, "_padding": self._padding.copy()})
        twin.store = None if self.store is None else self.store.fork()
        twin._collector = None if self._collector is None else self._collector.fork()
        twin._decoding = None if self._decoding is None else self._decoding.fork()
        return twin

    @property
    def progress(self) -> Progress | None:
        """How far it has come; None before the prompt is complete."""
        if self.store is None or self.prompt is None or self.logical < self.prompt:
            return None
        assert self._lengths is not None and self._prompts is not None
        return Progress(
            logical=self.logical,
            prompt=self.prompt,
            compressed_at=self.compressed_at,
            next_event=None if self._decoding is None else self._decoding.next,
            lengths=self._lengths,
            prompts=self._prompts,
            seen=self.valid_tokens(),
        )

    @property
    def recorded(self) -> dict[str, Tensor]:
        """The queries that the next event looks at, as far as they have come."""
        return {} if self._decoding is None else self._decoding.window.columns

    def resume(self, store: EntryStore, progress: Progress, recorded: dict[str, Tensor]) -> None:
        """Goes on where another layer was that told these."""
        self.store, self.is_initialized = store, True
        self.dtype, self.device = store.dtype, progress.lengths.device
        self.logical, self.prompt, self.compressed_at = progress.logical, progress.prompt, progress.compressed_at
        self._lengths, self._prompts = progress.lengths, progress.prompts
        self._padding = Padding([] if progress.seen is None else [progress.seen])
        if self.owner.schedule.every is not None and progress.next_event is not None:
            self._decoding = Decoding(self.owner.needs, self.owner.schedule.every, progress.prompt)
            self._decoding.next = progress.next_event
            self._decoding.window = QueryWindow.of(recorded)

    def valid_tokens(self) -> Tensor | None:
        """Which tokens so far are no padding, `[batch, tokens]`; None when all are."""
        if not self._padding or self._lengths is None:
            return None
        return self._padding.valid(len(self._lengths), self.device)

    def _begin(self, first: int) -> None:
        self.prompt = self.owner.prompt_length or first
        every = self.owner.schedule.every
        self._decoding = None if every is None else Decoding(self.owner.needs, every, self.prompt)

    def _attend_first(self, forward: Forward, rule: MaskRule | None) -> tuple[Tensor, list[Tensor] | None]:
        """Attention of the first tokens over themselves, and the log-sum-exp where column statistics need it."""
        if self.compressed_at is None and self.owner.needs.columns and forward.valid is None:
            rows = zip(forward.query, forward.key, forward.value, strict=True)
            parts = [causal_attention(q, k, v, forward.scaling) for q, k, v in rows]
            return torch.stack([output for output, _ in parts]).transpose(1, 2).contiguous(), [lse for _, lse in parts]
        mask = None if rule is None else rule.matrix
        output, _ = sdpa_attention_forward(
            forward.module, forward.query, forward.key, forward.value, mask, 0.0, forward.scaling
        )
        return output, None

    def _append(self, forward: Forward) -> None:
        assert self.store is not None
        self.store.append(forward.key, forward.value, forward.positions, forward.valid)

    def _attend_store(self, forward: Forward) -> Tensor:
        assert self.store is not None
        at = forward.positions if forward.length > 1 else None
        return ragged_attention(forward.query, self.store.spans(), forward.key.shape[1], forward.scaling, at)

    def _watch(self, forward: Forward, first: bool, lse: list[Tensor] | None) -> Tensor | None:
        """One chunk of the prompt: collects from it, and compresses when it is the last.

        Returns the attention output of draft tokens (assisted generation) that follow the prompt in the same
        forward, where the compression has happened before them: they see what it left.
        """
        end = self.owner.prompt_length
        beyond = 0 if end is None else max(self.logical - end, 0)
        prompt, drafts = forward, None
        if beyond:
            split = forward.length - beyond
            prompt, drafts = forward.tokens(slice(0, split)), forward.tokens(slice(split, None))
            lse = None if lse is None else [row[:, :split] for row in lse]
            if self.store is not None:
                self.store.crop(drafts.counts().tolist())
        columns, exists = self._entries(prompt)
        self._collect(prompt, columns["keys"], exists, lse)
        self._record(prompt, self.logical - forward.length)
        if end is not None and self.logical < end:
            self.store = prompt.pack() if first else self.store
            return None
        self.compressed_at = self.logical - beyond
        lengths = prompt.positions[:, -1] + 1
        parts = {} if self._collector is None else self._collector.parts(lengths)
        self.collected_seconds = {} if self._collector is None else dict(self._collector.seconds)
        self._collector = None
        self._observe(columns, exists, lengths, prompt, parts, unbroken=first and prompt.valid is None)
        if drafts is None:
            return None
        self._append(drafts)
        output = self._attend_store(drafts)
        self._decode(drafts, forward.query)
        return output

    def _decode(self, forward: Forward, queries: Tensor) -> None:
        """Tokens that follow the prompt: compresses at the newest event point that they reach.

        Attention is done: it saw what there was before the event. Tokens beyond the point are not observed.
        The queries are those of the whole call of the model, the prompt's own included.
        """
        if self._decoding is None or not self._is_concerned(self.logical):
            return
        before, point = self.logical - forward.length, self._decoding.due(self.logical)
        if point is None:
            self._record(forward, before)
            return
        assert self.store is not None
        seen, beyond = forward.tokens(slice(0, point - before)), forward.tokens(slice(point - before, None))
        self._record(seen, before)
        if beyond.length:
            self.store.crop(beyond.counts().tolist())
            self._beyond = beyond
        columns, exists = self.store.padded()
        lengths = seen.positions[:, -1] + 1
        needs = self.owner.needs
        layer_input = self.owner.layer_input(forward.module, queries) if needs.hidden_states else None
        parts = self._decoding.parts(lengths, forward.scaling, layer_input)
        self.compressed_at = point
        self._decoding.passed(point, padded=bool(self._padding))
        self._record(beyond, point)
        self._observe(columns, exists, lengths, forward, parts)

    def _is_concerned(self, length: int) -> bool:
        return self._decoding is not None and self._decoding.concerns(length, padded=bool(self._padding))

    def _record(self, forward: Forward, before: int) -> None:
        if self._decoding is not None and self._is_concerned(before + forward.length):
            self._decoding.record(forward, before, padded=bool(self._padding))

    def _entries(self, prompt: Forward) -> tuple[dict[str, Tensor], Tensor]:
        """The prompt's entries so far, padded at the end of shorter requests, and which exist."""
        if self.store is not None:
            return self.store.padded()
        if prompt.valid is not None:
            return prompt.pack().padded()
        columns = prompt.columns()
        return columns, torch.ones(columns["positions"].shape, dtype=torch.bool, device=self.device)

    def _collect(self, prompt: Forward, keys: Tensor, exists: Tensor, lse: list[Tensor] | None) -> None:
        needs = self.owner.needs
        if needs == Needs():
            return
        self._collector = self._collector or Accumulators(needs)
        self._collector.add(
            Chunk(
                queries=prompt.query,
                rows=_rows(keys, exists, prompt.valid, padded=bool(self._padding)),
                positions=prompt.positions,
                valid=prompt.valid,
                scaling=prompt.scaling,
                lse=lse,
                layer_input=self.owner.layer_input(prompt.module, prompt.query) if needs.hidden_states else None,
            )
        )

    def _observe(
        self,
        columns: dict[str, Tensor],
        exists: Tensor,
        lengths: Tensor,
        forward: Forward,
        parts: dict[str, Any],
        unbroken: bool = False,
    ) -> None:
        if self.owner.needs.output_projection:
            heads, size = forward.query.shape[1], forward.value.shape[-1]
            parts["output_projection"] = output_projection(forward.module, heads, size)
        if unbroken:  # the defaults say that nothing is missing anywhere, which is cheaper to work with
            parts.pop("query_positions", None)
        else:
            parts |= {"positions": columns["positions"], "valid": exists}
        self.store = None
        self._held = {name: columns.pop(name) for name in ("keys", "values", "positions")}
        observation = Observation(
            keys=self._held["keys"],
            values=self._held["values"],
            lengths=lengths,
            prompts=self._prompts,
            statistics=self.owner.statistics,
            scaling=forward.scaling,
            layer=self.index,
            layers=self.owner.compressed_layers,
            state=columns,
            **parts,
        )
        self.owner.observed(self, observation)


def _rows(keys: Tensor, exists: Tensor, valid: Tensor | None, padded: bool) -> list[tuple[Tensor, Tensor | slice]]:
    """For every request its keys without holes, and which of the chunk's queries are real."""
    if not padded:
        return [(row, slice(None)) for row in keys]
    counts = exists[:, 0].sum(-1).tolist()
    real = [slice(None)] * len(counts) if valid is None else valid
    return [(row[:, :count], own) for row, count, own in zip(keys, counts, real, strict=True)]


def _check_new(position_ids: Tensor | None, lengths: Tensor, valid: Tensor | None) -> None:
    """Refuses tokens that transformers feeds a second time.

    Raises:
        KeepsetError: some of them stand where the cache has tokens already.
    """
    if position_ids is None or position_ids.ndim != 2:
        return
    again = position_ids < lengths[:, None]
    if bool((again if valid is None else again & valid).any()):
        raise KeepsetError(
            "The input repeats positions that the cache holds already: chunked prefill and assisted generation "
            "onto a cache that is not empty are not supported, because transformers feeds them the past again."
        )
