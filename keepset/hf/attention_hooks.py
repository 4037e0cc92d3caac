"""`AttentionHooks`: watch calls of attention modules and rotary embeddings, whose input no cache is given."""

from __future__ import annotations

import threading
from collections.abc import Iterator
from typing import Any, Self

from torch import nn
from torch.utils.hooks import RemovableHandle

from keepset.errors import UnsupportedModelError
from keepset.hf.attention import AttentionInput
from keepset.hf.hooks import ModelHooks, after_calls, before_calls
from keepset.hf.layer_input import LayerInput, ModuleCall


class _Calls(threading.local):
    """The calls that one thread has made and that are under way.

    A rotary embedding is given no cache, so only the thread tells whose forward its call belongs to.

    Attributes:
        attention: the newest call of an attention module.
        rotary: calls of rotary embeddings; two, because models with two kinds of layers make two rotations per forward.
    """

    attention: ModuleCall | None = None
    rotary: tuple[ModuleCall, ...] = ()


class AttentionHooks(ModelHooks):
    """Remember the newest call of an attention module and of rotary embeddings, for methods that look at such.

    They see the calls with other caches, too, and hold nothing of any call once it is over, also if it has failed.
    """

    def forget(self) -> None:
        self._newest = _Calls()

    def fork(self, past: Any) -> Self:
        copied = super().fork(past)
        copied._newest = _Calls()  # each sees every call of the model
        return copied

    def layer_input(self, new: AttentionInput) -> LayerInput:
        """Return the input of the attention module whose call is under way.

        Args:
            new: what the attention function was given, with the tokens' positions.

        Raises:
            UnsupportedModelError: the input was not seen, or how the module rotates queries cannot be found out.
        """
        module, seen = new.module, self._newest.attention
        if seen is None or seen.module is not module:
            raise UnsupportedModelError(
                f"keepset could not see the input of {type(module).__name__}; methods that look at hidden states "
                "do not support this model."
            )
        rotary = None
        if (rotation := seen.kwargs.get("position_embeddings")) is not None:
            rotary = next((each for each in self._newest.rotary if each.output[0] is rotation[0]), None)
            if rotary is None or rotation[0].ndim != 3:
                raise UnsupportedModelError(
                    f"keepset could not find the rotary embedding of {type(module).__name__}; methods that look "
                    "at future queries do not support this model."
                )
        return LayerInput(seen, rotary, new.query, new.positions, new.valid, new.position_ids, new.rows)

    def _installed(self, model: nn.Module) -> Iterator[RemovableHandle]:
        for module in model.modules():
            if hasattr(module, "layer_idx"):
                yield before_calls(module, self._enter)
                yield after_calls(module, self._leave, failed=True)
            elif _is_rotary(module):
                yield after_calls(module, self._rotated)
            if any(map(_is_rotary, module.children())):
                yield after_calls(module, self._done, failed=True)

    def _enter(self, module: nn.Module, args: tuple[Any, ...], kwargs: dict[str, Any]) -> None:
        self._newest.attention = ModuleCall(module, args, kwargs)

    def _rotated(self, module: nn.Module, args: tuple[Any, ...], kwargs: dict[str, Any], output: Any) -> None:
        self._newest.rotary = (*self._newest.rotary[-1:], ModuleCall(module, args, kwargs, output))

    def _leave(self, *_: Any) -> None:
        self._newest.attention = None

    def _done(self, *_: Any) -> None:
        self._newest.rotary = ()


def _is_rotary(module: nn.Module) -> bool:
    return "RotaryEmbedding" in type(module).__name__
