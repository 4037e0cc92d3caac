"""`uncompiled`: keeps what keepset does while a model runs out of the graphs of a compiled model."""

from __future__ import annotations

from collections.abc import Callable
from typing import ParamSpec, TypeVar, cast

import torch

Parameters = ParamSpec("Parameters")
Result = TypeVar("Result")


def uncompiled(function: Callable[Parameters, Result]) -> Callable[Parameters, Result]:
    """Return the function so that PyTorch's compiler leaves it alone.

    Caches change with every token, and the attention function finds its layer by a note on the very tensor that the
    cache has returned. A graph would be good for one token, or lose the note.
    """
    return cast(Callable[Parameters, Result], torch.compiler.disable(function))
