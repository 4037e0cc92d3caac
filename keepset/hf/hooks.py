"""Hooks on a model that serve one cache and keep neither it nor themselves alive."""

from __future__ import annotations

import copy
import weakref
from abc import ABC, abstractmethod
from collections.abc import Callable, Iterable, Iterator
from typing import Any, Self

from torch import nn
from torch.utils.hooks import RemovableHandle


class ModelHooks(ABC):
    """Hooks that the model holds, but not this: they go with it. Calls with one cache, `past`, are looked at."""

    def __init__(self, model: nn.Module, past: Any) -> None:
        self._model: weakref.ref[Any] = weakref.ref(model)
        self._past = weakref.ref(past)
        self._removal: weakref.finalize[..., Any] | None = None
        self.forget()
        self.open()

    def open(self) -> None:
        """Installs the hooks where they are not."""
        model = self._model()
        if self._removal is None and model is not None:
            self._removal = weakref.finalize(self, _remove, list(self._installed(model)))

    def close(self) -> None:
        """Removes the hooks and forgets what they saw."""
        if self._removal is not None:
            self._removal()
            self._removal = None
        self.forget()

    def fork(self, past: Any) -> Self:
        """The same for another cache."""
        twin = copy.copy(self)
        twin._past, twin._removal = weakref.ref(past), None
        if self._removal is not None:
            twin.open()
        return twin

    @abstractmethod
    def forget(self) -> None:
        """Lets go of what was seen; what one of two forks has seen is never changed for the other."""

    @abstractmethod
    def _installed(self, model: nn.Module) -> Iterator[RemovableHandle]: ...


def weakly(method: Callable[..., Any]) -> Callable[..., Any]:
    """The method, without holding its object."""
    reference = weakref.WeakMethod(method)
    return lambda *args: None if (alive := reference()) is None else alive(*args)


def _remove(handles: Iterable[RemovableHandle]) -> None:
    for handle in handles:
        handle.remove()
