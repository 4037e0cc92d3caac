"""`KnowsText`: a cache that is told what transformers' `generate` is given.

`generate` leaves out as many of the first ids as the cache has tokens, and takes it that they are the cache's. No hook
on a model sees these ids. So `generate` is wrapped for caches that tell their text from another. With any
other cache it does what it did.
"""

from __future__ import annotations

from abc import ABC, abstractmethod
from collections.abc import Mapping
from functools import wraps
from typing import Any, TypeGuard

from jaxtyping import Int
from torch import Tensor
from transformers import GenerationMixin


class KnowsText(ABC):
    """A cache that is told the ids that `generate` is given, and those that it returns."""

    @abstractmethod
    def check_text(self, ids: Int[Tensor, "rows n"]) -> None:
        """Refuse the ids of a whole text if they begin with other tokens than the cache holds."""

    @abstractmethod
    def remember_text(self, ids: Int[Tensor, "rows n"], given: int) -> None:
        """Take in the ids of a whole text, of which the cache holds the first.

        Args:
            ids: padding included.
            given: how many of them the caller gave; `generate` has chosen the others.
        """


def _watched(generate: Any) -> Any:
    """Return `generate` with calls of the caches that know their text around it."""

    @wraps(generate)
    def watched(
        self: GenerationMixin, inputs: Tensor | None = None, generation_config: Any = None, *args: Any, **kwargs: Any
    ) -> Any:
        past, ids = kwargs.get("past_key_values"), kwargs.get("input_ids", inputs)
        if not isinstance(past, KnowsText) or not _is_whole_text(ids, kwargs):
            return generate(self, inputs, generation_config, *args, **kwargs)
        past.check_text(ids)
        output = generate(self, inputs, generation_config, *args, **kwargs)
        told = ids
        if not kwargs.get("custom_generate") and _beams(self, generation_config, kwargs) == 1:
            told = output if isinstance(output, Tensor) else getattr(output, "sequences", ids)
        past.remember_text(told, ids.shape[1])
        return output

    return watched


def _is_whole_text(ids: Any, kwargs: Mapping[str, Any]) -> TypeGuard[Tensor]:
    """Return whether these are the ids of all tokens, by transformers' rule: they are as many as the mask is long."""
    if not isinstance(ids, Tensor) or ids.ndim != 2 or not ids.numel() or kwargs.get("inputs_embeds") is not None:
        return False
    mask = kwargs.get("attention_mask")
    return mask is None or mask.shape[-1] == ids.shape[1]


def _beams(model: Any, generation_config: Any, kwargs: Mapping[str, Any]) -> int:
    """Return how many beams there are; what is generated of several is not in the order of the cache's requests."""
    config = generation_config or model.generation_config
    return kwargs.get("num_beams") or getattr(config, "num_beams", None) or 1


GenerationMixin.generate = _watched(GenerationMixin.generate)  # type: ignore[method-assign]
