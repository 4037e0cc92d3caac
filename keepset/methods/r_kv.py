"""R-KV: keep entries that are attended to and do not repeat later ones."""

from __future__ import annotations

from dataclasses import dataclass
from functools import cached_property

import torch
import torch.nn.functional as F
from jaxtyping import Float
from torch import Tensor

from keepset.core.feature import Needs
from keepset.core.features.window import WindowAttention
from keepset.core.method import Method, parameter
from keepset.core.observation import Observation
from keepset.core.shapes import Mask, Scores
from keepset.core.traits import Traits
from keepset.kernels.softmax import GroupReduction

_BLOCK = 2**20
"""The most similarities that are computed at a time, for all heads together."""


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
        """Return the sum of the cosines that count for each key, for some heads."""
        directions = F.normalize(keys.float(), dim=-1).masked_fill(~history[..., None], 0.0)
        others = directions.sum(2, keepdim=True) - directions
        charged = (directions * others).sum(-1)
        batch, kv_heads, entries, _ = directions.shape
        # In float32, whose maxima are vectorised; exact up to 2**24 entries.
        place = torch.arange(entries, device=directions.device, dtype=torch.float32)
        size = max(1, _BLOCK // (batch * kv_heads * entries))
        for start in range(0, entries, size):
            rows = directions[:, :, start : start + size]
            cosines = rows @ directions.transpose(-1, -2)
            cosines.diagonal(start, -2, -1).zero_()
            newest = place.where(cosines > self.threshold, -1).amax(-1).long()
            relieved = cosines.gather(-1, newest.clamp(min=0)[..., None])[..., 0].masked_fill(newest < 0, 0.0)
            charged.scatter_add_(-1, newest.clamp(min=0), -relieved)
        return charged
