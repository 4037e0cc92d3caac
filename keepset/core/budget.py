"""`Budget`: how many entries may stay, and which tokens always stay."""

from __future__ import annotations

import math
from collections.abc import Iterable, Sequence
from dataclasses import dataclass, field, fields, replace
from itertools import chain, islice, pairwise

import torch
from jaxtyping import Int
from torch import Tensor

from keepset.core.observation import Observation
from keepset.core.shapes import Mask, Quotas
from keepset.core.sizes import Sizes
from keepset.errors import BudgetError
from keepset.kernels.dispatch import upload

Ranges = tuple[tuple[int, int], ...]
"""Ranges of tokens: the first token of each, and the one after its last."""

IMAGE, TEXT = KINDS = ("image", "text")
"""Kinds of tokens that `protect` can name."""

SYSTEM = "system"
"""All before the first message of a user, which `protect` can name in conversations."""

LIMIT = 2**63
"""Numbers of tokens must be below this: it is more than an int64 tensor can hold."""

KEEP_HELP = "use a fraction in (0, 1] such as 0.25, or a whole number of entries from 1 such as 512"
"""The explanation of `keep` in errors."""

BYTES_HELP = "use a share of the bytes of a full 16-bit cache, in (0, 1], such as 0.25"
"""The explanation of `bytes` in errors."""


