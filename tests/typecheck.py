"""The run-time type checker for tests: the shapes and types of every function that takes or gives tensors.

Others are left out: recipes pass them what users typed, and they must answer with their own sentence.
"""

import functools
import re
from collections import Counter
from collections.abc import Callable
from types import SimpleNamespace
from typing import Any

import jaxtyping
from beartype import BeartypeConf, beartype

_beartype = beartype(conf=BeartypeConf(is_pep484_tower=True))
_jaxtyped = jaxtyping.jaxtyped
CALLS = 2
"""So many calls of a function are checked in a test: a prompt and a token, and further ones are of the same kind."""
COMBINATIONS = 2
"""So many combinations of a test's parameters are checked, if it is of the full tier."""
_calls: Counter[int] = Counter()
"""By a function's code: one that is defined anew at each call of another is the same."""
_combinations: Counter[object] = Counter()
"""By the test."""
_test = SimpleNamespace(checks=True)


def begin_test(test: object, full: bool) -> None:
    """Check all functions again, unless enough combinations of this test were checked.

    Args:
        test: the function whose parameters are combined.
        full: whether this combination is of the full tier.
    """
    _combinations[test] += 1
    _test.checks = not full or _combinations[test] <= COMBINATIONS
    _calls.clear()


def install() -> None:
    """What is imported of keepset after this is checked while it runs."""
    jaxtyping.jaxtyped = jaxtyped  # which the hook makes a decorator of everything
    jaxtyping.install_import_hook("keepset", "tests.typecheck.check")


def jaxtyped(*, typechecker: Callable[..., Any]) -> Callable[[Any], Any]:
    """jaxtyping's own, which costs more than most functions do, only where there are shapes."""
    decorate = _jaxtyped(typechecker=typechecker)

    def decorated(thing: Any) -> Any:
        if not isinstance(thing, type):
            return first_calls(thing, lambda: decorate(thing)) if has_shapes(thing) else thing
        plain = thing.__init__
        thing = decorate(thing)
        if thing.__init__ is not plain:
            checking = thing.__init__
            thing.__init__ = first_calls(plain, lambda: checking)
        return thing

    return decorated


def first_calls(function: Callable[..., Any], make: Callable[[], Callable[..., Any]]) -> Callable[..., Any]:
    """The one that checks, which is made when it is first called; after so many calls in a test the plain one."""
    code, checking = id(function.__code__), None

    @functools.wraps(function)
    def called(*args: Any, **options: Any) -> Any:
        nonlocal checking
        if not _test.checks or _calls[code] >= CALLS:
            return function(*args, **options)
        _calls[code] += 1
        checking = checking or make()
        return checking(*args, **options)

    return called


def has_shapes(function: Callable[..., Any]) -> bool:
    """Whether a name in its annotations stands for a type of jaxtyping's."""
    words = re.findall(r"\w+", str(function.__annotations__))
    return any("jaxtyping" in str(function.__globals__.get(word)) for word in words)


def check(function: Callable[..., Any]) -> Callable[..., Any]:
    """Makes a function check its arguments and its result."""
    code = getattr(function, "__code__", None)
    generated = code is not None and code.co_filename == "<string>"
    if generated and "jaxtyping" not in str(getattr(function, "__annotations__", "")):
        return function
    return _beartype(function)
