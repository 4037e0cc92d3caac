"""`Forwards`: which forwards of a cache came to their ends.

A forward that stops between two layers (Ctrl-C, out of memory, any exception) leaves a cache whose layers hold
different tokens. No length tells this for every kind of layer, so a model's decoder reports its calls to the caches
that it is given.
"""

from __future__ import annotations

from abc import ABC, abstractmethod
from typing import Any, NamedTuple

from jaxtyping import Int
from torch import Tensor, nn
from transformers import PreTrainedModel

from keepset.errors import KeepsetError
from keepset.hf.attention import uncompiled

_REPORTS = "_keepset_reports_forwards"
"""Attribute of a decoder that reports its calls."""


class DecoderCall(NamedTuple):
    """The arguments of a decoder's call, as a hook sees them."""

    args: tuple[Any, ...]
    kwargs: dict[str, Any]

    @property
    def tokens(self) -> int:
        """Return how many tokens of each request are fed."""
        inputs = self.kwargs.get("inputs_embeds")
        inputs = self.kwargs.get("input_ids", self.args[0] if self.args else None) if inputs is None else inputs
        return 0 if inputs is None else inputs.shape[1]

    @property
    def mask(self) -> Int[Tensor, "batch tokens"] | None:
        """Return which tokens are real, those before included; None if all are, or if the mask has another form."""
        mask = self.kwargs.get("attention_mask")
        return mask if isinstance(mask, Tensor) and mask.ndim == 2 else None


class Forwards(ABC):
    """A cache that a decoder tells of its calls."""

    @abstractmethod
    def begin_forward(self, call: DecoderCall) -> None:
        """Note that the decoder begins a call with this cache.

        Raises:
            KeepsetError: the call before was not complete, or this one cannot be answered.
        """

    @abstractmethod
    def end_forward(self) -> None:
        """Note that the call is complete."""


class WholeForwards(Forwards):
    """A cache that refuses to go on after a forward that has changed it and was not complete."""

    _in_forward = False
    _is_changed = False

    def begin_forward(self, call: DecoderCall) -> None:
        self.require_whole_forward()
        self._in_forward = True

    def end_forward(self) -> None:
        self._in_forward = self._is_changed = False

    def note_change(self) -> None:
        """Note that the forward under way has begun to change the cache."""
        self._is_changed = self._in_forward

    def require_whole_forward(self) -> None:
        """Check that no forward has changed the cache in part.

        Raises:
            KeepsetError: one has.
        """
        if self._is_changed:
            raise KeepsetError(
                "A forward with this cache ended before its last layer, so its layers hold different tokens: make a "
                "new cache, or go on from a copy made before that forward (cache.fork())."
            )


def decoder_of(model: Any) -> Any:
    """Return the part of a model that takes a cache; some models use the name decoder for their language head."""
    decoder = model.get_decoder()
    return decoder if isinstance(decoder, PreTrainedModel) else model.base_model


def report_forwards(model: nn.Module) -> None:
    """Make a model's decoder report its calls to the caches that it is given, from now on.

    The hooks hold nothing of a cache, so they stay.
    """
    decoder = decoder_of(model)
    if not hasattr(decoder, _REPORTS):
        setattr(decoder, _REPORTS, True)
        decoder.register_forward_pre_hook(_begin, with_kwargs=True)
        decoder.register_forward_hook(_end, with_kwargs=True)


@uncompiled
def _begin(module: nn.Module, args: tuple[Any, ...], kwargs: dict[str, Any]) -> None:
    if isinstance(past := kwargs.get("past_key_values"), Forwards):
        past.begin_forward(DecoderCall(args, kwargs))


@uncompiled
def _end(module: nn.Module, args: tuple[Any, ...], kwargs: dict[str, Any], output: Any) -> None:
    if isinstance(past := kwargs.get("past_key_values"), Forwards):
        past.end_forward()
