"""What keepset borrows from the inside of vLLM, thing by thing, and the version in which it was seen.

All else that the plug-in uses is an interface that vLLM offers to plug-ins.
"""

from __future__ import annotations

import torch

from keepset.core.rope import RotaryTable
from keepset.errors import UnsupportedModelError

ONE_ROTATION = ("llama", "mistral", "qwen2", "qwen3")
"""Model types of which it is known that all layers rotate, and with one table."""


def rotary_table(model_type: str, head_dim: int, dtype: torch.dtype) -> RotaryTable:
    """The rotation of the model that this process has loaded: vLLM's cache of rotary embeddings (seen in 0.32).

    Raises:
        UnsupportedModelError: it cannot be told which one the queries got.
    """
    from vllm.model_executor.layers import rotary_embedding

    tables = {
        id(rope): rope
        for rope in getattr(rotary_embedding, "_ROPE_DICT", {}).values()
        if rope.head_size == head_dim and rope.dtype == dtype and hasattr(rope, "cos_sin_cache")
    }
    if model_type not in ONE_ROTATION or len(tables) != 1:
        raise UnsupportedModelError(
            f"Under vLLM, methods that look at future queries support {', '.join(ONE_ROTATION)}, "
            f"and not {model_type}: choose another method, such as snapkv."
        )
    (rope,) = tables.values()
    return RotaryTable(rope.cos_sin_cache, rope.is_neox_style)
