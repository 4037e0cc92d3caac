"""`KnownTokens`: what is known of the text that a cache holds, to tell whether an input begins with it."""

from __future__ import annotations

import warnings
from abc import ABC, abstractmethod
from dataclasses import dataclass, replace
from typing import Self

from jaxtyping import Bool, Int
from torch import Tensor

from keepset.errors import KeepsetError


class KnownTokens(ABC):
    """The first tokens of a cache, as far as somebody has told them. It never changes, so copies share it.

    Attributes:
        given: how many of them were given by the caller; `generate` has chosen those after them.
    """

    given: int

    @abstractmethod
    def first_other(self, ids: Int[Tensor, "batch n"], real: Bool[Tensor, "batch logical"] | None) -> int | None:
        """Return the first place where an input has another token; None if there is none.

        Args:
            ids: of the input, padding included.
            real: which tokens of the cache are not padding; None if all are real.
        """

    @abstractmethod
    def first(self, length: int) -> Self | None:
        """Return what is known of the first `length` tokens."""

    @abstractmethod
    def rows(self, rows: Int[Tensor, " rows"]) -> Self:
        """Return what is known of a batch of these requests."""

    def check(self, ids: Int[Tensor, "batch n"], real: Bool[Tensor, "batch logical"] | None, logical: int) -> None:
        """Refuse an input that begins with other tokens.

        Args:
            ids: as for `first_other`.
            real: likewise.
            logical: tokens of the cache, padding included.

        Raises:
            KeepsetError: tokens that the caller gave before are others now. If `generate` had chosen them, it is a
                warning, because a text that is tokenized again may come out otherwise.
        """
        other = self.first_other(ids, real)
        if other is not None and other < self.given:
            raise KeepsetError(
                f"The cache holds {logical} tokens, and the input begins with others: make a new "
                "keepset.Cache for each text, or ask several questions about one text on forks of its cache "
                "(cache.fork())."
            )
        if other is not None:
            warnings.warn(
                "The input has other tokens than the cache in the place of those that were generated before, and the "
                "cache keeps its own: add new tokens to the ids that generate has returned, or use a cache.fork() made "
                "before it.",
                stacklevel=4,
            )


@dataclass(frozen=True, eq=False)
class ToldTokens(KnownTokens):
    """Tokens whose ids are known.

    Attributes:
        ids: of the tokens.
    """

    ids: Int[Tensor, "batch n"]
    given: int

    def first_other(self, ids: Int[Tensor, "batch n"], real: Bool[Tensor, "batch logical"] | None) -> int | None:
        n = min(self.ids.shape[1], ids.shape[1])
        others = self.ids[:, :n] != ids[:, :n].to(self.ids.device)
        if real is not None:
            others &= real[:, :n].to(others.device)
        places = others.any(0).nonzero()
        return int(places[0]) if len(places) else None

    def first(self, length: int) -> ToldTokens:
        return replace(self, ids=self.ids[:, :length], given=min(self.given, length))

    def rows(self, rows: Int[Tensor, " rows"]) -> ToldTokens:
        return replace(self, ids=self.ids[rows.to(self.ids.device)])
