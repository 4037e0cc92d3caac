"""`Progress`: how far a cache has come, which is the same in all of its layers between two forwards."""

from __future__ import annotations

import copy
from dataclasses import dataclass

import torch
from jaxtyping import Bool, Int
from torch import Tensor

from keepset.hf.mask import token_positions
from keepset.hf.padding import Padding


@dataclass(eq=False)
class Progress:
    """Lengths of a cache; the first layer of a forward moves them on.

    Attributes:
        logical, prompt: tokens of the cache and of its prompt, padding included.
        lengths, prompts: tokens of each request and of its prompt, padding left out.
        padding: which tokens are no padding.
        compressed_at: the newest event's length, if there was one.
        positions: of the newest forward's tokens, counted from each request's first token.
    """

    logical: int
    prompt: int
    lengths: Int[Tensor, " batch"]
    prompts: Int[Tensor, " batch"]
    padding: Padding
    compressed_at: int | None = None
    positions: Int[Tensor, "batch n"] | None = None

    @classmethod
    def start(cls, prompt: int, batch: int, device: torch.device) -> Progress:
        """Before the first token."""
        none = torch.zeros(batch, dtype=torch.long, device=device)
        return cls(0, prompt, none, none, Padding())

    def advance(self, n: int, valid: Bool[Tensor, "batch n"] | None) -> Int[Tensor, "batch n"]:
        """Takes `n` more tokens, all of them real where `valid` is None; gives their positions."""
        self.positions = token_positions(self.lengths, valid, n)
        self.lengths = self.positions[:, -1] + 1
        self.padding.note(valid, n, before=self.logical)
        if (left := self.prompt - self.logical) > 0:
            self.prompts = self.positions[:, min(left, n) - 1] + 1
        self.logical += n
        return self.positions

    def crop(self, removed: int) -> Int[Tensor, " batch"]:
        """Takes back the newest tokens; gives how many of them were real in each request."""
        real = self.padding.take_back(removed, len(self.lengths), self.lengths.device)
        self.lengths = self.lengths - real
        self.prompts = self.prompts.minimum(self.lengths)
        self.logical -= removed
        return real

    def reorder(self, rows: Int[Tensor, " rows"]) -> None:
        """Makes the batch consist of these requests."""
        self.lengths, self.prompts = self.lengths[rows], self.prompts[rows]
        self.padding.reorder(rows)

    def fork(self) -> Progress:
        """An independent copy."""
        twin = copy.copy(self)
        twin.padding = self.padding.copy()
        return twin

    @property
    def valid(self) -> Bool[Tensor, "batch logical"] | None:
        """Which tokens so far are no padding; None when all are."""
        return self.padding.valid(len(self.lengths), self.lengths.device) if self.padding else None
