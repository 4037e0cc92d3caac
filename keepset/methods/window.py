"""Methods that keep what queries have attended to: SnapKV, TOVA, H2O, RPC and R-KV."""

from __future__ import annotations

from dataclasses import dataclass, replace
from functools import cached_property

import torch
import torch.nn.functional as F
from jaxtyping import Float
from torch import Tensor

from keepset.core.budget import Budget, share_of
from keepset.core.feature import Needs
from keepset.core.features.attention import AttentionColumns
from keepset.core.features.queries import WindowAttention
from keepset.core.features.runtime_features import RecentQueries
from keepset.core.method import Method, parameter
from keepset.core.observation import Observation
from keepset.core.select import RECENT_RANK, Ranking
from keepset.core.shapes import Mask, Quotas, Scores
from keepset.core.traits import Traits
from keepset.kernels.columns import ColumnStatistic
from keepset.kernels.softmax import GroupReduction

_RECEIVED = AttentionColumns(ColumnStatistic.SUM)
_BLOCK = 2**20
"""The most similarities that are computed at a time, for all heads together."""


@dataclass(frozen=True)
class SnapKV(Method):
    """Keeps what the newest `window` queries attend to, smoothed along the text (Li et al. 2024, arXiv:2404.14469).

    The window's own entries always stay. Attention is averaged over the window, average-pooled with `kernel` over the
    entries before the window (zeros beyond the ends, as in the authors' program), and averaged over the query heads
    that share a KV head.
    """

    name = "snapkv"
    paper = "arXiv:2404.14469"

    window: int = parameter(64, minimum=1)
    kernel: int = parameter(5, minimum=1, odd=True)

    @cached_property
    def traits(self) -> Traits:
        return Traits(needs=Needs(WindowAttention(self.window)), recent=self.window)

    def score(self, observation: Observation) -> Scores:
        sums = observation[WindowAttention(self.window)]
        received = sums.attention_sums / sums.window
        in_window = observation.positions >= observation.lengths[:, None, None] - self.window
        return F.avg_pool1d(received.masked_fill(in_window, 0.0), self.kernel, stride=1, padding=self.kernel // 2)


@dataclass(frozen=True)
class TOVA(Method):
    """Keeps what the newest query attends to, averaged over all heads (Oren et al. 2024, arXiv:2401.06104).

    As in the paper's section 3.2, the heads of a layer share one set of tokens. Where `adakv` or `ams` has given them
    different ones, each KV head goes by its own query heads. The newest token itself always stays.
    """

    name = "tova"
    paper = "arXiv:2401.06104"
    traits = Traits(needs=Needs(RecentQueries(1)), recent=1)

    def score(self, observation: Observation) -> Scores:
        return observation.mean_over_heads(observation.by_query_group(observation.window_usage(1)).mean(2))


@dataclass(frozen=True)
class H2O(Method):
    """Keeps half heavy hitters, half newest tokens (Zhang et al. 2023, arXiv:2306.14048, algorithm 1).

    A heavy hitter's score is the attention that it received, summed over all queries of the prompt and over the query
    heads that share its KV head. The sums are streamed: no attention matrix exists.

    Attributes:
        recent_share: share of the budget that goes to the newest tokens; a half in the paper.
    """

    name = "h2o"
    paper = "arXiv:2306.14048"
    traits = Traits(needs=Needs(_RECEIVED))

    recent_share: float = parameter(0.5, minimum=0.0, maximum=1.0)

    def score(self, observation: Observation) -> Scores:
        return observation.by_query_group(observation[_RECEIVED]).sum(2)

    def ranked(self, observation: Observation, budget: Budget, quotas: Quotas) -> Ranking:
        ranking = super().ranked(observation, budget, quotas)
        newest = share_of(quotas, self.recent_share)
        is_newest = observation.positions >= observation.lengths[:, None, None] - newest[..., None]
        raised = ranking.scores.clamp(min=RECENT_RANK).where(is_newest & observation.valid, ranking.scores)
        return replace(ranking, scores=raised)


@dataclass(frozen=True)
class RPC(Method):
    """Keeps what a window of recent queries attends to (Song et al. 2025, arXiv:2505.13866).

    Attention of the `window` newest queries is averaged over them and over query heads, and average-pooled with
    `kernel`. The heads are those that share a KV head, and the first four tokens and the window always stay, as in the
    AMS paper's comparison (table 11) and its authors' program. With `aggregation="all"` the mean is over all heads of
    the layer, as in RPC's own formula and program; both names are its program's. If heads hold different entries, as
    inside `adakv`, each KV head still has its own mean. RPC compresses only decoded tokens:
    `rpc(aggregation='all', keep=..., every=..., protect_prompt=True)`.

    RPC lets the budget grow by a quarter of each interval; here `keep` is fixed. Attention is the model's own, over all
    entries, and all entries are pooled; RPC's program leaves prompt and window out of both.
    """

    name = "rpc"
    paper = "arXiv:2505.13866"

    window: int = parameter(32, minimum=1)
    kernel: int = parameter(7, minimum=1, odd=True)
    aggregation: str = parameter("group", choices=("group", "all"))

    @cached_property
    def traits(self) -> Traits:
        return Traits(needs=Needs(WindowAttention(self.window)), sinks=4, recent=self.window)

    def score(self, observation: Observation) -> Scores:
        sums = observation[WindowAttention(self.window)]
        received = sums.attention_sums / sums.window
        if self.aggregation == "all":
            received = observation.mean_over_heads(received)
        return F.avg_pool1d(received, self.kernel, stride=1, padding=self.kernel // 2)


@dataclass(frozen=True)
class RKV(Method):
    """Keeps what the newest queries attend to, less what is redundant (Cai et al. 2025, arXiv:2505.24133).

    The formula is that of the AMS paper's comparison (table 11) and its authors' program. The score is `mix_lambda` x
    importance - (1 - `mix_lambda`) x redundancy. Importance is attention over the entries before the window, averaged
    over the query group and the window's queries, and max-pooled with `kernel`. Redundancy is a softmax over each
    key's mean cosine to all other keys before the window. For each key, the newest key whose cosine with it exceeds
    `threshold` leaves this cosine out of its mean. The first four tokens and the window always stay.

    With `group="max"` importance is R-KV's own (equations 2 and 3, and its authors' program): a softmax over the
    largest logit of the group. R-KV protects no first tokens: `sinks=0`. Where its text differs from both programs, the
    programs are followed: the text pools each query's attention, over an even width, before the mean (equation 4), and
    leaves the cosine out of the key's own mean instead of that of its newest similar key (equations 5 and 6). The text
    is followed in two points. If no key is similar enough, no cosine is left out; the programs take the first entry
    then. The window's keys are not compared (3.1); R-KV's own program compares them. Only one key leaves a cosine out:
    the programs' ratio of retained ones (0.1) changes nothing in the direction that they take.

    Attributes:
        mix_lambda: the paper's lambda; 0.07 as in both programs, 0.1 in R-KV's text.
        group: how the query heads that share a KV head are joined: the "mean" of their attention, or the "max" of
            their logits.
    """

    name = "r_kv"
    paper = "arXiv:2505.24133"

    window: int = parameter(8, minimum=1)
    kernel: int = parameter(7, minimum=1, odd=True)
    mix_lambda: float = parameter(0.07, minimum=0.0, maximum=1.0)
    threshold: float = parameter(0.5, minimum=0.0, maximum=1.0)
    group: str = parameter("mean", choices=("mean", "max"))

    @cached_property
    def traits(self) -> Traits:
        return Traits(needs=Needs(self._attention), sinks=4, recent=self.window)

    @property
    def _attention(self) -> WindowAttention:
        return WindowAttention(
            self.window, history=True, sums_of=GroupReduction.LARGEST if self.group == "max" else GroupReduction.MEAN
        )

    def score(self, observation: Observation) -> Scores:
        history = observation.valid & (observation.positions < observation.lengths[:, None, None] - self.window)
        importance, redundancy = self._importance(observation), self._redundancy(observation, history)
        return self.mix_lambda * importance - (1 - self.mix_lambda) * redundancy

    def _importance(self, observation: Observation) -> Scores:
        sums = observation[self._attention]
        received = sums.attention_sums / observation.lengths.clamp(1, sums.window)[:, None, None]
        return F.max_pool1d(received, self.kernel, stride=1, padding=self.kernel // 2)

    def _redundancy(self, observation: Observation, history: Mask) -> Scores:
        charged = observation.over_heads(lambda heads: self._charged(observation.keys_of(heads), history[:, heads]))
        means = charged / history.sum(-1, keepdim=True).clamp(min=1)
        # If no entry counts, the softmax is NaN everywhere.
        return means.masked_fill(~history, float("-inf")).softmax(-1).masked_fill(~history, 0.0)

    def _charged(self, keys: Float[Tensor, "batch heads entries head_dim"], history: Mask) -> Scores:
        """Return the sum of the cosines that count for each key, for some heads.

        Args:
            keys: of some heads.
            history: which entries are compared.
        """
        directions = F.normalize(keys.float(), dim=-1).masked_fill(~history[..., None], 0.0)
        remaining = directions.sum(2, keepdim=True) - directions
        charged = (directions * remaining).sum(-1)
        batch, kv_heads, entries, _ = directions.shape
        # In float32, whose maxima are vectorised; exact up to 2**24 entries.
        index = torch.arange(entries, device=directions.device, dtype=torch.float32)
        size = max(1, _BLOCK // (batch * kv_heads * entries))
        for start in range(0, entries, size):
            rows = directions[:, :, start : start + size]
            cosines = rows @ directions.transpose(-1, -2)
            cosines.diagonal(start, -2, -1).zero_()
            newest = index.where(cosines > self.threshold, -1).amax(-1).long()
            relieved = cosines.gather(-1, newest.clamp(min=0)[..., None])[..., 0].masked_fill(newest < 0, 0.0)
            charged.scatter_add_(-1, newest.clamp(min=0), -relieved)
        return charged
