"""Which models the transformers runtime can compress; every other is refused in one sentence."""

from __future__ import annotations

from typing import Any

from torch import nn
from transformers import PreTrainedModel

from keepset.errors import KeepsetError


def check_model(model: nn.Module, config: Any) -> None:
    """Refuses models whose attention or cache is not of the kind that keepset handles.

    Raises:
        KeepsetError: says what the model has.
    """
    name = type(model).__name__
    if getattr(config, "is_encoder_decoder", False):
        raise KeepsetError(f"{name} is an encoder-decoder; keepset compresses decoder-only models.")
    if getattr(config, "attn_logit_softcapping", None) is not None:
        raise KeepsetError(f"{name} soft-caps its attention logits, which keepset's attention does not support.")
    if getattr(config, "kv_lora_rank", None):
        raise KeepsetError(f"{name} caches latents instead of keys and values; keepset does not support that.")
    if getattr(config, "num_kv_shared_layers", None):
        raise KeepsetError(f"{name} shares keys and values between layers; keepset does not support that.")
    if any(leaf.rsplit(".", 1)[-1] == "sinks" for leaf, _ in model.named_parameters()):
        raise KeepsetError(f"{name} has attention sinks in its softmax, which keepset's attention does not support.")
    if not isinstance(model, PreTrainedModel) or not model._can_set_attn_implementation():
        raise KeepsetError(
            f"{name} does not use transformers' attention interface, which keepset needs; most decoder-only models do."
        )
