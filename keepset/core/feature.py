"""`Feature`: one thing that a method can look at besides entries. `Needs`: those that it does look at."""

from __future__ import annotations

from abc import ABC
from collections.abc import Hashable, Iterator
from typing import TYPE_CHECKING, Any, ClassVar, Generic, Self, TypeVar

from keepset.core.accumulator import Accumulator
from keepset.errors import KeepsetError

if TYPE_CHECKING:
    from keepset.core.observation import Observation

Value = TypeVar("Value")
AnyFeature = TypeVar("AnyFeature", bound="Feature[Any]")


class Feature(ABC, Generic[Value]):
    """One thing that a method can look at; `observation[feature]` is its value.

    A subclass is a frozen dataclass in `keepset/core/features`, and all that a runtime has to know of it: equal ones
    are the same thing, and collected once for all methods that look at it. What is collected while a prompt runs has an
    `accumulator`, which every runtime drives; the rest a runtime gives by other means (`given.py`).

    Attributes:
        window: how many of the newest queries are recorded for it, for every event; for the prompt's end alone where
            it is `summed`.
        buffer: the same for events after the prompt only.
        summed: whether after the prompt it is added up while the queries of its window pass, entry by entry.
        unrotated: whether it takes queries before rotation, or rotates queries ahead.
        hidden_states: whether it takes the hidden states that enter the layer's attention.
        log_sum_exp: whether that of the prompt's attention saves it work.
        transformers_only: why no paged runtime gives it, as the end of a sentence about a method; `{engine}` stands
            for the engine's name.
        accumulator: what collects features of this kind over a prompt; None where a runtime gives them by other means.
    """

    label: ClassVar[str]
    window: int = 0
    buffer: int = 0
    summed: ClassVar[bool] = False
    unrotated: ClassVar[bool] = False
    hidden_states: ClassVar[bool] = False
    log_sum_exp: ClassVar[bool] = False
    transformers_only: ClassVar[str] = ""
    accumulator: ClassVar[type[Accumulator] | None] = None

    @property
    def name(self) -> str:
        """In words, for the catalogue of methods."""
        return self.label

    @property
    def prompt_only(self) -> str:
        """Why it does not exist at events after the prompt, as the end of a sentence about a recipe; "" if it does."""
        return ""

    @property
    def key(self) -> Hashable:
        """Features of one key are merged into one."""
        return self

    @property
    def cost(self) -> Hashable:
        """What the time of collecting it is filed under; features that are collected together share it."""
        return type(self)

    def merged(self, other: Self) -> Self:
        """What serves both this one and another of the same key."""
        return self

    def of(self, observation: Observation) -> Value:
        """What it is by what else there is in an observation where nothing was collected.

        Raises:
            KeepsetError: it cannot be told.
        """
        raise KeepsetError(f"This method looks at {self.name}: give Observation(features={{{self!r}: ...}}).")


class Needs:
    """What a method declares that it looks at, beyond keys, values and positions; `a | b` is what serves both.

    Args:
        features: in the order in which the catalogue names them. A runtime collects exactly these.
    """

    def __init__(self, *features: Feature[Any]) -> None:
        merged: dict[Hashable, Feature[Any]] = {}
        for feature in features:
            known = merged.get(feature.key)
            merged[feature.key] = feature if known is None else known.merged(feature)
        self._features = tuple(merged.values())

    def __iter__(self) -> Iterator[Feature[Any]]:
        return iter(self._features)

    def __len__(self) -> int:
        return len(self._features)

    def __or__(self, other: Needs) -> Needs:
        return Needs(*self, *other)

    def __eq__(self, other: object) -> bool:
        return isinstance(other, Needs) and set(self) == set(other)

    def __hash__(self) -> int:
        return hash(frozenset(self))

    def __repr__(self) -> str:
        return f"Needs({', '.join(map(repr, self))})"

    def of(self, kind: type[AnyFeature]) -> list[AnyFeature]:
        """The features of one class."""
        return [feature for feature in self if isinstance(feature, kind)]

    def names(self) -> list[str]:
        """In words, for the catalogue of methods."""
        return [feature.name for feature in self]

    @property
    def window(self) -> int:
        """How many of the newest queries are looked at at the prompt's end."""
        return max((feature.window for feature in self), default=0)

    @property
    def newest(self) -> int:
        """How many of the newest queries are themselves looked at at an event after the prompt."""
        return max((feature.window for feature in self if not feature.summed), default=0)

    @property
    def buffer(self) -> int:
        """How many of the newest queries something is made of at an event after the prompt."""
        return max((feature.buffer for feature in self), default=0)

    @property
    def unrotated(self) -> bool:
        """Whether a runtime must know how queries are rotated."""
        return any(feature.unrotated for feature in self)

    @property
    def hidden_states(self) -> bool:
        """Whether a runtime must see the layer's input, not only its queries, keys and values."""
        return any(feature.hidden_states for feature in self)

    @property
    def log_sum_exp(self) -> bool:
        """Whether the log-sum-exp of the prompt's attention is worth having."""
        return any(feature.log_sum_exp for feature in self)
