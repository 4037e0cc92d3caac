"""`Recipe`: method, budget and schedule, and the one text form that they have everywhere."""

from __future__ import annotations

import ast
import dataclasses
import difflib
import math
from collections.abc import Iterable
from dataclasses import dataclass, field, replace
from typing import Any

from keepset.core.budget import KEEP_HELP, Budget
from keepset.core.keep_set import KeepSet
from keepset.core.method import Allocator, Method
from keepset.core.observation import Observation
from keepset.core.schedule import Schedule
from keepset.errors import BudgetError, RecipeError
from keepset.registry import METHODS, find

_BUDGET = tuple(f.name for f in dataclasses.fields(Budget))
_SCHEDULE = tuple(f.name for f in dataclasses.fields(Schedule))


@dataclass(frozen=True)
class Recipe:
    """What to keep, how much of it, and when.

    The text form is a call expression, `adakv(snapkv(window=32), keep=512)`: the method with its
    parameters, then those of the budget (`keep`, `sinks`, `recent`, `protect_prompt`) and of the schedule (`prefill`,
    `every`). It is parsed, never evaluated, and `Recipe.parse(str(recipe)) == recipe`.

    Attributes:
        method: what to keep.
        budget: how much of it.
        schedule: when.

    Raises:
        BudgetError: when it is made of a budget and a schedule that do not go together.
    """

    method: Method
    budget: Budget = field(default_factory=Budget)
    schedule: Schedule = field(default_factory=Schedule)

    def __post_init__(self) -> None:
        if self.schedule.every is not None and isinstance(self.budget.keep, float):
            raise BudgetError(
                f"keep={self.budget.keep!r} does not go with every={self.schedule.every}, because a fraction of what "
                "is left would shrink at every event: use a whole number of entries such as 512."
            )
        if self.budget.protect_prompt:
            if self.schedule.every is None:
                raise BudgetError(
                    "protect_prompt=True keeps the whole prompt, so that only what follows it can be dropped: add "
                    "every=256, or another number of tokens, or leave it out."
                )
            # At the prompt's end there is nothing to drop yet.
            object.__setattr__(self, "schedule", replace(self.schedule, prefill=False))

    @classmethod
    def of(
        cls,
        method: Method,
        *,
        keep: int | float | None = None,
        sinks: int | None = None,
        recent: int | None = None,
        protect_prompt: bool = False,
        prefill: bool = True,
        every: int | None = None,
    ) -> Recipe:
        """A recipe with the method's own sinks and recent suffix where none are given.

        Args:
            method: with its parameters.
            keep, sinks, recent, protect_prompt: of the budget; see `Budget`.
            prefill, every: of the schedule; see `Schedule`.

        Raises:
            BudgetError: these do not go together.
        """
        budget = Budget(
            keep,
            method.sinks if sinks is None else sinks,
            method.recent if recent is None else recent,
            protect_prompt,
        )
        return cls(method, budget, Schedule(prefill, every))

    @classmethod
    def parse(cls, text: str) -> Recipe:
        """The recipe that a text describes.

        Args:
            text: a call expression, such as `adakv(snapkv(window=32), keep=512)`; methods may have former names.

        Raises:
            RecipeError: the text is no call expression, or a name or value in it is unknown or out of
                range; the message names the nearest one.
            BudgetError: budget or schedule cannot be.
        """
        text = text.strip()
        try:
            node = ast.parse(text, mode="eval").body
        except (SyntaxError, ValueError, RecursionError, MemoryError):
            raise RecipeError(f"{_quote(text)} is not a recipe: {_EXAMPLE}.") from None
        outer = {} if isinstance(node, ast.Name) else _keywords(node, text)
        method = _method(node, text, skip=(*_BUDGET, *_SCHEDULE))
        options = {name: _literal(outer[name], name, text) for name in (*_BUDGET, *_SCHEDULE) if name in outer}
        for name, value in options.items():
            if value is None:
                raise RecipeError(f"{name}=None says nothing: leave {name} out.")
        return cls.of(method, **options)

    @classmethod
    def parse_list(cls, text: str) -> list[Recipe]:
        """Recipes separated by commas.

        Args:
            text: such as `"snapkv, adakv(snapkv)"`.

        Raises:
            RecipeError: as `parse` does, or when there is none.
        """
        try:
            node = ast.parse(f"[{text.strip()}]", mode="eval").body
        except (SyntaxError, ValueError, RecursionError, MemoryError):
            node = None
        if not isinstance(node, ast.List) or not node.elts:
            raise RecipeError(f"{_quote(text)} is no list of recipes: {_EXAMPLE}, separated by commas.")
        return [cls.parse(ast.unparse(element)) for element in node.elts]

    def __str__(self) -> str:
        return self.text(self.budget.keep)

    def text(self, keep: int | float | None) -> str:
        """The recipe's text with another budget, whether that suits the recipe or not.

        Args:
            keep: see `Budget`; None to leave it out.
        """
        parts = _parameters(self.method)
        if keep is not None:
            parts.append(f"keep={keep!r}")
        for name, default in (("sinks", self.method.sinks), ("recent", self.method.recent)):
            if (value := getattr(self.budget, name)) != default:
                parts.append(f"{name}={value!r}")
        if self.budget.protect_prompt:
            parts.append("protect_prompt=True")
        for option in dataclasses.fields(self.schedule):
            implied = self.budget.protect_prompt and option.name == "prefill"
            if (value := getattr(self.schedule, option.name)) != option.default and not implied:
                parts.append(f"{option.name}={value!r}")
        return f"{self.method.name}({', '.join(parts)})" if parts else self.method.name

    def with_keep(self, keep: int | float) -> Recipe:
        """The same recipe with another budget.

        Args:
            keep: see `Budget`.

        Raises:
            BudgetError: it does not suit the recipe.
        """
        return replace(self, budget=replace(self.budget, keep=keep))

    def without_budget(self) -> Recipe:
        """The same recipe without its `keep`: what rows with different budgets have in common."""
        return replace(self, budget=replace(self.budget, keep=None))

    def select(self, observation: Observation) -> KeepSet:
        """What stays of one layer.

        Args:
            observation: the layer, with all that the method needs.

        Returns:
            A KeepSet of this layer.

        Raises:
            BudgetError: the method needs a budget and the recipe has none.
            KeepsetError: the observation lacks something that the method needs.
        """
        return self.require_budget().method.select(observation, self.budget)

    def require_budget(self) -> Recipe:
        """This recipe.

        Raises:
            BudgetError: its method needs a budget and it has none.
        """
        if self.method.needs_budget and self.budget.keep is None:
            if self.schedule.every is not None:
                example = self.text(max(512, self.budget.sinks + self.budget.recent))
                raise BudgetError(f"{self} says not how much to keep: write {example}.")
            raise BudgetError(f"{self} says not how much to keep: write {self.with_keep(0.25)}; for keep, {KEEP_HELP}.")
        return self


