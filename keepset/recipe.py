"""`Recipe`: a method, a budget and a `Schedule`, and their one text form."""

from __future__ import annotations

import ast
import dataclasses
import difflib
import math
from collections.abc import Iterable, Mapping, Sequence
from contextlib import suppress
from dataclasses import dataclass, field, replace
from functools import cache
from typing import Any

from keepset.core.budget import Budget, Ranges
from keepset.core.keep_set import KeepSet
from keepset.core.method import Allocator, Method
from keepset.core.observation import Observation
from keepset.core.traits import FULL_BYTES
from keepset.errors import BudgetError, RecipeError
from keepset.registry import METHODS, depends_on_methods, find, parameters_of


@dataclass(frozen=True)
class Schedule:
    """When compression happens.

    Attributes:
        prefill: whether to compress at the prompt's end; a prefill in chunks counts as one.
        every: number of decoded tokens between events after the prompt; None for no such events.
        turns: whether conversations are compressed: what was said before a turn, when the next turn begins. Then
            nothing happens at a prompt's end, and a share is one of all tokens that were said.

    Raises:
        BudgetError: if nothing would ever be compressed, or `every` is not a number of tokens.
    """

    prefill: bool = True
    every: int | None = None
    turns: bool = False

    def __post_init__(self) -> None:
        for name in ("prefill", "turns"):
            if not isinstance(getattr(self, name), bool):
                raise BudgetError(f"{name}={getattr(self, name)!r} is neither True nor False.")
        if self.turns:
            object.__setattr__(self, "prefill", False)
        if self.every is not None and (
            not isinstance(self.every, int) or isinstance(self.every, bool) or self.every < 1
        ):
            raise BudgetError(f"every={self.every!r} is not a number of tokens: use an integer from 1.")
        if not self.prefill and self.every is None and not self.turns:
            raise BudgetError("prefill=False needs every=... or turns=True, or nothing is ever compressed.")


