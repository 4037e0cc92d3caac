"""`Padding`: which tokens of a cache are real."""

from __future__ import annotations

from collections.abc import Sequence

import torch
from jaxtyping import Bool, Int
from torch import Tensor


class Padding:
    """Which tokens so far are no padding, in pieces as they came; false while there has been none.

    Args:
        pieces: of each `[batch, tokens]` of them which are real; a number where all are.
    """

    def __init__(self, pieces: Sequence[Tensor | int] = ()) -> None:
        self._pieces = list(pieces)

    def __bool__(self) -> bool:
        return bool(self._pieces)

    def copy(self) -> Padding:
        """An independent one."""
        return Padding(self._pieces)

    def note(self, valid: Bool[Tensor, "batch n"] | None, n: int, before: int) -> None:
        """Notes `n` more tokens, after so many; all are real where `valid` is None."""
        if valid is None and not self._pieces:
            return
        if not self._pieces and before:
            self._pieces.append(before)
        self._pieces.append(n if valid is None else valid)

    def reorder(self, rows: Int[Tensor, " rows"]) -> None:
        """Makes the batch consist of these rows."""
        self._pieces = [piece[rows] if isinstance(piece, Tensor) else piece for piece in self._pieces]

    def valid(self, batch: int, device: torch.device) -> Bool[Tensor, "batch tokens"]:
        """All of it."""
        whole = torch.ones(batch, 1, dtype=torch.bool, device=device)
        return torch.cat([whole.expand(-1, piece) if isinstance(piece, int) else piece for piece in self._pieces], 1)

    def take_back(self, removed: int, batch: int, device: torch.device) -> Int[Tensor, " batch"]:
        """Forgets the newest tokens; gives how many of them were real in each row."""
        if not self._pieces:
            return torch.full((batch,), removed, device=device)
        real = torch.zeros(batch, dtype=torch.long, device=device)
        while removed:
            newest = self._pieces.pop()
            width = newest if isinstance(newest, int) else newest.shape[1]
            taken = min(width, removed)
            real += taken if isinstance(newest, int) else newest[:, width - taken :].sum(-1)
            if taken < width:
                self._pieces.append(width - taken if isinstance(newest, int) else newest[:, : width - taken])
            removed -= taken
        return real
