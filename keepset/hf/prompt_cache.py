"""`PromptCache`: a cache whose layers are observed at events; a subclass says what becomes of the observations."""

from __future__ import annotations

import warnings
from abc import abstractmethod
from collections.abc import Mapping, Sequence
from dataclasses import replace
from functools import partial
from typing import Any

import torch
from jaxtyping import Int
from torch import Tensor
from transformers import PreTrainedModel
from transformers.cache_utils import Cache as TransformersCache
from transformers.cache_utils import (
    CacheLayerMixin,
    DynamicCache,
    DynamicLayer,
    LinearAttentionAndFullAttentionLayer,
)

from keepset.core.feature import Feature, Needs
from keepset.core.features.attention import SecondPass
from keepset.core.features.runtime_features import ModelStatistics, ModelTables, OutputProjection, Perplexity
from keepset.core.observation import Observation
from keepset.errors import KeepsetError, UnsupportedModelError
from keepset.hf.attention import NAME, AttentionCall, passed_by, set_pending_attention, switch
from keepset.hf.attention_hooks import AttentionHooks
from keepset.hf.dynamo import uncompiled
from keepset.hf.forward import Forward
from keepset.hf.generation import KnowsText
from keepset.hf.hooks import ModelHooks
from keepset.hf.known_tokens import ToldTokens
from keepset.hf.layer import HybridKeepLayer, KeepLayer
from keepset.hf.mask import OTHER_PROMPT, RealTokens
from keepset.hf.model_artifacts import statistics_for, tables_for
from keepset.hf.model_support import check_model
from keepset.hf.other_layers import cropped
from keepset.hf.perplexity import PerplexityHooks
from keepset.hf.phases import DecodingPhase, LayerEvent, PromptPhase
from keepset.hf.progress import Progress
from keepset.hf.projection import output_projection
from keepset.hf.second_pass import SecondPasses
from keepset.hf.stored_observation import StoredObservation
from keepset.recipe import Schedule