@dataclass(frozen=True)
class Recipe:
    """A method, a budget and a schedule: which entries to keep, how many, and when.

    The text form is a call expression, `adakv(snapkv(window=32), keep=512)`: the method with its parameters, then the
    options of the budget (`keep` or `bytes`, `sinks`, `recent`, `recent_extra`, `protect_prompt`, `protect`, `short`)
    and of the schedule (`prefill`, `every`, `turns`). It is parsed, never evaluated, and
    `Recipe.parse(str(recipe)) == recipe`.

    Attributes:
        written: the method that decides what to keep, as it was written.
        budget: how much to keep.
        schedule: when to compress.
        method: the executed method: `written` with parameters that depend on the budget; equality of recipes uses it.

    Raises:
        BudgetError: if budget and schedule contradict each other.
    """

    written: Method = field(compare=False)
    budget: Budget = field(default_factory=Budget)
    schedule: Schedule = field(default_factory=Schedule)
    method: Method = field(init=False, repr=False)

    def __post_init__(self) -> None:
        share = self.budget.keep if self.budget.bytes is None else self.budget.bytes
        if self.schedule.every is not None and isinstance(share, float):
            name = "keep" if self.budget.bytes is None else "bytes"
            raise BudgetError(
                f"{name}={share!r} does not go with every={self.schedule.every}, because a share of what is left would "
                "shrink at every event: use a whole number of entries such as keep=512."
            )
        if self.budget.protect_prompt:
            if self.schedule.every is None:
                raise BudgetError(
                    "protect_prompt=True keeps the whole prompt, so that only what follows it can be dropped: add "
                    "every=256, or another number of tokens, or leave it out."
                )
            # At the prompt's end there is nothing to drop.
            object.__setattr__(self, "schedule", replace(self.schedule, prefill=False))
        alone = self.schedule.turns and self.schedule.every is None and not self.budget.kinds
        if self.budget.protects_system and not alone:
            raise BudgetError(
                "protect='system' is for conversations, which are compressed between turns alone: add turns=True, and "
                "leave every= and images out; or protect ranges of tokens."
            )
        object.__setattr__(self, "method", _for_budget(self.written, vars(self.budget)))

    @classmethod
    def of(
        cls,
        method: Method,
        *,
        keep: int | float | None = None,
        bytes: float | None = None,
        sinks: int | None = None,
        recent: int | None = None,
        recent_extra: bool = False,
        protect_prompt: bool = False,
        protect: str | Sequence[str | Sequence[int]] = (),
        short: int = 0,
        prefill: bool = True,
        every: int | None = None,
        turns: bool = False,
    ) -> Recipe:
        """Return a recipe with the options of `Budget` and `Schedule`; for sinks and recent None is the method's own.

        Args:
            method: the method.
            keep, bytes, recent_extra, protect_prompt, protect, short: as in `Budget`.
            sinks, recent: as in `Budget`; None for the method's own.
            prefill, every: as in `Schedule`.

        Raises:
            BudgetError: if these do not go together.
        """
        sinks = method.traits.sinks if sinks is None else sinks
        recent = method.traits.recent if recent is None else recent
        always = sinks, recent, protect_prompt, protect
        budget = Budget(keep, *always, bytes=bytes, recent_extra=recent_extra, short=short)
        return cls(method, budget, Schedule(prefill, every, turns))

    @classmethod
    def parse(cls, text: str) -> Recipe:
        """Return the recipe that a text describes.

        Args:
            text: a call expression, such as `adakv(snapkv(window=32), keep=512)`; methods may have former names.

        Raises:
            RecipeError: if this is no text or no call expression, or a name or value in it is unknown or out of
                range; the message names the nearest known one.
            BudgetError: if budget and schedule do not go together.
        """
        if not isinstance(text, str):
            raise RecipeError(f"A recipe is a text, and this is {text!r:.80}: {_EXAMPLE}.")
        method, options = _parse(text)
        for name, value in options.items():
            if value is None:
                raise RecipeError(f"{name}=None says nothing: leave {name} out.")
        return cls.of(method, **options)

    @classmethod
    def parse_list(cls, text: str) -> list[Recipe]:
        """Return the recipes in a text such as `"snapkv, adakv(snapkv)"`, which are separated by commas.

        Raises:
            RecipeError: as `parse` does, or if there is none.
        """
        node = _expression(f"[{text.strip()}]")
        if not isinstance(node, ast.List) or not node.elts:
            raise RecipeError(f"{_shorten(text)!r} is no list of recipes: {_EXAMPLE}, separated by commas.")
        return [cls.parse(ast.unparse(element)) for element in node.elts]

    def __str__(self) -> str:
        return self.text(self.budget.keep, self.budget.bytes)

    def text(self, keep: int | float | None = None, bytes: float | None = None) -> str:
        """Return the recipe's text with another `Budget.keep` or `bytes`, unchecked; None is left out.

        Args:
            keep, bytes: as in `Budget`.
        """
        return _short_text(self.written, {**vars(self.budget), **vars(self.schedule), "keep": keep, "bytes": bytes})

    def with_budget(self, keep: int | float | None = None, bytes: float | None = None) -> Recipe:
        """Return the same recipe with this `Budget.keep` or `bytes`; with neither, the recipe without a budget.

        Args:
            keep, bytes: as in `Budget`, of which one may be given.

        Raises:
            BudgetError: if it does not suit the recipe.
        """
        return replace(self, budget=replace(self.budget, keep=keep, bytes=bytes))

    def with_always(self, sinks: int, recent: int) -> Recipe:
        """Return the same recipe with at least these numbers of first and newest tokens that always stay.

        A number that differs from the method's own was chosen for the recipe and does not change.

        Args:
            sinks: first tokens that always stay.
            recent: newest tokens that always stay.

        Raises:
            BudgetError: if that is more than the recipe keeps.
        """
        budget, traits = self.budget, self.method.traits
        sinks = max(traits.sinks, sinks) if budget.sinks == traits.sinks else budget.sinks
        recent = max(traits.recent, recent) if budget.recent == traits.recent else budget.recent
        return replace(self, budget=replace(budget, sinks=sinks, recent=recent))

    def located(self, images: Ranges | None) -> Recipe:
        """Return the same recipe for one request, with ranges in place of the images or text that it protects.

        Raises:
            BudgetError: if it protects images or text, and the places of images are unknown.
        """
        return replace(self, budget=self.budget.located(None if images is None else [images]))

    @property
    def advice(self) -> str:
        """Return a sentence with a better recipe, if the method's bare defaults do badly; else ""."""
        if not self.method.advice or self.with_budget() != Recipe.of(type(self.method)()):
            return ""
        return f"{self.method.name} {self.method.advice}."

    def select(self, observation: Observation) -> KeepSet:
        """Return the entries that stay in one layer, observed with everything that the method needs.

        Raises:
            BudgetError: if the method needs a budget and the recipe has none.
            KeepsetError: if the observation lacks something that the method needs.
        """
        return self.require_budget().method.select(observation, self.budget_for([observation]))

    def budget_for(self, observations: Sequence[Observation]) -> Budget:
        """Return the budget in entries for the layers of one choice: `bytes` becomes a share of entries."""
        return self.budget_of_sizes([observation.entry_sizes for observation in observations])

    def budget_of_sizes(self, sizes: Sequence[tuple[int, int]]) -> Budget:
        """Return the budget of `budget_for`, given the numbers of an entry's key and value for each layer."""
        if self.budget.bytes is None:
            return self.budget
        full = sum(FULL_BYTES * (key_size + value_size) for key_size, value_size in sizes)
        stored = sum(self.method.traits.entry_bytes(*entry_sizes) for entry_sizes in sizes)
        return replace(self.budget, keep=min(1.0, self.budget.bytes * full / stored), bytes=None)

    def require_budget(self) -> Recipe:
        """Return this recipe.

        Raises:
            BudgetError: if its method needs a budget and it has none.
        """
        if self.method.traits.needs_budget and not self.budget.is_given:
            entries = self.text(max(512, self.budget.sinks + self.budget.recent))
            if self.schedule.every is not None:
                raise BudgetError(f"{self} does not say how much to keep: write {entries}.")
            raise BudgetError(
                f"{self} does not say how much to keep: write {self.with_budget(bytes=0.25)}, a share of a full 16-bit "
                f"cache's bytes, or {entries}, entries per KV head."
            )
        return self


