"""`Looking`: a method that asks for anything and remembers what it was shown."""

from __future__ import annotations

from collections.abc import Iterator
from contextlib import contextmanager
from dataclasses import dataclass, field
from functools import cached_property
from typing import Any, ClassVar

from jaxtyping import Float
from torch import Tensor

import keepset
from keepset.core.feature import Feature, Needs
from keepset.core.method import Method
from keepset.core.observation import Observation
from keepset.core.traits import Traits


@dataclass(frozen=True)
class Looking(Method):
    """Keeps the newest entries, and remembers what every layer showed."""

    name: ClassVar[str] = "looking"
    paper: ClassVar[str] = "none"
    shown: ClassVar[dict[int, Observation]] = {}

    looks_at: Needs = field(default=Needs())

    @cached_property
    def traits(self) -> Traits:
        return Traits(needs=self.looks_at)

    def score(self, observation: Observation) -> Float[Tensor, "batch kv_heads entries"]:
        self.shown[observation.layer] = observation
        return observation.positions.float()


def looking(*features: Feature[Any], keep: int | float = 4, **options: Any) -> keepset.Recipe:
    """Return a recipe whose method looks at these features."""
    return keepset.Recipe.of(Looking(Needs(*features)), keep=keep, **options)


@contextmanager
def shown() -> Iterator[dict[int, Observation]]:
    """Collect what every layer shows to `Looking` inside, by the layer's index."""
    Looking.shown.clear()
    found: dict[int, Observation] = {}
    yield found
    found.update(Looking.shown)
