"""The registry of methods by their names in recipes: keepset's own, and those of other installed packages."""

from __future__ import annotations

import dataclasses
import importlib.metadata
import keyword
import os
import sys
from collections.abc import Callable, Iterator, Mapping
from functools import cache
from importlib import import_module
from types import MappingProxyType
from typing import Any, TypeVar

from keepset.allocators.ams import AMS
from keepset.allocators.heads import AdaKV, ChunkKV, CriticalKV, Uniform
from keepset.allocators.layers import Dynamic, Pyramid, ZigZag
from keepset.allocators.pool import Composite, Pool
from keepset.allocators.post_processors import Match, Quantized
from keepset.allocators.presets import Glance, KVCompose, KVZip, Reread
from keepset.core.features.attention import SecondPass
from keepset.core.method import Allocator, Method
from keepset.errors import KeepsetError, RecipeError
from keepset.methods.compilerkv import CompilerKV
from keepset.methods.distilled import Distilled
from keepset.methods.expected_attention import ExpectedAttention
from keepset.methods.gvote import GVote
from keepset.methods.keys import KeyDiff, Knorm, LagKV
from keepset.methods.measured import DuoAttention, QFilter, TriAttention
from keepset.methods.positions import Random, StreamingLLM
from keepset.methods.second_pass import PromptQueries, SecondPassAttention
from keepset.methods.window import H2O, RKV, RPC, TOVA, SnapKV

GROUP = "keepset.methods"
"""The group of a package's entry points, each of which names a module that registers methods."""

MODULES = "KEEPSET_PLUGINS"
"""The environment variable with the names of further modules, separated by commas. `keepset --plugin` adds to it, and
child processes, such as a server's, inherit it."""


_BUILT_IN: tuple[tuple[type[Method], ...], ...] = (
    (StreamingLLM, Random),
    (Knorm, KeyDiff, LagKV),
    (TOVA, SnapKV, RPC, RKV),
    (H2O, ExpectedAttention, PromptQueries, QFilter, Distilled, TriAttention, DuoAttention, GVote, SecondPassAttention),
    (KVCompose, KVZip, Glance, Reread, CompilerKV),
    (Uniform, Pyramid, ChunkKV, AdaKV, AMS, CriticalKV, ZigZag, Dynamic, Composite, Pool, Match, Quantized),
)
"""Methods, grouped by their inputs: positions; keys and values; newest queries; all queries; all layers; allocators."""

_methods = {method.name: method for group in _BUILT_IN for method in group}

METHODS: Mapping[str, type[Method]] = MappingProxyType(_methods)
"""Every registered method by its name in recipes."""

_SPELLINGS: dict[str, tuple[str, Mapping[str, Any]]] = {"int8": ("quantized", {"bits": 8})}
"""Other names of methods in recipes, and the parameters for which such a name stands."""


_of_methods: list[Any] = []
"""Functions whose caches hold facts of methods."""

Cached = TypeVar("Cached", bound=Callable[..., Any])


def register(method: type[Method]) -> type[Method]:
    """Add your own method, and return it; recipe texts can then use its name, which must be unique.

    A class of the same module and name replaces the one before, as when a notebook's cell runs again. Recipes that were
    made before keep theirs.

    Raises:
        RecipeError: if it is not a method, lacks a name or `@dataclass(frozen=True)`, or has another method's name.
    """
    if not (isinstance(method, type) and issubclass(method, Method)):
        raise RecipeError(f"{method!r} is no class of methods: register a class that derives from keepset.Method.")
    if not getattr(method, "name", ""):
        raise RecipeError(f"{method.__name__} has no name for recipes: give the class name = '...'.")
    if not method.name.isidentifier() or keyword.iskeyword(method.name):
        raise RecipeError(
            f"{method.__name__} has the name {method.name!r}, which no recipe can contain: use letters, digits and _, "
            "and a letter first."
        )
    annotated = vars(method).get("__annotations__", {}).items()
    undeclared = [name for name, kind in annotated if "ClassVar" not in str(kind)]
    if undeclared and "__dataclass_params__" not in vars(method):
        raise RecipeError(
            f"{method.__name__} has the parameter {undeclared[0]!r} and is no dataclass, so that recipes could not set "
            "it: put @dataclass(frozen=True) above the class, below @register."
        )
    registered = METHODS.get(method.name, method)
    if (registered.__module__, registered.__qualname__) != (method.__module__, method.__qualname__):
        raise RecipeError(f"A method named {method.name!r} is registered already: choose another name.")
    _methods[method.name] = method
    for cached in _of_methods:
        cached.cache_clear()
    return method


