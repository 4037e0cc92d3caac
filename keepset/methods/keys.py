"""Methods that look at keys and values alone: Knorm, KeyDiff and LagKV."""

from __future__ import annotations

from dataclasses import dataclass
from functools import cached_property, partial

import torch
import torch.nn.functional as F
from jaxtyping import Float
from torch import Tensor

from keepset.core.method import Method, parameter
from keepset.core.observation import Observation
from keepset.core.shapes import Scores
from keepset.core.traits import Traits


@dataclass(frozen=True)
class Knorm(Method):
    """Keeps the entries whose keys have the smallest L2 norm (Devoto et al. 2024, arXiv:2406.11430)."""

    name = "knorm"
    paper = "arXiv:2406.11430"

    def score(self, observation: Observation) -> Scores:
        return observation.over_heads(lambda heads: -observation.keys_of(heads).float().norm(dim=-1))


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


@dataclass(frozen=True)
class LagKV(Method):
    """Keeps what varies most over its channels on the next partition's scale (Liang et al. 2025, arXiv:2504.04704).

    Entries after the sinks are cut into partitions of `lag`. Every channel of a key is scaled by its smallest and
    largest value in the partition that follows. The standard deviation over channels goes through a softmax over the
    partition. The same is done with values, and the sum of both is the entry's information. Entries of partitions that
    no full partition follows always stay.

    The paper keeps an equal share of every partition, so an entry's score is its rank in its partition. Partitions are
    cut anew at every event, from the entries that exist; the authors' program leaves compressed ones alone, and grows.
    A channel that does not vary in the next partition counts as zero.

    Attributes:
        lag: entries per partition.
        skip: first tokens, attention sinks, that belong to no partition and always stay.
    """

    name = "lagkv"
    paper = "arXiv:2504.04704"

    lag: int = parameter(128, minimum=1)
    skip: int = parameter(4, minimum=0)

    @cached_property
    def traits(self) -> Traits:
        return Traits(sinks=self.skip, recent=self.lag)

    def score(self, observation: Observation) -> Scores:
        """Return the rank of each entry's information within its partition, in [0, 1), and 1 outside of partitions."""
        scores = torch.ones(observation.valid.shape, dtype=torch.float32, device=observation.valid.device)
        count = (scores.shape[-1] - self.skip) // self.lag
        if count < 2:
            return scores
        information = observation.over_heads(
            lambda heads: (
                self._information(observation.keys_of(heads), count)
                + self._information(observation.values_of(heads), count)
            )
        )
        # A stable ascending sort: among equal ones the later is better, as everywhere.
        ranks = information.argsort(dim=-1, stable=True).argsort(dim=-1).float() / self.lag
        partitions = slice(self.skip, self.skip + (count - 1) * self.lag)
        follows = torch.arange(count - 1, device=scores.device) + 2  # full partitions that must exist
        full = (observation.valid.sum(-1, keepdim=True) - self.skip) // self.lag
        ranks = ranks.masked_fill((follows > full)[..., None], 1.0)
        scores[..., partitions] = ranks.flatten(2)
        return scores

    def _information(
        self, states: Float[Tensor, "batch kv_heads entries dim"], count: int
    ) -> Float[Tensor, "batch kv_heads partitions lag"]:
        """Return the information of the entries of every partition but the last, on the scale of the one after it.

        Args:
            states: keys or values in the order of their positions.
            count: how many partitions there are.
        """
        cut = states[:, :, self.skip : self.skip + count * self.lag].unflatten(2, (count, self.lag)).float()
        low, high = cut[:, :, 1:].aminmax(dim=3, keepdim=True)
        scaled = (cut[:, :, :-1] - low).div_(high - low).masked_fill_(high == low, 0.0)
        return scaled.std(-1, correction=min(1, scaled.shape[-1] - 1)).nan_to_num().softmax(-1)
