"""`EngineContext`: all that keepset's classes in one process must know of one another under vLLM.

vLLM asks an attention backend for classes and for each layer's kind of cache without saying for which model or
layer, and makes the objects itself. They share what this module holds; the only global is which context is
current.
"""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass
from functools import cached_property
from typing import Any

import torch
from torch import Tensor
from vllm.config import VllmConfig, get_current_vllm_config_or_none
from vllm.logger import init_logger
from vllm.platforms import current_platform
from vllm.v1.kv_cache_interface import AttentionSpec

from keepset.errors import UnsupportedEngineError
from keepset.paged.event_queue import EventQueue
from keepset.paged.freed_blocks import FreedBlocks
from keepset.paged.grouping import group_leader
from keepset.paged.layer_group import LayerGroup
from keepset.paged.passing import PassingQueries
from keepset.paged.per_head import PerHeadSequences
from keepset.paged.query_records import slots_for
from keepset.paged.recording import Recording
from keepset.paged.step import StepPlan
from keepset.recipe import Recipe
from keepset.vllm import stats
from keepset.vllm.compat import all_layers, ask_for_prompt_lengths, attention_layers, captured_tokens
from keepset.vllm.memory import Shape, reserve
from keepset.vllm.query_projection import VLLMQueryProjection, watch_projections
from keepset.vllm.settings import contexts_of, recipe_of, save_limit_of
from keepset.vllm.spec import KeepSpec
from keepset.vllm.validation import check, check_layer, check_spec

logger = init_logger(__name__)


@dataclass
class PlannedStep:
    """The step that a group of layers is about to compute.

    Attributes:
        group, plan: of them.
        places: of the layers in it, by name.
        metadata: that vLLM's attention gets for it.
    """

    group: LayerGroup
    plan: StepPlan
    places: dict[str, int]
    metadata: Any

    @cached_property
    def per_head(self) -> PerHeadSequences:
        """Heads as requests, where they have entries of their own; the layers share it."""
        assert self.plan.ragged is not None
        return PerHeadSequences(self.plan.ragged)