@dataclass(frozen=True, eq=False)
class Budget:
    """The number of entries that each KV head keeps, and the tokens that always stay.

    The number is exact: a method that is asked for n entries keeps n, or all if there are fewer.

    Attributes:
        keep: a float in (0, 1] is a fraction of the entries, an int is entries per KV head, and None leaves the
            number to `bytes` or to the method.
        bytes: instead of `keep`, the share in (0, 1] that the entries may take of a full 16-bit cache of the same
            tokens, keys and values alone. `Traits.entry_bytes` says what an entry takes. A recipe converts it to `keep`
            once the size of a head is known (`Recipe.budget_for`).
        sinks: first tokens that always stay; they count towards `keep`.
        recent: newest tokens that always stay; they count towards `keep`. If a fraction of a short text is fewer
            entries than sinks and recent tokens together, all of these stay.
        recent_extra: whether the recent tokens stay in addition to `keep`, which then counts only entries before them.
            It cannot be combined with `bytes`, which counts every entry.
        short: a request whose prompt has fewer tokens than this keeps all of it, because little of it can be spared.
        protect_prompt: whether the request's prompt always stays, as sinks do. It counts towards `keep`. If prompt
            and recent tokens are more than `keep`, exactly these stay.
        protect: what always stays, as a protected prompt does: ranges of tokens `(first, end)` without `end`,
            `"image"` for the tokens of images and videos, `"text"` for all others, or a list of these. Names are
            stored first, then ranges in order, with touching ones joined. A runtime tells where images are (`located`).
            In conversations also `"system"`, which a runtime finds, too (`with_system`).

    Raises:
        BudgetError: if a value is out of range, or the values contradict one another.
    """

    keep: int | float | None = None
    bytes: float | None = field(default=None, kw_only=True)
    sinks: int = 0
    recent: int = 0
    protect_prompt: bool = False
    protect: str | Sequence[str | Sequence[int]] = ()
    recent_extra: bool = field(default=False, kw_only=True)
    short: int = field(default=0, kw_only=True)

    def __post_init__(self) -> None:
        for name in ("sinks", "recent", "short"):
            value = getattr(self, name)
            if not isinstance(value, int) or isinstance(value, bool) or not 0 <= value < LIMIT:
                raise BudgetError(f"{name}={value!r} is not a number of tokens: use an integer from 0.")
        for name in ("protect_prompt", "recent_extra"):
            if not isinstance(getattr(self, name), bool):
                raise BudgetError(f"{name}={getattr(self, name)!r} is neither True nor False.")
        object.__setattr__(self, "protect", _protected(self.protect))
        if self.bytes is not None:
            self._check_bytes(self.bytes)
        if self.keep is None:
            return
        if isinstance(self.keep, bool) or not isinstance(self.keep, int | float):
            raise BudgetError(f"keep={self.keep!r} is not a number: {KEEP_HELP}.")
        if not (0 < self.keep <= 1 if isinstance(self.keep, float) else 1 <= self.keep < LIMIT):
            raise BudgetError(_out_of_range("keep", self.keep, KEEP_HELP))
        counted = {"sinks": self.sinks} if self.recent_extra else {"sinks": self.sinks, "recent": self.recent}
        if isinstance(self.keep, int) and self.keep < (always := sum(counted.values())):
            said = ", ".join(f"{name}={count}" for name, count in counted.items())
            raise BudgetError(
                f"keep={self.keep} is below the {always} entries that always stay ({said}): raise keep, or lower those."
            )

    def _check_bytes(self, share: object) -> None:
        """Raise BudgetError if `bytes` is no share, or `keep` is given too; convert an int 1 to a float."""
        if isinstance(share, bool) or not isinstance(share, int | float):
            raise BudgetError(f"bytes={share!r} is not a number: {BYTES_HELP}.")
        if not 0 < share <= 1:
            raise BudgetError(_out_of_range("bytes", share, BYTES_HELP))
        if self.recent_extra:
            raise BudgetError(f"bytes={share!r} counts every entry, and recent_extra=True does not: use keep instead.")
        if self.keep is not None:
            raise BudgetError(f"keep={self.keep!r} and bytes={share!r} both say how much stays: leave one of them out.")
        object.__setattr__(self, "bytes", float(share))

    def __eq__(self, other: object) -> bool:
        # keep=1 is one entry and keep=1.0 is everything, though 1 == 1.0.
        return isinstance(other, Budget) and self._key == other._key

    def __hash__(self) -> int:
        return hash(self._key)

    @property
    def _key(self) -> tuple[object, ...]:
        always = self.sinks, self.recent, self.recent_extra, self.protect_prompt, self.protect, self.short
        return type(self.keep), self.keep, self.bytes, *always

    def is_exceeded(self, length: int) -> bool:
        """Return whether more always stays of a text than the share of it that `keep` is.

        Args:
            length: tokens of the text.
        """
        if not isinstance(self.keep, float) or self.recent_extra or length < self.short:
            return False
        return min(self.sinks + self.recent, length) > max(math.floor(self.keep * length), 1)

    @property
    def is_given(self) -> bool:
        """Return whether the budget says how much stays."""
        return self.keep is not None or self.bytes is not None

    @property
    def protects(self) -> bool:
        """Return whether tokens other than the first and the newest may always stay."""
        return self.protect_prompt or self.protects_ranges or self.short > 0

    @property
    def kinds(self) -> tuple[str, ...]:
        """Return which kinds of tokens always stay, `"image"` or `"text"`, wherever they are."""
        return tuple(part for part in KINDS if part in self.protect)

    @property
    def protects_system(self) -> bool:
        """Return whether all before a conversation's first message of a user always stays."""
        return SYSTEM in self.protect

    def with_system(self, span: Ranges) -> Budget:
        """Return the same budget with a range of tokens in place of `"system"`.

        Args:
            span: where these tokens are.
        """
        return replace(self, protect=(*self.kinds, *self.ranges, *span)) if self.protects_system else self

    @property
    def ranges(self) -> Ranges:
        """Return the ranges of tokens that always stay."""
        return tuple((part[0], part[1]) for part in self.protect if not isinstance(part, str))

    def located(self, images: Sequence[Ranges] | None) -> Budget:
        """Return the same budget with ranges of tokens in place of `"image"` and `"text"`.

        Raises:
            BudgetError: if the budget protects images or text, and it is not known where images are.
        """
        if not self.kinds:
            return self
        if images is None:
            raise BudgetError(
                f"protect={self.kinds[0]!r} takes the token ids of the text, and the model was given embeddings alone: "
                "give input_ids, or protect ranges of tokens."
            )
        found = tuple(self._ranges_beside(request_images) for request_images in images)
        if len(set(found)) == 1:
            return replace(self, protect=found[0])
        arguments = {f.name: getattr(self, f.name) for f in fields(Budget) if f.name != "protect"}
        return LocatedBudget(**arguments, protect=(), requests=found)

    def _ranges_beside(self, images: Ranges) -> Ranges:
        """Return the protected ranges of a request whose images are in these ranges."""
        texts = pairwise([0, *chain.from_iterable(joined(images)), LIMIT - 1])
        kinds = {IMAGE: images, TEXT: [span for span in islice(texts, 0, None, 2) if span[0] < span[1]]}
        return joined([*self.ranges, *chain.from_iterable(kinds[kind] for kind in self.kinds)])

    def of_tokens(self, tokens: int) -> Budget:
        """Return the budget in entries of a text of so many tokens, of which some entries may be gone already.

        A text of fewer tokens than `short` keeps all of them.

        Raises:
            BudgetError: if the budget is still in bytes.
        """
        always, keep = self.sinks + (0 if self.recent_extra else self.recent), self.keep
        if tokens < self.short:
            keep = max(tokens, always, 1)
        elif isinstance(keep, float):
            keep = max(int(share_of(torch.tensor(tokens, dtype=torch.long), keep)), always, 1)
        return replace(self, keep=keep, short=0)

    def quotas(self, sizes: Sizes) -> Quotas:
        """Return how many entries each KV head keeps: at least one, and all where there are fewer than asked for.

        Raises:
            BudgetError: if the budget is still in bytes.
        """
        if self.bytes is not None:
            raise BudgetError(f"bytes={self.bytes} says nothing of entries yet: take Recipe.budget_for's budget.")
        if self.keep is None:
            return sizes.entries
        keep = share_of(sizes.entries, self.keep) if isinstance(self.keep, float) else self.keep
        quota = (keep + self.extra(sizes)[:, None]).maximum(self.always(sizes)[:, None])
        return quota.clamp(min=1).minimum(sizes.entries)

    def first(self, sizes: Sizes) -> Int[Tensor, " batch"]:
        """Return how many of the first tokens always stay: the sinks, or the whole prompt if it is protected."""
        sinks = sizes.lengths.clamp(max=self.sinks)
        if self.protect_prompt:
            return sinks.maximum(sizes.prompts)
        return sinks.maximum(sizes.prompts.where(sizes.prompts < self.short, 0)) if self.short else sinks

    def always(self, sizes: Sizes) -> Int[Tensor, " batch"]:
        """Return how many tokens always stay: the first ones, the protected ranges and the newest ones.

        A token in several of these counts once.
        """
        first, newest = self.first(sizes), sizes.lengths.clamp(max=self.recent)
        if not self.protects_ranges:
            return first + newest
        begins, ends = self._bounds(len(first), first.device).unfold(-1, 2, 2).unbind(-1)
        until = (sizes.lengths - newest)[:, None].minimum(ends)
        return first + newest + (until - begins.maximum(first[:, None])).clamp(min=0).sum(-1)

    def extra(self, sizes: Sizes) -> Int[Tensor, " batch"]:
        """Return how many of the recent tokens stay in addition to `keep`."""
        return sizes.lengths.clamp(max=self.recent if self.recent_extra else 0)

    def aim(self, sizes: Sizes) -> Int[Tensor, " batch"]:
        """Return how many entries a KV head keeps if it has that many; `keep` must be a number of entries.

        This is `keep` plus what stays in addition; or, if tokens are protected, the number of tokens that always stay
        if that is more.
        """
        assert isinstance(self.keep, int)
        keep = self.keep + self.extra(sizes)
        return keep.maximum(self.always(sizes)) if self.protects else keep

    def is_protected(self, observation: Observation) -> Mask:
        """Return which entries are among the first tokens that always stay, or in a protected range."""
        first = observation.positions < self.first(observation.sizes)[:, None, None]
        if not self.protects_ranges:
            return first
        positions = observation.positions.flatten(1).contiguous()
        bounds = self._bounds(len(positions), first.device).expand(len(positions), -1).contiguous()
        inside = torch.searchsorted(bounds, positions, right=True) % 2 == 1
        return first | inside.view_as(first)

    @property
    def protects_ranges(self) -> bool:
        """Return whether ranges of tokens always stay."""
        return bool(self.protect)

    def _bounds(self, rows: int, device: torch.device) -> Int[Tensor, "requests bounds"]:
        """Return the first token and the end of each protected range: one row for all, or a row for each.

        Args:
            rows: how many requests there are.
            device: where the result goes.
        """
        if unknown := [name for name in (*KINDS, SYSTEM) if name in self.protect]:
            raise BudgetError(f"protect={unknown[0]!r} says nothing of positions yet: take Budget.located's budget.")
        return upload(self.ranges, device).flatten()[None]

    def is_recent(self, observation: Observation) -> Mask:
        """Return which entries are among the newest tokens that always stay."""
        return observation.positions >= observation.lengths[:, None, None] - self.recent


