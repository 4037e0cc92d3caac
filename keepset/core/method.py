"""`Method`: the base of everything that looks at an Observation and answers with a KeepSet."""

from __future__ import annotations

import dataclasses
import functools
import math
from abc import ABC, abstractmethod
from collections.abc import Iterator, Mapping, Sequence
from dataclasses import dataclass
from typing import Any, ClassVar, get_type_hints

from torch import Tensor

from keepset.core.budget import Budget
from keepset.core.feature import Needs
from keepset.core.features.runtime_features import EntryBiases
from keepset.core.keep_set import KeepSet, LayerKeepSet, Layout
from keepset.core.observation import Observation
from keepset.core.select import Ranking, ranked_scores
from keepset.core.shapes import Quotas, Scores
from keepset.errors import RecipeError


def parameter(
    default: Any,
    *,
    minimum: int | float | None = None,
    maximum: int | float | None = None,
    odd: bool = False,
    choices: Sequence[str] = (),
) -> Any:
    """A hyper-parameter of a method: a dataclass field that says what it may be.

    Args:
        default: the paper's.
        minimum, maximum: of numbers, both included.
        odd: whether a whole number must have a middle.
        choices: of texts.

    Returns:
        The field. A value that is out of range raises RecipeError when the method is made.
    """
    allowed = {"minimum": minimum, "maximum": maximum, "odd": odd, "choices": tuple(choices)}
    return dataclasses.field(default=default, metadata=allowed)