class EngineContext:
    """A configuration with a recipe.

    Attributes:
        config, recipe: they.
        projections: of the layers, by name, where the recipe looks at hidden states.
        freed_blocks: what events emptied, for the connector to fetch.
        events: of all layers.
        groups: of layers that share block tables, by the name of the first.
        neighbours: those of each layer, by its name, and its place among them.
    """

    def __init__(self, config: VllmConfig, recipe: Recipe) -> None:
        check(config, recipe)
        stats.serving(str(recipe))
        logger.info("keepset serves %s", recipe)
        self.config, self.recipe = config, recipe
        self.projections: dict[str, VLLMQueryProjection] = {}
        self.freed_blocks = FreedBlocks()
        self.events = EventQueue(self.freed_blocks)
        self.groups: dict[str, LayerGroup] = {}
        self.neighbours: dict[str, tuple[list[Any], int]] = {}
        self._watch = watch_projections(self.projections) if recipe.method.needs.hidden_states else None
        self._passing: PassingQueries | None = None
        self._reserve: Tensor | None = None
        self._parts: dict[tuple[str, ...], PassingQueries] = {}
        self._specs_made = 0
        self._tape: Tensor | None = None
        self._steps: dict[str, PlannedStep] = {}

    @cached_property
    def layers(self) -> dict[str, int]:
        """The model's attention layers that this process has, by name, and their indices."""
        layers = {}
        for name, layer, index in attention_layers(self.config):
            check_layer(name, layer, unseen=self._watch is not None and name not in self.projections)
            layers[name] = index
        return layers

    @cached_property
    def recording(self) -> Recording:
        """What layers hold of queries."""
        model, parallel = self.config.model_config, self.config.parallel_config
        group = model.get_num_attention_heads(parallel) // model.get_num_kv_heads(parallel)
        assert isinstance(model.dtype, torch.dtype)
        return Recording.of(self.recipe, group, model.get_head_size(), model.dtype.itemsize)

    def spec_of_next_layer(self, spec: AttentionSpec) -> AttentionSpec:
        """The kind of cache of the layer that is asked for now."""
        if self._watch is not None:  # the model is built
            self._watch.remove()
        layer_ids = tuple(self.layers.values())
        index = layer_ids[self._specs_made % len(layer_ids)]
        self._specs_made += 1
        ask_for_prompt_lengths(self.config)
        if self._passing is None:  # and vLLM has not measured yet what there is room for
            self._passing = self._room(len(layer_ids))
            entry_bytes, longest = 2 * spec.head_size * spec.dtype.itemsize, self.config.model_config.max_model_len
            shape = Shape(len(layer_ids), spec.num_kv_heads, entry_bytes, longest)
            saves = save_limit_of(self.config) is not None
            self._reserve = reserve(self.config, self.recipe, self.recording.group, saves, shape)
            self._tape = self._make_tape(len(layer_ids))
        scheduler, layers = self.config.scheduler_config, all_layers(self.config, layer_ids)
        return KeepSpec.wrap(
            check_spec(spec),
            recipe=str(self.recipe),
            layer=group_leader(self.recipe, index, layers),
            layers=layers,
            tokens_per_step=scheduler.max_num_batched_tokens,
            steps_ahead=int(bool(scheduler.async_scheduling)),
            per_head=contexts_of(self.config) is not None,
        )

    def passing(self, layers: Sequence[str]) -> PassingQueries:
        """What a group of layers, by their names, holds of queries."""
        assert self._passing is not None
        self._reserve = None  # vLLM has measured
        taken = sum(map(len, self._parts))
        return self._parts.setdefault(tuple(layers), self._passing.part(taken, len(layers)))

    def _room(self, layers: int) -> PassingQueries:
        model, requests = self.config.model_config, self.config.scheduler_config.max_num_seqs
        heads = model.get_num_attention_heads(self.config.parallel_config)
        assert isinstance(model.dtype, torch.dtype)
        return PassingQueries(
            self.recording, layers, slots_for(requests), heads, model.get_head_size(), model.dtype,
            current_platform.device_type,
        )  # fmt: skip

    def _make_tape(self, layers: int) -> Tensor | None:
        tokens, model = captured_tokens(self.config), self.config.model_config
        if not (tokens and self.recording):
            return None
        heads = model.get_num_attention_heads(self.config.parallel_config)
        assert isinstance(model.dtype, torch.dtype)
        shape = layers, tokens, heads, model.get_head_size()
        return torch.zeros(shape, dtype=model.dtype, device=current_platform.device_type)

    def tape(self, layers: Sequence[str]) -> Tensor | None:
        """Where neighbouring layers that are called while a graph captures them leave their queries."""
        first = list(self.layers).index(layers[0])
        assert list(self.layers)[first : first + len(layers)] == list(layers)
        return None if self._tape is None else self._tape[first : first + len(layers)]

    def leave(self, layer: str, queries: Tensor) -> None:
        """A layer is called in a step that a graph may capture; those beyond the tape only fill it up to a size."""
        if self._tape is not None:
            tape = self._tape[list(self.layers).index(layer)]
            tape[: len(queries)].copy_(queries[: len(tape)])

    def add(self, group: LayerGroup, layers: Sequence[str]) -> None:
        """A group of these layers; if there is one, it was of a cache that vLLM had to measure what graphs take."""
        if (former := self.groups.get(layers[0])) is not None:
            self.events.steps.pop(former, None)
        self.groups[layers[0]] = group

    def begin(self, step: PlannedStep) -> None:
        """What the next forward of these layers is to do."""
        self._steps.update(dict.fromkeys(step.places, step))

    def step(self, layer: str, metadata: Any) -> PlannedStep | None:
        """The step of a layer that was given this metadata; None for a run without.

        Raises:
            UnsupportedEngineError: the metadata are not those that were made for it.
        """
        if metadata is None:
            return None
        step = self._steps.get(layer)
        if step is None or step.metadata is not metadata:
            raise UnsupportedEngineError("This vLLM hands its layers other metadata than keepset has made.")
        return step


_active: EngineContext | None = None


def activate() -> EngineContext | None:
    """What the current configuration says, from now on for all that is asked about its model."""
    global _active  # noqa: PLW0603
    config = get_current_vllm_config_or_none()
    if _active is None or _active.config is not config:
        recipe = recipe_of(config)
        _active = None if config is None or recipe is None else EngineContext(config, recipe)
    return _active


def active() -> EngineContext | None:
    """What `activate` found for the model that was loaded last."""
    return _active
