"""Match: what stays makes up for what was dropped."""

from __future__ import annotations

from collections.abc import Iterator, Sequence
from dataclasses import dataclass, replace

import torch

from keepset.allocators.post_processor import PostProcessor
from keepset.core.feature import Needs
from keepset.core.features.queries import PaddedQueries, ReferenceQueries
from keepset.core.features.runtime_features import EntryBiases, RecentQueries
from keepset.core.keep_set import LayerKeepSet
from keepset.core.method import parameter
from keepset.core.observation import BIAS, Observation
from keepset.kernels.dispatch import upload
from keepset.kernels.matching import FitProblem, match_attention


@dataclass(frozen=True)
class Match(PostProcessor):
    """Fits what stays, so that attention over it is as it was over all (Zweiger et al. 2026, arXiv:2602.16284).

    A last step of a recipe, after any other method has chosen: `match(reread, keep=0.1)`. Entries that stay keep
    their keys. Each gets a bias, the logarithm of how many dropped entries it stands for, and another value. Both are
    fitted to reference queries, for a KV head's whole query group together (`kernels/matching.py`).

    Reference queries are the prompt's own, at equal distances, as if they came once more right after it; those of a
    second pass, which cost more, were a worse reference (docs/results.md). What attention pays to an entry includes its
    bias, with the methods inside, too.

    At events after the prompt entries that stay keep what they got at its end. To fit them anew, to the newest `window`
    queries, made answers worse with every event where these come often: what those queries look at is near to them, and
    to no later one, but what is fitted stays (docs/results.md).

    Attributes:
        biases: whether entries get biases; without them other values alone do what they can, under any engine's own
            attention.
        queries: how many reference queries of each query head, at most.
        ridge: how much it costs to leave the values that were, and one bias for all, in parts of the normal equations'
            mean diagonal.
        window: how many of the newest queries are the reference at events after the prompt; 0: nothing is fitted then.
    """

    name = "match"
    paper = "arXiv:2602.16284"
    stage = 1

    biases: bool = parameter(True)
    queries: int = parameter(128, minimum=1)
    ridge: float = parameter(0.01, minimum=1e-6)
    window: int = parameter(0, minimum=0)

    @property
    def needs(self) -> Needs:
        biases = [EntryBiases()] if self.biases else []
        newest = [RecentQueries(self.window)] if self.window else []
        return self.scorer.needs | Needs(ReferenceQueries(self.queries), *newest, *biases)

    @property
    def state_names(self) -> tuple[str, ...]:
        return (*super().state_names, BIAS) if self.biases else super().state_names

    @property
    def prefill_only(self) -> bool:
        return not self.window

    def rewritten(self, observation: Observation, kept: LayerKeepSet) -> LayerKeepSet:
        if not self.window and ReferenceQueries(self.queries) not in observation.features:
            return kept
        everything, device = self._heads(observation), observation.valid.device
        bias = observation.valid.new_zeros(observation.valid.shape, dtype=torch.float32)
        if observation.bias is not None:
            bias += observation.bias
        by_head = bias.flatten(0, 1)
        values = observation.values.new_zeros(len(kept.indices), observation.values.shape[-1])
        known = observation.num_kept if self.equal_heads else None
        first, sizes = kept.cu_seqlens, kept.heads.host_values if known is None else known
        for rows in _alike(sizes):
            together = upload(rows, device)
            place = torch.arange(sizes[rows[-1]], device=device)
            exists = place < kept.counts.flatten()[together, None]
            packed = (first[together, None] + place).where(exists, 0)
            chosen = kept.indices[packed]
            more, fitted = match_attention(
                everything.of(together), chosen, exists, observation.scaling, self.ridge, self.biases
            )
            # Places that hold nothing add nothing to the first entry: to look for them would wait for the device.
            by_head[together] = by_head[together].scatter_add(1, chosen, more)
            fitted = fitted.to(values.dtype).masked_fill(~exists[..., None], 0.0)
            values.index_add_(0, packed.flatten(), fitted.flatten(0, 1))
        state = {**kept.state, BIAS: bias} if self.biases else kept.state
        return replace(kept, state=state, values=values)

    def _heads(self, observation: Observation) -> FitProblem:
        """All heads of all requests, and what they are asked."""
        reference = ReferenceQueries(self.queries)
        if reference in observation.features:
            asked = observation[reference].at_most(self.queries)
        else:
            newest, at = observation.newest_queries(self.window)
            asked = PaddedQueries(newest, at >= 0)
        kv_heads = observation.valid.shape[1]
        queries = observation.by_query_group(asked.queries).flatten(2, 3).flatten(0, 1)
        exists = asked.exists.repeat(1, asked.queries.shape[1] // kv_heads).repeat_interleave(kv_heads, 0)
        bias = torch.zeros((), device=queries.device) if observation.bias is None else observation.bias
        added = bias.to(queries.device).where(observation.valid, float("-inf"))
        return FitProblem(
            queries, exists, *(part.flatten(0, 1) for part in (observation.keys, observation.values, added))
        )


def _alike(counts: Sequence[int]) -> Iterator[list[int]]:
    """Heads that keep about as many entries, the most last: few places are empty where they are fitted together."""
    group: list[int] = []
    for row in sorted(range(len(counts)), key=counts.__getitem__):
        if group and counts[row] > 1.25 * counts[group[0]] + 4:
            yield group
            group = []
        group.append(row)
    yield group
