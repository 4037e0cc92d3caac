"""`check_model`: which models the transformers runtime can compress."""

from __future__ import annotations

from functools import partial
from typing import Any

from torch import Tensor, nn
from transformers import PreTrainedModel

from keepset.core.nan_scores import NAN_MODEL
from keepset.errors import KeepsetError, UnsupportedModelError


def check_model(model: nn.Module) -> None:
    """Refuse a model whose attention or cache is not of the kind that keepset handles.

    Raises:
        UnsupportedModelError: says in one sentence what the model has.
    """
    if not isinstance(model, nn.Module):
        raise UnsupportedModelError(
            f"keepset.Cache takes a model, and this is {model!r:.80}: load one first, as by "
            "AutoModelForCausalLM.from_pretrained(...)."
        )
    if not hasattr(model, "config"):
        raise UnsupportedModelError(f"{type(model).__name__} is no model of transformers, which keepset needs here.")
    config: Any = model.config
    config = config.get_text_config(decoder=True)
    declared = partial(getattr, config)
    foreign = not (isinstance(model, PreTrainedModel) and model._can_set_attn_implementation())
    soft_caps = declared("attn_logit_softcapping", None) is not None
    sinks = any(name.rsplit(".", 1)[-1] == "sinks" for name, _ in model.named_parameters())
    wrapped = hasattr(model, "_orig_mod")
    own_cache = not getattr(model, "_supports_default_dynamic_cache", lambda: True)()
    reasons = {
        "is torch.compile's wrapper: give keepset the model itself, or compile it in place by model.compile()": wrapped,
        "is an encoder-decoder; keepset compresses decoder-only models": declared("is_encoder_decoder", False),
        "soft-caps its attention logits, which keepset's attention does not support": soft_caps,
        "caches latents instead of keys and values; keepset does not support that": declared("kv_lora_rank", None),
        "shares keys and values between layers; keepset does not support that": declared("num_kv_shared_layers", None),
        "has attention sinks in its softmax, which keepset's attention does not support": sinks,
        "takes only a cache of its own kind, in whose place keepset's cannot stand": own_cache and not foreign,
        "does not use transformers' attention interface, which keepset needs; most decoder-only models do": foreign,
    }
    for reason, applies in reasons.items():
        if applies:
            raise UnsupportedModelError(f"{type(model).__name__} {reason}.")


def check_logits(logits: Tensor) -> None:
    """Refuse logits that are not numbers: every answer would be the same nonsense.

    Raises:
        KeepsetError: some are NaN.
    """
    if bool(logits.isnan().any()):
        raise KeepsetError(NAN_MODEL)
