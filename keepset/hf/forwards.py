"""`Forwards`: what a decoder tells the caches that it is given.

A forward that stops between two layers (Ctrl-C, out of memory, any exception) leaves a cache whose layers hold
different tokens. No length tells this for every kind of layer, so a decoder reports its calls.
"""

from __future__ import annotations

from abc import ABC, abstractmethod
from typing import Any, NamedTuple

from jaxtyping import Int, Shaped
from torch import Tensor


class DecoderCall(NamedTuple):
    """The arguments of a call of a model or of its decoder, as a hook sees them."""

    args: tuple[Any, ...]
    kwargs: dict[str, Any]

    @property
    def ids(self) -> Int[Tensor, "batch n"] | None:
        """Return the token ids that are fed; None if there are none."""
        return self.kwargs.get("input_ids", self.args[0] if self.args else None)

    @property
    def inputs(self) -> Shaped[Tensor, "batch n *hidden"] | None:
        """Return the embeddings that are fed, or else the token ids."""
        embeddings = self.kwargs.get("inputs_embeds")
        return self.ids if embeddings is None else embeddings

    @property
    def tokens(self) -> int:
        """Return how many tokens of each request are fed."""
        inputs = self.inputs
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
