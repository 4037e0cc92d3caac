"""AMS: quotas for regions, so that none of them is wiped out."""

from __future__ import annotations

from dataclasses import dataclass
from typing import NamedTuple

import torch
import torch.nn.functional as F

from keepset.allocators import segments
from keepset.allocators.segments import PerEntry, PerSegment
from keepset.core.budget import Budget
from keepset.core.feature import Needs
from keepset.core.features.window import WindowAttention
from keepset.core.keep_set import LayerKeepSet
from keepset.core.method import Allocator, Method, parameter
from keepset.core.observation import Observation
from keepset.core.select import Ranking, finite
from keepset.core.shapes import Quotas, Scores
from keepset.errors import RecipeError

_EPSILON = 1e-12


class Segments(NamedTuple):
    """What AMS makes of one layer at an event.

    Attributes:
        mass: of every entry, 1 in sum over a head; 0 at holes.
        segment: of every entry, counted from 0.
        quotas: entries that every segment keeps; segments that do not exist keep none.
    """

    mass: Scores
    segment: PerEntry
    quotas: PerSegment


@dataclass(frozen=True)
class AMS(Allocator):
    """Cuts each head's text into segments of equal attention mass and gives each a quota (Yang and Shen 2026).

    Adaptive Mass-Segmented compression, algorithm 1 with the values of table 15. What the last `window` queries
    attend to is a head's mass, eq. 1: the mean over them and the query group, average-pooled over `kernel` entries.
    It is mixed with the entries' credit, c <- `decay` c + (1 - `decay`) m from c = 0 (section 3.3), so that what is
    attended to at one event after another counts for more than what is new. The text is cut where every further
    `segment_mass` is full; segments get `min_quota` entries and of the rest what is in proportion to their mass, all of
    the budget in sum; inside a segment the best by the scorer are chosen. Sinks and the recent suffix join them, and
    what is then too much goes, the lowest scores first (lines 38 to 41). Where the minima do not fit, segments of least
    mass go without.

    Where the authors' program differs the text decides: masses are of each request and head alone; cuts include the
    entry that fills a segment; what a segment cannot take is shared in proportion to mass. The text names no pooling
    width and no length of the suffix; 5 and 32 are the program's.

    `padding` says what an entry gets for queries of the window that came before it (B.4). With "observations" each of
    these missing observations counts as the most that an entry of the window got. With "positions", the program's way,
    every entry of the window gets the most that any entry got; that is mostly the first token's, and then hardly any
    mass is left for the rest.

    Switches of table 7: `weighted=False` divides by length instead of mass, `credit=False` takes each event's mass
    alone, `adaptive=False` cuts every 128 entries, `segmented=False` is one top-k per head.
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
    def needs(self) -> Needs:
        return self.scorer.needs | Needs(*([WindowAttention(self.window)] if self._uses_mass else []))

    @property
    def state_names(self) -> tuple[str, ...]:
        return (*super().state_names, "credit")

    @property
    def sinks(self) -> int:
        """Four, as in table 15."""
        return max(4, self.scorer.sinks)

    @property
    def recent(self) -> int:
        return max(32, self.scorer.recent)

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
        protects = budget.protect_prompt or budget.protect
        most = mass.shape[-1] if protects else budget.sinks + budget.recent
        mask = segments.trimmed(ranking.scores, chosen | always & observation.valid, quotas, most)
        if credit is None:
            return ranking.keep(mask)
        # Where all may stay there was no event.
        eventful = (quotas < observation.valid.sum(-1))[..., None]
        return ranking.keep(mask, credit=credit.where(eventful, observation.state.get("credit", 0.0)))

    def segments(self, observation: Observation, budget: Budget) -> Segments:
        """Mass, segments and quotas at this event, for who wants to look at them."""
        mass, _ = self._mass(observation)
        segment, _, parts = self._divided(observation, mass, self.quotas(observation, budget))
        return Segments(mass, segment, parts)

    def _mass(self, observation: Observation) -> tuple[Scores, Scores | None]:
        """The mass that counts, and the entries' new credit."""
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
        """Mean attention of the window's queries; for those that came before an entry, the window's best counts."""
        sums = observation[WindowAttention(self.window)]
        received = sums.mean.nan_to_num(0.0, 0.0, 0.0).masked_fill(~observation.valid, 0.0)
        if self.padding == "positions":
            best = received.amax(-1, keepdim=True)
            received = received.where(observation.positions < observation.lengths[:, None, None] - self.window, best)
            return self._pooled(received.masked_fill(~observation.valid, 0.0))
        unseen = sums.window - sums.asked(observation, observation.positions)
        best = received.where(unseen > 0, 0.0).amax(-1, keepdim=True)
        return self._pooled((received + best * unseen / sums.window).masked_fill(~observation.valid, 0.0))

    def _pooled(self, usage: Scores) -> Scores:
        return F.avg_pool1d(usage, self.kernel, stride=1, padding=self.kernel // 2)

    def _divided(
        self, observation: Observation, mass: Scores, quotas: Quotas
    ) -> tuple[PerEntry, PerSegment, PerSegment]:
        """Segments, where they end, and their quotas."""
        order, filled = observation.valid.cumsum(-1), mass.double().cumsum(-1)
        if self.adaptive:
            ends = segments.cut_by_mass(filled, order, self.segment_mass, self.min_segment, self.max_segment)
        else:
            ends = segments.cut_by_length(order, self.FIXED_LENGTH)
        segment = torch.searchsorted(ends, order)  # of a hole some segment
        length = ends.diff(dim=-1, prepend=torch.zeros_like(ends[..., :1])).double()
        weight = segments.sums(filled, order, ends) if self.weighted else length
        parts = segments.divide(quotas, weight, length, length.clamp(max=self.min_quota))
        return segment, ends, parts


def _distribution(values: Scores) -> Scores:
    return values / values.sum(-1, keepdim=True).clamp(min=_EPSILON**2)
