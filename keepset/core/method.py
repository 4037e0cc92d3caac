"""`Method` and `Allocator`: they look at an Observation and return a KeepSet."""

from __future__ import annotations

import dataclasses
import functools
import math
from abc import ABC, abstractmethod
from collections.abc import Iterator, Mapping, Sequence
from dataclasses import dataclass
from functools import cached_property
from typing import Any, ClassVar, get_type_hints

import torch
from torch import Tensor

from keepset.core.budget import Budget
from keepset.core.feature import Feature
from keepset.core.keep_set import KeepSet, LayerKeepSet
from keepset.core.observation import Observation
from keepset.core.select import Ranking, ranked_scores
from keepset.core.shapes import Quotas, Scores
from keepset.core.sizes import Sizes
from keepset.core.traits import Traits, combine
from keepset.errors import KeepsetError, RecipeError

_ARTICLES: dict[Any, str] = {
    int: "a whole number",
    int | None: "a whole number",
    float: "a number",
    bool: "True or False",
    str: "a text in quotes",
}


def parameter(
    default: Any,
    *,
    minimum: int | float | None = None,
    maximum: int | float | None = None,
    odd: bool = False,
    choices: Sequence[str | int] = (),
) -> Any:
    """Return a dataclass field for a hyper-parameter of a method, with the paper's value as its default.

    A value that is not allowed raises RecipeError when the method is made.

    Args:
        default: the paper's value.
        minimum, maximum: the range of a number; None for no bound.
        odd: whether an even number is refused.
        choices: the allowed values of a text or number; empty for any.
    """
    allowed = {"minimum": minimum, "maximum": maximum, "odd": odd, "choices": tuple(choices)}
    return dataclasses.field(default=default, metadata=allowed)