def depends_on_methods(cached: Cached) -> Cached:
    """Return a function with a cache, whose results are forgotten whenever a method is registered."""
    _of_methods.append(cached)
    return cached


def find(name: str) -> type[Method] | None:
    """Return the method with this name or alias; None if there is none.

    Raises:
        KeepsetError: a plug-in that may define it cannot be imported.
    """
    method = METHODS.get(name) or METHODS.get(_SPELLINGS.get(name, ("", {}))[0])
    if method is None:
        load_methods()
        method = METHODS.get(name)
    return method


def parameters_of(name: str) -> Mapping[str, Any]:
    """Return the parameters that an alias implies: `bits=8` for `int8`, an alias of `quantized`."""
    return {} if name in METHODS else _SPELLINGS.get(name, ("", {}))[1]


@cache
def load_methods() -> None:
    """Import the modules that register methods by `keepset.register`, once in a process.

    Raises:
        KeepsetError: a module cannot be imported.
    """
    if os.environ.get(MODULES) and (folder := os.getcwd()) not in sys.path:
        sys.path.append(folder)  # the last, so that its modules hide no others
    for module in _modules():
        try:
            import_module(module)
        except Exception as error:  # plug-ins are not keepset's code
            raise KeepsetError(
                f"The plug-in {module!r} cannot be imported ({type(error).__name__}: {error}): fix it, or take it out "
                f"of {MODULES} and --plugin, or uninstall its package."
            ) from error


def _modules() -> Iterator[str]:
    for point in importlib.metadata.entry_points(group=GROUP):
        yield point.value.partition(":")[0]
    yield from filter(None, map(str.strip, os.environ.get(MODULES, "").split(",")))


def add(module: str) -> None:
    """Make this process, and its child processes, import a module for its methods, also one of the current folder.

    Args:
        module: Python's dotted name of it.

    Raises:
        KeepsetError: it is not a module's name.
    """
    if not all(part.isidentifier() for part in module.split(".")):
        raise KeepsetError(f"--plugin {module!r} is no name of a module: write one such as my_package.methods.")
    modules = os.environ.get(MODULES)
    os.environ[MODULES] = f"{modules},{module}" if modules else module


def catalogue() -> list[dict[str, Any]]:
    """Return one entry per method, as `keepset methods --json` writes it.

    An entry has name, family, layout, needs, parameters with their defaults and ranges, paper and summary; the numbers
    of first and newest tokens that always stay; whether a recipe must say how much to keep, can compress while decoding
    (`every`) and can be served under vLLM; the passes over a prompt; and advice if bare defaults do badly. A parameter
    without a default (an allocator's scorer) is None. Facts of an allocator that depend on its scorer are given for
    `knorm`, which only needs keys. Methods of plug-ins are included.
    """
    load_methods()
    return [_entry(kind) for kind in METHODS.values()]


def _entry(kind: type[Method]) -> dict[str, Any]:
    divides = issubclass(kind, Allocator)
    traits = (kind(Knorm()) if divides else kind()).traits  # type: ignore[call-arg]
    fields = dataclasses.fields(kind)
    return {
        "name": kind.name,
        "family": kind.family,
        "layout": traits.layout,
        "needs": ["what its scorer needs"] if divides else traits.needs.names(),
        "parameters": {f.name: None if f.default is dataclasses.MISSING else f.default for f in fields},
        "ranges": {f.name: _range(f.metadata) for f in fields if f.metadata},
        "paper": kind.paper,
        "summary": (kind.__doc__ or "").strip().partition("\n")[0],
        "sinks": traits.sinks,
        "recent": traits.recent,
        "needs_budget": traits.needs_budget,
        "every": not any(feature.prompt_only for feature in traits.needs),
        "vllm": not any(feature.transformers_only for feature in traits.needs),
        "passes": 2 if traits.needs.of(SecondPass) else 1,
        "advice": kind.advice,
    }


def _range(allowed: Mapping[str, Any]) -> str:
    """Return a parameter's range or choices in words."""
    if allowed["choices"]:
        return " or ".join(map(repr, allowed["choices"]))
    ends = [("from", allowed["minimum"]), ("to", allowed["maximum"])]
    words = [f"{word} {end}" for word, end in ends if end is not None]
    return " ".join([*(["odd,"] if allowed["odd"] else []), *words]).strip(",") or "any"
