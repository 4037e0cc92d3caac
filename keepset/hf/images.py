"""Hooks that find the images of a prompt, and keep the positions that a model gives tokens after them."""

from __future__ import annotations

from collections.abc import Iterator
from typing import Any

import torch
from jaxtyping import Bool, Int
from torch import Tensor, nn
from torch.utils.hooks import RemovableHandle
from transformers import PreTrainedConfig, PreTrainedModel

from keepset.core.budget import Ranges, runs
from keepset.errors import UnsupportedModelError
from keepset.hf.hooks import ModelHooks, after_calls, before_calls

_NAMES = ("image_token_id", "image_token_index", "video_token_id", "video_token_index")
"""Configurations' names for the token that images replace."""


def image_token_ids(config: PreTrainedConfig) -> tuple[int, ...]:
    """Return the ids of tokens that stand for images and videos, as the configuration of a whole model names them."""
    parts = [config, getattr(config, "vision_config", None)]
    found = (getattr(part, name, None) for part in parts for name in _NAMES)
    return tuple(dict.fromkeys(token for token in found if isinstance(token, int)))


def require_image_tokens(model: PreTrainedModel, kind: str) -> None:
    """Check that a model's images can be told from its text, for a recipe that protects one of them.

    Raises:
        UnsupportedModelError: the model's configuration names no token of images.
    """
    if not image_token_ids(model.config):
        raise UnsupportedModelError(
            f"protect={kind!r} needs a model that puts images in the places of a token, and the configuration of "
            f"{type(model).__name__} names no such token ({_NAMES[0]}): protect ranges of tokens instead, such as "
            "protect=[[4, 580]]."
        )


class ImageHooks(ModelHooks):
    """Hooks on a model that see the token ids of the calls with one cache, to find the tokens of images among them.

    Args:
        model: with a configuration that names such tokens.
        past: the cache.
    """

    def __init__(self, model: PreTrainedModel, past: Any) -> None:
        self._tokens = image_token_ids(model.config)
        super().__init__(model, past)

    def forget(self) -> None:
        self._ids: Tensor | None = None

    def _installed(self, model: nn.Module) -> Iterator[RemovableHandle]:
        yield before_calls(model, self._enter)
        yield after_calls(model, self._leave, failed=True)

    def _enter(self, module: nn.Module, args: tuple[Any, ...], kwargs: dict[str, Any]) -> None:
        if kwargs.get("past_key_values") is self._past():
            self._ids = kwargs.get("input_ids", args[0] if args else None)

    def _leave(self, *_: Any) -> None:
        self._ids = None

    def found(
        self, positions: Int[Tensor, "batch n"], real: Bool[Tensor, "batch n"] | None
    ) -> tuple[Ranges, ...] | None:
        """Return where images are among the tokens of the call that is under way; None if it was given no token ids."""
        if self._ids is None or self._ids.shape != positions.shape:
            return None
        ids = self._ids.to(positions.device)
        images = torch.isin(ids, torch.tensor(self._tokens, device=ids.device))
        images = images if real is None else images & real
        return tuple(runs(row[own].tolist()) for row, own in zip(positions, images, strict=True))


class RopeDeltas(ModelHooks):
    """Hooks that remember for one cache how far the model's positions differ from numbers of tokens.

    Models with several axes of positions (M-RoPE) give an image fewer positions than tokens. They remember the
    difference for the newest prompt only, and would use it for every cache.

    Attributes:
        deltas: what the model adds to the number of tokens to get a position, for each request; None before the prompt.
    """

    def __init__(self, model: PreTrainedModel, past: Any) -> None:
        self.deltas: Tensor | None = None
        super().__init__(model, past)

    @staticmethod
    def owner(model: nn.Module) -> Any:
        """Return the module that remembers the difference; None if the model gives every token its own position."""
        return next((module for module in model.modules() if "rope_deltas" in vars(module)), None)

    def forget(self) -> None:
        """Forget nothing: deltas belong to the tokens that the cache holds."""

    def reorder(self, rows: Int[Tensor, " rows"]) -> None:
        """Make the batch consist of these requests."""
        self.deltas = None if self.deltas is None else self.deltas[rows.to(self.deltas.device)]

    def recall(self) -> None:
        """Make the model continue with this cache's prompt."""
        model = self._model()
        if model is not None:
            self.owner(model).rope_deltas = self.deltas

    def _installed(self, model: nn.Module) -> Iterator[RemovableHandle]:
        owner = self.owner(model)
        yield before_calls(owner, self._enter)
        yield after_calls(owner, self._leave)

    def _enter(self, module: nn.Module, args: tuple[Any, ...], kwargs: dict[str, Any]) -> None:
        if self._is_own(kwargs) and (kwargs["past_key_values"].progress or kwargs.get("position_ids") is None):
            self.recall()

    def _leave(self, module: Any, args: tuple[Any, ...], kwargs: dict[str, Any], output: Any) -> None:
        if self._is_own(kwargs) and module.rope_deltas is not None:
            # Beams of a request have its delta, which the model remembers once.
            deltas, rows = module.rope_deltas, kwargs["past_key_values"].requests
            self.deltas = deltas.repeat_interleave(max(rows // len(deltas), 1), 0)

    def _is_own(self, kwargs: dict[str, Any]) -> bool:
        """Return whether a call is with the cache."""
        past = kwargs.get("past_key_values")
        return past is not None and past is self._past()
