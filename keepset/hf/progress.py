"""`Progress`: how far a cache has come, which is the same in all of its layers between two forwards."""

from __future__ import annotations

from dataclasses import dataclass, replace

import torch
from jaxtyping import Bool, Int
from torch import Tensor


@dataclass(frozen=True, eq=False)
class Progress:
    """Lengths of a cache.

    Attributes:
        logical, prompt: tokens of the cache and of its prompt, padding included.
        compressed_at: the newest event's length, if there was one.
        next_event: the next one's, where a recipe compresses while decoding.
        lengths, prompts: tokens of each request and of its prompt, padding left out.
        seen: which tokens are no padding; None where there is none.
    """

    logical: int
    prompt: int
    compressed_at: int | None
    next_event: int | None
    lengths: Int[Tensor, " batch"]
    prompts: Int[Tensor, " batch"]
    seen: Bool[Tensor, "batch logical"] | None

    def to(self, device: torch.device) -> Progress:
        """The same on another device."""
        seen = None if self.seen is None else self.seen.to(device)
        return replace(self, lengths=self.lengths.to(device), prompts=self.prompts.to(device), seen=seen)
