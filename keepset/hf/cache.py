"""`Cache`: a transformers cache that compresses itself by a recipe."""

from __future__ import annotations

import copy
import functools
import logging
import time
from collections.abc import Callable, Mapping, Sequence
from dataclasses import replace
from operator import attrgetter
from pathlib import Path
from typing import Any, Never

import torch
from jaxtyping import Int
from torch import Tensor
from transformers import PreTrainedModel

from keepset.core.budget import Budget, Ranges
from keepset.core.features.attention import SecondPass
from keepset.core.features.runtime_features import QuantizedEntries
from keepset.core.keep_set import NAN_NOTICED, KeepSet, LayerKeepSet, LazyHostInts
from keepset.core.method import Method, forecast_quotas
from keepset.core.observation import Observation
from keepset.core.traits import FULL_BYTES
from keepset.defaults import ANSWERED_AT_ONCE, default_recipe
from keepset.errors import KeepsetError
from keepset.hf import saved
from keepset.hf.attention import AttentionInput, without_autocast
from keepset.hf.hooks import require_image_tokens
from keepset.hf.layer import LayerState
from keepset.hf.layer_stack import layers_of, stacks_of, unstacked
from keepset.hf.model_support import check_model
from keepset.hf.observed_cache import ObservedCache
from keepset.hf.progress import Event, Progress
from keepset.hf.recipe_notes import warn_beyond_budget
from keepset.hf.store import StoredObservation
from keepset.kernels.dispatch import is_async_device
from keepset.recipe import Recipe, check_schedule

logger = logging.getLogger(__name__)

EventCallback = Callable[[Observation, Budget, KeepSet], None]
"""Called for every layer at every event with the method's observation, the budget, and the entries that stay."""


