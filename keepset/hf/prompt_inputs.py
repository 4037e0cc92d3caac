"""`PromptInputs`: what a prompt is made of, as the model's decoder is given it."""

from __future__ import annotations

import weakref
from typing import Any

import torch
from jaxtyping import Shaped
from torch import Tensor, nn
from torch.utils.hooks import RemovableHandle

from keepset.errors import KeepsetError
from keepset.hf.hooks import remove, weakly


class PromptInputs:
    """A forward pre-hook on the decoder that keeps the token ids, or embeddings, that go with one cache.

    The model holds the hook, but neither this nor the cache.
    """

    def __init__(self, decoder: nn.Module, past: Any) -> None:
        self._decoder, self._past = weakref.ref(decoder), weakref.ref(past)
        self._parts: list[Tensor] = []
        self._handles: list[RemovableHandle] = []
        weakref.finalize(self, remove, self._handles)
        self.open()

    def open(self) -> None:
        """Installs the hook where it is not."""
        decoder = self._decoder()
        if not self._handles and decoder is not None:
            self._handles.append(decoder.register_forward_pre_hook(weakly(self._enter), with_kwargs=True))

    def close(self) -> None:
        """Removes the hook and forgets what it saw."""
        remove(self._handles)
        self._parts = []

    def fork(self, past: Any) -> PromptInputs:
        """The same for another cache."""
        decoder = self._decoder()
        assert decoder is not None
        twin = PromptInputs(decoder, past)
        twin._parts = list(self._parts)
        if not self._handles:
            twin.close()
        return twin

    def first(self, tokens: int) -> Shaped[Tensor, "batch tokens *hidden"]:
        """The first `tokens` of every request, padding included.

        Raises:
            KeepsetError: the decoder was not called in a way that shows them.
        """
        if sum(part.shape[1] for part in self._parts) < tokens:
            raise KeepsetError("keepset could not see the prompt's tokens; this model cannot run a second pass.")
        return torch.cat(self._parts, 1)[:, :tokens]

    def _enter(self, module: nn.Module, args: tuple[Any, ...], kwargs: dict[str, Any]) -> None:
        if kwargs.get("past_key_values") is not self._past():
            return
        given = kwargs.get("inputs_embeds")
        if given is None:
            given = kwargs.get("input_ids", args[0] if args else None)
        if given is not None:
            self._parts.append(given.detach())
