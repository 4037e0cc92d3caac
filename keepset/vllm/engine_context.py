"""`EngineContext`: the state that keepset's classes in one process share under vLLM.

vLLM asks an attention backend for classes and for each layer's kind of cache without naming the model or layer, and
makes the objects itself. So their shared state is here. Only the choice of the active context is global.
"""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass
from functools import cached_property
from typing import Any, cast

import torch
from torch import Tensor
from vllm.config import VllmConfig, get_current_vllm_config_or_none
from vllm.logger import init_logger
from vllm.model_executor.models.utils import extract_layer_index
from vllm.platforms import current_platform
from vllm.v1.kv_cache_interface import AttentionSpec, KVCacheSpec

from keepset.errors import UnsupportedModelError
from keepset.paged.engine import StepAdapter
from keepset.paged.entry_columns import columns_of
from keepset.paged.event_execution import EventQueue
from keepset.paged.eviction import group_leader
from keepset.paged.layer_group import LayerGroup
from keepset.paged.layout_table import EmptiedBlocks
from keepset.paged.ragged_heads import PerHeadSequences
from keepset.paged.step import StepPlan
from keepset.recipe import Recipe
from keepset.recording import Recording
from keepset.vllm import stats
from keepset.vllm.compat import (
    all_layers,
    ask_for_prompt_lengths,
    attention_layers,
    captured_tokens,
    drafted_tokens,
    layer_specs,
)
from keepset.vllm.formats import ROW_SCALES, check_rows
from keepset.vllm.model_weights import ModelWeights
from keepset.vllm.query_projection import VLLMQueryProjection, watch_projections
from keepset.vllm.settings import contexts_of, is_compressed, recipe_of, save_limit_of
from keepset.vllm.spec import KeepSpec, QueryBuffers, Shape, reserve
from keepset.vllm.validation import (
    LAYERS_THAT_DRAFT,
    check,
    check_layer,
    check_layers,
    check_spec,
    leaves_alone,
)

logger = init_logger(f"vllm.{__name__}")  # vLLM shows only messages of its own loggers


@dataclass
class PlannedStep:
    """The step that a group of layers is about to compute.

    Attributes:
        group: the group of layers.
        plan: the step's plan.
        metadata: the metadata of the step for vLLM's attention.
        is_plain: whether the layers do only what vLLM's own do.
        slots: the address of the slots to which vLLM writes, in the plan.
    """

    group: LayerGroup
    plan: StepPlan
    metadata: Any

    def __post_init__(self) -> None:
        plan = self.plan
        self.is_plain = plan.ragged is None and not plan.in_layers and not plan.dummy
        self.slots = plan.slot_mapping.data_ptr()

    @cached_property
    def per_head(self) -> PerHeadSequences:
        """Heads as requests, for a step with tokens of ragged heads; the layers share it."""
        assert self.plan.ragged is not None
        return PerHeadSequences(self.plan.ragged)


class CurrentStep:
    """The step that the layers of a group compute next. They share this object; it has None until a step is planned."""

    planned: PlannedStep | None = None


