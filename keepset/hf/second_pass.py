"""`SecondPasses`: a task's tokens, or the prompt's own once more, run on top of the prompt's whole cache."""

from __future__ import annotations

import threading
import time
from collections.abc import Collection, Iterator, Mapping, Sequence
from contextlib import contextmanager
from dataclasses import dataclass, replace
from functools import cache
from typing import Any

import torch
from jaxtyping import Bool, Float, Int, Shaped
from torch import Tensor, nn
from torch.utils.hooks import RemovableHandle
from transformers import AutoTokenizer, PreTrainedModel
from transformers.cache_utils import Cache as TransformersCache
from transformers.cache_utils import LinearAttentionLayer

from keepset.core.feature import Feature, Needs, widened
from keepset.core.features.attention import SecondPass, SecondPassColumns
from keepset.errors import KeepsetError, UnsupportedModelError
from keepset.hf import latents
from keepset.hf.attention import AttentionInput, by_group, set_pending_attention
from keepset.hf.autocast import Autocast, resumed
from keepset.hf.forwards import DecoderCall
from keepset.hf.hooks import ModelHooks, before_calls, is_rotary
from keepset.hf.latents import LatentStore
from keepset.hf.layer import LogicalLayer
from keepset.hf.layer_input import position_offset
from keepset.hf.model_support import decoder_of
from keepset.hf.other_layers import HybridLayerState, one_request, states_of
from keepset.kernels.columns import ColumnStatistic
from keepset.kernels.second_pass import PackedSequence, SoftmaxScope, second_pass_attention

KeysAndValues = tuple[
    Float[Tensor, "batch kv_heads entries head_dim"], Float[Tensor, "batch kv_heads entries value_dim"]
]
"""Keys and values of one layer."""


class _Rotated(threading.local):
    """The newest arguments of a rotary embedding in one thread; such a module is given no cache."""

    given: tuple[Any, ...] = ()


@dataclass(frozen=True, eq=False)
class _Prompt:
    """A prompt that passes run on top of."""

    entries: Mapping[int, KeysAndValues]
    ids: Shaped[Tensor, "batch tokens *hidden"]
    axes: Int[Tensor, "axes batch tokens"] | None
    valid: Bool[Tensor, "batch tokens"] | None
    layers: Sequence[Any]
    first: Int[Tensor, " batch"]
    autocast: Autocast | None


