"""`MaskRule`: what transformers asks a mask function for, kept as a rule instead of a matrix.

One mask is made for all layers, but layers that dropped different entries need different masks. So the rule
travels, and each layer applies it to what it holds.
"""

from __future__ import annotations

from dataclasses import dataclass
from functools import cached_property
from typing import Any, Never

from jaxtyping import Bool, Int
from torch import Tensor
from transformers.masking_utils import causal_mask_function, sdpa_mask

from keepset.errors import KeepsetError, UnsupportedModelError
from keepset.hf.dynamo import uncompiled
from keepset.kernels.dispatch import upload

OTHER_PROMPT = "for another prompt make a new cache, because one serves one conversation"
"""What to do instead of feeding a cache a second prompt."""


class KeepsetLength(int):
    """The length of a keepset layer: the one thing that a mask function is told about the cache."""


@dataclass(frozen=True, eq=False)
class RealTokens:
    """Which of some tokens are no padding, where some are; the host has looked once for all layers.

    Attributes:
        mask: where the tokens are.
        host_mask: the same on the host.
        positions: counted from each request's first token, on the host; negative of padding.
    """

    mask: Bool[Tensor, "batch n"]
    host_mask: Bool[Tensor, "batch n"]
    positions: Int[Tensor, "batch n"]

    def part(self, tokens: slice) -> RealTokens:
        """Of some of the tokens."""
        return RealTokens(self.mask[:, tokens], self.host_mask[:, tokens], self.positions[:, tokens])

    @cached_property
    def counts(self) -> list[int]:
        """How many each request has."""
        return self.host_mask.sum(-1).tolist()

    @cached_property
    def indices(self) -> list[Int[Tensor, " _"]]:
        """Those of each request."""
        return [upload(row.nonzero()[:, 0], self.mask.device) for row in self.host_mask]


class MaskRule:
    """The arguments of one mask, evaluated when somebody needs it."""

    def __init__(self, arguments: dict[str, Any]) -> None:
        self._arguments = arguments

    @property
    def dtype(self) -> Never:
        """No layer may compute with a mask: raises UnsupportedModelError."""
        raise UnsupportedModelError(
            "This model changes its attention mask in every layer, by what it looks at, which keepset does not support."
        )

    @cached_property
    def matrix(self) -> Bool[Tensor, "batch 1 q kv"] | None:
        """The ordinary mask, for layers that hold everything; None where plain causality is enough."""
        return sdpa_mask(**self._arguments)

    @cached_property
    def real(self) -> RealTokens | None:
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
        # The host looks once. What came before a single token is asked by nobody, and would be long.
        first = offset if offset + 1 == end else 0
        here = padding[:, first:end].bool().cpu()
        positions, new = (here.cumsum(-1) - 1).masked_fill(~here, -1)[:, offset - first :], here[:, offset - first :]
        return None if new.all() else RealTokens(padding[:, offset:end], new, positions)


@uncompiled
def mask_rule(**arguments: Any) -> MaskRule | Tensor | None:
    """The mask function that keepset registers: a rule for keepset's own layers, for all others sdpa's mask."""
    if isinstance(arguments["q_offset"], KeepsetLength):
        if not arguments["q_length"]:
            held = int(arguments["q_offset"])
            raise KeepsetError(f"The cache holds {held} tokens and the input goes no further: {OTHER_PROMPT}.")
        padding, end = arguments.get("attention_mask"), int(arguments["q_offset"]) + int(arguments["q_length"])
        if padding is not None and padding.shape[-1] < end:  # before any layer has stored a token
            raise KeepsetError(
                f"The attention mask covers {padding.shape[-1]} tokens but the cache and the input are {end}: "
                f"give a mask for all tokens, cached ones included, and {OTHER_PROMPT}; chunked prefill onto a cache "
                "that is not empty is not supported."
            )
        return MaskRule(arguments)
    return sdpa_mask(**arguments)
