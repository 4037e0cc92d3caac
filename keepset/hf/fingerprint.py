"""What tells one model from another, cheaply: its make, and a few numbers of every weight."""

from __future__ import annotations

import hashlib
import json

import torch
from transformers import PreTrainedModel

_NUMBERS = 16
"""Looked at in every weight; what was trained further differs in most of them."""


def fingerprint(model: PreTrainedModel) -> dict[str, str]:
    """What has to be equal for two models to make the same keys and values, by names that a person understands."""
    config = model.config.get_text_config(decoder=True)
    rotation = getattr(config, "rope_parameters", None) or {}
    return {
        "architecture": type(model).__name__,
        "number of layers": str(config.num_hidden_layers),
        "hidden size": str(config.hidden_size),
        "precision": str(model.dtype).removeprefix("torch."),
        "rotation": json.dumps(rotation, sort_keys=True, default=str),
        "sliding window": str(getattr(config, "sliding_window", None)),
        "weights": _weights(model),
    }


def _weights(model: PreTrainedModel) -> str:
    digest = hashlib.sha256()
    for name, weight in model.named_parameters():
        digest.update(f"{name} {tuple(weight.shape)} {weight.dtype}".encode())
        flat = weight.detach().flatten()
        some = flat[:: max(len(flat) // _NUMBERS, 1)].contiguous()
        digest.update(some.view(torch.uint8).cpu().numpy().data)
    return digest.hexdigest()
