"""`PromptAccumulators`: what a method needs of a prompt that runs under transformers."""

from __future__ import annotations

from typing import Any, Self

from jaxtyping import Int
from torch import Tensor

from keepset.core.accumulate import Accumulators, Chunk
from keepset.core.feature import Needs
from keepset.core.features.recent_queries import RecentQueries
from keepset.hf.window import QueryWindow


class PromptAccumulators(Accumulators):
    """The newest queries of a layer, and all that has an accumulator."""

    def __init__(self, needs: Needs) -> None:
        super().__init__(needs)
        self._size, self._window = needs.window, QueryWindow()

    def add(self, chunk: Chunk) -> None:
        """Takes one chunk in."""
        if self._size:
            with self.timed(RecentQueries):
                self._window.add(chunk.queries, chunk.positions, chunk.valid, self._size)
                self._window.keep(self._size)
        super().add(chunk)

    def fork(self) -> Self:
        """An independent copy."""
        twin = super().fork()
        twin._window = self._window.fork()
        return twin

    def parts(self, lengths: Int[Tensor, " batch"]) -> dict[str, Any]:
        """The collected part of an Observation, as its keyword arguments."""
        return {**self._window.parts(self._size), "features": self.values(lengths)}