def check_schedule(recipe: Recipe) -> None:
    """Check that a recipe's method can work at the events of its schedule.

    Raises:
        RecipeError: if the recipe compresses while decoding and the method needs data that no longer exist then; or if
            a step works only at the prompt's end and the recipe compresses nothing there.
    """
    if recipe.schedule.every is None and not recipe.schedule.turns:
        return
    traits = recipe.method.traits
    if not recipe.schedule.prefill and traits.prefill_only:
        step = traits.prefill_only[0]
        if recipe.schedule.turns:
            raise RecipeError(
                f"{recipe} compresses between turns, and {step} works only at a prompt's end: leave {step} out."
            )
        raise RecipeError(
            f"{recipe} compresses nothing at the prompt's end, and {step} does nothing at any other: leave "
            f"{step} out, or prefill=False or protect_prompt=True."
        )
    for feature in traits.needs:
        if feature.prompt_only:
            option = "every=" if recipe.schedule.every is not None else "turns=True"
            raise RecipeError(f"{recipe} {feature.prompt_only}: leave {option} out.")


@depends_on_methods
@cache
def in_full(text: str) -> str:
    """Return a recipe's text with all omitted defaults; budget and schedule are not checked against each other.

    Files hold this text, so that no later default changes their meaning.

    Raises:
        RecipeError: as `Recipe.parse` does.
    """
    method, options = _parse(text)
    options = {**_default_options(method, options), **options}
    return _text_of(_for_budget(method, options), _given_options(options), in_full=True)


@depends_on_methods
@cache
def in_short(text: str) -> str:
    """Return a text of `in_full` without today's defaults, for people to read.

    Raises:
        RecipeError: as `Recipe.parse` does, and if the text omits a value, whose default may have been another when the
            file was written.
    """
    method, options = _parse(text, in_full=True)
    if _has_budget(method, options):
        method = method.without_bytes(options.get("bytes"))
    return _short_text(method, options)