def check_schedule(recipe: Recipe) -> None:
    """Refuses to compress while decoding by a method that looks at what is gone by then.

    Raises:
        RecipeError: says what it looks at.
    """
    if recipe.schedule.every is None:
        return
    for feature in recipe.method.needs:
        if feature.prompt_only:
            raise RecipeError(f"{recipe} {feature.prompt_only}: leave every= out.")


_EXAMPLE = "write a method with its parameters, such as snapkv(keep=0.25) or adakv(snapkv, keep=512)"


def _method(node: ast.expr, text: str, skip: Iterable[str] = ()) -> Method:
    name, arguments, keywords = _call(node, text)
    kind = find(name)
    if kind is None:
        raise RecipeError(f"There is no method {name!r}{_nearest(name, METHODS)}")
    parameters = [f.name for f in dataclasses.fields(kind)]
    values: dict[str, Any] = {}
    for keyword, value in keywords.items():
        if keyword in parameters:
            values[keyword] = _value(value, keyword, text)
        elif keyword not in skip:
            known = [p for p in parameters if p != "scorer"] + list(skip)
            where = "" if skip or keyword not in (*_BUDGET, *_SCHEDULE) else " inside another method"
            raise RecipeError(f"{name} has no parameter {keyword!r}{where}{_nearest(keyword, known)}")
    if len(arguments) > 1 or (arguments and not issubclass(kind, Allocator)):
        takes = (
            "takes one method, then named parameters" if issubclass(kind, Allocator) else "takes only named parameters"
        )
        raise RecipeError(f"{name} {takes}: {_EXAMPLE}.")
    if arguments and "scorer" in values:
        raise RecipeError(f"{name} divides the budget of one method: give it once.")
    if arguments:
        values["scorer"] = _method(arguments[0], text)
    if issubclass(kind, Allocator) and "scorer" not in values:
        raise RecipeError(f"{name} divides the budget of another method: write for example {name}(snapkv, keep=0.25).")
    return kind(**values)