@dataclass(frozen=True)
class Method(ABC):
    """A frozen set of hyper-parameters and the decision that follows from them.

    The decision has four steps, and a method overrides those that its paper is about: `score` the entries,
    set `quotas` over layers and heads, order the entries (`ranked`), and `choose`. A scorer defines only the
    first. A method that looks across layers sets `across_layers` and overrides `select_all`.

    Attributes:
        name: in recipes.
        family: `"scorer"` or `"allocator"`.
        layout: where counts of kept entries may differ.
        paper: where it is from, if there is one.
        across_layers: whether it chooses for all layers together, once the last one has been observed.
        needs_budget: whether a recipe must say how much to keep.
        counts_from_data: whether how many entries a layer keeps depends on more than lengths and budget.
        stage: of a recipe; 0 chooses what stays, and what changes that comes around it in the order of its stages.
        advice: a variant to write where its bare defaults do badly, and why, as the end of a sentence about it.

    Raises:
        RecipeError: when it is made, of a parameter that is out of its range.
    """

    name: ClassVar[str]
    family: ClassVar[str] = "scorer"
    layout: ClassVar[Layout] = Layout.DENSE
    paper: ClassVar[str] = "none"
    across_layers: ClassVar[bool] = False
    needs_budget: ClassVar[bool] = True
    counts_from_data: ClassVar[bool] = False
    stage: ClassVar[int] = 0
    advice: ClassVar[str] = ""

    def __post_init__(self) -> None:
        kinds = _kinds(type(self))
        for field in dataclasses.fields(self):
            self._check(field, kinds[field.name])

    @property
    def needs(self) -> Needs:
        """What the runtime has to collect for this method."""
        return Needs()

    @property
    def equal_heads(self) -> bool:
        """Whether all KV heads of a layer keep the same number of entries."""
        return self.layout != Layout.HEAD_RAGGED

    @property
    def equal_layers(self) -> bool:
        """Whether all layers keep the same number of entries."""
        return self.layout != Layout.LAYER_RAGGED

    @property
    def biased(self) -> bool:
        """Whether attention adds to the logits of entries what the method says (`observation.bias`)."""
        return bool(self.needs.of(EntryBiases))

    @property
    def fixed_total(self) -> bool:
        """Whether lengths and budget alone say how many entries a layer keeps.

        A paged runtime then frees pages without asking what was kept. Where it is so, `quotas` must not look
        at keys, values or queries, and the kept entries of a layer must be their sum.
        """
        return not self.counts_from_data

    @property
    def count_known_on_host(self) -> bool:
        """Whether it looks at one layer, and lengths, budget and files say how many entries that keeps, by `quotas`.

        A runtime that has the files need not wait for a device to say so.
        """
        return self.fixed_total and not self.across_layers

    @property
    def memory_factor(self) -> int:
        """How many numbers, about, it makes of each entry at a time: a paged runtime shows it so many fewer at once."""
        return 1

    @property
    def prefill_only(self) -> bool:
        """Whether it does nothing at events after the prompt."""
        return False

    @property
    def chooses(self) -> bool:
        """Whether it has its own way from a ranking to what stays."""
        return type(self).choose not in (Method.choose, Allocator.choose)

    @property
    def state_names(self) -> tuple[str, ...]:
        """Names of the numbers per entry that it answers with (`remember`): paged runtimes make room for no others."""
        return ()

    @property
    def sinks(self) -> int:
        """First tokens that the method always keeps, unless its recipe says otherwise."""
        return 0

    @property
    def recent(self) -> int:
        """Newest tokens that the method always keeps, unless its recipe says otherwise."""
        return 0

    @abstractmethod
    def score(self, observation: Observation) -> Scores:
        """How much each entry is worth keeping; higher is better.

        Args:
            observation: one layer, of all requests of a batch.

        Returns:
            A number for every entry, of any floating-point type; what it says of holes does not count. NaN is worse
            than every number.
        """

    def remember(self, observation: Observation, scores: Scores) -> Mapping[str, Tensor]:
        """The method's own numbers per entry after this event, `[batch, kv_heads, entries]`, by names of its choice.

        They move with the entries, and at the next event they are `observation.state`. By default what there was.

        Args:
            observation: as `score` was given it.
            scores: what `score` has answered.
        """
        return observation.state

    def quotas(self, observation: Observation, budget: Budget) -> Quotas:
        """How many entries the average head of this layer keeps.

        Where `fixed_total` holds, it looks at lengths, positions and layers alone: a paged runtime's scheduler asks it
        without keys.

        Args:
            observation: one layer, of all requests of a batch.
            budget: the recipe's.

        Returns:
            A number for every request and KV head.
        """
        return budget.quotas(observation)

    def ranked(self, observation: Observation, budget: Budget, quotas: Quotas) -> Ranking:
        """The layer's entries in order: what always stays above the rest, and holes below everything.

        Args:
            observation: one layer, of all requests of a batch.
            budget: the recipe's.
            quotas: what `quotas` has answered.

        Returns:
            What `choose` is given.
        """
        scores = self.score(observation)
        order = ranked_scores(scores, observation, budget)
        return Ranking(observation, budget, order, scores, quotas, self.remember(observation, scores))

    def choose(self, ranking: Ranking) -> LayerKeepSet:
        """From ranking and quotas to what stays: the best entries of every head.

        Args:
            ranking: what `ranked` has answered.

        Returns:
            What stays of the layer, and what the method remembers of its entries.
        """
        return ranking.best()

    def select(self, observation: Observation, budget: Budget) -> KeepSet:
        """What stays of one layer, and what the method remembers of it.

        Args:
            observation: the layer, with all that the method `needs`.
            budget: the recipe's.

        Returns:
            A KeepSet of this layer.

        Raises:
            KeepsetError: the observation lacks something that the method needs.
        """
        return KeepSet([self.choose(self.ranked(observation, budget, self.quotas(observation, budget)))])

    def select_all(self, observations: Sequence[Observation], budget: Budget) -> KeepSet:
        """What stays of all layers.

        Args:
            observations: in the model's order, with all that the method `needs`. One may be of several layers
                (`Observation.layer_ids`), and so is its part of the answer, under the first one's index.
            budget: the recipe's.

        Raises:
            KeepsetError: an observation lacks something that the method needs.
        """
        return KeepSet(
            [self.select(observation, budget).layer(observation.layer_ids[0]) for observation in observations]
        )

    def _check(self, field: dataclasses.Field[Any], kind: Any) -> None:
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
        if choices and value not in choices:
            known = ", ".join(map(repr, choices))
            raise RecipeError(f"{self.name}: {field.name}={value!r} is none of its choices: use one of {known}.")