class EngineContext:
    """State that keepset's classes share under one configuration with a recipe.

    Attributes:
        config, recipe: vLLM's configuration, and the recipe that it names.
        projections: the layers' query projections by name, if the recipe needs queries before rotation.
        emptied_blocks: blocks that events have emptied, for the connector to fetch.
        events: the planner of all groups' steps, which also executes their events.
        groups: the groups of layers that share block tables, by the name of each group's first layer.
        weights: the model's weights, if contexts are served.
        adapter: translates metadata of steps for all groups, once there is one.
        block_size: tokens per block of the compressed layers, once vLLM has asked for their kinds of cache.

    Raises:
        UnsupportedEngineError, UnsupportedModelError: the recipe cannot be served.
    """

    def __init__(self, config: VllmConfig, recipe: Recipe) -> None:
        check(config, recipe)
        if is_compressed(config):
            stats.serving(str(recipe))
            logger.info("keepset serves %s", recipe)
        else:
            stats.serving(None)
            logger.info("keepset compresses no prompts, and serves the contexts in %s", contexts_of(config))
        # Requests with images have their own recipes if the recipe says that images, or text, always stay.
        self.config, self.recipe = config, recipe.located(())
        self.projections: dict[str, VLLMQueryProjection] = {}
        self.emptied_blocks = EmptiedBlocks()
        self.events = EventQueue(self.emptied_blocks)
        self.groups: dict[str, LayerGroup] = {}
        needs = recipe.method.traits.needs
        self._watch = (
            watch_projections(self.projections, needs.hidden_states) if needs.unrotated or needs.hidden_states else None
        )
        self.weights = None if contexts_of(config) is None else ModelWeights()
        self._buffers: QueryBuffers | None = None
        self._reserve: Tensor | None = None
        self.block_size, self._specs_made = 0, 0
        self._target: set[str] | None = None
        self.adapter: StepAdapter | None = None

    def is_drafted_by(self, config: VllmConfig) -> bool:
        """Return whether another configuration is that of a model that drafts for this one."""
        same = [getattr(config, part) is getattr(self.config, part) for part in ("compilation_config", "model_config")]
        return config is not self.config and config.speculative_config is not None and all(same)

    def begin_draft(self) -> None:
        """Note that layers built from now on belong to a draft model; vLLM builds it last."""
        if self._target is None:
            self._target = set(self.config.compilation_config.static_forward_context)

    def _is_draft(self, name: str) -> bool:
        """Return whether a layer belongs to a draft model, which is built last or whose layers are numbered last."""
        if self.config.speculative_config is None:
            return False
        built_last = self._target is not None and name not in self._target
        return built_last or extract_layer_index(name) >= self.config.model_config.get_total_num_hidden_layers()

    @cached_property
    def layers(self) -> dict[str, int]:
        """The indices of the compressed layers by name: the layers of this process that attend to all tokens."""
        layers, compressed = {}, []
        for name, layer, index in attention_layers(self.config):
            if not leaves_alone(layer.get_kv_cache_spec(self.config)) and not self._is_draft(name):
                unseen = self._watch is not None and name not in self.projections
                check_layer(name, layer, unseen=unseen)
                layers[name] = index
                compressed.append(layer)
        drafts = self.config.speculative_config
        if drafts is not None and drafts.method in LAYERS_THAT_DRAFT and not self._drafts:
            raise UnsupportedModelError(
                f"keepset cannot serve this model: it cannot tell layers that draft ({drafts.method}) from the "
                "others; use ngram or suffix."
            )
        check_layers(self.config, self.recipe, compressed, self._others)
        return layers

    @cached_property
    def _others(self) -> list[KVCacheSpec]:
        """The kinds of caches that keepset leaves to vLLM: those of bounded size, and those of drafts."""
        return [spec for name, spec in layer_specs(self.config) if self._is_draft(name) or leaves_alone(spec)]

    @cached_property
    def _drafts(self) -> list[KVCacheSpec]:
        """The kinds of caches of a draft model's layers."""
        return [spec for name, spec in layer_specs(self.config) if self._is_draft(name)]

    @cached_property
    def recording(self) -> Recording:
        """The plan of which queries layers record, and for what."""
        group, head_dim, drafts = self._layer.num_queries_per_kv, self._layer.head_size, drafted_tokens(self.config)
        return Recording.of_recipe(self.recipe, group, head_dim, self.dtype.itemsize, drafts)

    @property
    def dtype(self) -> torch.dtype:
        """The model's dtype, which queries, keys and values have."""
        return cast(torch.dtype, self.config.model_config.dtype)

    @property
    def _layer(self) -> Any:
        """The implementation of the first compressed layer; all of them have the same shape."""
        return self.config.compilation_config.static_forward_context[next(iter(self.layers))].impl

    @cached_property
    def columns(self) -> dict[str, tuple[int, ...]]:
        """The columns that entries have beside key and value; see `columns_of`."""
        contexts, saves = contexts_of(self.config) is not None, save_limit_of(self.config) is not None
        return columns_of(self.recipe, self.recording.group, contexts=contexts, saves=saves)

    def customize_spec(self, spec: AttentionSpec) -> AttentionSpec:
        """Return the kind of cache of the next layer; vLLM asks layer by layer.

        vLLM also asks for blocks of one token, to learn their size; these belong to no layer.

        Raises:
            UnsupportedEngineError, UnsupportedModelError: the model's layers cannot be compressed.
        """
        if spec.block_size == 1:
            return spec
        layer_ids = tuple(self.layers.values())  # raises if layers cannot be served; the model is built by now
        if leaves_alone(spec):
            return spec
        if self._watch is not None:
            self._watch.remove()
        spec_index = self._specs_made % (len(layer_ids) + sum(not leaves_alone(spec) for spec in self._drafts))
        self._specs_made += 1
        if spec_index >= len(layer_ids):  # a draft model's layer; these come last
            return spec
        index = layer_ids[spec_index]
        # Other groups of layers may have smaller blocks, which the configuration then names.
        self.block_size = spec.block_size
        ask_for_prompt_lengths(self.config)
        if self._buffers is None:  # vLLM has not measured memory yet
            self._check_cache(spec)
            requests, device = self.config.scheduler_config.max_num_seqs, current_platform.device_type
            longest, head_dim = self.config.model_config.max_model_len, self._layer.head_size
            queries, tokens = (self._layer.num_heads, head_dim, self.dtype, device), captured_tokens(self.config)
            self._buffers = QueryBuffers(self.recording, len(layer_ids), requests, *queries, tokens)
            stored, bytes_read = spec.state_content_size_bytes, 2 * head_dim * self.dtype.itemsize
            shape = Shape(len(layer_ids), spec.num_kv_heads, head_dim, stored, bytes_read, longest)
            self._reserve = reserve(self.config, self.recipe, self.recording.group, self.columns, shape)
        scheduler, layers = self.config.scheduler_config, all_layers(self.config, layer_ids)
        return KeepSpec.wrap(
            check_spec(spec),
            recipe=str(self.recipe),
            layer=group_leader(self.recipe, index, layers),
            layers=layers,
            tokens_per_step=scheduler.max_num_batched_tokens,
            steps_ahead=int(bool(scheduler.async_scheduling)),
            value_size=getattr(self._layer, "kv_lora_rank", spec.head_size),
            per_head=self.recipe.schedule.turns or contexts_of(self.config) is not None,
            alone=not self._others,
        )

    def _check_cache(self, spec: AttentionSpec) -> None:
        """Check that keepset reads from a quantised cache what vLLM writes to it."""
        if current_platform.is_cpu():
            return
        device, kind = torch.device(current_platform.device_type), self.config.cache_config.cache_dtype
        if kind in ROW_SCALES:
            check_rows(kind, spec.num_kv_heads, self._layer.head_size, self.dtype, device)

    @property
    def buffers(self) -> QueryBuffers:
        """The buffers for queries, once vLLM has asked for the layers' kinds of cache."""
        assert self._buffers is not None
        return self._buffers

    def add(self, group: LayerGroup, layers: Sequence[str]) -> None:
        """Add a group of layers. It replaces an earlier group of them, whose cache vLLM made only to measure graphs.

        Args:
            group: the group.
            layers: names of its layers.
        """
        if (former := self.groups.get(layers[0])) is not None:
            self.events.steps.pop(former, None)
        self.groups[layers[0]] = group
        self._reserve = None  # vLLM has measured


_active: EngineContext | None = None


def activate() -> EngineContext | None:
    """Make the context of vLLM's current configuration active, and return it; None if the configuration has no recipe.

    A draft model may be built under its own configuration; its layers are filed with the model's.
    """
    global _active  # noqa: PLW0603
    config = get_current_vllm_config_or_none()
    if config is not None and _active is not None and _active.is_drafted_by(config):
        _active.begin_draft()
        return _active
    if _active is None or _active.config is not config:
        recipe = recipe_of(config)
        _active = None if config is None or recipe is None else EngineContext(config, recipe)
    return _active


def active() -> EngineContext | None:
    """Return the context of the model that was loaded last, if it has a recipe."""
    return _active
