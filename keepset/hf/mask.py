"""`MaskRule`: what transformers asks a mask function for, kept as a rule instead of a matrix.

One mask is made for all layers, but layers that dropped different entries need different masks. So the rule
travels, and each layer applies it to what it holds.
"""

from __future__ import annotations

from functools import cached_property
from typing import Any

from jaxtyping import Bool
from torch import Tensor
from transformers.masking_utils import causal_mask_function, sdpa_mask

from keepset.errors import KeepsetError, UnsupportedModelError
from keepset.hf.uncompiled import uncompiled

OTHER_PROMPT = "for another prompt make a new cache, because one serves one conversation"
"""What to do instead of feeding a cache a second prompt."""


class KeepsetLength(int):
    """The length of a keepset layer: the one thing that a mask function is told about the cache."""


class MaskRule:
    """The arguments of one mask, evaluated when somebody needs it."""

    def __init__(self, arguments: dict[str, Any]) -> None:
        self._arguments = arguments

    @cached_property
    def matrix(self) -> Bool[Tensor, "batch 1 q kv"] | None:
        """The ordinary mask, for layers that hold everything; None where plain causality is enough."""
        return sdpa_mask(**self._arguments)

    @cached_property
    def valid(self) -> Bool[Tensor, "batch n"] | None:
        """Which of the new tokens are no padding; None when all are."""
        if self._arguments["mask_function"] is not causal_mask_function:
            raise UnsupportedModelError(
                "keepset.Cache supports plain causal attention with padding; this model or call asks for another mask."
            )
        padding: Tensor | None = self._arguments.get("attention_mask")
        if padding is None:
            return None
        offset = int(self._arguments["q_offset"])
        end = offset + int(self._arguments["q_length"])
        if padding.shape[-1] < end:
            raise KeepsetError(
                f"The attention mask covers {padding.shape[-1]} tokens but the cache and the input are {end}: "
                f"give a mask for all tokens, cached ones included, and {OTHER_PROMPT}; chunked prefill onto a cache "
                "that is not empty is not supported."
            )
        new = padding[:, offset:end]
        return None if bool(new.all()) else new


@uncompiled
def mask_rule(**arguments: Any) -> MaskRule | Tensor | None:
    """The mask function that keepset registers: a rule for keepset's own layers, for all others sdpa's mask."""
    if isinstance(arguments["q_offset"], KeepsetLength):
        if not arguments["q_length"]:
            held = int(arguments["q_offset"])
            raise KeepsetError(f"The cache holds {held} tokens and the input goes no further: {OTHER_PROMPT}.")
        return MaskRule(arguments)
    return sdpa_mask(**arguments)
