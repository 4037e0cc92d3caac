"""`Progress`: how far a cache has come, in lengths that are the same in all layers. `Event`: one compression."""

from __future__ import annotations

from dataclasses import dataclass
from operator import add

from jaxtyping import Bool, Int
from torch import Tensor

from keepset.core.budget import Ranges
from keepset.core.keep_set import KeepSet
from keepset.hf.known_text import KnownTokens


@dataclass(frozen=True, eq=False)
class Event:
    """One compression.

    Attributes:
        length: logical length of the cache at the event, padding included.
        keep_set: what stayed; None for events before the newest unless the cache keeps its history.
        entries: number of entries before it, over all layers, requests and KV heads.
        kept: number of entries that stayed.
        nbytes_before: bytes of the keys and values before it.
        seconds: time spent on choosing and freeing.
    """

    length: int
    keep_set: KeepSet | None
    entries: int
    kept: int
    nbytes_before: int
    seconds: float


@dataclass(eq=False)
class Progress:
    """Lengths of a cache, the same in all layers between two forwards. The first layer of a forward advances them.

    Tensors are never modified, so copies share them.

    Attributes:
        logical, prompt: tokens of the cache and of its prompt, padding included.
        lengths, prompts: tokens of each request and of its prompt, padding left out.
        tokens, prompt_tokens: the same on the host.
        valid: which tokens are not padding; None while all are real.
        compressed_at: logical length at the newest event, if there was one.
        positions: positions of the newest forward's tokens, counted from each request's first; padding has that of the
            token before. None between two forwards.
        known: the first tokens, as far as they are known.
        images: where the images of each request are, in positions; None if that is not known.
    """

    logical: int
    prompt: int
    lengths: Int[Tensor, " batch"]
    prompts: Int[Tensor, " batch"]
    tokens: list[int]
    prompt_tokens: list[int]
    valid: Bool[Tensor, "batch logical"] | None = None
    compressed_at: int | None = None
    positions: Int[Tensor, "batch n"] | None = None
    known: KnownTokens | None = None
    images: tuple[Ranges, ...] | None = None

    @property
    def has_images(self) -> bool:
        """Return whether a request is known to have images."""
        return self.images is not None and any(self.images)

    def add_images(self, found: tuple[Ranges, ...] | None) -> None:
        """Record where images are among the newest tokens; None if that is not known."""
        self.images = None if self.images is None or found is None else tuple(map(add, self.images, found))

    def crop(self, removed: int) -> list[int]:
        """Take back the newest tokens; return how many of them were real in each request."""
        real = [removed] * len(self.tokens)
        if self.valid is None:
            self.lengths = self.lengths - removed
        else:
            gone = self.valid[:, self.logical - removed :].sum(-1)
            self.valid = self.valid[:, : self.logical - removed]
            self.lengths, real = self.lengths - gone, gone.tolist()
        self.prompts = self.prompts.minimum(self.lengths)
        self.tokens = [before - taken for before, taken in zip(self.tokens, real, strict=True)]
        self.prompt_tokens = list(map(min, self.prompt_tokens, self.tokens))
        self.logical -= removed
        self.known = None if self.known is None else self.known.first(self.logical)
        if self.images is not None:
            self.images = tuple(
                tuple((first, min(end, length)) for first, end in own if first < length)
                for own, length in zip(self.images, self.tokens, strict=True)
            )
        return real

    def reorder(self, rows: Int[Tensor, " rows"]) -> None:
        """Make the batch consist of these requests."""
        self.lengths, self.prompts = self.lengths[rows], self.prompts[rows]
        chosen = rows.tolist()
        self.tokens = [self.tokens[row] for row in chosen]
        self.prompt_tokens = [self.prompt_tokens[row] for row in chosen]
        self.valid = None if self.valid is None else self.valid[rows]
        self.known = None if self.known is None else self.known.rows(rows)
        self.images = None if self.images is None else tuple(self.images[row] for row in chosen)
