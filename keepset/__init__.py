"""keepset decides which entries of a language model's KV cache to keep, and really frees the rest.

A method looks at an `Observation` and answers with a `KeepSet`; a runtime executes the `KeepSet`.
"""

from __future__ import annotations

import importlib
from typing import TYPE_CHECKING, Any

if TYPE_CHECKING:
    from keepset import models
    from keepset.core.budget import Budget
    from keepset.core.feature import Feature, Needs
    from keepset.core.features.attention_columns import AttentionColumns
    from keepset.core.features.model_statistics import ModelStatistics
    from keepset.core.features.moments import HiddenMoments, QueryMoments
    from keepset.core.features.output_projection import OutputProjection
    from keepset.core.features.perplexity import Perplexity
    from keepset.core.features.prompt_queries import PromptQueryAttention
    from keepset.core.features.recent_queries import RecentQueries
    from keepset.core.features.second_pass import SecondPass
    from keepset.core.keep_set import KeepSet, LayerKeepSet
    from keepset.core.method import Allocator, Method, parameter
    from keepset.core.observation import Observation
    from keepset.core.ranking import Ranking
    from keepset.core.schedule import Schedule
    from keepset.errors import KeepsetError
    from keepset.hf.cache import Cache
    from keepset.recipe import Recipe
    from keepset.registry import METHODS, register

__version__ = "0.1.0"

# Resolved on first use: importing torch takes a second, and asking for the version should not.
_HOMES = {
    "Allocator": "keepset.core.method",
    "AttentionColumns": "keepset.core.features.attention_columns",
    "Budget": "keepset.core.budget",
    "Cache": "keepset.hf.cache",
    "Feature": "keepset.core.feature",
    "HiddenMoments": "keepset.core.features.moments",
    "KeepSet": "keepset.core.keep_set",
    "KeepsetError": "keepset.errors",
    "LayerKeepSet": "keepset.core.keep_set",
    "METHODS": "keepset.registry",
    "Method": "keepset.core.method",
    "ModelStatistics": "keepset.core.features.model_statistics",
    "Needs": "keepset.core.feature",
    "Observation": "keepset.core.observation",
    "OutputProjection": "keepset.core.features.output_projection",
    "Perplexity": "keepset.core.features.perplexity",
    "PromptQueryAttention": "keepset.core.features.prompt_queries",
    "QueryMoments": "keepset.core.features.moments",
    "Ranking": "keepset.core.ranking",
    "RecentQueries": "keepset.core.features.recent_queries",
    "Recipe": "keepset.recipe",
    "Schedule": "keepset.core.schedule",
    "SecondPass": "keepset.core.features.second_pass",
    "models": "keepset.models",
    "parameter": "keepset.core.method",
    "register": "keepset.registry",
}

__all__ = [
    "METHODS",
    "Allocator",
    "AttentionColumns",
    "Budget",
    "Cache",
    "Feature",
    "HiddenMoments",
    "KeepSet",
    "KeepsetError",
    "LayerKeepSet",
    "Method",
    "ModelStatistics",
    "Needs",
    "Observation",
    "OutputProjection",
    "Perplexity",
    "PromptQueryAttention",
    "QueryMoments",
    "Ranking",
    "RecentQueries",
    "Recipe",
    "Schedule",
    "SecondPass",
    "models",
    "parameter",
    "register",
]


def __getattr__(name: str) -> Any:
    if name not in _HOMES:
        raise AttributeError(f"module 'keepset' has no attribute {name!r}")
    module = importlib.import_module(_HOMES[name])
    return module if _HOMES[name] == f"keepset.{name}" else getattr(module, name)


def __dir__() -> list[str]:
    return [*__all__, "__version__"]