@dataclass(frozen=True, eq=False)
class LocatedBudget(Budget):
    """The budget of a batch whose requests protect different ranges, because their images are in different places.

    Attributes:
        requests: the protected ranges of each request.
    """

    requests: tuple[Ranges, ...] = field(default=(), kw_only=True)

    @property
    def _key(self) -> tuple[object, ...]:
        return *super()._key, self.requests

    @property
    def protects_ranges(self) -> bool:
        return True

    def _bounds(self, rows: int, device: torch.device) -> Int[Tensor, "rows bounds"]:
        most = max(map(len, self.requests))
        # Ranges without tokens, after all others.
        padded = [
            [*request_ranges, *[(LIMIT - 1, LIMIT - 1)] * (most - len(request_ranges))]
            for request_ranges in self.requests
        ]
        # A row is a request in a layer, layer after layer.
        return upload(padded, device).flatten(1).repeat(rows // len(self.requests), 1)


def _out_of_range(name: str, value: float, allowed: str) -> str:
    # A percentage may be meant. As such smaller numbers would leave almost nothing, and nobody means that.
    if 5 <= value <= 100:
        allowed = allowed[0].upper() + allowed[1:]
        return f"{name}={value!r} is out of range; did you mean {name}={float(value / 100)}? {allowed}."
    return f"{name}={value!r} is out of range: {allowed}."


def _protected(protect: object) -> tuple[str | tuple[int, int], ...]:
    """Return the names in `protect`, then its ranges in order."""
    parts = [protect] if isinstance(protect, str) else protect
    if not isinstance(parts, list | tuple) or not all(part in (*KINDS, SYSTEM) or _is_range(part) for part in parts):
        # Ranges are shown as recipes and requests write them.
        shown = protect
        if isinstance(protect, list | tuple):
            shown = [list(part) if isinstance(part, tuple) else part for part in protect]
        raise BudgetError(
            f"protect={shown!r:.80} is no list of ranges of tokens: write [[0, 512]], the first token and the one "
            "after the last, as often as needed, or 'image', 'text', or in a conversation 'system'."
        )
    names = [name for name in (*KINDS, SYSTEM) if name in parts]
    return *names, *joined([part for part in parts if not isinstance(part, str)])


def joined(ranges: Iterable[Sequence[int]]) -> Ranges:
    """Return ranges in order, with touching and overlapping ones joined into one."""
    whole: list[tuple[int, int]] = []
    for first, end in sorted(map(tuple, ranges)):
        if whole and first <= whole[-1][1]:
            whole[-1] = whole[-1][0], max(end, whole[-1][1])
        else:
            whole.append((first, end))
    return tuple(whole)


def runs(positions: Sequence[int]) -> Ranges:
    """Return rising positions as ranges."""
    ranges: list[tuple[int, int]] = []
    for position in positions:
        if ranges and ranges[-1][1] == position:
            ranges[-1] = ranges[-1][0], position + 1
        else:
            ranges.append((position, position + 1))
    return tuple(ranges)


def _is_range(bounds: object) -> bool:
    if not isinstance(bounds, list | tuple) or len(bounds) != 2:
        return False
    whole = all(isinstance(bound, int) and not isinstance(bound, bool) for bound in bounds)
    return whole and 0 <= bounds[0] < bounds[1] < LIMIT


def share_of(counts: Int[Tensor, "*shape"], share: float) -> Int[Tensor, "*shape"]:
    """Return each number times a share from 0 to 1, rounded down.

    Args:
        counts: numbers from 0 on.
        share: a share from 0 to 1.
    """
    # 0.29 * 100 is 28.999...96 in binary; no text is long enough for 1e-9 to matter.
    return (counts.double() * share + 1e-9).floor().long()
