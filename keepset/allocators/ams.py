"""AMS: quotas for regions of the text, so that no region is dropped completely."""

from __future__ import annotations

from dataclasses import dataclass
from typing import NamedTuple

import torch
import torch.nn.functional as F

from keepset.allocators import segments
from keepset.allocators.segments import PerEntry, PerSegment
from keepset.core.budget import Budget
from keepset.core.feature import Needs
from keepset.core.features.queries import WindowAttention
from keepset.core.keep_set import LayerKeepSet
from keepset.core.method import Allocator, Method, parameter
from keepset.core.observation import Observation
from keepset.core.select import Ranking, finite
from keepset.core.shapes import Quotas, Scores
from keepset.core.traits import Traits
from keepset.errors import RecipeError

_EPSILON = 1e-12


class Segments(NamedTuple):
    """A layer at an event as AMS divides it.

    Attributes:
        mass: the mass of every entry; it sums to 1 over a head and is 0 at holes.
        segment: the number of every entry's segment, counted from 0.
        quotas: entries that every segment keeps; segments that do not exist keep none.
    """

    mass: Scores
    segment: PerEntry
    quotas: PerSegment


@dataclass(frozen=True)
class AMS(Allocator):
    """Cuts each head's text into segments of equal attention mass and gives each a quota (Yang and Shen 2026).

    Adaptive Mass-Segmented compression, algorithm 1 with the values of table 15. A head's mass is the attention of the
    last `window` queries (equation 1): their mean, over the query group as well, average-pooled over `kernel` entries.
    It is mixed with the entries' credit, c <- `decay` c + (1 - `decay`) m from c = 0 (section 3.3), so that entries
    that are attended to at one event after another count for more than new ones. The text is cut where every further
    `segment_mass` is full. Each segment gets `min_quota` entries, and a share of the rest in proportion to its mass, so
    that the whole budget is used. Inside a segment the best entries by the scorer are chosen. Sinks and the recent
    suffix are added, and the lowest scores are dropped until the budget holds (lines 38 to 41). If the minima do not
    fit, the segments of least mass get none.

    Where the authors' program differs, the text decides: each request and head has its own masses; cuts include the
    entry that fills a segment; what a segment cannot take is shared in proportion to mass. The text gives no pooling
    width and no length of the suffix; 5 and 32 are the program's.

    `padding` says what an entry gets for queries of the window that came before it (B.4). With "observations", each of
    these missing observations counts as the most that an entry of the window got. With "positions", as in the program,
    every entry of the window gets the most that any entry got; that is mostly the first token's, and then hardly any
    mass is left for the rest.

    Switches of table 7: `weighted=False` divides by length instead of mass, `credit=False` uses only each event's mass,
    `adaptive=False` cuts every 128 entries, `segmented=False` is one top-k per head.
    """

    name = "ams"
    paper = "Adaptive Mass-Segmented KV Compression for Long-Form Reasoning (2026)"

    window: int = parameter(128, minimum=1)
    kernel: int = parameter(5, minimum=1, odd=True)
    segment_mass: float = parameter(0.1, minimum=1e-4, maximum=1.0)
    min_segment: int = parameter(16, minimum=1)
    max_segment: int = parameter(256, minimum=2)
    min_quota: int = parameter(1, minimum=0)
    decay: float = parameter(0.9, minimum=0.0, maximum=1.0)
    mix: float = parameter(0.9, minimum=0.0, maximum=1.0)
    weighted: bool = parameter(True)
    credit: bool = parameter(True)
    adaptive: bool = parameter(True)
    segmented: bool = parameter(True)
    padding: str = parameter("observations", choices=("observations", "positions"))

    FIXED_LENGTH = 128

    def __post_init__(self) -> None:
        super().__post_init__()
        if self.max_segment < 2 * self.min_segment:
            raise RecipeError(
                f"ams: max_segment={self.max_segment} is less than twice min_segment={self.min_segment}, "
                "so that a segment could be too long to stay and too short to divide: raise it."
            )

    def objection(self, inner: Method) -> str:
        sentence = (
            f"ams chooses inside each segment, so it cannot wrap {inner.name}, which chooses too: wrap a scorer, as in "
            f"ams(tova), and put ams inside, as in {inner.name}(ams(tova)), if you want both."
        )
        return sentence if inner.chooses else ""

    @property
    def own_traits(self) -> Traits:
        needs = Needs(WindowAttention(self.window)) if self._uses_mass else Needs()
        return Traits(needs=needs, sinks=4, recent=32, state_names=("credit",))  # 4 sinks as in table 15

    @property
    def _uses_mass(self) -> bool:
        return self.segmented and (self.weighted or self.adaptive)

    def choose(self, ranking: Ranking) -> LayerKeepSet:
        if not self.segmented:
            return ranking.best()
        observation, budget, quotas = ranking.observation, ranking.budget, ranking.quotas
        mass, credit = self._mass(observation)
        segment, ends, parts = self._divided(observation, mass, quotas)
        worth = finite(ranking.raw).masked_fill(~observation.valid, float("-inf"))
        chosen = segments.top_of_segments(worth, segment, ends, parts)
        always = budget.is_protected(observation) | budget.is_recent(observation)
        most = mass.shape[-1] if budget.protects else budget.sinks + budget.recent
        mask = segments.trimmed(ranking.scores, chosen | always & observation.valid, quotas, most)
        if credit is None:
            return ranking.keep(mask)
        # If all may stay, nothing is compressed.
        eventful = (quotas < observation.valid.sum(-1))[..., None]
        return ranking.keep(mask, credit=credit.where(eventful, observation.state.get("credit", 0.0)))

    def segments(self, observation: Observation, budget: Budget) -> Segments:
        """Return mass, segments and quotas at this event, for diagnostics and tests.

        Args:
            observation: the layer.
            budget: the recipe's budget, in entries.
        """
        mass, _ = self._mass(observation)
        segment, _, parts = self._divided(observation, mass, self.quotas(observation.sizes, budget))
        return Segments(mass, segment, parts)

    def _mass(self, observation: Observation) -> tuple[Scores, Scores | None]:
        """Return the mass that counts, and the entries' new credit."""
        valid = observation.valid
        if not self._uses_mass:
            return _distribution(valid.float()), None
        mass = _distribution((self._usage(observation).clamp(min=0) + _EPSILON).masked_fill(~valid, 0.0))
        if not self.credit:
            return mass, None
        before = observation.state.get("credit", torch.zeros_like(mass))
        credit = self.decay * before + (1 - self.decay) * mass
        return self.mix * mass + (1 - self.mix) * _distribution(credit), credit

    def _usage(self, observation: Observation) -> Scores:
        """Return the mean attention of each entry from the window's queries, with `padding` for earlier queries."""
        sums = observation[WindowAttention(self.window)]
        received = (sums.attention_sums / sums.window).nan_to_num(0.0, 0.0, 0.0).masked_fill(~observation.valid, 0.0)
        if self.padding == "positions":
            best = received.amax(-1, keepdim=True)
            received = received.where(observation.positions < observation.lengths[:, None, None] - self.window, best)
            return self._pooled(received.masked_fill(~observation.valid, 0.0))
        ages = (observation.lengths[:, None, None] - observation.positions).clamp(0, sums.window)
        unseen = sums.window - ages
        best = received.where(unseen > 0, 0.0).amax(-1, keepdim=True)
        return self._pooled((received + best * unseen / sums.window).masked_fill(~observation.valid, 0.0))

    def _pooled(self, usage: Scores) -> Scores:
        return F.avg_pool1d(usage, self.kernel, stride=1, padding=self.kernel // 2)

    def _divided(
        self, observation: Observation, mass: Scores, quotas: Quotas
    ) -> tuple[PerEntry, PerSegment, PerSegment]:
        order, filled = observation.valid.cumsum(-1), mass.double().cumsum(-1)
        if self.adaptive:
            ends = segments.cut_by_mass(filled, order, self.segment_mass, self.min_segment, self.max_segment)
        else:
            ends = segments.cut_by_length(order, self.FIXED_LENGTH)
        segment = torch.searchsorted(ends, order)  # a hole gets any segment
        length = ends.diff(dim=-1, prepend=torch.zeros_like(ends[..., :1])).double()
        weight = segments.sums(filled, order, ends) if self.weighted else length
        parts = segments.divide(quotas, weight, length, length.clamp(max=self.min_quota))
        return segment, ends, parts


def _distribution(values: Scores) -> Scores:
    return values / values.sum(-1, keepdim=True).clamp(min=_EPSILON**2)