class PromptCache(TransformersCache, KnowsText):
    """A transformers cache whose growing layers are keepset's.

    A layer is told of a forward, and answers with its attention and the event that it has reached. What waits then,
    until an observation is complete, is a list: for the last layer, where second passes run over all of them or a
    method chooses among all of them; for the end of the model's call, where its logits are looked at.

    Attributes:
        needs: what its layers collect.
        schedule: when its layers are observed.
        kept_layers: those that may be compressed, by their indices; others, such as sliding windows, stay
            transformers' own.
        compressed_layers: their indices.
        progress: how far it has come; None before the first token.
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
        check_model(model)
        config = model.config.get_text_config(decoder=True)
        switch(model)

        # transformers decides each layer's kind; only those that would grow without end are replaced.
        layers = DynamicCache(config=config).layers
        self.kept_layers = {i: kept for i, layer in enumerate(layers) if (kept := _kept(i, layer)) is not None}
        if not self.kept_layers:
            reason = _NOTHING_GROWS.format(model=type(model).__name__)
            if not any(isinstance(layer, CacheLayerMixin) for layer in layers):
                raise UnsupportedModelError(f"{reason}, so keepset has nothing to compress.")
            warnings.warn(f"{reason}, so keepset compresses nothing.", stacklevel=3)
            needs = Needs()
        super().__init__(layers=[self.kept_layers.get(index, layer) for index, layer in enumerate(layers)])
        self.needs, self.schedule, self.prompt_length = needs, schedule or Schedule(), prompt_length
        self.compressed_layers = tuple(self.kept_layers)
        self._from_files: dict[Feature[Any], Any] = {
            **{stats: statistics_for(model, self.compressed_layers, stats.file) for stats in needs.of(ModelStatistics)},
            **{tables: tables_for(model, len(self.kept_layers), tables.file) for tables in needs.of(ModelTables)},
        }
        self.progress: Progress | None = None
        self._hooks = AttentionHooks(model, self) if needs.unrotated else None
        self._second = SecondPasses(model, self, needs, tasks) if needs.of(SecondPass) else None
        self._perplexity = PerplexityHooks(model, self, needs.of(Perplexity)) if needs.of(Perplexity) else None
        self._waits_for_all_layers = self._second is not None
        self._no_drafts = ""
        if self._perplexity is not None:
            self._no_drafts = "A prompt's perplexity cannot be told together with drafted tokens"
        if self._second is not None:
            self._no_drafts = "A second pass over the prompt cannot take drafted tokens together with it"
        self._waiting: list[tuple[KeepLayer, LayerEvent]] = []
        self._attending = False

    @property
    def nbytes(self) -> int:
        """Bytes allocated, those of layers that keepset leaves alone included."""
        kept = self.kept_layers.values()
        others = sum(_nbytes(layer) for layer in self.layers if not isinstance(layer, KeepLayer))
        return others + sum(layer.nbytes + layer.nbytes_states for layer in kept)

    # --- transformers' side

    @uncompiled
    def update(
        self, key_states: Tensor, value_states: Tensor, layer_idx: int, *args: Any, **kwargs: Any
    ) -> tuple[Tensor, Tensor]:
        """Takes a layer's new keys and values; a kept layer stores them when its attention follows."""
        requests, known = len(key_states), None if self.progress is None else len(self.progress.lengths)
        if known not in (None, requests):
            raise KeepsetError(
                f"The cache holds {known} requests, and the input has {requests}: call "
                "cache.batch_repeat_interleave(...) first, as for beams or several answers to one question."
            )
        kept = self.kept_layers.get(layer_idx)
        if kept is not None and kept.store is not None and not kept.store.takes(key_states, value_states):
            raise KeepsetError(
                f"What the cache holds of layer {layer_idx} does not fit the model: its heads are of another number, "
                "size or precision. Use the model that the cache was made with."
            )
        keys, values = super().update(key_states, value_states, layer_idx, *args, **kwargs)
        if kept is None:
            return keys, values
        if self._attending:
            if (attended := passed_by()) is not None:
                raise UnsupportedModelError(
                    f"{attended} attends over other keys than it caches, which keepset does not support."
                )
            raise KeepsetError(
                f"keepset.Cache needs the attention implementation {NAME!r}, but another one ran: do not change it "
                f"after creating the cache, or call model.set_attn_implementation({NAME!r})."
            )
        self._attending = True
        set_pending_attention(partial(self.attend, layer_idx), keys, values)
        return keys, values

    def reset(self) -> None:
        super().reset()
        self.progress = None
        self._waiting.clear()
        self._attending = False
        for hooks in self._all_hooks():
            hooks.close()
            hooks.open()

    def reorder_cache(self, beam_idx: Any) -> None:
        if self.progress is None:
            super().reorder_cache(beam_idx)
            return
        # On the host, where every layer needs them.
        rows: Any = torch.tensor(self._requests(beam_idx))
        if self._looks_at_prompt:
            raise KeepsetError("A batch cannot be reordered before its prompt is complete.")
        super().reorder_cache(rows)
        self.progress.reorder(rows.to(self.progress.lengths.device))

    def batch_select_indices(self, indices: Tensor) -> None:
        if self.progress is None:
            super().batch_select_indices(indices)
        else:  # which all kinds of layers can
            self.reorder_cache(indices)

    def batch_repeat_interleave(self, repeats: int) -> None:
        if self.progress is None:
            super().batch_repeat_interleave(repeats)
        else:
            self.reorder_cache(torch.arange(len(self.progress.tokens)).repeat_interleave(max(repeats, 0)))

    def crop(self, tokens_to_remove: int) -> None:
        progress = self.progress
        if progress is None:
            super().crop(tokens_to_remove)
            return
        removed = max(progress.logical - tokens_to_remove, 0) if tokens_to_remove > 0 else -tokens_to_remove
        new = progress.logical - (progress.compressed_at or 0)
        if removed > new:
            raise KeepsetError(
                f"Only the {new} tokens after the compression can be taken back, not {removed}: assisted "
                "generation needs keepset.Cache(..., prompt_length=...), because it drafts tokens together with "
                "the prompt."
            )
        if removed and self._looks_at_prompt:
            raise KeepsetError(
                "Tokens of a prompt that is not complete cannot be taken back, because the recipe looks at more than "
                "its entries, and has seen theirs: go on from a copy made before them (cache.fork())."
            )
        if not all(kept.can_take_back(removed) for kept in self.kept_layers.values()):
            raise KeepsetError(
                f"What the newest {removed} tokens look at is added up for the next compression already, which "
                "cannot be undone: take fewer back, or go on from a copy made before them (cache.fork())."
            )
        if removed and any(isinstance(kept, HybridKeepLayer) for kept in self.kept_layers.values()):
            raise KeepsetError(
                "The recurrent states of this model cannot take tokens back: go on from a copy made before them "
                "(cache.fork())."
            )
        length = progress.logical - removed
        others = [(each, cropped(each, removed, length)) for each in self.layers if not isinstance(each, KeepLayer)]
        if removed:
            per_request = progress.crop(removed)
            for kept in self.kept_layers.values():
                kept.take_back(removed, per_request, progress.lengths)
        for layer, attributes in others:
            vars(layer).update(attributes)

    def activate_past_recording(self) -> None:
        """What transformers calls before assisted generation, which drafts tokens with the prompt."""
        if self.schedule.every is not None:
            raise KeepsetError(
                "Assisted generation cannot go with compression while decoding (every=...), because its drafted "
                "tokens would be compressed before they are accepted: leave one of them out."
            )
        is_compressed = self.progress is not None and self.progress.compressed_at is not None
        if self.kept_layers and self.prompt_length is None and not is_compressed:
            raise KeepsetError(
                "Assisted generation needs keepset.Cache(..., prompt_length=...), because it drafts tokens "
                "together with the prompt."
            )
        super().activate_past_recording()

    # --- one forward of one layer

    def attend(self, index: int, call: AttentionCall) -> Tensor:
        """A kept layer's attention, and what follows from the events that it reaches by it."""
        layer, self._attending = self.kept_layers[index], False
        real = None if call.mask is None else call.mask.real
        if layer.index == self.compressed_layers[0]:
            self._advance(call, real)
        assert self.progress is not None and self.progress.positions is not None
        positions, padded = self.progress.positions.to(call.query.device), self.progress.valid is not None
        forward = Forward(call, call.query, call.key, call.value, positions, real, layer.logical, padded)
        phase = layer.phase
        if self._hooks is not None and phase is not None and phase.looks_at(forward):
            layer_input = self._hooks.layer_input(call, positions, real)
            forward = replace(forward, layer_input=layer_input, rotation=layer_input.rotation)
        # Drafts of assisted generation that follow the prompt see what its compression has left.
        parts = forward.split(self.progress.prompt) if isinstance(phase, PromptPhase) else (forward, None)
        outputs = []
        for part in filter(None, parts):
            output, event = layer.attend(part)
            outputs.append(output)
            if event is not None:
                self._reached(layer, part, event)
        if layer.index == self.compressed_layers[-1]:
            self.progress.positions = None  # of the prompt these are as many as it has tokens
        return outputs[0] if len(outputs) == 1 else torch.cat(outputs, 1)

    def _advance(self, call: AttentionCall, real: RealTokens | None) -> None:
        """The first layer's part of a forward: counts the tokens for all."""
        n = call.query.shape[2]
        if self.progress is None:
            none = torch.zeros(len(call.query), dtype=torch.long, device=call.query.device)
            prompt, every = self.prompt_length or n, self.schedule.every
            self.progress = Progress(0, prompt, none, none, [0] * len(none), [0] * len(none))
            for layer in self.kept_layers.values():
                layer.prompt = PromptPhase(self.needs, prompt) if self.schedule.prefill else None
                layer.decoding = None if every is None else DecodingPhase(self.needs, every, prompt + every)
        elif n > 1 and call.joint is None and call.position_ids is not None and call.position_ids.ndim == 2:
            again = call.position_ids < self.progress.lengths[:, None]
            if bool((again if real is None else again & real.mask).any()):
                raise KeepsetError(
                    f"The input repeats positions that the cache holds already: {OTHER_PROMPT}; chunked prefill and "
                    "assisted generation onto a cache that is not empty are not supported, because transformers feeds "
                    "them the past again."
                )
        self.progress.advance(n, real, call.joint)

    def _reached(self, layer: KeepLayer, forward: Forward, event: LayerEvent) -> None:
        """Makes observations of a layer's event and of those that wait with it, once they can be complete."""
        assert self.progress is not None
        self.progress.compressed_at = event.length
        if self._perplexity is not None and not self._perplexity.watching:
            raise KeepsetError("This recipe looks at the model's logits: call the model, not only its decoder.")
        if self._no_drafts and event.length == self.progress.prompt < self.progress.logical:
            raise KeepsetError(f"{self._no_drafts}: leave assisted generation out.")
        for feature in self.needs.of(OutputProjection):
            heads, size = forward.query.shape[1], forward.value.shape[-1]
            event.features[feature] = output_projection(forward.call.module, heads, size)
        self._waiting.append((layer, event))
        if self._waits_for_all_layers and len(self._waiting) < len(self.kept_layers):
            return
        if self._second is not None:
            entries = {kept.index: (each.observed["keys"], each.observed["values"]) for kept, each in self._waiting}
            passes = self._second.run(entries, self.progress, self.layers)
            for kept, each in self._waiting:
                each.features.update(passes[kept.index])
        if self._perplexity is None:
            self._observe()

    def _observe(self) -> None:
        """What waits is complete."""
        waiting, self._waiting = self._waiting, []
        assert self.progress is not None
        common: dict[str, Any] = {"prompts": self.progress.prompts, "layers": self.compressed_layers}
        common["longest"] = max(self.progress.tokens)
        observations = []
        for layer, event in waiting:
            features = {**self._from_files, **event.features}
            own = {**common, **event.observed, "layer": layer.index, "num_kept": self._stays(layer, event)}
            store = event.store
            look = Observation if store is None else partial(StoredObservation, store)
            observations.append(look(**own, features=features))
        self._choose(observations)

    @abstractmethod
    def _choose(self, observations: list[Observation]) -> None:
        """These observations of an event, in the order of their layers, are complete.

        They are of all layers where somebody looks at all of them, else of as many as have come.
        """

    def _stays(self, layer: KeepLayer, event: LayerEvent) -> Sequence[int] | None:
        """How many entries of each head will stay of a layer, where it is known before anybody chooses."""
        return None

    # --- around the forwards

    def on_logits(self, perplexities: Mapping[Feature[Any], Tensor]) -> None:
        """The model's call is over: completes the observations that waited for its logits."""
        for _, event in self._waiting:
            event.features.update(perplexities)
        self._observe()

    def check_text(self, ids: Int[Tensor, "rows n"]) -> None:
        """Refuse the ids of a whole text if they begin with other tokens than the cache holds, as far as it knows them.

        Args:
            ids: as `generate` is given them, padding included.

        Raises:
            KeepsetError: tokens that were given before are others now. Of those that were generated it is a warning,
                because a text that is tokenized again may come out otherwise.
        """
        progress = self.progress
        if progress is None or progress.known is None or ids.shape[1] <= progress.logical:
            return
        requests, rows = len(progress.tokens), len(ids)
        if requests % rows:  # `update` says so
            return
        other = progress.known.first_other(ids.repeat_interleave(requests // rows, 0), progress.valid)
        if other is not None and other < progress.known.given:
            raise KeepsetError(
                f"The cache holds {progress.logical} tokens, and the input begins with others: make a new "
                "keepset.Cache for each text, or ask several questions about one text on forks of its cache "
                "(cache.fork())."
            )
        if other is not None:
            warnings.warn(
                "The input has other tokens than the cache in the place of those that were generated before, and the "
                "cache keeps its own: add new tokens to the ids that generate has returned, or use a cache.fork() made "
                "before it.",
                stacklevel=3,
            )

    def remember_text(self, ids: Int[Tensor, "rows n"], given: int) -> None:
        """Take in the ids of a whole text, of which the cache holds the first; the caller gave the first `given`."""
        progress = self.progress
        if progress is None or len(progress.tokens) % len(ids):
            return
        rows = ids.repeat_interleave(len(progress.tokens) // len(ids), 0)
        progress.known = ToldTokens(rows, given).first(progress.logical)

    def stop_watching(self) -> None:
        """Removes the hooks on the model: nothing more is compressed."""
        for hooks in self._all_hooks():
            hooks.close()

    def require_prompt(self) -> Progress:
        """How far the cache has come, between two forwards; raises KeepsetError where it holds no whole prompt."""
        if not self.kept_layers:
            raise KeepsetError(
                f"{_NOTHING_GROWS.format(model='This model')}, so keepset has nothing to save or to ask."
            )
        progress = self.progress
        lengths = {layer.get_seq_length() for layer in self.layers if isinstance(layer, CacheLayerMixin)}
        if progress is None or progress.logical < progress.prompt or lengths != {progress.logical}:
            raise KeepsetError("This cache does not hold a whole prompt yet: run the model on all of it first.")
        return progress

    @property
    def _looks_at_prompt(self) -> bool:
        """Whether a prompt is under way of which more is collected than its entries."""
        return any(kept.prompt is not None and bool(kept.prompt.needs) for kept in self.kept_layers.values())

    def _all_hooks(self) -> list[ModelHooks]:
        return [hooks for hooks in (self._hooks, self._second, self._perplexity) if hooks is not None]

    def _requests(self, rows: Tensor) -> list[int]:
        """Return which requests these are, on the host; raises KeepsetError where there are no such."""
        assert self.progress is not None
        requests = len(self.progress.tokens)
        if rows.dtype == torch.bool:
            chosen = rows.nonzero()[:, 0].tolist() if len(rows) == requests else []
        else:
            chosen = rows.tolist()
        if not chosen or not all(-requests <= row < requests for row in chosen):
            raise KeepsetError(
                f"The cache holds {requests} requests, and a batch of it needs at least one of them: give indices from "
                f"0 to {requests - 1}, or a mask of {requests}."
            )
        return [row % requests for row in chosen]


_NOTHING_GROWS = "{model} has no layer that caches the whole text, but only sliding windows or states of a fixed size"


def _kept(index: int, layer: Any) -> KeepLayer | None:
    """Return what stands for transformers' own layer; None for those that do not grow without end."""
    if type(layer) is LinearAttentionAndFullAttentionLayer:
        return HybridKeepLayer(index, layer)
    return KeepLayer(index) if type(layer) is DynamicLayer else None


def _nbytes(layer: Any) -> int:
    """Bytes that another kind of layer holds: a sliding window may be a view of the whole prompt."""
    values = [x for part in vars(layer).values() for x in (part.values() if isinstance(part, dict) else [part])]
    storages = [tensor.untyped_storage() for tensor in values if isinstance(tensor, Tensor)]
    return sum({storage.data_ptr(): storage.nbytes() for storage in storages}.values())
