"""Last steps of a recipe, which change how the entries that stay are stored: Match and Quantized."""

from __future__ import annotations

from abc import abstractmethod
from collections.abc import Iterator, Sequence
from dataclasses import dataclass, replace

import torch
from jaxtyping import Float
from torch import Tensor

from keepset.core.budget import Budget
from keepset.core.feature import Needs
from keepset.core.features.queries import ReferenceQueries
from keepset.core.features.runtime_features import EntryBiases, QuantizedEntries
from keepset.core.keep_set import KeepSet, LayerKeepSet
from keepset.core.method import Allocator, Method, parameter
from keepset.core.observation import Observation
from keepset.core.select import Ranking
from keepset.core.traits import FULL_BYTES, Traits
from keepset.errors import KeepsetError
from keepset.kernels.dispatch import is_async_device, upload
from keepset.kernels.entry_format import FORMATS
from keepset.kernels.matching import FitProblem, match_attention
from keepset.kernels.packed import BIAS

FEW_BYTES = 0.075
"""The share of a full 16-bit cache's bytes below which many entries in 4 bits are nearer to it than fewer in 8."""


@dataclass(frozen=True)
class PostProcessor(Allocator):
    """Leaves another method's choice as it is, and changes how the chosen entries are stored.

    If there are several, the outermost runs first, so that those inside know how entries will be stored.
    """

    @property
    def own_traits(self) -> Traits:
        return Traits(needs_budget=False)  # the method inside says whether it needs one

    def check_scorer(self) -> None:
        """Accept every method: entries can be processed even if the budget cannot be divided again."""

    @abstractmethod
    def processed(self, observation: Observation, kept: LayerKeepSet) -> LayerKeepSet:
        """Return the same choice with this step's changes.

        Args:
            kept: the choice of the method inside.
        """

    def choose(self, ranking: Ranking) -> LayerKeepSet:
        return self.stored(ranking.observation, self.chooser.choose(ranking))

    def select_all(self, observations: Sequence[Observation], budget: Budget) -> KeepSet:
        chosen = self.chooser.select_all(observations, budget)
        if self.traits.across_layers:
            chosen.count()
        return KeepSet(
            [self.stored(observation, chosen.layer(observation.layer_ids[0])) for observation in observations]
        )

    @property
    def chooser(self) -> Method:
        return self.scorer.chooser

    def stored(self, observation: Observation, kept: LayerKeepSet) -> LayerKeepSet:
        return self.scorer.stored(observation, self.processed(observation, kept))