class SecondPasses(ModelHooks):
    """Run tokens on top of a prompt while all layers still hold all entries, inside the last layer's attention.

    Requests run one by one, without padding, each as a call of the model's decoder with a cache that only looks at
    those entries. A hook on the decoder sees the prompt's tokens or embeddings.

    Attributes:
        seconds: time of each pass, by its `cost`.
    """

    def __init__(self, model: PreTrainedModel, past: Any, needs: Needs, tasks: Sequence[Tensor]) -> None:
        self._needs = needs.of(SecondPass)
        self._tasks = [_check_task(task, model) for task in tasks]
        self._repeat = Repeat.of(model) if any(needed.repeat for needed in self._needs) else None
        if self._repeat and tasks:
            raise KeepsetError("A prompt that is to be repeated is its own task: leave task_tokens out.")
        self.seconds: dict[SecondPass, float] = {}
        super().__init__(model, past)

    def forget(self) -> None:
        self._inputs: list[Tensor] = []
        self._axes: list[Tensor] = []
        self._deep = False
        self._newest = _Rotated()

    def run(
        self,
        entries: Mapping[int, KeysAndValues],
        up_to_event: AttentionInput,
        valid: Bool[Tensor, "batch tokens"] | None,
        layers: Sequence[Any],
    ) -> dict[int, dict[Feature[Any], SecondPassColumns]]:
        """Run all passes at the end of a prompt.

        Args:
            entries: keys and values of each layer, `[batch, kv_heads, tokens, ...]`.
            up_to_event: the prompt's newest tokens in its last layer.
            valid: which tokens of the prompt are no padding; None if all are.
            layers: the cache's layers.

        Returns:
            The statistics of every kind of pass by layer.
        """
        passes: dict[int, dict[Feature[Any], SecondPassColumns]] = {index: {} for index in entries}
        # Before a pass rotates tokens of its own.
        first = up_to_event.lengths + position_offset(self._newest.given, up_to_event.positions, up_to_event.valid)
        ids = self._tokens(up_to_event.end)
        axes = torch.cat(self._axes, 2)[:, :, : up_to_event.end] if self._axes else None
        prompt = _Prompt(entries, ids, axes, valid, layers, first.to(ids.device), up_to_event.autocast)
        for kind in dict.fromkeys(needed.cost for needed in self._needs):
            together = [needed for needed in self._needs if needed.cost == kind]
            names = set[ColumnStatistic]().union(*(needed.statistics for needed in together))
            start = time.perf_counter()
            per_layer = self._run(kind, names, prompt)
            self.seconds = {**self.seconds, kind: time.perf_counter() - start}
            for index, columns in per_layer.items():
                for needed in together:
                    statistics = {name: columns.statistics[name] for name in needed.statistics}
                    passes[index][needed] = replace(columns, statistics=statistics)
        return passes

    @torch.no_grad()
    def _run(
        self, kind: SecondPass, names: Collection[ColumnStatistic], prompt: _Prompt
    ) -> dict[int, SecondPassColumns]:
        ids, entries, valid = prompt.ids, prompt.entries, prompt.valid
        batch = len(ids)
        for task in self._tasks:
            if batch % len(task):  # where beams repeat requests, they repeat their tasks
                raise KeepsetError(
                    f"task_tokens has {len(task)} rows and the prompt {batch}: give one row, or one for every request."
                )
        received: dict[int, list[dict[ColumnStatistic, Tensor]]] = {index: [] for index in entries}
        tokens, opening = torch.zeros(2, batch, dtype=torch.long, device=ids.device)
        for request in range(batch):
            real = slice(None) if valid is None else valid[request]
            request_ids, axes = ids[request][real], None if prompt.axes is None else prompt.axes[:, request][:, real]
            if not len(request_ids):
                raise KeepsetError(
                    f"Request {request} has nothing but padding within the prompt, and a second pass needs a token of "
                    "every request: give a larger prompt_length."
                )
            tasks = [task[request // (batch // len(task))].to(request_ids.device) for task in self._tasks]
            parts = self._passes(kind, request_ids, axes, tasks)
            for index, statistics in self._run_request(prompt, request, len(request_ids), parts, names).items():
                received[index].append(statistics)
            tokens[request] = sum(len(part.tokens) for part in parts)
            opening[request] = parts[0].about.start if parts[0].about else 0
        passes = {}
        for index, rows in received.items():
            width = entries[index][0].shape[2]
            statistics = {name: widened([row[name] for row in rows], width) for name in names}
            passes[index] = SecondPassColumns(statistics, tokens, opening)
        return passes

    def _run_request(
        self, prompt: _Prompt, request: int, length: int, parts: list[Part], names: Collection[ColumnStatistic]
    ) -> dict[int, dict[ColumnStatistic, Tensor]]:
        """Run parts on top of one request.

        Args:
            prompt: what is known of the prompt.
            request: the row of the batch.
            length: its tokens without padding.
            parts: what to run.
            names: the statistics.

        Returns:
            Statistics of each layer's entries, `[query_heads, entries]`.
        """
        layers = prompt.layers
        caches: dict[int, _Entries] = {}
        for i, entries in prompt.entries.items():
            kind = _HybridEntries if isinstance(layers[i], HybridLayerState) else _Entries
            caches[i] = kind(entries, request, length, names)
            caches[i].readers, caches[i].layer = layers[i].readers, i if layers[i].store_type is LatentStore else None
        other_layers = {i: layer for i, layer in enumerate(layers) if i not in caches}
        states = any(isinstance(entry_cache, _HybridEntries) for entry_cache in caches.values())
        # Layers that are not keepset's would let one part see another.
        for together in _calls(parts, 1 if other_layers or states else _TOGETHER):
            for i, entry_cache in caches.items():
                entry_cache.pieces = [PackedSequence(len(part.tokens), part.about) for part in together]
                if isinstance(entry_cache, _HybridEntries):
                    vars(entry_cache).update(states_of(layers[i], slice(request, request + 1)))
            copies = {i: one_request(layer, request, length, prompt.valid) for i, layer in other_layers.items()}
            of_layers = [(caches | copies)[i] for i in range(len(layers))]
            with resumed(prompt.autocast):
                self._call(together, length, prompt.first[request], of_layers)
        return {i: entry_cache.received for i, entry_cache in caches.items()}

    def _tokens(self, length: int) -> Shaped[Tensor, "batch tokens *hidden"]:
        """Return the prompt's token ids, or embeddings, of this length."""
        if sum(part.shape[1] for part in self._inputs) < length:
            raise UnsupportedModelError(
                "keepset could not see the prompt's tokens; this model cannot run a second pass."
            )
        return torch.cat(self._inputs, 1)[:, :length]

    def _installed(self, model: nn.Module) -> Iterator[RemovableHandle]:
        decoder = decoder_of(model)
        yield before_calls(decoder, self._enter)
        for module in _rotary(decoder):
            yield before_calls(module, self._rotate)

    def _enter(self, module: nn.Module, args: tuple[Any, ...], kwargs: dict[str, Any]) -> None:
        past = self._past()
        if kwargs.get("past_key_values") is not past or past is None:
            return
        before = 0 if past.progress is None else past.progress.logical
        while sum(part.shape[1] for part in self._inputs) > before:  # of a call that was refused
            self._inputs, self._axes = self._inputs[:-1], self._axes[:-1]
        if (inputs := DecoderCall(args, kwargs).inputs) is not None:
            self._inputs = [*self._inputs, inputs.detach()]
            at = kwargs.get("position_ids")
            if isinstance(at, Tensor) and at.ndim == 3 and len(at) > 1:  # several axes, as images have (M-RoPE)
                self._axes = [*self._axes, at[-3:].detach()]  # before these three there may be a count of tokens
            # Some models add what they see to the hidden states of later layers, too.
            self._deep |= any("deepstack" in name and value is not None for name, value in kwargs.items())

    def _rotate(self, module: nn.Module, args: tuple[Any, ...], kwargs: dict[str, Any]) -> None:
        self._newest.given = *args, *kwargs.values()

    def _passes(
        self, kind: SecondPass, prompt: Tensor, axes: Int[Tensor, "axes tokens"] | None, tasks: list[Tensor]
    ) -> list[Part]:
        """Return what runs after one request's prompt.

        Args:
            kind: the feature.
            prompt: the request's token ids, or embeddings.
            axes: the model's positions of these tokens if they have several axes.
            tasks: token ids of questions that are asked in place of the prompt.
        """
        if self._repeat is None or not kind.repeat:
            if self._deep and not tasks:
                raise UnsupportedModelError(
                    "A second pass over this prompt cannot show its images, because the model adds them to several "
                    "layers: give task_tokens, or choose another method, such as snapkv."
                )
            if tasks or axes is None:
                return [Part(part) for part in tasks or prompt.split(kind.chunk or len(prompt))]
            chunks = zip(prompt.split(kind.chunk or len(prompt)), axes.split(kind.chunk or len(prompt), 1), strict=True)
            return [Part(part, positions=token_positions - token_positions.min()) for part, token_positions in chunks]
        if prompt.ndim > 1:
            raise KeepsetError("A prompt of embeddings cannot be asked for again in words: give token ids.")
        return [Part(tokens, about) for tokens, about in self._repeat.passes(prompt, kind.chunk)]

    def _call(self, parts: list[Part], length: int, first: Int[Tensor, ""], layers: list[Any]) -> None:
        model = self._model()
        assert model is not None
        decoder, reached = decoder_of(model), length + max(len(part.tokens) for part in parts)
        longest = getattr(model.config.get_text_config(decoder=True), "max_position_embeddings", None)
        if longest is not None and reached > longest and not list(_rotary(model)):
            raise UnsupportedModelError(
                f"A second pass after this prompt reaches a length of {reached}, but {type(model).__name__} has "
                f"learned only {longest} positions: give a shorter prompt."
            )
        tokens = torch.cat([part.tokens for part in parts])
        positions = first + torch.cat([part.places for part in parts], -1)[..., None, :]
        kind = "input_ids" if tokens.ndim == 1 else "inputs_embeds"
        with _unchanged_rotations(decoder):
            inputs = {kind: tokens[None], "past_key_values": TransformersCache(layers=layers)}
            decoder(**inputs, position_ids=positions, use_cache=True)


def takes_task_tokens(needs: Needs) -> bool:
    """Return whether a second pass can run a task's tokens; one that repeats the prompt is its own task."""
    passes = needs.of(SecondPass)
    return bool(passes) and not any(needed.repeat for needed in passes)


_TOGETHER = 512
"""Tokens of one call of the model: enough for products at full speed, but few compared with the prompt."""


@dataclass(frozen=True, eq=False)
class Part:
    """Tokens to run after a prompt.

    Attributes:
        tokens: their ids or embeddings.
        about: the scope of the statistics and the softmax; None: the whole prompt.
        positions: the model's own positions of them, from 0, if it has several axes; None: one after another.
    """

    tokens: Shaped[Tensor, "n *hidden"]
    about: SoftmaxScope | None = None
    positions: Int[Tensor, "axes n"] | None = None

    @property
    def places(self) -> Int[Tensor, "*axes n"]:
        """Return the positions of the tokens, from 0."""
        return torch.arange(len(self.tokens), device=self.tokens.device) if self.positions is None else self.positions


def _calls(parts: list[Part], most: int) -> list[list[Part]]:
    """Return parts in groups that run together: at most `most` tokens, or one part."""
    calls: list[list[Part]] = []
    for part in parts:
        if calls and sum(len(packed_part.tokens) for packed_part in [*calls[-1], part]) <= most:
            calls[-1].append(part)
        else:
            calls.append([part])
    return calls


_WHOLE = "\n\nRepeat the previous context exactly."
_PART = "\n\nRepeat the part of the previous context exactly, starting with "
_REMINDER = 8
"""How many of a chunk's last tokens introduce the next chunk."""

_SINKS = 4
"""How many first tokens every chunk's softmax sees if no chat template opens the prompt."""

_TURN = "\n\nAnswer: "
"""The text between the words and their answer if the tokenizer has no chat template."""
_MARK = "keepset"
"""A placeholder for a user's words, which shows what a chat template puts around them."""


@dataclass(frozen=True)
class Repeat:
    """Words by which a model is asked to repeat its prompt (KVzip, 2025, arXiv:2505.23416), in its tokens.

    Attributes:
        opening: the chat template's text before a user's words; a prompt's own opening is not repeated.
        whole: the request for the first chunk.
        part: the request for a later chunk; the last tokens of the chunk before follow it.
        turn: the text between the user's words and the model's.
    """

    opening: tuple[int, ...]
    whole: tuple[int, ...]
    part: tuple[int, ...]
    turn: tuple[int, ...]

    @classmethod
    def of(cls, model: PreTrainedModel) -> Repeat:
        """Return the words in the tokens of the tokenizer beside a model."""
        name = model.config.name_or_path or ""
        words = _words(name)
        vocabulary = getattr(model.get_input_embeddings(), "num_embeddings", None)
        if vocabulary is not None and max(words.whole + words.part + words.turn) >= vocabulary:
            raise KeepsetError(
                f"The tokenizer of {name!r} has tokens that the model does not know: give the model its own."
            )
        return words

    def prefix(self, prompt: Int[Tensor, " tokens"]) -> int:
        """Return how many tokens of a prompt are the chat template's opening; 0 if nothing follows it."""
        length = len(self.opening)
        return length if length < len(prompt) and tuple(prompt[:length].tolist()) == self.opening else 0

    def passes(self, prompt: Int[Tensor, " tokens"], chunk: int) -> Iterator[tuple[Int[Tensor, " more"], SoftmaxScope]]:
        """Yield for each chunk the tokens to run after the prompt, and the entries that they may attend to.

        Args:
            prompt: the tokens of one request.
            chunk: tokens of the prompt for each pass; 0 for all.
        """
        prefix = self.prefix(prompt)
        whole, part, turn = (prompt.new_tensor(words) for words in (self.whole, self.part, self.turn))
        before = prompt[:0]
        start = prefix
        for chunk_tokens in prompt[prefix:].split(chunk or len(prompt)):
            words = [part, before] if start > prefix else [whole]
            yield (
                torch.cat([*words, turn, chunk_tokens]),
                SoftmaxScope(prefix or min(_SINKS, start), start, start + len(chunk_tokens)),
            )
            before, start = chunk_tokens[-_REMINDER:], start + len(chunk_tokens)


@cache
def _words(name: str) -> Repeat:
    try:
        tokenizer: Any = AutoTokenizer.from_pretrained(name, trust_remote_code=False) if name else None
    except (OSError, ValueError, ImportError, RuntimeError):
        tokenizer = None
    if tokenizer is None:
        raise KeepsetError(
            f"To ask the model to repeat its prompt takes its tokenizer, and {name!r} has none: load the model from a "
            "folder, or by a name on the Hugging Face Hub, that has one."
        )
    opening, turn = "", _TURN
    if tokenizer.chat_template:
        marked = [{"role": "user", "content": _MARK}]
        chat = tokenizer.apply_chat_template(marked, tokenize=False, add_generation_prompt=True, enable_thinking=False)
        opening, separator, after = chat.rpartition(_MARK)
        turn = after if separator else _TURN
    texts = (opening, _WHOLE, _PART, turn)
    return Repeat(*(tuple(tokenizer.encode(text, add_special_tokens=False)) for text in texts))


class _Entries(LogicalLayer):
    """One request's entries of one layer; tokens attend to them, and are not added."""

    def __init__(self, entries: KeysAndValues, request: int, length: int, names: Collection[ColumnStatistic]) -> None:
        super().__init__()
        self._entries = entries[0][request, :, :length], entries[1][request, :, :length]
        self.logical, self._names = length, names
        self.received: dict[ColumnStatistic, Tensor] = {}
        self.pieces: list[PackedSequence] = []
        self.readers = 0
        self.layer: int | None = None
        self._sums: list[dict[str, Tensor]] = []

    def update(self, key_states: Tensor, value_states: Tensor, *args: Any, **kwargs: Any) -> tuple[Tensor, Tensor]:
        if self.layer is None:
            set_pending_attention(self._attend, key_states, value_states)
        else:
            latents.set_pending(self._attend, self.layer, key_states, value_states)
        return key_states, value_states

    def _attend(self, new: AttentionInput) -> Tensor:
        new.convert(self._entries[0].dtype)
        new_entries = new.key[0], new.value[0]
        output, sums = second_pass_attention(
            new.query[0], self._entries, new_entries, new.softmax, self._names, self.pieces
        )
        self._sums.append(sums)
        if len(self._sums) <= self.readers:
            set_pending_attention(self._attend, new.key, new.value)
            return output.transpose(0, 1)[None].contiguous()
        everybody, self._sums = self._sums, []
        if self.readers:
            sums = {
                name: by_group([head_sums[name] for head_sums in everybody], new.key.shape[1], 0)
                for name in self._names
            }
        self.received = {
            name: name.merge(self.received[name], sums[name]) if self.received else sums[name] for name in self._names
        }
        return new.finished(output.transpose(0, 1)[None].contiguous())


class _HybridEntries(LinearAttentionLayer, _Entries):  # type: ignore[override]
    """One request's entries, and a copy of its recurrent states, which tokens change."""

    def __init__(self, entries: KeysAndValues, request: int, length: int, names: Collection[ColumnStatistic]) -> None:
        LinearAttentionLayer.__init__(self)
        _Entries.__init__(self, entries, request, length, names)


def _check_task(task: Any, model: PreTrainedModel) -> Int[Tensor, "batch tokens"]:
    if not isinstance(task, Tensor) or task.ndim != 2 or not task.numel() or task.is_floating_point():
        raise KeepsetError("task_tokens is no tensor of token ids [batch, tokens], nor a list of such: give one.")
    vocabulary = getattr(model.get_input_embeddings(), "num_embeddings", int(task.max()) + 1)
    if int(task.min()) < 0 or int(task.max()) >= vocabulary:
        raise KeepsetError(f"task_tokens has ids that the model does not know: use those from 0 to {vocabulary - 1}.")
    return task


def _rotary(model: nn.Module) -> Iterator[nn.Module]:
    return filter(is_rotary, model.modules())


@contextmanager
def _unchanged_rotations(decoder: nn.Module) -> Iterator[None]:
    """Restore rotary embeddings afterwards: some adapt their frequencies to the longest position so far."""
    before = [(module, dict(vars(module)), dict(module._buffers)) for module in _rotary(decoder)]
    try:
        yield
    finally:
        for module, attributes, buffers in before:
            vars(module).update(attributes)
            module._buffers.update(buffers)
