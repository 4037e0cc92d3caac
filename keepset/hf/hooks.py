"""`ModelHooks`: hooks on a model that serve one cache and keep neither the cache nor themselves alive."""

from __future__ import annotations

import copy
import weakref
from abc import ABC, abstractmethod
from collections.abc import Callable, Iterable, Iterator
from typing import Any, Self

from torch import nn
from torch.utils.hooks import RemovableHandle


class ModelHooks(ABC):
    """Hooks on a model that look at calls with one cache. They are removed when this object goes.

    The model may serve other caches in other threads meanwhile. So what a hook has seen is either checked to be of a
    call with this cache, or kept for the thread that made the call.

    Args:
        model: that holds the hooks, but not this object.
        past: the cache.
    """

    def __init__(self, model: nn.Module, past: Any) -> None:
        self._model: weakref.ref[Any] = weakref.ref(model)
        self._past = weakref.ref(past)
        self._removal: weakref.finalize[..., Any] | None = None
        self.forget()
        self.open()

    def open(self) -> None:
        """Install the hooks unless they are installed."""
        model = self._model()
        if self._removal is None and model is not None:
            self._removal = weakref.finalize(self, _remove, list(self._installed(model)))

    def close(self) -> None:
        """Remove the hooks and forget what they saw."""
        if self._removal is not None:
            self._removal()
            self._removal = None
        self.forget()

    def fork(self, past: Any) -> Self:
        """Return a copy that serves another cache."""
        copied = copy.copy(self)
        copied._past, copied._removal = weakref.ref(past), None
        if self._removal is not None:
            copied.open()
        return copied

    @abstractmethod
    def forget(self) -> None:
        """Forget what was seen. What one of two forks has seen is never changed for the other."""

    @abstractmethod
    def _installed(self, model: nn.Module) -> Iterator[RemovableHandle]:
        """Install the hooks and yield their handles."""


def before_calls(module: nn.Module, method: Callable[..., Any]) -> RemovableHandle:
    """Call `method(module, args, kwargs)` before every call of a module, without holding the method's object.

    Args:
        module: to watch.
        method: what it returns takes the place of args and kwargs unless it is None.
    """
    return module.register_forward_pre_hook(_weakly(method, 3), with_kwargs=True)


def after_calls(module: nn.Module, method: Callable[..., Any], *, failed: bool = False) -> RemovableHandle:
    """Call `method(module, args, kwargs, output)` after every call of a module, without holding the method's object.

    Args:
        module: to watch.
        method: what it returns takes the place of the output unless it is None.
        failed: whether to call it after calls that failed, too.
    """
    return module.register_forward_hook(_weakly(method, 4), with_kwargs=True, always_call=failed)


def _weakly(method: Callable[..., Any], count: int) -> Callable[..., Any]:
    """Return a hook that passes `count` arguments on to the method while its object lives.

    A call under way still meets hooks that another thread removes meanwhile, and gives them no `kwargs`. It is with
    another cache than theirs, so the method is not called.
    """
    reference = weakref.WeakMethod(method)

    def hook(*args: Any) -> Any:
        alive = reference()
        return None if alive is None or len(args) < count else alive(*args)

    return hook


def _remove(handles: Iterable[RemovableHandle]) -> None:
    for handle in handles:
        handle.remove()