@dataclass(frozen=True)
class Match(PostProcessor):
    """Fits what stays so that attention over it is near to that over all (Zweiger et al. 2026, arXiv:2602.16284).

    It is a last step of a recipe, after any other method has chosen: `match(reread, keep=0.1)`. Entries that stay keep
    their keys. Each gets a bias, the logarithm of how many dropped entries it stands for, and another value. Both are
    fitted to reference queries, for a KV head's whole query group together (`kernels/matching.py`).

    Inside `quantized(..., bits=4)` it is fitted to keys as they will be read.

    Reference queries are the prompt's own, as if they came once more right after it: some at equal distances, to cover
    all parts of the text, and its newest, to which later queries are most similar. Those of a second pass cost more and
    were a worse reference (docs/results.md). The attention that an entry receives includes its bias, for the methods
    inside as well.

    At events after the prompt, and between turns, the reference is the newest `window` queries, in the same way.

    Attributes:
        biases: whether entries get biases. Without them only values are fitted, which any engine's own attention can
            use.
        queries: the most reference queries of each query head that lie at equal distances in the prompt.
        newest: the most reference queries of each query head that are the prompt's newest.
        ridge: the cost of departing from the old values, and from one bias for all, relative to the normal equations'
            mean diagonal.
        window: how many of the newest queries are the reference at events after the prompt; 0 fits nothing then, so
            that entries keep their biases and values.
    """

    name = "match"
    paper = "arXiv:2602.16284"
    stage = 1

    biases: bool = parameter(True)
    queries: int = parameter(64, minimum=1)
    newest: int = parameter(128, minimum=0)
    ridge: float = parameter(0.01, minimum=1e-6)
    window: int = parameter(32, minimum=0)

    @property
    def _reference(self) -> ReferenceQueries:
        return ReferenceQueries(self.queries, self.newest, self.window)

    @property
    def own_traits(self) -> Traits:
        biases = [EntryBiases()] if self.biases else []
        return replace(
            super().own_traits,
            needs=Needs(self._reference, *biases),
            state_names=(BIAS,) if self.biases else (),
            prefill_only=() if self.window else (self.name,),
        )

    def processed(self, observation: Observation, kept: LayerKeepSet) -> LayerKeepSet:
        if self._reference not in observation.features:
            return kept
        problem, device = self._problem(observation), observation.valid.device
        softmax, sinks = observation.softmax, _of_queries(observation.sinks, problem)
        bias = observation.valid.new_zeros(observation.valid.shape, dtype=torch.float32)
        if observation.bias is not None:
            bias += observation.bias
        bias_by_head = bias.flatten(0, 1)
        # Keys of 8 bits are so exact that a fit to them would be the same.
        format = FORMATS[4] if kept.bits == 4 and not observation.moved_as_stored else None
        values = observation.values.new_zeros(len(kept.indices), observation.values.shape[-1])
        host_counts = observation.num_kept if self.traits.equal_heads else None
        first, sizes = kept.cu_seqlens, kept.heads.host_values if host_counts is None else host_counts
        for rows in _groups_of_similar_size(sizes, device):
            together = upload(rows, device)
            order = torch.arange(sizes[rows[-1]], device=device)
            exists = order < kept.counts.flatten()[together, None]
            packed = (first[together, None] + order).where(exists, 0)
            chosen = kept.indices[packed]
            head_softmax = replace(softmax, sinks=None if sinks is None else sinks[together])
            added_bias, fitted = match_attention(
                problem.of(together), chosen, exists, head_softmax, self.ridge, self.biases, format
            )
            # Empty places add zero to the first entry: looking for them would wait for the device.
            bias_by_head[together] = bias_by_head[together].scatter_add(1, chosen, added_bias)
            fitted = fitted.to(values.dtype).masked_fill(~exists[..., None], 0.0)
            values.index_add_(0, packed.flatten(), fitted.flatten(0, 1))
        state = {**kept.state, BIAS: bias} if self.biases else kept.state
        return replace(kept, state=state, values=values)

    def _problem(self, observation: Observation) -> FitProblem:
        """Return the entries of all heads of all requests, and the reference queries."""
        value = observation[self._reference]
        is_prompt = value.spread.queries.shape[2] > 0
        reference = value.at_most(self.queries, self.newest if is_prompt else self.window)
        kv_heads = observation.valid.shape[1]
        queries = observation.by_query_group(reference.queries).flatten(2, 3).flatten(0, 1)
        exists = reference.exists.repeat(1, reference.queries.shape[1] // kv_heads).repeat_interleave(kv_heads, 0)
        bias = observation.bias
        if bias is None:
            bias = torch.zeros((), dtype=torch.float32, device=queries.device)
        added = bias.to(queries.device).where(observation.valid, float("-inf"))
        parts = (part.flatten(0, 1) for part in (observation.keys, observation.values, added))
        return FitProblem(queries, exists, *parts)


def _of_queries(sinks: Float[Tensor, "kv_heads group"] | None, problem: FitProblem) -> Float[Tensor, "heads m"] | None:
    if sinks is None:
        return None
    heads, queries = problem.asked.shape
    return sinks.repeat_interleave(queries // sinks.shape[1], 1).repeat(heads // len(sinks), 1)


def _groups_of_similar_size(counts: Sequence[int], device: torch.device) -> Iterator[list[int]]:
    """Yield groups of heads that keep about as many entries, so that a fit of a group has little padding.

    Groups are wider on devices where launches cost more than padding.

    Args:
        counts: entries that each head keeps.
        device: where the fit runs.
    """
    group: list[int] = []
    most = 4.0 if is_async_device(device) else 1.25
    for row in sorted(range(len(counts)), key=counts.__getitem__):
        if group and counts[row] > most * counts[group[0]] + 4:
            yield group
            group = []
        group.append(row)
    yield group


@dataclass(frozen=True)
class Quantized(PostProcessor):
    """Stores what stays, and all tokens after it, in 8 or 4 bits a number, with a scale for each key and value.

    It is the last step of a recipe, also around `match`: `quantized(match(reread), keep=0.5)`. Every key and every
    value is mixed by an orthogonal matrix and has its own scale (`kernels/entry_format.py`). In 8 bits the mixed
    numbers are rounded to multiples of the scale, in 4 bits to levels for a normal distribution. In 4 bits, new tokens
    have a residual of 4 more bits for the rounding error, which the next event drops. From the second
    event on, the methods inside see rounded entries. `keep` counts entries as always. `int8(...)` is another spelling
    of `quantized(..., bits=8)`.

    Attributes:
        bits: bits of each number of a key or value; None for 4 if the budget is below `bytes=0.075`, else 8.
    """

    name = "quantized"
    stage = 2

    bits: int | None = parameter(None, choices=(8, 4))

    def for_bytes(self, share: float | None) -> Quantized:
        return replace(self, bits=_bits_for(share)) if self.bits is None else self

    def without_bytes(self, share: float | None) -> Quantized:
        return replace(self, bits=None) if self.bits == _bits_for(share) else self

    @property
    def own_traits(self) -> Traits:
        bits = self.bits or _bits_for(None)
        return replace(
            super().own_traits,
            needs=Needs(QuantizedEntries(bits)),
            key_bits=bits,
            value_bits=bits,
            extra_bytes=2 * FULL_BYTES,
        )

    def processed(self, observation: Observation, kept: LayerKeepSet) -> LayerKeepSet:
        bits, sizes = self.traits.key_bits, (observation.head_dim, observation.value_dim)
        if bits == 4 and any(size % 2 for size in sizes):
            raise KeepsetError(
                f"Two numbers of 4 bits share a byte, and this model's keys and values have {sizes[0]} and {sizes[1]} "
                "numbers: use bits=8."
            )
        rows = sum(-(-bits * size // 8) for size in sizes)
        return replace(kept, bits=bits, entry_bytes=rows + 2 * observation.dtype.itemsize)


def _bits_for(share: float | None) -> int:
    return 4 if share is not None and share < FEW_BYTES else 8
