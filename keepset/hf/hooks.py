"""`ModelHooks`: hooks on a model that serve one cache and keep neither the cache nor themselves alive.

Some of them find the images of a prompt, and keep the positions that a model gives tokens after them."""

from __future__ import annotations

import copy
import gc
import threading
import weakref
from abc import ABC, abstractmethod
from collections import deque
from collections.abc import Callable, Iterator, Sequence
from typing import Any, Self

import torch
from jaxtyping import Bool, Float, Int
from torch import Tensor, nn
from torch.utils.hooks import RemovableHandle
from transformers import PreTrainedConfig, PreTrainedModel

from keepset.core.budget import Ranges, runs
from keepset.core.features.runtime_features import Perplexity
from keepset.errors import KeepsetError, UnsupportedModelError
from keepset.hf.attention import AttentionInput, uncompiled
from keepset.hf.forwards import DecoderCall
from keepset.hf.layer_input import LayerInput, ModuleCall, cos_and_sin


class ModelHooks(ABC):
    """Hooks on a model that observe calls with one cache. They are removed when this object is deleted.

    The model may serve other caches in other threads meanwhile. So a hook either checks that a call is with this cache,
    or keeps its observation for the thread that made the call.

    Args:
        model: the model, which holds the hooks but not this object.
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
        _removals.catch_up()
        model = self._model()
        if self._removal is None and model is not None:
            self._removal = weakref.finalize(self, _removals.remove, list(self._installed(model)))

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
        """Forget what was seen. Forks do not share what they have seen."""

    @abstractmethod
    def _installed(self, model: nn.Module) -> Iterator[RemovableHandle]:
        """Install the hooks and yield their handles."""


def before_calls(module: nn.Module, method: Callable[..., Any]) -> RemovableHandle:
    """Call `method(module, args, kwargs)` before every call of a module, without holding the method's object.

    Args:
        module: any part of a model.
        method: a bound method; its result replaces arguments and keyword arguments unless it is None.

    Returns:
        The hook's handle. The hook does nothing once the method's object is gone.
    """
    return module.register_forward_pre_hook(_weakly(method, 3), with_kwargs=True)


def after_calls(module: nn.Module, method: Callable[..., Any], *, failed: bool = False) -> RemovableHandle:
    """Call `method(module, args, kwargs, output)` after every call of a module, without holding the method's object.

    Args:
        module: any part of a model.
        method: a bound method; its result replaces the output unless it is None.
        failed: whether to call it also after calls that raised an error.

    Returns:
        The hook's handle. The hook does nothing once the method's object is gone.
    """
    return module.register_forward_hook(_weakly(method, 4), with_kwargs=True, always_call=failed)


def _weakly(method: Callable[..., Any], count: int) -> Callable[..., Any]:
    """Return a hook that passes `count` arguments on to the method while its object lives.

    Args:
        method: a bound method.
        count: how many arguments it takes; a call with fewer does nothing.
    """
    reference = weakref.WeakMethod(method)

    @uncompiled
    def hook(*args: Any) -> Any:
        alive = reference()
        return None if alive is None or len(args) < count else alive(*args)

    return hook


class _Removals:
    """Removes hooks, but not while garbage is collected.

    A collection can begin while PyTorch goes through a module's hooks, which must not change then. What it deletes
    waits for the next hooks that are opened. Until then its hooks find that their object is gone, and do nothing.
    """

    def __init__(self) -> None:
        self._collecting = False
        self._waiting: deque[list[RemovableHandle]] = deque()
        gc.callbacks.append(self._note)

    def _note(self, phase: str, _: dict[str, int]) -> None:
        self._collecting = phase == "start"

    def remove(self, handles: list[RemovableHandle]) -> None:
        """Remove hooks now, or later if garbage is being collected."""
        self._waiting.append(handles)
        if not self._collecting:
            self.catch_up()

    def catch_up(self) -> None:
        """Remove the hooks that wait; several threads may do so at once."""
        while True:
            try:
                handles = self._waiting.popleft()
            except IndexError:
                return
            for handle in handles:
                handle.remove()


_removals = _Removals()


class _Calls(threading.local):
    """The calls that one thread has made and that are under way."""

    attention: tuple[ModuleCall, ...] = ()
    rotary: tuple[ModuleCall, ...] = ()


class AttentionHooks(ModelHooks):
    """Remember the newest call of an attention module and of rotary embeddings, for methods that need them.

    They also see calls with other caches, and hold nothing of a call once it is over, even if it has failed.
    """

    def forget(self) -> None:
        self._newest = _Calls()

    def fork(self, past: Any) -> Self:
        copied = super().fork(past)
        copied._newest = _Calls()  # each sees every call of the model
        return copied

    def layer_input(self, new: AttentionInput) -> LayerInput:
        """Return the input of the attention module whose call is under way."""
        module, rotary = new.module, None
        attention_call = next((call for call in self._newest.attention if call.module is module), None)
        if attention_call is None:
            raise UnsupportedModelError(
                f"keepset could not see the input of {type(module).__name__}; methods that look at hidden states "
                "do not support this model."
            )
        if (rotation := attention_call.kwargs.get("position_embeddings")) is not None:
            rotary = next((call for call in self._newest.rotary if _is_output(rotation, call)), None)
            if rotary is None or cos_and_sin(rotation)[0].ndim != 3:
                raise UnsupportedModelError(
                    f"keepset could not find the rotary embedding of {type(module).__name__}; methods that look "
                    "at future queries do not support this model."
                )
        return LayerInput(
            attention_call,
            rotary,
            new.query,
            new.positions,
            new.valid,
            new.position_ids,
            new.rows,
            autocast=new.autocast,
            absorb=new.absorb,
        )

    def _installed(self, model: nn.Module) -> Iterator[RemovableHandle]:
        for module in model.modules():
            if hasattr(module, "layer_idx"):
                yield before_calls(module, self._enter)
                yield after_calls(module, self._leave, failed=True)
            elif is_rotary(module):
                yield after_calls(module, self._rotated)
            if any(map(is_rotary, module.children())):
                yield after_calls(module, self._done, failed=True)

    def _enter(self, module: nn.Module, args: tuple[Any, ...], kwargs: dict[str, Any]) -> None:
        self._newest.attention = (*self._newest.attention, ModuleCall(module, args, kwargs))

    def _rotated(self, module: nn.Module, args: tuple[Any, ...], kwargs: dict[str, Any], output: Any) -> None:
        self._newest.rotary = (*self._newest.rotary[-1:], ModuleCall(module, args, kwargs, output))

    def _leave(self, module: nn.Module, *_: Any) -> None:
        calls = self._newest.attention
        while calls and calls[-1].module is not module:
            calls = calls[:-1]
        self._newest.attention = calls[:-1]

    def _done(self, *_: Any) -> None:
        self._newest.rotary = ()


def _is_output(rotation: Any, call: ModuleCall) -> bool:
    return rotation is call.output if isinstance(rotation, Tensor) else rotation[0] is call.output[0]


def is_rotary(module: nn.Module) -> bool:
    """Return whether a module is a rotary embedding."""
    return "RotaryEmbedding" in type(module).__name__


class PerplexityHooks(ModelHooks):
    """Hooks around the whole model that see its logits for the newest tokens of the calls with one cache.

    A caller may ask only for the last token's logits, as `generate` does. The model then computes as many as needed,
    and the caller gets those that it asked for. The cache's `on_logits` runs after every call.

    Args:
        model: with a language head.
        past: the cache.
        needs: the perplexity's number of tokens.

    Attributes:
        watching: whether a call of the model with the cache is under way.
    """

    def __init__(self, model: nn.Module, past: Any, needs: Sequence[Perplexity]) -> None:
        self._needs, self._longest = needs, max(needed.tokens for needed in needs)
        super().__init__(model, past)

    def forget(self) -> None:
        self.watching = False
        self._ids: Tensor | None = None
        self._wanted: int | Tensor = 0
        self._losses: list[Tensor] = []
        self._last: list[Tensor] = []

    def _installed(self, model: nn.Module) -> Iterator[RemovableHandle]:
        yield before_calls(model, self._enter)
        yield after_calls(model, self._leave)

    def _enter(self, module: nn.Module, args: tuple[Any, ...], kwargs: dict[str, Any]) -> Any:
        if kwargs.get("past_key_values") is not self._past():
            return None
        self.watching = True
        self._ids = DecoderCall(args, kwargs).ids
        if self._ids is None:
            raise KeepsetError("Embeddings have no perplexity, which this recipe looks at: give token ids.")
        self._wanted = kwargs.get("logits_to_keep", 0)
        if isinstance(self._wanted, int) and self._wanted == 0:
            return None
        least = self._longest + 1
        enough = isinstance(self._wanted, int) and _ends_with_tokens(kwargs.get("attention_mask"), self._ids)
        return args, {**kwargs, "logits_to_keep": max(self._wanted, least) if enough else 0}

    @torch.no_grad()
    def _leave(self, module: nn.Module, args: tuple[Any, ...], kwargs: dict[str, Any], output: Any) -> Any:
        if not self.watching or kwargs.get("past_key_values") is not self._past():
            return None
        past, self.watching = kwargs["past_key_values"], False
        logits = getattr(output, "logits", None)
        if not isinstance(logits, Tensor):
            raise UnsupportedModelError(
                f"keepset could not see the logits of {type(module).__name__}, which this recipe looks at: call a "
                "model with a language head, with return_dict=True."
            )
        assert self._ids is not None
        valid = past.progress.valid
        self._add(logits, self._ids, None if valid is None else valid[:, -self._ids.shape[1] :])
        if isinstance(self._wanted, Tensor):
            output.logits = logits[:, self._wanted]
        elif 0 < self._wanted < logits.shape[1]:
            output.logits = logits[:, -self._wanted :].clone()
        self._ids = None
        perplexities = {}
        for needed in self._needs:
            # The first token of all is left out, because no logits predict it.
            newest = (row[-needed.tokens :] for row in self._losses)
            means = [row.mean() if len(row) else row.new_tensor(torch.inf) for row in newest]
            perplexities[needed] = torch.stack(means).exp()
        past.on_logits(perplexities)
        return output

    def _add(
        self, logits: Float[Tensor, "batch newest vocabulary"], ids: Tensor, valid: Bool[Tensor, "batch tokens"] | None
    ) -> None:
        newest, whole = logits.shape[1], logits.shape[1] == ids.shape[1]
        batch = len(ids)
        self._losses = list(self._losses) or [logits.new_zeros(0, dtype=torch.float32)] * batch
        last = self._last or [logits[0, :0]] * batch
        self._last = []
        for row in range(batch):
            exists = slice(None) if valid is None else valid[row, -newest:]
            row_logits, tokens = logits[row][exists], ids[row, -newest:][exists]
            # The logits for the first of these tokens came with the last call, unless tokens lie between.
            scored_logits = torch.cat([last[row] if whole else row_logits[:0], row_logits])
            foretold = scored_logits[:-1].float().log_softmax(-1)
            losses = -foretold.gather(-1, tokens[len(tokens) - len(foretold) :, None].to(foretold.device))[:, 0]
            self._losses[row] = torch.cat([self._losses[row], losses])[-self._longest :]
            self._last.append(scored_logits[-1:].clone())


def _ends_with_tokens(mask: Tensor | None, ids: Tensor) -> bool:
    if mask is None:
        return True
    new = mask[:, -ids.shape[1] :].bool()
    return mask.ndim == 2 and not bool((new[:, :-1] & ~new[:, 1:]).any())


_NAMES = ("image_token_id", "image_token_index", "video_token_id", "video_token_index")
"""Configurations' names for the token that images replace."""