@dataclass(frozen=True)
class Method(ABC):
    """A frozen set of hyper-parameters that decides which entries stay.

    The decision has four steps: `score` the entries, set `quotas` over layers and heads, order the entries (`ranked`)
    and `choose`. A method overrides the steps that its paper is about; a scorer only defines the first. A method that
    looks across layers says so in its traits and overrides `select_all`.

    Attributes:
        name: the method's name in recipes.
        family: `"scorer"` or `"allocator"`.
        paper: the paper that it is from, or `"none"`.
        stage: the order of a recipe's steps: 0 chooses what stays; post-processors of higher stages wrap those of
            lower ones.
        advice: what to write instead if the plain defaults do badly, and why; the end of a sentence that begins with
            the method's name.

    Raises:
        RecipeError: if a parameter is out of its range.
    """

    name: ClassVar[str]
    family: ClassVar[str] = "scorer"
    paper: ClassVar[str] = "none"
    stage: ClassVar[int] = 0
    advice: ClassVar[str] = ""

    def __post_init__(self) -> None:
        kinds = _kinds(type(self))
        for field in dataclasses.fields(self):
            self._check(field, kinds[field.name])

    @cached_property
    def traits(self) -> Traits:
        """Return what a runtime has to know about this method; computed once."""
        return Traits()

    def for_bytes(self, share: float | None) -> Method:
        """Return this method with the parameters that the budget's `bytes` (or None) decides."""
        return self

    def without_bytes(self, share: float | None) -> Method:
        """Return this method without the parameters that `for_bytes` would give it."""
        return self

    @property
    def chooses(self) -> bool:
        """Return whether this method overrides how the entries that stay are chosen from a ranking."""
        return type(self).choose not in (Method.choose, Allocator.choose)

    def steps(self) -> Iterator[Method]:
        """Yield this method, the one inside it, the one inside that, and so on."""
        yield self

    @property
    def chooser(self) -> Method:
        """Return the method inside all steps that only change how chosen entries are stored."""
        return self

    def stored(self, observation: Observation, kept: LayerKeepSet) -> LayerKeepSet:
        """Return the same choice with what the steps outside the `chooser` change.

        Args:
            observation: the layer or layers.
            kept: the chooser's choice.
        """
        return kept

    @abstractmethod
    def score(self, observation: Observation) -> Scores:
        """Return how much each entry is worth keeping; higher is better.

        Returns:
            A number for every entry, of any floating-point type. The numbers of holes do not count. NaN is worse than
            every number; a cache that meets it says so once.
        """

    def remember(self, observation: Observation, scores: Scores) -> Mapping[str, Tensor]:
        """Return the numbers that the method remembers anew of each entry after this event; by default none.

        They move with the entries and are `observation.state` at the next event. So do the numbers of
        `observation.state` under other names, unchanged.

        Args:
            observation: the layer, or several layers as rows of one batch.
            scores: what `score` has returned of it.

        Returns:
            Tensors `[batch, kv_heads, entries]` by their names, which the traits list as `state_names`.
        """
        return {}

    def quotas(self, sizes: Sizes, budget: Budget) -> Quotas:
        """Return how many entries each KV head of a layer keeps; if heads differ, their average.

        Args:
            sizes: lengths and numbers of entries of a layer, or of several.
            budget: the recipe's budget, in entries.

        Returns:
            Numbers of entries, `[batch, kv_heads]`.
        """
        return budget.quotas(sizes)

    def ranked(self, observation: Observation, budget: Budget, quotas: Quotas) -> Ranking:
        """Return the layer's entries in order: those that always stay first, holes last.

        Args:
            observation: the layer, or several layers as rows of one batch.
            budget: the recipe's budget, in entries.
            quotas: what `quotas` has returned.

        Raises:
            KeepsetError: scores are no tensor, or of another shape than `[batch, kv_heads, entries]`.
        """
        scores = self.score(observation)
        if not isinstance(scores, Tensor):
            raise KeepsetError(
                f"{self.name} has returned {type(scores).__name__} as scores: its score must be a tensor with a number "
                "for each entry, [batch, kv_heads, entries]."
            )
        if scores.shape != observation.valid.shape:
            raise KeepsetError(
                f"{self.name} has returned scores of the shape {list(scores.shape)}: its score must have a number for "
                f"each entry, [batch, kv_heads, entries], which here is {list(observation.valid.shape)}."
            )
        order = ranked_scores(scores, observation, budget)
        return Ranking(observation, budget, order, scores, quotas, self.remember(observation, scores))

    def choose(self, ranking: Ranking) -> LayerKeepSet:
        """Return what stays of a layer (by default the best entries of every head), and what is remembered of it."""
        return ranking.best()

    def select(self, observation: Observation, budget: Budget) -> KeepSet:
        """Return what stays of one layer, and what the method remembers of it; see `select_all`.

        Args:
            observation: the layer, or several layers as rows of one batch.

        Raises:
            KeepsetError: if the observation lacks something that the method needs.
        """
        return self.select_all([observation], budget)

    def select_all(self, observations: Sequence[Observation], budget: Budget) -> KeepSet:
        """Return what stays of all layers, and what the method remembers of them.

        Args:
            observations: the layers in the model's order, with everything that the method needs. One observation may
                hold several layers (`Observation.layer_ids`); its part of the answer is under the first one's index.

        Raises:
            KeepsetError: if an observation lacks something that the method needs.
        """
        kept = []
        for observation in observations:
            kept.append(self.choose(self.ranked(observation, budget, self.quotas(observation.sizes, budget))))
        return KeepSet(kept)

    def _check(self, field: dataclasses.Field[Any], kind: Any) -> None:
        """Raise RecipeError if a parameter has a value that is not allowed; convert ints of float parameters.

        Args:
            field: the parameter.
            kind: its type.
        """
        value, allowed = getattr(self, field.name), field.metadata
        if kind is float and isinstance(value, int) and not isinstance(value, bool):
            object.__setattr__(self, field.name, value := float(value))
        if not isinstance(value, kind) or (kind is not bool and isinstance(value, bool)):
            raise RecipeError(f"{self.name}: {field.name}={value!r} is not {_ARTICLES.get(kind, 'a method')}.")
        if kind is float and not math.isfinite(value):
            raise RecipeError(f"{self.name}: {field.name}={value!r} is not a finite number.")
        low, high = allowed.get("minimum"), allowed.get("maximum")
        if (low is not None and value < low) or (high is not None and value > high):
            raise RecipeError(f"{self.name}: {field.name}={value!r} is out of range: use {_range(low, high)}.")
        if allowed.get("odd") and value % 2 == 0:
            raise RecipeError(f"{self.name}: {field.name}={value} has no middle: use an odd number.")
        choices = allowed.get("choices")
        if choices and value is not None and value not in choices:
            listed = ", ".join(map(repr, choices))
            raise RecipeError(f"{self.name}: {field.name}={value!r} is none of its choices: use one of {listed}.")


