"""`PromptInputs`: what a prompt is made of, as the model's decoder is given it."""

from __future__ import annotations

from collections.abc import Iterator
from typing import Any

import torch
from jaxtyping import Shaped
from torch import Tensor, nn
from torch.utils.hooks import RemovableHandle

from keepset.errors import UnsupportedModelError
from keepset.hf.hooks import ModelHooks, weakly


class PromptInputs(ModelHooks):
    """A forward pre-hook on the decoder that keeps the token ids, or embeddings, that go with one cache."""

    def forget(self) -> None:
        """Lets go of them."""
        self._parts: list[Tensor] = []

    def _installed(self, model: nn.Module) -> Iterator[RemovableHandle]:
        yield model.register_forward_pre_hook(weakly(self._enter), with_kwargs=True)

    def first(self, tokens: int) -> Shaped[Tensor, "batch tokens *hidden"]:
        """The first `tokens` of every request, padding included.

        Raises:
            UnsupportedModelError: the decoder was not called in a way that shows them.
        """
        if sum(part.shape[1] for part in self._parts) < tokens:
            raise UnsupportedModelError(
                "keepset could not see the prompt's tokens; this model cannot run a second pass."
            )
        return torch.cat(self._parts, 1)[:, :tokens]

    def _enter(self, module: nn.Module, args: tuple[Any, ...], kwargs: dict[str, Any]) -> None:
        if kwargs.get("past_key_values") is not self._past():
            return
        inputs = kwargs.get("inputs_embeds")
        if inputs is None:
            inputs = kwargs.get("input_ids", args[0] if args else None)
        if inputs is not None:
            self._parts = [*self._parts, inputs.detach()]
