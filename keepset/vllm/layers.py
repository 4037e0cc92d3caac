"""The layers of a model that vLLM has built, as keepset's own parts see them."""

from __future__ import annotations

from collections.abc import Sequence
from functools import partial
from typing import Any, cast

import torch
from vllm.distributed import get_tensor_model_parallel_rank

from keepset.paged.engine import Pages
from keepset.paged.layer_group import LayerGroup
from keepset.paged.planner import Planner
from keepset.vllm import stats
from keepset.vllm.compat import rotary_table
from keepset.vllm.engine_context import EngineContext
from keepset.vllm.settings import save_limit_of


def layer_group(context: EngineContext, planner: Planner, names: Sequence[str]) -> LayerGroup:
    """Layers that share block tables, by their names.

    Raises:
        UnsupportedModelError: the recipe needs the model's rotation, which cannot be told.
    """
    config = context.config
    layers = [config.compilation_config.static_forward_context[name] for name in names]
    context.neighbours |= {name: (layers, place) for place, name in enumerate(names)}
    for layer in layers:
        layer.impl.forget_pages()
    impl, rotary = layers[0].impl, None
    if context.recipe.method.needs.unrotated:
        dtype = cast(torch.dtype, config.model_config.dtype)
        rotary = rotary_table(config.model_config.hf_text_config.model_type, impl.head_size, dtype)
    projections = [context.projections[name] for name in names] if context.projections else ()
    count = stats.count if get_tensor_model_parallel_rank() == 0 else None  # of several ranks, one counts
    passing = context.passing(names)
    pages = [partial(_pages, layer) for layer in layers]
    tape, saves = context.tape(names), save_limit_of(config) is not None
    return LayerGroup(planner, pages, passing, impl.scale, rotary, projections, count, tape, saves)


def _pages(layer: Any) -> Pages:
    """Of its cache, which vLLM gives a layer once it knows how much there is room for."""
    return layer.impl.pages(layer, layer.kv_cache)
