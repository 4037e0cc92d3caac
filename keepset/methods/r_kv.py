"""R-KV: what is looked at and does not repeat what came later."""

from __future__ import annotations

from dataclasses import dataclass

import torch
import torch.nn.functional as F

from keepset.core.feature import Needs
from keepset.core.features.given import RecentQueries
from keepset.core.method import Method, parameter
from keepset.core.observation import Observation
from keepset.core.shapes import Scores

_BLOCK = 2**20
"""Similarities at a time, of all heads together."""


@dataclass(frozen=True)
class RKV(Method):
    """Keeps what the newest queries attend to, less what is redundant (Cai et al. 2025, arXiv:2505.24133).

    Importance: the largest logit of the query group, softmax over the entries before the window, mean over the
    window's queries, max-pooled with `kernel`. Redundancy: cosines between keys, summed over all others and divided
    by the number of entries, softmax over the entries; of the keys that are more similar to a key than `threshold`,
    the newest is not charged with that cosine. The score is `mix_lambda` · importance - (1 - `mix_lambda`) ·
    redundancy. The window always stays.

    As in the authors' program one newest entry is spared: its ratio of retained ones (0.1) changes nothing in the
    direction that it takes by default. A key without a similar one spares none (there it spares the first entry).

    Attributes:
        mix_lambda: the paper's lambda.
    """

    name = "r_kv"
    paper = "arXiv:2505.24133"

    window: int = parameter(8, minimum=1)
    kernel: int = parameter(7, minimum=1, odd=True)
    mix_lambda: float = parameter(0.07, minimum=0.0, maximum=1.0)
    threshold: float = parameter(0.5, minimum=0.0, maximum=1.0)

    @property
    def needs(self) -> Needs:
        return Needs(RecentQueries(self.window))

    @property
    def recent(self) -> int:
        return self.window

    def score(self, observation: Observation) -> Scores:
        return self.mix_lambda * self._importance(observation) - (1 - self.mix_lambda) * self._redundancy(observation)

    def _importance(self, observation: Observation) -> Scores:
        newest, at = observation.newest_queries(self.window)
        queries = observation.by_query_group(newest * observation.scaling)
        logits = (queries.flatten(2, 3) @ observation.keys.transpose(-1, -2)).float()
        logits = logits.unflatten(2, queries.shape[2:4]).amax(2)
        # All window queries see what lies before the window.
        before = observation.positions < observation.lengths[:, None, None] - self.window
        exists = (at >= 0)[:, None, :, None]
        logits = logits.masked_fill(~(before & observation.valid)[:, :, None], float("-inf"))
        attention = logits.softmax(-1).nan_to_num(nan=0.0).masked_fill(~exists, 0.0)
        received = attention.sum(2) / exists.sum(2).clamp(min=1)
        return F.max_pool1d(received, self.kernel, stride=1, padding=self.kernel // 2)

    def _redundancy(self, observation: Observation) -> Scores:
        directions = F.normalize(observation.keys.float(), dim=-1)
        directions = directions.masked_fill(~observation.valid[..., None], 0.0)
        others = directions.sum(2, keepdim=True) - directions
        charged = (directions * others).sum(-1)
        batch, kv_heads, entries, _ = directions.shape
        # As float32, whose maxima are vectorised; exact up to 2**24 entries.
        place = torch.arange(entries, device=directions.device, dtype=torch.float32)
        size = max(1, _BLOCK // (batch * kv_heads * entries))
        for start in range(0, entries, size):
            rows = directions[:, :, start : start + size]
            cosines = rows @ directions.transpose(-1, -2)
            cosines.diagonal(start, -2, -1).zero_()
            newest = place.where(cosines > self.threshold, -1).amax(-1).long()
            spared = cosines.gather(-1, newest.clamp(min=0)[..., None])[..., 0].masked_fill(newest < 0, 0.0)
            charged.scatter_add_(-1, newest.clamp(min=0), -spared)
        mean = charged / observation.valid.sum(-1, keepdim=True).clamp(min=1)
        return mean.masked_fill(~observation.valid, float("-inf")).softmax(-1)
