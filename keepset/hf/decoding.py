"""`Decoding`: what one layer needs to know between two events of compression while decoding."""

from __future__ import annotations

import copy
from typing import Any

from jaxtyping import Int
from torch import Tensor

from keepset.core.accumulate import Accumulators, Chunk
from keepset.core.feature import Feature, Needs
from keepset.hf.attention_hooks import LayerInput
from keepset.hf.forward import Forward
from keepset.hf.window import QueryWindow


class Decoding:
    """The next event point, and the queries that a method will look at there.

    Event points are `prompt + k * every` in logical length. Queries are recorded only where the next event
    reaches them, so that a token far from it costs nothing. Batches with padding are recorded all the time:
    there the newest queries of a request may lie further back than they are many. Only what was not recorded
    before a batch's very first padding cannot be looked at any more.

    Attributes:
        next: the next event point; every token so far lies before it.
        window: what is recorded.
    """

    def __init__(self, needs: Needs, every: int, prompt: int) -> None:
        self._needs, self._every = needs, every
        self._size = max(needs.window, needs.buffer)
        self.next = prompt + every
        self.window = QueryWindow()

    def concerns(self, length: int, padded: bool) -> bool:
        """Whether the next event lies at or before this length, or looks at tokens before it."""
        return length > self.next - max(self._size, 1) or (padded and self._size > 0)

    def due(self, length: int) -> int | None:
        """The newest event point that is reached with this length; older ones are passed over."""
        return length - (length - self.next) % self._every if length >= self.next else None

    def record(self, forward: Forward, before: int, padded: bool) -> None:
        """Records those of a forward's queries that the next event looks at; `before` is the length before it."""
        first = 0 if padded else max(self.next - self._size - before, 0)
        if self._size and first < forward.length:
            new = forward.tokens(slice(first, None))
            self.window.add(new.query, new.positions, new.valid, self._size, new.rotation)

    def passed(self, point: int, padded: bool) -> None:
        """Moves on to the event after this one, and forgets what that one will not look at."""
        self.next = point + self._every
        self.window.keep(self._size if padded else self._size - self._every)

    def fork(self) -> Decoding:
        """An independent copy."""
        twin = copy.copy(self)
        twin.window = self.window.fork()
        return twin

    def parts(self, lengths: Int[Tensor, " batch"], scaling: float, layer_input: LayerInput | None) -> dict[str, Any]:
        """What the method looks at, as an Observation's keyword arguments; the layer's input is the newest."""
        features: dict[Feature[Any], Any] = {}
        buffer = self.window.newest(self._needs.buffer) if layer_input is not None else None
        if buffer is not None and layer_input is not None:
            newest = Accumulators(feature for feature in self._needs if feature.buffer)
            source = layer_input.rotated_by(buffer.rotation)
            newest.add(Chunk(buffer.queries, list, buffer.positions, None, scaling, source=source))
            features = newest.values(lengths)
        return {**self.window.parts(self._needs.window), "features": features}
