"""`Progress`: how far a cache has come, the same in all layers between two forwards; `Event`: a compression."""

from __future__ import annotations

from dataclasses import dataclass

import torch
from jaxtyping import Bool, Int
from torch import Tensor

from keepset.core.keep_set import KeepSet
from keepset.hf.attention import BatchedAttention
from keepset.hf.known_tokens import KnownTokens
from keepset.hf.mask import RealTokens


@dataclass(eq=False)
class Progress:
    """Lengths of a cache; the first layer of a forward moves them on. No tensor is written into: copies share them.

    Attributes:
        logical, prompt: tokens of the cache and of its prompt, padding included.
        lengths, prompts: tokens of each request and of its prompt, padding left out.
        tokens, prompt_tokens: the same on the host.
        valid: which tokens are no padding; None while all are.
        compressed_at: the newest event's length, if there was one.
        positions: of the newest forward's tokens, counted from each request's first; padding has that of the token
            before.
        known: of the first tokens, as far as they were told.
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

    def advance(self, n: int, real: RealTokens | None, joint: BatchedAttention | None = None) -> None:
        """Takes `n` more tokens, all of them real where nothing is said; `joint` may bring the lengths."""
        valid = None if real is None else real.mask
        if joint is None:
            steps = torch.arange(n, device=self.lengths.device) if valid is None else valid.long().cumsum(-1) - 1
            self.positions = self.lengths[:, None] + steps
            self.lengths = self.positions[:, -1] + 1
        else:
            self.positions, self.lengths = joint.positions, joint.lengths
        if valid is not None or self.valid is not None:
            before, new = ((len(self.lengths), tokens) for tokens in (self.logical, n))
            whole = self.lengths.new_ones(before, dtype=torch.bool) if self.valid is None else self.valid
            self.valid = torch.cat([whole, whole.new_ones(new) if valid is None else valid], 1)
        if (left := self.prompt - self.logical) > 0:
            self.prompts = self.positions[:, min(left, n) - 1] + 1
            self.prompt_tokens = self._with(min(left, n), None if real is None else real.part(slice(0, left)))
        self.tokens = self._with(n, real)
        self.logical += n

    def crop(self, removed: int) -> list[int]:
        """Takes back the newest tokens; gives how many of them were real in each request."""
        real = [removed] * len(self.tokens)
        if self.valid is None:
            self.lengths = self.lengths - removed
        else:
            there = self.valid[:, self.logical - removed :].sum(-1)
            self.valid = self.valid[:, : self.logical - removed]
            self.lengths, real = self.lengths - there, there.tolist()
        self.prompts = self.prompts.minimum(self.lengths)
        self.tokens = [before - gone for before, gone in zip(self.tokens, real, strict=True)]
        self.prompt_tokens = list(map(min, self.prompt_tokens, self.tokens))
        self.logical -= removed
        self.known = None if self.known is None else self.known.first(self.logical)
        return real

    def reorder(self, rows: Int[Tensor, " rows"]) -> None:
        """Makes the batch consist of these requests."""
        self.lengths, self.prompts = self.lengths[rows], self.prompts[rows]
        chosen = rows.tolist()
        self.tokens = [self.tokens[row] for row in chosen]
        self.prompt_tokens = [self.prompt_tokens[row] for row in chosen]
        self.valid = None if self.valid is None else self.valid[rows]
        self.known = None if self.known is None else self.known.rows(rows)

    def _with(self, n: int, real: RealTokens | None) -> list[int]:
        """Tokens of each request with `n` more, or with these."""
        counts = [n] * len(self.tokens) if real is None else real.counts
        return [before + new for before, new in zip(self.tokens, counts, strict=True)]


@dataclass(frozen=True, eq=False)
class Event:
    """One compression.

    Attributes:
        length: logical length of the cache at the event, padding included.
        keep_set: what stayed; of events before the newest only where the cache keeps its history.
        entries: entries that there were, over all layers, requests and KV heads.
        kept: how many of them stayed.
        nbytes_before: bytes of their keys and values.
        seconds: time spent on choosing and freeing.
    """

    length: int
    keep_set: KeepSet | None
    entries: int
    kept: int
    nbytes_before: int
    seconds: float