@dataclass(frozen=True)
class Allocator(Method):
    """A method that divides the budget of another one.

    The method inside takes every step that the allocator does not override, so allocators nest. A nesting whose total
    is not exact is refused.

    Attributes:
        scorer: the method inside, whose budget is divided.
        chooses_alone: whether no method inside may choose entries.

    Raises:
        RecipeError: if the method inside does not go with this one.
    """

    family: ClassVar[str] = "allocator"
    chooses_alone: ClassVar[bool] = False

    scorer: Method

    def __post_init__(self) -> None:
        super().__post_init__()
        for inner in self.scorer.steps():
            if inner.stage and inner.name == self.name:
                raise RecipeError(f"{self.name} is there twice: leave one of them out.")
            if inner.stage and inner.stage >= self.stage:
                raise RecipeError(
                    f"{inner.name} changes what stays, so it is a recipe's last step: write {inner.name}(...) around "
                    f"{self.name}(...), or leave one of them out."
                )
        self.check_scorer()

    def check_scorer(self) -> None:
        """Raise RecipeError if the budget of the method inside cannot be divided."""
        inside = self.scorer.traits
        if isinstance(self.scorer, Allocator) and inside.across_layers and not self.own_traits.across_layers:
            outer = self.scorer.name
            raise RecipeError(
                f"{self.name} looks at one layer alone, and {outer} at all of them together: put {self.name} inside, "
                f"as in {outer}({self.name}(snapkv)), or leave one of them out."
            )
        if not isinstance(self.scorer, Allocator) and (inside.across_layers or not inside.equal_layers):
            raise RecipeError(
                f"{self.scorer.name} itself sets how much every head keeps, which {self.name} cannot divide again: "
                "use it alone."
            )
        for inner in self.scorer.steps():
            if objection := self.objection(inner):
                raise RecipeError(objection)

    def objection(self, inner: Method) -> str:
        """Return why this method cannot wrap the one inside, as a sentence; "" if it can."""
        if not (self.chooses_alone and inner.chooses):
            return ""
        return (
            f"{self.name} chooses the entries of every head itself, and so does {inner.name}: put {self.name} inside, "
            f"as in adakv({self.name}(snapkv)), or leave one of them out."
        )

    def steps(self) -> Iterator[Method]:
        yield self
        yield from self.scorer.steps()

    @property
    def own_traits(self) -> Traits:
        """Return what this allocator adds to the traits of the method inside."""
        return Traits()

    @cached_property
    def traits(self) -> Traits:
        """Return the traits of this allocator and of all methods inside it together."""
        return combine(self.own_traits, self.scorer.traits)

    def score(self, observation: Observation) -> Scores:
        return self.scorer.score(observation)

    def quotas(self, sizes: Sizes, budget: Budget) -> Quotas:
        return self.scorer.quotas(sizes, budget)

    def ranked(self, observation: Observation, budget: Budget, quotas: Quotas) -> Ranking:
        return self.scorer.ranked(observation, budget, quotas)

    def choose(self, ranking: Ranking) -> LayerKeepSet:
        return self.scorer.choose(ranking)


@functools.cache
def _kinds(method: type[Method]) -> dict[str, Any]:
    """Return the types of a method's parameters; cached, because resolving them is the slowest part of making one."""
    return get_type_hints(method)


def _range(low: int | float | None, high: int | float | None) -> str:
    if low is not None and high is not None:
        return f"{low} to {high}"
    return f"{low} or more" if low is not None else f"{high} or less"


def forecast_quotas(
    method: Method,
    budget: Budget,
    entries: Sequence[Sequence[int]],
    lengths: Sequence[int],
    prompts: Sequence[int],
    layer_ids: Sequence[int],
    layers: tuple[int, ...],
    features: Mapping[Feature[Any], Any] | None = None,
) -> Quotas:
    """Return how many entries each head will keep, for neighbouring layers that hold equally many.

    Args:
        method: a method whose traits have `fixed_total` or `count_known_on_host`.
        entries: entries that each head of each request holds, `[requests][kv_heads]`. Under `fixed_total`, giving
            every head the average of its request leads to the same total.
        prompts: tokens of each request's prompt.
        layer_ids: indices of the layers.
        layers: indices of all layers that are compressed.
        features: features that were read from files.

    Returns:
        Quotas `[len(layer_ids) * requests, kv_heads]` on the CPU, layer after layer.
    """
    repeats = len(layer_ids)
    entry_counts = torch.tensor(entries, dtype=torch.long).repeat(repeats, 1)
    tokens, prompt_tokens = (torch.tensor(numbers, dtype=torch.long).repeat(repeats) for numbers in (lengths, prompts))
    sizes = Sizes(entry_counts, tokens, prompt_tokens, tuple(layer_ids), layers, features or {})
    return method.quotas(sizes, budget).minimum(entry_counts)