def shown(text: str) -> str:
    """Return a text from a file in short; unchanged if this version cannot read it."""
    with suppress(RecipeError):
        return in_short(text)
    return text


_OPTIONS = {option.name: option.default for kind in (Budget, Schedule) for option in dataclasses.fields(kind)}
"""The options of budget and schedule with their defaults, which hold unless the method has its own."""
_EXAMPLE = "write a method with its parameters, such as snapkv(keep=0.25) or adakv(snapkv, keep=512)"


_NEWER = ("recent_extra", "short", "turns")


def _expression(text: str) -> ast.expr | None:
    """Return the expression in a text; None if it is none."""
    try:
        return ast.parse(text, mode="eval").body
    except (SyntaxError, ValueError, RecursionError, MemoryError):
        return None


def _parse(text: str, *, in_full: bool = False) -> tuple[Method, dict[str, Any]]:
    """Return the method that a text describes, and the options of budget and schedule that it names.

    Args:
        text: of a recipe.
        in_full: whether each parameter must be named.
    """
    text = text.strip()
    node = _expression(text)
    method = _build_method(node, text, _OPTIONS, in_full=in_full)
    _, _, keywords = _call(node, text)
    options = {
        name: (_ranges if name == "protect" else _literal)(keywords[name], name, text)
        for name in _OPTIONS
        if name in keywords
    }
    if in_full:
        _require(_given_options(_default_options(method, options)), options, text)
    return method, options


def _require(names: Iterable[str], named: Iterable[str], text: str) -> None:
    if missing := sorted(set(names) - set(named)):
        raise RecipeError(f"{_shorten(text)!r} does not say {missing[0]}, whose default may have been another.")


def _default_options(method: Method, options: Mapping[str, Any]) -> dict[str, Any]:
    always = {"sinks": method.traits.sinks, "recent": method.traits.recent}
    later = options.get("protect_prompt", False) or options.get("turns", False)
    return _OPTIONS | always | {"prefill": not later}


def _given_options(options: Mapping[str, Any]) -> dict[str, Any]:
    """Return the options that have a value. Files leave others out, because older files do not name newer options."""
    return {
        name: value
        for name, value in options.items()
        if value is not None and value != () and (name not in _NEWER or value != _OPTIONS[name])
    }


def _build_method(node: ast.expr | None, text: str, options: Iterable[str] = (), *, in_full: bool = False) -> Method:
    name, arguments, keywords = _call(node, text)
    kind = find(name)
    if kind is None:
        raise RecipeError(f"There is no method {name!r}{nearest(name, METHODS)}")
    fixed = parameters_of(name)
    parameters = [f.name for f in dataclasses.fields(kind) if f.name not in fixed]
    values: dict[str, Any] = {}
    for keyword, value in keywords.items():
        if keyword in parameters:
            inner = keyword == "scorer"
            values[keyword] = _build_method(value, text, in_full=in_full) if inner else _literal(value, keyword, text)
        elif keyword not in options:
            allowed = [*(parameter for parameter in parameters if parameter != "scorer"), *options]
            where = " inside another method" if keyword in _OPTIONS else ""
            raise RecipeError(f"{name} has no parameter {keyword!r}{where}{nearest(keyword, allowed)}")
    divides = issubclass(kind, Allocator)
    if len(arguments) > (1 if divides else 0):
        accepted = "one method, then named parameters" if divides else "only named parameters"
        raise RecipeError(f"{name} takes {accepted}: {_EXAMPLE}.")
    if arguments and "scorer" in values:
        raise RecipeError(f"{name} divides the budget of one method: give it once.")
    if arguments:
        values["scorer"] = _build_method(arguments[0], text, in_full=in_full)
    if divides and "scorer" not in values:
        raise RecipeError(f"{name} divides the budget of another method: write for example {name}(snapkv, keep=0.25).")
    if in_full:
        _require(parameters, values, text)
    return kind(**fixed, **values)