class Cache(ObservedCache):
    """A cache for `model.generate(..., past_key_values=cache)` that keeps what a recipe says.

    Creating one sets the model's attention implementation to keepset's, which behaves as `sdpa` for every
    other cache. The prompt is compressed layer by layer while it is prefilled. Tokens after it stay, unless the
    recipe has `every=`: then all entries are compressed again after so many tokens. Tokens that are fed
    together see the entries before the newest event among them. A cache serves one conversation: further
    `generate` calls continue on it.

    Args:
        model: a decoder-only transformers model, perhaps with adapters in PEFT's wrapper.
        recipe: a text such as `"snapkv(keep=0.25)"`, or a `Recipe`. If none is named, the default for a prompt that is
            answered at once is taken (`keepset.defaults`), which a warning says once for each model.
        task_tokens: for methods with a second pass: the tokens of a question that is known, `[batch, tokens]`, which
            then run instead of the prompt's own; one row, or one for every request. A list gives several questions.
        prompt_length: tokens of the prompt, padding included. Needed only where the first forward is not
            the whole prompt and nothing else: with `prefill_chunk_size` and with assisted generation.
        history: keep the KeepSet of every event; otherwise `events` has that of the newest and only figures of others.
        observer: is called with every layer's observation and what was kept of it; its time is not the event's.

    Raises:
        KeepsetError: the recipe or the model cannot be used.
    """

    def __init__(
        self,
        model: PreTrainedModel,
        recipe: str | Recipe | None = None,
        *,
        task_tokens: Tensor | Sequence[Tensor] | None = None,
        prompt_length: int | None = None,
        history: bool = False,
        observer: EventCallback | None = None,
    ) -> None:
        model = check_model(model)
        if recipe is None:
            name = model.config.name_or_path or ""
            recipe, why = default_recipe(name, name or "this model", ANSWERED_AT_ONCE)
            _say_once(why)
        self.recipe = (recipe if isinstance(recipe, Recipe) else Recipe.parse(recipe)).require_budget()
        check_schedule(self.recipe)
        for kind in self.recipe.budget.kinds:
            require_image_tokens(model, kind)
        needs = self.recipe.method.traits.needs
        tasks = [task_tokens] if isinstance(task_tokens, Tensor) else task_tokens or []
        if task_tokens is not None and not needs.of(SecondPass):
            raise KeepsetError(f"{self.recipe.method.name} is not aware of a task: leave task_tokens out.")
        if task_tokens is not None and not tasks:
            raise KeepsetError("task_tokens has no task: give the tokens of one, or leave it out.")
        super().__init__(model, needs, prompt_length, self.recipe.schedule, tasks)
        if self.recipe.method.traits.across_layers:
            self._waits_for_all_layers = True
            reason = "looks across layers, so it cannot take drafted tokens together with the prompt"
            self._no_drafts = self._no_drafts or f"{self.recipe.method.name} {reason}"
        self._stacks_layers = all(
            feature in self._from_files or isinstance(feature, QuantizedEntries) for feature in needs
        )
        self.events: list[Event] = []
        self.history = history
        self.observer = observer
        # Events that some layers have not reached yet, by length.
        self._unfinished: dict[int, CompressionEvent] = {}
        # The arguments and the result of the newest `_num_kept`.
        self._forecast: tuple[tuple[Any, ...], list[list[int]]] | None = None
        # The arguments and the result of the newest `_budget`.
        self._in_entries: tuple[tuple[Any, ...], Budget] | None = None
        # Tokens of which a share is taken between turns.
        self._said: int | None = None
        # Where all before the first user's message is, if the recipe protects it.
        self._system: Ranges | None = None

    @classmethod
    def load(cls, path: str | Path, model: PreTrainedModel) -> Cache:
        """Return the cache that `save` has written, ready to continue.

        Args:
            model: the model that the context is of; it serves no other.

        Raises:
            KeepsetError: an argument is of another kind, or the file is not a saved context, damaged, of another
                version or of another model.
        """
        if not isinstance(path, str | Path):
            raise KeepsetError(
                f"Cache.load was given {type(path).__name__} as the path: give the file first, then the model."
            )
        model = check_model(model)
        context = saved.load(Path(path), model)
        cache = cls(model, context.recipe)
        context.restore(cache)
        cache.events = [] if context.event is None else [context.event]
        return cache

    @classmethod
    def from_prompt(
        cls, model: PreTrainedModel, recipe: str | Recipe, prompt: ObservedCache, observations: Sequence[Observation]
    ) -> Cache:
        """Return this recipe's cache of a prompt that another cache has watched.

        It is exact, because a prompt is compressed after its attention: one prefill serves any number of recipes.

        Args:
            prompt: the cache that the prompt was fed to, such as a `Recorder`.
            observations: of all its layers, with what the recipe's method needs; they stay as they are.

        Raises:
            KeepsetError: the recipe cannot be used, or compresses more than the prompt.
        """
        cache = cls(model, recipe)
        if cache.schedule.every is not None or cache.schedule.turns:
            option, when = ("turns=True", "between turns") if cache.schedule.turns else ("every=", "while decoding")
            reason = f"compresses {when}, but a shared prefill serves the prompt's compression only"
            raise KeepsetError(f"{cache.recipe} {reason}: leave {option} out.")
        cache.stop_watching()
        for index, prompt_layer in enumerate(prompt.layers):
            if index in cache.managed_layers:
                cache.managed_layers[index].copy_states(prompt_layer)
            else:
                cache.layers[index] = copy.deepcopy(prompt_layer)
        if prompt.progress is not None:
            cache.progress, cache.adapters = copy.copy(prompt.progress), prompt.adapters
            cache.set_position_offsets(None if prompt._rope is None else prompt._rope.deltas)
            for layer in cache.managed_layers.values():
                layer.logical = cache.progress.logical
            with without_autocast(prompt.progress.lengths.device):
                if observations:
                    cache._choose(list(observations))
        return cache

    def __repr__(self) -> str:
        if self.progress is None:
            return f"Cache({self.recipe}: empty)"
        stores = [layer.store for layer in self.managed_layers.values() if layer.store is not None]
        heads = sum(store.kv_heads * store.batch for store in stores)
        mean_entries = sum(store.entries for store in stores) / max(heads, 1)
        counted = f"{self.nbytes_counted / 1e6:.1f} MB of {self.nbytes_counted_full / 1e6:.1f} in 16 bits"
        fixed = f", {self.nbytes_fixed / 1e6:.1f} of them in windows and states" if self.nbytes_fixed else ""
        allocated = f"{self.nbytes / 1e6:.1f} MB allocated{fixed}"
        return f"Cache({self.recipe}: {mean_entries:.0f} of {self.progress.logical} tokens, {counted}; {allocated})"

    @property
    def nbytes_entries(self) -> int:
        """Bytes of the present entries; the rest of `nbytes` is for tokens to come and for the next event."""
        stored = [(layer, layer.store) for layer in self.managed_layers.values() if layer.store is not None]
        return self.nbytes - sum(layer.nbytes - store.entries_nbytes for layer, store in stored)

    @property
    def nbytes_full(self) -> int:
        """Bytes of keys and values of all tokens so far, and of what other layers hold now."""
        total = self.nbytes
        for layer in self.managed_layers.values():
            if layer.store is not None:
                heads = layer.store.heads
                entry = sum(heads.sizes) * heads.dtype.itemsize
                total += layer.store.batch * layer.store.kv_heads * layer.logical * entry - layer.nbytes
        return total

    @property
    def nbytes_counted(self) -> int:
        """Bytes of the present entries as `Budget.bytes` counts them.

        That is in 16 bits, whatever the model's type, and without layers that keepset leaves alone.
        """
        total, traits = 0, self.recipe.method.traits
        for layer in self.managed_layers.values():
            if layer.store is not None:
                sizes = layer.store.heads.sizes
                twice = 0 if layer.store.residual is None else layer.store.residual.entries
                total += layer.store.entries * traits.entry_bytes(*sizes) + twice * traits.layer_bytes(*sizes)
        return total

    @property
    def nbytes_counted_full(self) -> int:
        """Bytes of a full 16-bit cache of all tokens so far, counted alike."""
        tokens = 0 if self.progress is None else sum(self.progress.tokens)
        stores = [layer.store for layer in self.managed_layers.values() if layer.store is not None]
        return sum(store.kv_heads * tokens * FULL_BYTES * sum(store.heads.sizes) for store in stores)

    @property
    def share(self) -> float:
        """`nbytes_counted` as a share of `nbytes_counted_full`; 1.0 of an empty cache."""
        full = self.nbytes_counted_full
        return self.nbytes_counted / full if full else 1.0

    @property
    def keep_set(self) -> KeepSet | None:
        """Entries that the newest compression kept; None before the first."""
        return self.events[-1].keep_set if self.events else None

    def trim(self) -> None:
        """Free the places that are reserved for tokens to come; they are allocated again when needed."""
        for layer in self.managed_layers.values():
            if layer.store is not None:
                layer.store.trim()

    def fork(self) -> Cache:
        """Return an independent copy: what is appended to one is not seen by the other.

        Raises:
            KeepsetError: a forward with this cache was interrupted.
        """
        self.require_whole_forward()
        copied = object.__new__(type(self))
        vars(copied).update(vars(self))
        copied.progress = copy.copy(self.progress)
        copied.events, copied._unfinished, copied._waiting = list(self.events), {}, []
        for name in ("_hooks", "_second", "_perplexity", "_images", "_rope"):
            hooks = getattr(self, name)
            setattr(copied, name, None if hooks is None else hooks.fork(copied))
        copied.managed_layers = {index: layer.fork() for index, layer in self.managed_layers.items()}
        copied.layers = [
            copied.managed_layers.get(index) or copy.deepcopy(layer) for index, layer in enumerate(self.layers)
        ]
        return copied

    def __copy__(self) -> Cache:
        return self.fork()

    def __deepcopy__(self, memo: dict[int, Any]) -> Cache:
        return self.fork()

    def __reduce_ex__(self, protocol: Any) -> Never:
        """Refuse to be pickled, as also `torch.save` would do.

        Raises:
            KeepsetError: always.
        """
        raise KeepsetError(
            "A keepset.Cache belongs to a model and cannot be pickled: write it with cache.save(path), and read it "
            "with keepset.Cache.load(path, model)."
        )

    def save(
        self,
        path: str | Path,
        *,
        force: bool = False,
        model_name: str | None = None,
        token_ids: Sequence[int] | None = None,
        opening: int = 0,
        joint: Sequence[int] = (),
    ) -> None:
        """Write what is cached into one file, whole or not at all.

        Args:
            force: replace a file that is there.
            model_name: the name or folder by which the model is found, if not the one that it was loaded by.
            token_ids: those of the cached text of one request, if a server is to find the file by them.
            opening: how many of them every message begins with (by its chat template), also a question.
            joint: tokens that then come between the text and the question.

        Raises:
            KeepsetError: the file exists, there is no whole prompt yet, `token_ids` are not as many as its tokens, the
                model has layers of a kind that cannot be saved, or the path cannot be written to.
        """
        model = self._model_ref()
        if model is None:
            raise KeepsetError("The model of this cache is gone: keep it until the cache is saved.")
        saved.check_new(path, force)
        name = model.config.name_or_path or "" if model_name is None else model_name
        event = self.events[-1] if self.events else None
        text = None if token_ids is None else saved.Text(token_ids, opening, joint)
        saved.save(Path(path), self, str(self.recipe), event, model, name, text)

    def ask(
        self, input_ids: Int[Tensor, "rows tokens"], attention_mask: Int[Tensor, "rows tokens"] | None = None
    ) -> dict[str, Any]:
        """Return arguments for `model.generate` to continue with these tokens on a fork; the cache does not change.

        Args:
            input_ids: any number of rows for a cache of one request, else a row for each request.
            attention_mask: the mask of these tokens, if some are padding, which recurrent states do not allow.

        Returns:
            Keyword arguments. The answer begins with these tokens. The cached tokens come before them but are not
            among the ids, so penalties for repetition do not see them.

        Raises:
            KeepsetError: these are no tokens, there is no whole prompt yet, or the rows do not fit it.
        """
        if not isinstance(input_ids, Tensor) or input_ids.ndim != 2 or input_ids.is_floating_point():
            raise KeepsetError(
                "ask takes a question's tokens, [rows, tokens], as a tokenizer gives them: write "
                "cache.ask(**tokenizer(question, add_special_tokens=False, return_tensors='pt'))."
            )
        progress = self.require_prompt()
        requests, rows = len(progress.lengths), len(input_ids)
        if not input_ids.numel() or requests not in (1, rows):
            raise KeepsetError(
                f"The input has {rows} rows of {input_ids.shape[1]} tokens, and the cache {requests} requests: give at "
                "least one token for each of them."
            )
        copied = self.fork()
        if rows != requests:
            copied.batch_repeat_interleave(rows)
        new = torch.ones_like(input_ids) if attention_mask is None else attention_mask
        before = new.new_ones(1, progress.logical) if progress.valid is None else progress.valid.to(new)
        return {
            "input_ids": input_ids,
            "attention_mask": torch.cat([before.expand(rows, -1), new], 1),
            "past_key_values": copied,
        }

    def reset(self) -> None:
        super().reset()
        self.events.clear()
        self._unfinished.clear()

    @torch.no_grad()
    def compact(self, said: int | None = None, tokens: int | None = None, system: Ranges | None = None) -> None:
        """Compress all that is held, between two turns, by a recipe with `turns=True`.

        The recipe looks at the queries of the turn that ends: of the tokens since the newest compression, or since
        tokens were taken back. Without such tokens nothing is compressed.

        Args:
            said: of how many tokens the recipe's share is one; None for all tokens so far.
            tokens: how many tokens the next turn goes on from, padding included; None for all. Later ones are taken
                back once all are compressed, however many: a client may continue with another answer than it got.
            system: where all before the first user's message is, for a recipe that protects it.

        Raises:
            KeepsetError: the recipe does not compress between turns, there is no whole prompt yet, requests of
                different lengths have no share in common, or windows or states of the model cannot take tokens back.
                Nothing has changed then.
        """
        if not self.schedule.turns:
            raise KeepsetError(f"{self.recipe} does not compress between turns: add turns=True to it.")
        progress = self.require_prompt()
        if tokens is not None and not 0 < tokens <= progress.logical:
            raise KeepsetError(
                f"tokens={tokens} is out of range: the next turn goes on from 1 to {progress.logical} tokens, all that "
                "the cache has."
            )
        if system is None and self.recipe.budget.protects_system:
            raise KeepsetError(
                "protect='system' keeps what comes before the first user's message: give system= its tokens, such as "
                "[(0, 40)], or take keepset.Conversation, which finds them."
            )
        self._system = None if system is None else tuple(system)
        removed = 0 if tokens is None else progress.logical - tokens
        others = self._without_newest(progress, removed)
        if progress.turn != progress.logical:
            self._compact(progress, said)
        self._take_back(removed, others, is_whole=False)

    def _compact(self, progress: Progress, said: int | None) -> None:
        if said is None and len(set(progress.tokens)) > 1 and not isinstance(self.recipe.budget.keep, int):
            raise KeepsetError(
                "The requests have different lengths, and a share between turns is one of one number of tokens: give "
                "said=, or a recipe with a number of entries such as keep=512."
            )
        self._said = progress.tokens[0] if said is None else said
        self._is_changed = True  # until all layers are compressed
        with without_autocast(progress.lengths.device):
            for layer in self.managed_layers.values():
                if (last := layer.end_turn(progress.lengths, progress.valid)) is not None:
                    self._observe_event(layer, last)
        for layer in self.managed_layers.values():
            layer.collector.begin_turn(progress.logical, progress.lengths)
        progress.turn, self._is_changed = progress.logical, False

    def leave_out(self, spans: Sequence[tuple[int, int]]) -> None:
        """Drop the entries of some tokens. Nothing is computed again, and later tokens keep their positions.

        What came after these tokens has read them. Tokens up to here cannot be taken back any more.

        Args:
            spans: positions in each request, `(first, end)` without `end`.

        Raises:
            KeepsetError: a span is none of tokens that the cache holds, or the model has states or windows, from which
                no token can be left out.
        """
        if not spans:
            return
        progress = self.require_prompt()
        for first, end in spans:
            if not 0 <= first < end <= min(progress.tokens):
                raise KeepsetError(
                    f"({first}, {end}) is no span of tokens: give the first token and the one after the last, of the "
                    f"{min(progress.tokens)} tokens that every request has."
                )
        if not all(type(layer) is LayerState for layer in self.layers):
            raise KeepsetError(
                "Recurrent states and sliding windows of this model have read all tokens, so none can be left out: "
                "make a new cache of the text without them."
            )
        for layer in self.managed_layers.values():
            layer.leave_out(spans)
        progress.compressed_at = progress.logical

    def _num_kept(self, layer: LayerState, up_to_event: AttentionInput) -> Sequence[int] | None:
        """Return how many entries of each head will stay, so that the host need not wait for the device.

        Args:
            layer: the layer.
            up_to_event: the tokens up to the event.
        """
        progress, method = self.progress, self.recipe.method
        if not (is_async_device(up_to_event.key.device) and method.traits.count_known_on_host):
            return None
        assert progress is not None
        head_entries = layer.held(up_to_event)
        if up_to_event.end > progress.prompt or self.schedule.turns:
            later_counts = [0] * len(head_entries) if layer.after_event is None else layer.after_event.counts
            lengths = [tokens - later for tokens, later in zip(progress.tokens, later_counts, strict=True)]
        else:  # nothing was dropped yet
            lengths = [heads[0] for heads in head_entries]
        if method.traits.fixed_total:  # the average head gives the same number for a layer
            head_entries = [[sum(heads) // len(heads)] * len(heads) for heads in head_entries]
        # Of all layers at once, since they hold the same: unless the event before has left them different numbers, or
        # their heads have other sizes.
        layers = self.compressed_layers
        key, value = layer.store_type.stored(up_to_event.key[:0], up_to_event.value[:0])
        budget = self._budget([(key.shape[-1], value.shape[-1])])
        basis = budget, head_entries, lengths, progress.prompt_tokens, layers, layers
        if self._forecast is None or self._forecast[0] != basis:
            quotas = forecast_quotas(method, *basis, self._from_files)
            self._forecast = basis, quotas.unflatten(0, (len(layers), -1)).flatten(1).tolist()
        return self._forecast[1][layers.index(layer.index)]

    def _budget(self, sizes: list[tuple[int, int]]) -> Budget:
        """Return the budget in entries for layers whose entries have these sizes; computed once per size."""
        images = None if self.progress is None else self.progress.images
        basis = sizes, images, self._said, self._system
        if self._in_entries is None or self._in_entries[0] != basis:
            budget = self.recipe.budget_of_sizes(sizes).located(images)
            budget = budget if self._system is None else budget.with_system(self._system)
            self._in_entries = basis, budget if self._said is None else budget.of_tokens(self._said)
        return self._in_entries[1]

    def _choose(self, observations: list[Observation]) -> None:
        """Compress the observed layers: one by one, or together where the method looks across them."""
        assert self.progress is not None and self.progress.compressed_at is not None
        length, across_layers = self.progress.compressed_at, self.recipe.method.traits.across_layers
        if length not in self._unfinished:
            self._unfinished[length] = CompressionEvent(length, self.recipe.method, self.managed_layers)
        event = self._unfinished[length]
        stacks = stacks_of(observations, across_layers) if self._stacks_layers else observations
        for group in [stacks] if across_layers else [[stack] for stack in stacks]:
            members = [member for stack in group for member in layers_of(stack)] if self._stacks_layers else group
            budget = self._budget([member.entry_sizes for member in members])
            keep_set = event.compress(group, members, budget)
            if self.observer is not None:
                for observation in members:
                    self.observer(observation, budget, keep_set)
        if len(event.kept) < len(self.managed_layers):
            return
        del self._unfinished[length]
        finished = event.finished()
        if event.has_nan:
            _say_once(_NAN_SCORES.format(recipe=self.recipe.text()))
        if not self.events and budget.is_exceeded(max(self.progress.tokens)):
            warn_beyond_budget(self.recipe, budget.keep, max(self.progress.tokens))
        if self.events and not self.history:
            self.events[-1] = replace(self.events[-1], keep_set=None)
        self.events.append(finished)
        if self.schedule.every is None and not self.schedule.turns:
            self.stop_watching()


class CompressionEvent:
    """A compression under way: has a method choose and layers drop the rest, and gathers what an `Event` says of it.

    Layers reach it one after another, or all together.

    Args:
        length: logical length of the cache at the event, padding included.
        method: chooses what stays.
        layers: all layers that take part, by their indices.

    Attributes:
        kept: what stays of the layers that have reached it.
    """

    def __init__(self, length: int, method: Method, layers: Mapping[int, LayerState]) -> None:
        self._length, self._method, self._layers = length, method, layers
        self.kept: list[LayerKeepSet] = []
        self._entries, self._nbytes, self._seconds = 0, 0, 0.0
        self._with_nan: list[LazyHostInts] = []
        """Whether scores were NaN."""

    def compress(self, chosen_from: list[Observation], members: Sequence[Observation], budget: Budget) -> KeepSet:
        """Have the method choose, and each layer store what stays of it alone.

        Args:
            chosen_from: the observations that the method gets together; each may be a stack of layers.
            members: those of the single layers.
            budget: the recipe's, in entries.

        Returns:
            What stays, with a part for each layer.
        """
        start, across_layers = time.perf_counter(), self._method.traits.across_layers
        noticed = NAN_NOTICED.set(self._with_nan)
        try:
            keep_set = self._method.select_all(chosen_from, budget)
        finally:
            NAN_NOTICED.reset(noticed)
        if across_layers:
            keep_set.count(self._with_nan)
        if members is not chosen_from:
            keep_set = unstacked(keep_set, chosen_from)
        for observation in members:
            kept = keep_set.layer(observation.layer_ids[0])
            self._layers[kept.layer].keep(observation, kept)
            self.kept.append(kept.to_record())
            self._entries += observation.count
            # As they were stored, which after an event before may be in few bits.
            pair_bytes = (
                observation.store.pair_bytes if isinstance(observation, StoredObservation) else observation.entry_bytes
            )
            self._nbytes += observation.count * pair_bytes
        self._seconds += time.perf_counter() - start
        return keep_set

    def finished(self) -> Event:
        """Return the event, once all layers have reached it; they then store the tokens that came after it."""
        keep_set = KeepSet(self.kept)
        # Counts from the data were read one by one. On a GPU the host would wait once more.
        traits = self._method.traits
        one_by_one = traits.counts_from_data and not traits.across_layers
        if one_by_one and is_async_device(self.kept[0].counts.device):
            self._with_nan = []
        keep_set.count(self._with_nan)
        for layer in self._layers.values():
            layer.append_after_event(self._length)
        return Event(self._length, keep_set, self._entries, keep_set.entries, self._nbytes, self._seconds)

    @property
    def has_nan(self) -> bool:
        """Return whether scores were NaN, as far as a finished event knows it without another wait for the device."""
        return [1] in map(attrgetter("host_values"), self._with_nan)


_NAN_SCORES = (
    "{recipe} gives some entries scores of NaN, so nothing says which of them to keep: its formula fails on these "
    "numbers, or the model predicts NaN; try another recipe, or the model in float32 or bfloat16."
)


@functools.cache
def _say_once(sentence: str) -> None:
    logger.warning("keepset: %s", sentence)  # a warning is shown even if logging is not set up
