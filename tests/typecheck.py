"""The run-time type checker for tests: the shapes and types of every function that takes or gives tensors.

Others are left out: recipes pass them what users typed, and they must answer with their own sentence.
"""

from collections.abc import Callable
from typing import Any

from beartype import BeartypeConf, beartype

_beartype = beartype(conf=BeartypeConf(is_pep484_tower=True))


def check(function: Callable[..., Any]) -> Callable[..., Any]:
    code = getattr(function, "__code__", None)
    generated = code is not None and code.co_filename == "<string>"
    if generated and "jaxtyping" not in str(getattr(function, "__annotations__", "")):
        return function
    return _beartype(function)