def image_token_ids(config: PreTrainedConfig) -> tuple[int, ...]:
    """Return the ids of tokens that stand for images and videos, as the configuration of a whole model names them."""
    parts = [config, getattr(config, "vision_config", None)]
    found = (getattr(part, name, None) for part in parts for name in _NAMES)
    return tuple(dict.fromkeys(token for token in found if isinstance(token, int)))


def require_image_tokens(model: PreTrainedModel, kind: str) -> None:
    """Check that a model's images can be told from its text, for a recipe that protects one of them.

    Args:
        model: a model that may see images.
        kind: what the recipe protects, "image" or "text".

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
            self._ids = DecoderCall(args, kwargs).ids

    def _leave(self, *_: Any) -> None:
        self._ids = None

    def found(
        self, positions: Int[Tensor, "batch n"], real: Bool[Tensor, "batch n"] | None
    ) -> tuple[Ranges, ...] | None:
        """Return where images are among the tokens of the call that is under way; None if it was given no token ids.

        Args:
            positions: positions of the tokens, counted from each request's first.
            real: which of them are no padding; None if all are.
        """
        if self._ids is None or self._ids.shape != positions.shape:
            return None
        ids = self._ids.to(positions.device)
        images = torch.isin(ids, torch.tensor(self._tokens, dtype=torch.long, device=ids.device))
        images = images if real is None else images & real
        return tuple(runs(row[in_row].tolist()) for row, in_row in zip(positions, images, strict=True))


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
