"""KeyDiff: keep keys that point elsewhere than the others, because they draw attention."""

from __future__ import annotations

from dataclasses import dataclass
from functools import partial

import torch.nn.functional as F

from keepset.core.method import Method
from keepset.core.observation import Observation
from keepset.core.shapes import Scores


@dataclass(frozen=True)
class KeyDiff(Method):
    """Keeps the entries whose keys are least similar to the others (Park et al. 2025, arXiv:2504.15364).

    An entry's score is minus the cosine between its key and the mean of all normalised keys of its head: the paper's
    form that is linear in the number of entries. It does not use attention. The paper compresses a prompt block by
    block; here `every=` does that.
    """

    name = "keydiff"
    paper = "arXiv:2504.15364"

    def score(self, observation: Observation) -> Scores:
        return observation.over_heads(partial(_distances, observation))


def _distances(observation: Observation, heads: slice) -> Scores:
    directions = F.normalize(observation.keys_of(heads).float(), dim=-1)
    directions.masked_fill_(~observation.valid[:, heads, :, None], 0.0)
    anchor = F.normalize(directions.sum(2), dim=-1)
    return -(directions @ anchor[..., None])[..., 0]
