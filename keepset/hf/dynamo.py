"""`uncompiled`: what keepset does while a model runs, kept out of the graphs of a model that PyTorch compiles."""

from __future__ import annotations

from collections.abc import Callable
from typing import ParamSpec, TypeVar, cast

import torch

Parameters = ParamSpec("Parameters")
Result = TypeVar("Result")


def uncompiled(function: Callable[Parameters, Result]) -> Callable[Parameters, Result]:
    """The function, which then runs as it always does.

    Caches change with every token, and who attends is found by the very tensor that a cache has handed over: a graph
    would be good for one token, or forget which tensor it was.
    """
    return cast(Callable[Parameters, Result], torch.compiler.disable(function))