def _call(node: ast.expr, text: str) -> tuple[str, list[ast.expr], dict[str, ast.expr]]:
    if isinstance(node, ast.Name):
        return node.id, [], {}
    if isinstance(node, ast.Call) and isinstance(node.func, ast.Name):
        return node.func.id, node.args, _keywords(node, text)
    raise RecipeError(f"{_quote(text)} is not a recipe: {_EXAMPLE}.")


def _keywords(node: ast.expr, text: str) -> dict[str, ast.expr]:
    if not isinstance(node, ast.Call):
        raise RecipeError(f"{_quote(text)} is not a recipe: {_EXAMPLE}.")
    keywords: dict[str, ast.expr] = {}
    for keyword in node.keywords:
        if keyword.arg is None:
            raise RecipeError(f"{_quote(text)} is not a recipe: {_EXAMPLE}.")
        if keyword.arg in keywords:
            raise RecipeError(f"{keyword.arg} is given twice: write it once.")
        keywords[keyword.arg] = keyword.value
    return keywords


def _value(node: ast.expr, name: str, text: str) -> Any:
    return _method(node, text) if name == "scorer" else _literal(node, name, text)


def _literal(node: ast.expr, name: str, text: str) -> Any:
    """A number, truth value or text written out; anything else is refused."""
    # Cut from the text: unparsing recurses, and Python refuses to print integers of thousands of digits.
    source = _shorten(" ".join((ast.get_source_segment(text, node) or "").split()))
    sign = 1
    if isinstance(node, ast.UnaryOp) and isinstance(node.op, ast.USub):
        node, sign = node.operand, -1
    value = node.value if isinstance(node, ast.Constant) else ...
    if isinstance(value, int | float) and not isinstance(value, bool):
        if (isinstance(value, int) and value.bit_length() > 63) or not math.isfinite(value):
            raise RecipeError(f"{name}={source} is too large a number.")
        return sign * value
    if sign == 1 and (value is None or isinstance(value, bool | str)):
        return value
    raise RecipeError(f"{name}={source} is not a plain value: write a number, True, False or a text in quotes.")


def _parameters(method: Method) -> list[str]:
    parts = []
    for option in dataclasses.fields(method):
        value = getattr(method, option.name)
        if isinstance(value, Method):
            inner = _parameters(value)
            parts.append(f"{value.name}({', '.join(inner)})" if inner else value.name)
        elif value != option.default:
            parts.append(f"{option.name}={value!r}")
    return parts


def _nearest(name: str, known: Iterable[str]) -> str:
    known = sorted(known)
    close = difflib.get_close_matches(name, known, n=1, cutoff=0.5)
    hint = f"; did you mean {close[0]!r}? " if close else ". "
    return f"{hint}There are: {', '.join(known)}."


def _quote(text: str) -> str:
    return repr(_shorten(text))


def _shorten(text: str) -> str:
    return text if len(text) <= 80 else text[:77] + "..."
