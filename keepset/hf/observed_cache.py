"""`ObservedCache`: a cache whose layers are observed at events; subclasses decide what happens to the observations."""

from __future__ import annotations

import sys
import warnings
import weakref
from abc import abstractmethod
from collections.abc import Mapping, Sequence
from functools import partial
from operator import add
from typing import Any

import torch
from jaxtyping import Int
from torch import Tensor, nn
from transformers import PreTrainedModel
from transformers.cache_utils import CacheLayerMixin, LinearAttentionLayer

from keepset.contexts.weights import adapters_digest
from keepset.core.feature import Feature, Needs
from keepset.core.features.attention import SecondPass
from keepset.core.features.moments import HiddenMoments
from keepset.core.features.runtime_features import ModelStatistics, ModelTables, OutputProjection, Perplexity
from keepset.core.observation import Observation
from keepset.errors import KeepsetError, UnsupportedModelError
from keepset.hf import latents
from keepset.hf.attention import (
    NAME,
    OTHER_PROMPT,
    SWITCHING,
    AttentionInput,
    CachedTokens,
    narrow_mask,
    set_pending_attention,
    uncompiled,
    without_autocast,
)
from keepset.hf.edits import EditableCache
from keepset.hf.forwards import DecoderCall, Forwards
from keepset.hf.hooks import AttentionHooks, ImageHooks, ModelHooks, PerplexityHooks, RopeDeltas, image_token_ids
from keepset.hf.latents import LatentStore
from keepset.hf.layer import LayerState
from keepset.hf.model_support import (
    caches_latents,
    check_model,
    decoder_of,
    longest_in_cache,
    output_projections,
    readers_of,
    statistics_for,
    tables_for,
)
from keepset.hf.other_layers import compressible, is_bounded, mend_mixers, nbytes_of, own_layers
from keepset.hf.progress import KnowsText, Progress
from keepset.hf.query_recorder import Collector
from keepset.hf.second_pass import SecondPasses
from keepset.hf.store import StoredObservation
from keepset.recipe import Schedule


