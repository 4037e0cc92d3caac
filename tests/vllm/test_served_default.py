"""What a model's configuration tells of its rotation."""

from __future__ import annotations

from typing import Any

import pytest
from transformers import (
    BloomConfig,
    Cohere2Config,
    DeepseekV3Config,
    Gemma3TextConfig,
    Glm4Config,
    LlamaConfig,
    MistralConfig,
    PreTrainedConfig,
    Qwen2Config,
    Qwen3Config,
    Qwen3NextConfig,
    SmolLM3Config,
)

from keepset.vllm.recipe_support import one_rotation

ROTATION: dict[str, Any] = {"rope_theta": 1e4}
LONG = {"short_factor": [1.0] * 64, "long_factor": [2.0] * 64, "original_max_position_embeddings": 64, "factor": 4.0}


@pytest.mark.parametrize(
    ("config", "tells"),
    [
        *[(kind(), True) for kind in (LlamaConfig, MistralConfig, Qwen2Config, Qwen3Config, Glm4Config)],
        *[(kind(), True) for kind in (Qwen3NextConfig, DeepseekV3Config)],
        (LlamaConfig(rope_parameters=ROTATION | {"rope_type": "yarn", "factor": 4.0}), True),
        (LlamaConfig(rope_parameters=ROTATION | LONG | {"rope_type": "longrope"}), False),  # two tables
        (LlamaConfig(use_qk_norm=True), False),  # norms after the rotation
        *[(kind(), False) for kind in (BloomConfig, Gemma3TextConfig, SmolLM3Config, Cohere2Config)],
    ],
    ids=lambda each: each.model_type if isinstance(each, PreTrainedConfig) else str(each),
)
def test_whether_all_layers_rotate_by_one_table(config: PreTrainedConfig, tells: bool) -> None:
    assert one_rotation(config.to_dict()) == tells