@dataclass(frozen=True)
class Allocator(Method):
    """A method that divides a budget for another one.

    It passes on every step that it does not override, so allocators nest. A nesting without an exact total is refused.

    Attributes:
        scorer: the method that it divides for.
        chooses_alone: whether no method inside may choose entries.

    Raises:
        RecipeError: when it is made of a method that it does not go with.
    """

    family: ClassVar[str] = "allocator"
    chooses_alone: ClassVar[bool] = False

    scorer: Method

    def __post_init__(self) -> None:
        super().__post_init__()
        for inner in self.inner():
            if inner.stage and inner.stage >= self.stage:
                raise RecipeError(
                    f"{inner.name} changes what stays, so it is a recipe's last step: write {inner.name}(...) around "
                    f"{self.name}(...), or leave one of them out."
                )
        self.check_scorer()

    def check_scorer(self) -> None:
        """Raises RecipeError of a method inside whose budget cannot be divided."""
        if isinstance(self.scorer, Allocator) and self.scorer.across_layers and not self.across_layers:
            outer = self.scorer.name
            raise RecipeError(
                f"{self.name} looks at one layer alone, and {outer} at all of them together: put {self.name} inside, "
                f"as in {outer}({self.name}(snapkv)), or leave one of them out."
            )
        if not isinstance(self.scorer, Allocator) and (self.scorer.across_layers or not self.scorer.equal_layers):
            raise RecipeError(
                f"{self.scorer.name} says itself how much every head keeps, which {self.name} cannot divide again: "
                "use it alone."
            )
        for inner in self.inner():
            if objection := self.objection(inner):
                raise RecipeError(objection)

    def objection(self, inner: Method) -> str:
        """Why this does not go with a method inside it, as a sentence; "" where it does."""
        if not (self.chooses_alone and inner.chooses):
            return ""
        return (
            f"{self.name} chooses the entries of every head itself, and so does {inner.name}: put {self.name} inside, "
            f"as in adakv({self.name}(snapkv)), or leave one of them out."
        )

    def inner(self) -> Iterator[Method]:
        """The method that it divides a budget for, the one inside that, and so on."""
        yield self.scorer
        if isinstance(self.scorer, Allocator):
            yield from self.scorer.inner()

    @property
    def needs(self) -> Needs:
        return self.scorer.needs

    @property
    def equal_heads(self) -> bool:
        return super().equal_heads and self.scorer.equal_heads

    @property
    def equal_layers(self) -> bool:
        return super().equal_layers and self.scorer.equal_layers

    @property
    def fixed_total(self) -> bool:
        return super().fixed_total and self.scorer.fixed_total

    @property
    def count_known_on_host(self) -> bool:
        return super().count_known_on_host and self.scorer.count_known_on_host

    @property
    def memory_factor(self) -> int:
        return self.scorer.memory_factor

    @property
    def state_names(self) -> tuple[str, ...]:
        return self.scorer.state_names

    @property
    def sinks(self) -> int:
        return self.scorer.sinks

    @property
    def recent(self) -> int:
        return self.scorer.recent

    def score(self, observation: Observation) -> Scores:
        return self.scorer.score(observation)

    def quotas(self, observation: Observation, budget: Budget) -> Quotas:
        return self.scorer.quotas(observation, budget)

    def ranked(self, observation: Observation, budget: Budget, quotas: Quotas) -> Ranking:
        return self.scorer.ranked(observation, budget, quotas)

    def choose(self, ranking: Ranking) -> LayerKeepSet:
        return self.scorer.choose(ranking)


@functools.cache
def _kinds(method: type[Method]) -> dict[str, Any]:
    """The types of a method's parameters; to resolve them takes longer than all else that constructing one does."""
    return get_type_hints(method)


_ARTICLES: dict[Any, str] = {int: "a whole number", float: "a number", bool: "True or False", str: "a text in quotes"}


def _range(low: int | float | None, high: int | float | None) -> str:
    if low is not None and high is not None:
        return f"{low} to {high}"
    return f"{low} or more" if low is not None else f"{high} or less"
