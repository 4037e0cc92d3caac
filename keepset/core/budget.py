"""`Budget`: how many entries may stay, and which ones always do."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass

import torch
from jaxtyping import Int
from torch import Tensor

from keepset.core.observation import Observation
from keepset.core.shapes import Mask, Quotas
from keepset.errors import BudgetError
from keepset.kernels.dispatch import upload


@dataclass(frozen=True, eq=False)
class Budget:
    """Entries per KV head, exact: a method asked for n keeps n, or all when there are fewer.

    Its methods say what that comes to in one layer: each is given the layer's observation, of all requests of a batch.

    Attributes:
        keep: a float in (0, 1] is a fraction of the entries, an int is entries per KV head, None leaves the
            number to the method.
        sinks: first tokens that always stay; they count towards `keep`.
        recent: newest tokens that always stay. Where a fraction of a short text is less than both, both stay, and of
            a text that is no longer than that everything.
        protect_prompt: the request's prompt always stays, like sinks. It counts towards `keep`, too; where both it and
            the recent suffix are more than that, they are what stays.
        protect: ranges of tokens `(first, end)`, without the one at the end, that always stay as a protected prompt
            does; in order and apart from one another, however they were given.

    Raises:
        BudgetError: when it is made of something that is out of range, or does not fit together.
    """

    keep: int | float | None = None
    sinks: int = 0
    recent: int = 0
    protect_prompt: bool = False
    protect: Sequence[Sequence[int]] = ()

    def __post_init__(self) -> None:
        for name in ("sinks", "recent"):
            value = getattr(self, name)
            if not isinstance(value, int) or isinstance(value, bool) or not 0 <= value < LIMIT:
                raise BudgetError(f"{name}={value!r} is not a number of tokens: use an integer from 0.")
        if not isinstance(self.protect_prompt, bool):
            raise BudgetError(f"protect_prompt={self.protect_prompt!r} is neither True nor False.")
        object.__setattr__(self, "protect", _joined(self.protect))
        if self.keep is None:
            return
        if isinstance(self.keep, bool) or not isinstance(self.keep, int | float):
            raise BudgetError(f"keep={self.keep!r} is not a number: {KEEP_HELP}.")
        if not (0 < self.keep <= 1 if isinstance(self.keep, float) else 1 <= self.keep < LIMIT):
            raise BudgetError(f"keep={self.keep!r} is out of range: {KEEP_HELP}.")
        if isinstance(self.keep, int) and self.keep < self.sinks + self.recent:
            raise BudgetError(
                f"keep={self.keep} is below the {self.sinks + self.recent} entries that always stay "
                f"(sinks={self.sinks}, recent={self.recent}): raise keep, or lower those."
            )

    def __eq__(self, other: object) -> bool:
        # 1 == 1.0, but one entry is not everything.
        return isinstance(other, Budget) and self._key == other._key

    def __hash__(self) -> int:
        return hash(self._key)

    @property
    def _key(self) -> tuple[object, ...]:
        return type(self.keep), self.keep, self.sinks, self.recent, self.protect_prompt, self.protect

    def quotas(self, observation: Observation) -> Quotas:
        """Entries that stay of every request and KV head; all where there are fewer, and never none."""
        existing = observation.valid.sum(-1)
        if self.keep is None:
            return existing
        always = self.always(observation)[:, None]
        wanted = share_of(existing, self.keep) if isinstance(self.keep, float) else self.aim(observation)[:, None]
        return wanted.maximum(always).clamp(min=1).minimum(existing)

    def first(self, observation: Observation) -> Int[Tensor, " batch"]:
        """How many of the first tokens always stay: the sinks, or the whole prompt where that is protected."""
        sinks = observation.lengths.clamp(max=self.sinks)
        return sinks.maximum(observation.prompts) if self.protect_prompt else sinks

    def always(self, observation: Observation) -> Int[Tensor, " batch"]:
        """How many tokens always stay, the first, those of ranges and the newest; less where a text is too short."""
        first, newest = self.first(observation), observation.lengths.clamp(max=self.recent)
        if not self.protect:
            return first + newest
        begins, ends = upload(self.protect, first.device).unbind(1)
        until = (observation.lengths - newest)[:, None].minimum(ends)
        return first + newest + (until - begins.maximum(first[:, None])).clamp(min=0).sum(-1)

    def aim(self, observation: Observation) -> Int[Tensor, " batch"]:
        """Entries per KV head where there are as many: `keep`, or what always stays if that is protected and more."""
        assert isinstance(self.keep, int)
        keep = torch.full_like(observation.lengths, self.keep)
        protects = self.protect_prompt or self.protect
        return keep.maximum(self.always(observation)) if protects else keep

    def is_protected(self, observation: Observation) -> Mask:
        """Which entries are among the first tokens that always stay, or in a range that does."""
        first = observation.positions < self.first(observation)[:, None, None]
        if not self.protect:
            return first
        bounds = upload(self.protect, first.device).flatten()
        return first | (torch.searchsorted(bounds, observation.positions.contiguous(), right=True) % 2 == 1)

    def is_recent(self, observation: Observation) -> Mask:
        """Which entries are among the newest tokens that always stay."""
        return observation.positions >= observation.lengths[:, None, None] - self.recent


def _joined(ranges: object) -> tuple[tuple[int, int], ...]:
    """Ranges in order, those that meet as one."""
    if not isinstance(ranges, list | tuple) or not all(map(_is_range, ranges)):
        raise BudgetError(
            f"protect={ranges!r:.80} is no list of ranges of tokens: write [[0, 512]], the first token and the one "
            "after the last, as often as needed."
        )
    joined: list[tuple[int, int]] = []
    for first, end in sorted(map(tuple, ranges)):
        if joined and first <= joined[-1][1]:
            joined[-1] = joined[-1][0], max(end, joined[-1][1])
        else:
            joined.append((first, end))
    return tuple(joined)


def _is_range(bounds: object) -> bool:
    if not isinstance(bounds, list | tuple) or len(bounds) != 2:
        return False
    whole = all(isinstance(bound, int) and not isinstance(bound, bool) for bound in bounds)
    return whole and 0 <= bounds[0] < bounds[1] < LIMIT


def share_of(counts: Int[Tensor, "*shape"], share: float) -> Int[Tensor, "*shape"]:
    """This share of each of these numbers, rounded down."""
    # 0.29 * 100 is 28.999...96 in binary; no text is long enough for 1e-9 to matter.
    return (counts.double() * share + 1e-9).floor().long()


LIMIT = 2**63
"""What a tensor of whole numbers can hold."""

KEEP_HELP = "use a fraction in (0, 1] such as 0.25, or a whole number of entries from 1 such as 512"