class ObservedCache(EditableCache, KnowsText):
    """A transformers cache whose growing layers are keepset's.

    A layer attends to new tokens and returns whether they reach an event. Its observation then waits until it is
    complete: until the last layer, if second passes run or a method chooses among all layers; until the end of the
    model's call, if its logits are needed.

    Args:
        model: a decoder-only transformers model. Its attention implementation becomes keepset's.
        needs: a method's inputs besides the entries.
        prompt_length: tokens of the prompt, padding included; None: the first forward is the prompt.
        schedule: when layers are observed; at the prompt's end unless it says otherwise.
        tasks: tokens of questions for second passes, each `[batch, tokens]`.

    Attributes:
        managed_layers: those that may be compressed, by their indices; others, such as sliding windows, stay
            transformers' own.
        compressed_layers: their indices.
        progress: how far it has come; None before the first token.
        adapters: digests of the adapters with which the model has read tokens, "" for none.

    Raises:
        KeepsetError: the model or an argument cannot be used.
    """

    def __init__(
        self,
        model: PreTrainedModel,
        needs: Needs,
        prompt_length: int | None = None,
        schedule: Schedule | None = None,
        tasks: Sequence[Tensor] = (),
    ) -> None:
        if prompt_length is not None and prompt_length < 1:
            raise KeepsetError(f"prompt_length={prompt_length} is not a number of tokens: use an integer from 1.")
        model = check_model(model)
        self._config, self._model_name = model.config.get_text_config(decoder=True), type(model).__name__
        with SWITCHING:
            model.set_attn_implementation(NAME)
        _report_forwards(model)
        mend_mixers(model)

        self._longest_in_cache = longest_in_cache(model)

        # transformers decides each layer's kind; only those that would grow without end are replaced.
        layers = own_layers(self._config, self._model_name)
        self.managed_layers = {
            i: kept for i, layer in enumerate(layers) if (kept := compressible(i, layer)) is not None
        }
        if not self.managed_layers:
            if grows := next((type(layer).__name__ for layer in layers if not is_bounded(layer)), None):
                raise UnsupportedModelError(
                    f"{self._model_name} caches more than keys and values ({grows}), which keepset does not support."
                )
            reason = _NOTHING_GROWS.format(model=self._model_name)
            if not any(isinstance(layer, CacheLayerMixin) for layer in layers):
                raise UnsupportedModelError(f"{reason}, so keepset has nothing to compress.")
            warnings.warn(f"{reason}, so keepset compresses nothing.", stacklevel=3)
            needs = Needs()
        super().__init__(layers=[self.managed_layers.get(index, layer) for index, layer in enumerate(layers)])
        self.needs, self.schedule, self.prompt_length = needs, schedule or Schedule(), prompt_length
        self.compressed_layers = tuple(self.managed_layers)
        self._from_files: dict[Feature[Any], Any] = {
            **{stats: statistics_for(model, self.compressed_layers, stats) for stats in needs.of(ModelStatistics)},
            **{tables: tables_for(model, len(self.managed_layers), tables.file) for tables in needs.of(ModelTables)},
        }
        self._projections = needs.of(OutputProjection)
        self.progress: Progress | None = None
        self._model_ref = weakref.ref(model)
        self.adapters = frozenset[str]()
        self._hooks = AttentionHooks(model, self) if needs.unrotated or needs.hidden_states else None
        self._second = SecondPasses(model, self, needs, tasks) if needs.of(SecondPass) else None
        self._perplexity = PerplexityHooks(model, self, needs.of(Perplexity)) if needs.of(Perplexity) else None
        self._images = ImageHooks(model, self) if image_token_ids(model.config) else None
        self._rope = None if RopeDeltas.owner(model) is None else RopeDeltas(model, self)
        self._waits_for_all_layers = self._second is not None
        # Layers that wait for one another, and of which only entries are read, are chosen from together.
        self._stacks_layers = False
        self._no_drafts = ""
        if self._perplexity is not None:
            self._no_drafts = "A prompt's perplexity cannot be told together with drafted tokens"
        if self._second is not None:
            self._no_drafts = "A second pass over the prompt cannot take drafted tokens together with it"
        self._share(needs)
        for layer in self.managed_layers.values() if caches_latents(self._config) else ():
            layer.store_type = LatentStore
        self._waiting: list[Observation] = []
        self._attending = self._in_forward = False
        # Models write some states where they lie, past the cache.
        self._has_states = any(isinstance(layer, LinearAttentionLayer) for layer in self.layers)

    def _share(self, needs: Needs) -> None:
        """Tell layers how many others read their entries."""
        for index, readers in readers_of(self._config).items():
            if index not in self.managed_layers:
                continue
            self.managed_layers[index].readers = readers
            self._no_drafts = "Layers that share keys and values cannot take drafted tokens together with a prompt"
            if needs.of(HiddenMoments):
                raise UnsupportedModelError(
                    f"Layers of {self._model_name} share keys and values, and this method asks for queries that one "
                    "layer makes of hidden states: choose another one, such as snapkv."
                )

    @property
    def nbytes(self) -> int:
        """Bytes allocated, those of layers that keepset leaves alone included."""
        return self.nbytes_fixed + sum(layer.nbytes for layer in self.managed_layers.values())

    @property
    def nbytes_fixed(self) -> int:
        """Bytes that no recipe changes: sliding windows, and recurrent and convolution states."""
        unmanaged = sum(nbytes_of(layer) for layer in self.layers if not isinstance(layer, LayerState))
        return unmanaged + sum(layer.nbytes_states for layer in self.managed_layers.values())

    # --- transformers' side

    @uncompiled
    def update(
        self, key_states: Tensor, value_states: Tensor, layer_idx: int, *args: Any, **kwargs: Any
    ) -> tuple[Tensor, Tensor]:
        """Take a layer's new keys and values. A kept layer stores them when its attention follows.

        Args:
            key_states: `[batch, kv_heads, n, head_dim]`, after rotation.
            value_states: `[batch, kv_heads, n, value_dim]`.
            layer_idx: index of the layer.
            args, kwargs: further arguments of transformers' caches.

        Returns:
            Keys and values to attend to. For a kept layer these are the new ones, with the function that attends to
            the layer's entries attached.

        Raises:
            KeepsetError: the tokens do not fit the cache, or another attention implementation has run.
        """
        requests, cached_requests = len(key_states), None if self.progress is None else len(self.progress.tokens)
        if cached_requests not in (None, requests):
            raise KeepsetError(
                f"The cache holds {cached_requests} requests, and the input has {requests}: call "
                "cache.batch_repeat_interleave(...) first, as for beams or several answers to one question."
            )
        kept = self.managed_layers.get(layer_idx)
        if kept is None:
            self._is_changed = self._in_forward
            return super().update(key_states, value_states, layer_idx, *args, **kwargs)
        if kept.store is not None:
            store_heads, new = kept.store.heads, (key_states.shape[1], key_states.shape[-1], value_states.shape[-1])
            if (kept.store.kv_heads, *store_heads.sizes) != new:
                raise KeepsetError(
                    f"What the cache holds of layer {layer_idx} does not fit the model: its heads are of another "
                    "number or size. Use the model that the cache was made with."
                )
        if self._attending:
            if self._config._attn_implementation == NAME:
                raise UnsupportedModelError(
                    f"{self._model_name} attends over other keys than it caches, which keepset does not support."
                )
            raise KeepsetError(
                f"keepset.Cache needs the attention implementation {NAME!r}, but another one ran: do not change it "
                f"after creating the cache, or call model.set_attn_implementation({NAME!r})."
            )
        self._attending = True
        if kept.store_type is LatentStore:
            latents.set_pending(partial(self.attend, kept), layer_idx, key_states, value_states)
        else:
            set_pending_attention(partial(self.attend, kept), key_states, value_states)
        return key_states, value_states

    def begin_forward(self, call: DecoderCall) -> None:
        if self._is_changed:
            self.require_whole_forward()
        self._in_forward = True
        if self.progress is not None and self._longest_in_cache is not None:
            self._check_length(self.progress.logical, self.progress.logical + call.tokens)
        if self._has_states:
            self._check_padding(call)
            self._is_changed = True
        # Of a call that was refused or interrupted.
        self._attending = False
        if self._hooks is not None:
            self._hooks.forget()

    def end_forward(self) -> None:
        self._in_forward = False
        self._is_changed = bool(self._waiting)  # for the model's logits

    def check_reach(self, present: int, reached: int) -> None:
        self._check_length(present if self.progress is None else self.progress.logical, reached, present)

    def _check_length(self, before: int, fed: int, present: int | None = None) -> None:
        """Refuse to leave the lengths at which the model rotates its tokens in the same way.

        Args:
            before: tokens of the cache before its next forward, or of that forward if it is the first.
            fed: tokens that are to be fed in all.
            present: tokens of the text before the first that is generated; None if nothing is.
        """
        most = self._longest_in_cache
        if most is None or not before <= most < fed:
            return
        generates = present is not None and present <= most
        advice = f"use at most max_new_tokens={most + 1 - present}, or " if generates and present is not None else ""
        raise KeepsetError(
            f"{self._model_name} rotates all tokens in another way once a text has more than {most}, which those in a "
            f"cache cannot follow, and {fed} are to be fed: {advice}begin a new cache with a text of more than {most}."
        )

    def _check_padding(self, call: DecoderCall) -> None:
        """Refuse padding behind tokens, which would change states, and a mask that is too short to tell it."""
        mask, tokens = call.mask, call.tokens
        if mask is None:
            return
        end = tokens + (0 if self.progress is None else self.progress.logical)
        if mask.shape[-1] < end:
            raise narrow_mask(mask, end)
        if tokens < 2:  # one token is no padding
            return
        new = mask[:, -tokens:].bool()
        began = new.cumsum(-1) > 0
        if self.progress is not None:
            if len(new) != len(self.progress.tokens):
                return  # `update` says so
            began |= torch.tensor(self.progress.tokens, dtype=torch.long, device=new.device)[:, None] > 0
        if bool((began & ~new).any()):
            raise KeepsetError(
                f"Padding behind tokens changes the states of {self._model_name}: pad prompts at their left, and ask "
                "questions of different lengths one by one."
            )

    def __bool__(self) -> bool:
        # Of a cache that is empty and true, Phi-3's `generate` thinks that it has the beginning of a long prompt.
        return self.progress is not None

    def reset(self) -> None:
        super().reset()
        self._in_forward = self._is_changed = False
        self.progress, self.adapters = None, frozenset()
        self._waiting.clear()
        self._attending = False
        if self._rope is not None:
            self._rope.deltas = None
        for hooks in self._all_hooks():
            hooks.close()
            hooks.open()

    # --- one forward of one layer

    def attend(self, layer: LayerState, new: AttentionInput) -> Tensor:
        """Return a kept layer's attention, after handling the event that it reaches.

        Args:
            layer: the layer.
            new: its new tokens, as they came to the attention function.

        Returns:
            Attention's output, `[batch, n, query_heads, value_dim]`.
        """
        self._attending = False
        if layer.store is not None and layer.store.heads.keys.dtype != new.key.dtype:  # of another autocast, or in bits
            new.convert(layer.store.heads.dtype)
        first = layer.index == self.compressed_layers[0]
        if first and new.mask is not None and self.progress is not None:
            new.mask.cached = CachedTokens(self.progress.valid)
        new.real = None if new.mask is None else new.mask.real
        if first:
            self._advance(new)
        self._is_changed = self._in_forward
        progress = self.progress
        assert progress is not None and progress.positions is not None
        new.positions, new.cache_valid = progress.positions.to(new.key.device), progress.valid
        new.start, new.end = layer.logical, layer.logical + new.positions.shape[1]
        if progress.turn == new.start:
            layer.collector.expect_answer(progress.prompt)
        if self._hooks is not None and layer.collector.looks_at(new):
            new.layer_input = self._hooks.layer_input(new)
            new.rotation = new.layer_input.rotation
        # Drafts of assisted generation that follow the prompt attend to what its compression has kept.
        parts = (new, None) if layer.collector.prompt is None else new.split(progress.prompt)
        if layer.readers:
            if layer.has_readers_left:  # in the forward before they attended to something else
                raise UnsupportedModelError(
                    f"Layers of this model share the keys and values of layer {layer.index} in a way that keepset does "
                    "not see, as on several devices: put them on one device."
                )
            if parts[1] is not None:
                raise KeepsetError(f"{self._no_drafts}: leave assisted generation out.")
        outputs = []
        for part in filter(None, parts):
            output, up_to_event = layer.attend(part)
            outputs.append(output)
            if up_to_event is not None:
                self._observe_event(layer, up_to_event)
        if layer.readers:
            set_pending_attention(partial(self.attend_shared, layer), new.key, new.value)
        if layer.index == self.compressed_layers[-1]:
            progress.positions = None  # for a prompt this is a tensor as long as the prompt
        return outputs[0] if len(outputs) == 1 else torch.cat(outputs, 1)

    def attend_shared(self, layer: LayerState, reader: AttentionInput) -> Tensor:
        """Return the attention of another layer to a kept layer's entries, after handling the event that it reaches.

        Args:
            layer: the layer that holds the entries.
            reader: the new tokens, with the queries of the layer that attends.

        Returns:
            Attention's output, `[batch, n, query_heads, value_dim]`.
        """
        output, up_to_event = layer.attend(reader)
        if layer.has_readers_left:
            set_pending_attention(partial(self.attend_shared, layer), reader.key, reader.value)
        if up_to_event is not None:
            self._observe_event(layer, up_to_event)
        return output

    def _begin(self, new: AttentionInput) -> Progress:
        """Prepare for the first tokens; return the cache's progress before them."""
        none = torch.zeros(len(new.key), dtype=torch.long, device=new.key.device)
        prompt, every = self.prompt_length or new.length, self.schedule.every
        self.progress = Progress(0, prompt, none, none, [0] * len(none), [0] * len(none))
        self.progress.turn = 0 if self.schedule.turns else None
        self.progress.images = None if self._images is None else ((),) * len(none)
        for layer in self.managed_layers.values():
            compressed = prompt if self.schedule.prefill else None
            turns = self.schedule.turns
            layer.collector = Collector(self.needs, compressed, every, prompt + (every or 0), turns)
        return self.progress

    def _advance(self, new: AttentionInput) -> None:
        """Count the tokens of a forward for all layers and find their positions, before the first of them attends."""
        n, real = new.key.shape[2], new.real
        # Without PEFT no model has adapters.
        reads = "peft" in sys.modules and (self.progress is None or n > 1)
        if reads and (model := self._model_ref()) is not None:
            self.adapters |= {adapters_digest(model)}
        valid = None if real is None else real.mask
        if (progress := self.progress) is None:
            progress = self._begin(new)
        elif n > 1 and new.batched is None and new.position_ids is not None and new.position_ids.ndim == 2:
            again = new.position_ids < progress.lengths[:, None]
            if bool((again if valid is None else again & valid).any()):
                raise KeepsetError(
                    f"The input repeats positions that the cache holds already: {OTHER_PROMPT}; chunked prefill and "
                    "assisted generation onto a cache that is not empty are not supported, because transformers feeds "
                    "them the past again."
                )
        if new.batched is None:
            steps = torch.arange(n, device=progress.lengths.device) if valid is None else valid.long().cumsum(-1) - 1
            positions = progress.lengths[:, None] + steps
            progress.positions, progress.lengths = positions, positions[:, -1] + 1
        else:
            positions = new.batched.positions
            progress.positions, progress.lengths = positions, new.batched.lengths
        if valid is not None or progress.valid is not None:
            before, after = ((len(progress.lengths), tokens) for tokens in (progress.logical, n))
            whole = progress.lengths.new_ones(before, dtype=torch.bool) if progress.valid is None else progress.valid
            progress.valid = torch.cat([whole, whole.new_ones(after) if valid is None else valid], 1)
        if progress.turn == progress.logical:
            progress.prompt = max(progress.logical + n, self.prompt_length or 0)
        if (left := progress.prompt - progress.logical) > 0:
            progress.prompts = positions[:, min(left, n) - 1] + 1
            counts = [min(left, n)] * len(progress.tokens) if real is None else real.part(slice(0, left)).counts
            progress.prompt_tokens = list(map(add, progress.tokens, counts))
        progress.tokens = list(map(add, progress.tokens, [n] * len(progress.tokens) if real is None else real.counts))
        progress.logical += n
        # Images are in prompts, or in later tokens that are fed together.
        if self._images is not None and new.batched is None and (n > 1 or left > 0):
            progress.add_images(self._images.found(positions, valid))

    @torch.no_grad()
    def _observe_event(self, layer: LayerState, up_to_event: AttentionInput) -> None:
        """Observe a layer at an event, and pass on the observations that this completes.

        Args:
            layer: the layer.
            up_to_event: the tokens up to the event, from `LayerState.attend`.
        """
        progress = self.progress
        assert progress is not None
        progress.compressed_at = up_to_event.end
        if self._rope is not None and progress.has_images and any(s.rotates for s in self.needs.of(ModelStatistics)):
            raise UnsupportedModelError(
                f"This method rotates by one position for each token, and {self._model_name} gives those of an image "
                "positions along several axes: choose another method for prompts with images, such as snapkv."
            )
        if self._perplexity is not None and not self._perplexity.watching:
            raise KeepsetError("This recipe looks at the model's logits: call the model, not only its decoder.")
        if self._no_drafts and up_to_event.end == progress.prompt < progress.logical:
            raise KeepsetError(f"{self._no_drafts}: leave assisted generation out.")
        features = dict(self._from_files)
        for feature in self._projections:
            features[feature] = output_projections(up_to_event)
        observation = layer.observe(
            up_to_event,
            layers=self.compressed_layers,
            prompts=progress.prompts,
            longest=max(progress.tokens),
            num_kept=self._num_kept(layer, up_to_event),
            features=features,
        )
        stacks = self._stacks_layers and isinstance(observation, StoredObservation)
        waits = self._waits_for_all_layers or stacks
        if not waits and self._perplexity is None:
            # This layer alone: at a prompt's end others may already wait for a later event of the same forward.
            self._choose([observation])
            return
        self._waiting.append(observation)
        if waits and len(self._waiting) < len(self.managed_layers):
            return
        if self._second is not None:
            entries = {observation.layer: (observation.keys, observation.values) for observation in self._waiting}
            passes = self._second.run(entries, up_to_event, progress.valid, self.layers)
            self._waiting = [observation.with_features(passes[observation.layer]) for observation in self._waiting]
        if self._perplexity is None:
            self._choose_waiting()

    def _choose_waiting(self) -> None:
        """Choose from the waiting observations, which are complete."""
        waiting, self._waiting = self._waiting, []
        if waiting:
            with without_autocast(waiting[0].valid.device):  # the caller's, once the model's call is over
                self._choose(waiting)

    @abstractmethod
    def _choose(self, observations: list[Observation]) -> None:
        """Choose from complete observations of an event, in the order of their layers."""

    def _num_kept(self, layer: LayerState, up_to_event: AttentionInput) -> Sequence[int] | None:
        """Return how many entries of each head of a layer will stay, if the host knows it before the choice.

        Args:
            layer: the layer.
            up_to_event: the tokens up to the event.

        Returns:
            Numbers request after request, and head after head.
        """
        return None

    # --- around the forwards

    @torch.no_grad()
    def on_logits(self, perplexities: Mapping[Feature[Any], Tensor]) -> None:
        """Complete the observations that waited for the model's logits, once its call is over."""
        self._waiting = [observation.with_features(perplexities) for observation in self._waiting]
        self._choose_waiting()
        self._is_changed = False

    @property
    def requests(self) -> int:
        """Return how many requests it holds; 0 before the first token."""
        return 0 if self.progress is None else len(self.progress.tokens)

    def resume(self) -> None:
        """Make the model continue with this cache's text, whatever other caches it ran with in between."""
        self.require_whole_forward()
        if self.progress is not None and self._rope is not None:
            self._rope.recall()

    @property
    def position_offsets(self) -> Int[Tensor, "batch 1"] | int:
        """Return the differences between the model's positions and the numbers of tokens before them."""
        return 0 if self._rope is None or self._rope.deltas is None else self._rope.deltas

    def set_position_offsets(self, offsets: Int[Tensor, "batch 1"] | None) -> bool:
        """Take over `position_offsets` of another cache; return whether this model has such."""
        if self._rope is not None:
            self._rope.deltas = offsets
        return offsets is None or self._rope is not None

    def stop_watching(self) -> None:
        """Remove the hooks on the model: nothing more is compressed."""
        for hooks in self._all_hooks():
            hooks.close()

    def require_prompt(self) -> Progress:
        """Return the cache's progress between two forwards.

        Raises:
            KeepsetError: it does not hold a whole prompt.
        """
        if not self.managed_layers:
            raise KeepsetError(
                f"{_NOTHING_GROWS.format(model='This model')}, so keepset has nothing to save or to ask."
            )
        self.require_whole_forward()
        progress = self.progress
        lengths = {layer.get_seq_length() for layer in self.layers if isinstance(layer, CacheLayerMixin)}
        waits = any(kept.has_readers_left for kept in self.managed_layers.values())
        if waits or progress is None or progress.logical < progress.prompt or lengths != {progress.logical}:
            raise KeepsetError("This cache does not hold a whole prompt yet: run the model on all of it first.")
        return progress

    def _all_hooks(self) -> list[ModelHooks]:
        return [hooks for hooks in (self._hooks, self._second, self._perplexity) if hooks is not None]


_NOTHING_GROWS = "{model} has no layer that caches the whole text, but only sliding windows or states of a fixed size"
_REPORTS = "_keepset_reports_forwards"
"""Attribute of a decoder that reports its calls."""


def _report_forwards(model: PreTrainedModel) -> None:
    """Make a model's decoder report its calls to the caches that it is given, from now on.

    The hooks hold nothing of a cache, so they stay.
    """
    decoder = decoder_of(model)
    if not hasattr(decoder, _REPORTS):
        setattr(decoder, _REPORTS, True)
        decoder.register_forward_pre_hook(_begin, with_kwargs=True)
        decoder.register_forward_hook(_end, with_kwargs=True)


@uncompiled
def _begin(module: nn.Module, args: tuple[Any, ...], kwargs: dict[str, Any]) -> None:
    if isinstance(past := kwargs.get("past_key_values"), Forwards):
        past.begin_forward(DecoderCall(args, kwargs))


@uncompiled
def _end(module: nn.Module, args: tuple[Any, ...], kwargs: dict[str, Any], output: Any) -> None:
    if isinstance(past := kwargs.get("past_key_values"), Forwards):
        past.end_forward()