def _call(node: ast.expr | None, text: str) -> tuple[str, list[ast.expr], dict[str, ast.expr]]:
    if isinstance(node, ast.Name):
        return node.id, [], {}
    keywords: dict[str, ast.expr] = {}
    if isinstance(node, ast.Call) and isinstance(node.func, ast.Name):
        for keyword in node.keywords:
            if keyword.arg in keywords:
                raise RecipeError(f"{keyword.arg} is given twice: write it once.")
            if keyword.arg is not None:
                keywords[keyword.arg] = keyword.value
        if len(keywords) == len(node.keywords):
            return node.func.id, node.args, keywords
    raise RecipeError(f"{_shorten(text)!r} is not a recipe: {_EXAMPLE}.")


def _literal(node: ast.expr, name: str, text: str) -> Any:
    """Return a literal number, boolean or text; anything else raises RecipeError."""
    operand, sign = node, 1
    if isinstance(node, ast.UnaryOp) and isinstance(node.op, ast.USub):
        operand, sign = node.operand, -1
    value = operand.value if isinstance(operand, ast.Constant) else ...
    if isinstance(value, int | float) and not isinstance(value, bool):
        if (isinstance(value, int) and value.bit_length() > 63) or not math.isfinite(value):
            raise RecipeError(f"{name}={_source(node, text)} is too large a number.")
        return sign * value
    if sign == 1 and (value is None or isinstance(value, bool | str)):
        return value
    written = f"{name}={_source(node, text)}"
    raise RecipeError(f"{written} is not a plain value: write a number, True, False or a text in quotes.")


def _source(node: ast.expr, text: str) -> str:
    """Return a node's part of the text, for an error; it reads the whole text.

    It is cut from the text, because unparsing recurses, and Python refuses to print integers of thousands of digits.
    """
    return _shorten(" ".join((ast.get_source_segment(text, node) or "").split()))


def _ranges(node: ast.expr, name: str, text: str) -> Any:
    if isinstance(node, ast.List | ast.Tuple):
        return tuple(_ranges(element, name, text) for element in node.elts)
    return _literal(node, name, text)


def _for_budget(method: Method, options: Mapping[str, Any]) -> Method:
    return method.for_bytes(options.get("bytes")) if _has_budget(method, options) else method


def _has_budget(method: Method, options: Mapping[str, Any]) -> bool:
    has_option = options.get("keep") is not None or options.get("bytes") is not None
    return has_option or not method.traits.needs_budget


def _short_text(method: Method, options: Mapping[str, Any]) -> str:
    implied = _default_options(method, options)
    return _text_of(method, {name: value for name, value in options.items() if value != implied[name]})


def _text_of(method: Method, options: Mapping[str, Any], *, in_full: bool = False) -> str:
    parts = []
    for parameter in dataclasses.fields(method):
        value = getattr(method, parameter.name)
        if isinstance(value, Method):
            parts.append(_text_of(value, {}, in_full=in_full))
        elif in_full or value != parameter.default:
            parts.append(f"{parameter.name}={value!r}")
    options = {name: _protect_text(value) if name == "protect" else value for name, value in options.items()}
    parts += [f"{name}={value!r}" for name, value in options.items()]
    return f"{method.name}({', '.join(parts)})" if parts else method.name


def _protect_text(protect: str | Sequence[str | Sequence[int]]) -> str | list[str | list[int]]:
    """Return the value of `protect` in a recipe's text: a single name, else a list."""
    if isinstance(protect, str):
        return protect
    parts = [part if isinstance(part, str) else list(part) for part in protect]
    return parts[0] if len(parts) == 1 and isinstance(parts[0], str) else parts


def nearest(name: str, names: Iterable[str]) -> str:
    """Return the end of an error's sentence: the most similar known name, and all known names.

    Args:
        name: what was asked for.
        names: all that there are.
    """
    names = sorted(names)
    close = difflib.get_close_matches(name, names, n=1, cutoff=0.5)
    hint = f"; did you mean {close[0]!r}? " if close else ". "
    return f"{hint}There are: {', '.join(names)}."


def _shorten(text: str) -> str:
    return text if len(text) <= 80 else text[:77] + "..."
