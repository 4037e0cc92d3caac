"""GVote: sampled future queries vote for the entries that they would attend to."""

from __future__ import annotations

import math
from dataclasses import dataclass
from functools import cached_property

import torch
from jaxtyping import Float, Int
from torch import Tensor

from keepset.core.feature import Needs
from keepset.core.features.moments import HiddenMoments
from keepset.core.features.runtime_features import RecentQueries
from keepset.core.keep_set import LayerKeepSet
from keepset.core.method import Method, parameter
from keepset.core.observation import Observation
from keepset.core.select import Ranking, top_mask
from keepset.core.shapes import Scores
from keepset.core.traits import Traits
from keepset.kernels.dispatch import upload
from keepset.kernels.softmax import normalised
from keepset.methods.positions import normal, stream

_LARGEST = torch.finfo(torch.float32).max
_BLOCK = 2**23
"""The most logits of a request at a time; independent of the batch, because other blocks would round differently."""


@dataclass(frozen=True)
class GVote(Method):
    """Keeps every entry that one of a few sampled future queries wants (Tang et al. 2025, arXiv:2509.03136).

    Algorithm 1: the newest query's attention reaches `p_nuc` with its B_step best entries. Hidden states are sampled
    from N(mean, diag(variance)) of the prompt's hidden states, and the model makes queries of them at the mean rotation
    of the next `future` positions. Each query chooses its B_step best entries by logits, and the union stays: no budget
    is needed.

    Where the paper is silent: B_step is computed for each query head, and a KV head keeps the union over its query
    group as well. The variance is the population's. By default neither the first tokens nor the newest always stay;
    a recipe can set `sinks` and `recent`, and a few recent ones help, since the mean rotation does not prefer near
    entries. The noise of a layer's samples is the same for all requests. A prompt of at most `skip` tokens stays whole,
    since it has no statistics, and so do heads whose newest query overflowed. A `keep` is a cap: at most that many of a
    head's union stay, the best by votes (of samples and query heads), then by the mean attention of the samples.

    Attributes:
        p_nuc: attention that the newest query's best entries hold together; with 1.0 all entries stay.
        samples: future queries per query head; the paper finds 8 or more enough.
        future: how many coming positions the rotation is averaged over. The paper gives no number; 512 is that of
            expected attention, whose Gaussian hidden states it builds on. Fewer suit the very next queries better.
        skip: first tokens, attention sinks, that the statistics leave out; 4, as in expected attention.
        seed: the seed of the samples, which are hashes of it, the layer, the sample and the channel.
    """

    name = "gvote"
    advice = "keeps neither the first tokens nor the newest by itself: gvote(sinks=4, recent=32) does far better"
    paper = "arXiv:2509.03136"

    p_nuc: float = parameter(0.95, minimum=0.0, maximum=1.0)
    samples: int = parameter(8, minimum=1, maximum=4096)
    future: int = parameter(512, minimum=1)
    skip: int = parameter(4, minimum=0)
    seed: int = parameter(0, minimum=0, maximum=2**31 - 1)

    @cached_property
    def traits(self) -> Traits:
        return Traits(
            needs=Needs(RecentQueries(1), HiddenMoments(self.skip)),
            equal_heads=False,
            needs_budget=False,
            counts_from_data=True,
            memory_factor=self.samples,
        )

    def score(self, observation: Observation) -> Scores:
        """Return votes plus the samples' mean attention; an entry without a vote scores below 1."""
        queries = observation.by_query_group(self.queries(observation))
        steps = self.step_budgets(observation)
        _, heads, group, samples, _ = queries.shape
        scores = torch.zeros(observation.valid.shape, dtype=torch.float32, device=observation.valid.device)
        at_once = max(1, _BLOCK // (heads * group * scores.shape[2]))
        sinks = None if observation.sinks is None else observation.sinks[..., None]
        for few in queries.split(at_once, 3):
            logits = query_logits(observation, few)
            paid = normalised(logits, sinks).sum((2, 3)) / (group * samples)
            scores += top_mask(logits, steps[..., None].expand(logits.shape[:-1])).sum((2, 3)) + paid
        return scores

    def choose(self, ranking: Ranking) -> LayerKeepSet:
        """Return the entries that have a vote or always stay, as far as a cap allows."""
        return ranking.keep((ranking.scores >= 1) & top_mask(ranking.scores, ranking.quotas))

    def step_budgets(self, observation: Observation) -> Int[Tensor, "batch kv_heads group"]:
        """Return B_step of every query head: how many entries the newest query needs."""
        attention = observation.by_query_group(observation.window_attention(1)[:, :, 0])
        if observation.sinks is not None:  # attention to a sink belongs to no entry
            attention = attention / attention.sum(-1, keepdim=True)
        needed = nucleus(attention, self.p_nuc)
        existing = observation.valid.sum(-1, keepdim=True)
        return needed.minimum(existing).where(observation.lengths[:, None, None] > self.skip, existing)

    def hidden_states(self, observation: Observation) -> Float[Tensor, "batch samples hidden"]:
        """Return samples of the hidden states that may enter the layer's attention."""
        moments = observation[HiddenMoments(self.skip)]
        samples = torch.arange(self.samples, device=moments.mean.device)
        layers = upload(observation.layer_ids, samples.device)[:, None]
        noise = observation.repeat_per_request(normal(stream(self.seed, layers, samples), moments.mean.shape[-1]))
        return moments.mean[:, None] + moments.variance.sqrt()[:, None] * noise

    def queries(self, observation: Observation) -> Float[Tensor, "batch query_heads samples head_dim"]:
        """Return the queries that the model makes of the sampled hidden states."""
        hidden = self.hidden_states(observation)
        newest, _ = observation.newest_queries(1)
        return observation[HiddenMoments(self.skip)].queries(hidden.to(newest.dtype), self.future)


def nucleus(attention: Float[Tensor, "*rows entries"], mass: float) -> Int[Tensor, "*rows"]:
    """Return how many entries, the best first, hold a share `mass` of each row's attention; all where it is NaN.

    Args:
        attention: of a query to all entries; sums to 1.
        mass: a share from 0 to 1.
    """
    cumulative = attention.sort(dim=-1, descending=True).values.double().cumsum(-1)
    # A share of 1 also needs entries whose attention rounds to 0.
    return 1 + (~(cumulative[..., :-1] >= (mass if mass < 1 else math.inf))).sum(-1)


def query_logits(
    observation: Observation, queries: Float[Tensor, "batch kv_heads group n head_dim"]
) -> Float[Tensor, "batch kv_heads group n entries"]:
    """Return the logits of queries that see every entry: finite, NaN below all others, and -inf at holes.

    Args:
        observation: the layer.
        queries: after rotation.
    """
    folded = (queries.float() * observation.scaling).flatten(2, 3)
    logits = observation.over_heads(
        lambda heads: folded[:, heads] @ observation.keys_of(heads).float().transpose(-1, -2)
    )
    logits = observation.softmax.capped(logits).nan_to_num(nan=-_LARGEST, posinf=_LARGEST, neginf=-_LARGEST)
    return logits.masked_fill(~observation.valid[:, :, None], float("-inf")).unflatten(2, queries.shape[2:4])
