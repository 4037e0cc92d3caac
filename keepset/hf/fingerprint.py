"""What tells one model from another, cheaply: its make, and a few numbers of every weight."""

from __future__ import annotations

import hashlib
import json
from collections.abc import Mapping
from typing import Any

import torch
from transformers import PreTrainedConfig, PreTrainedModel

_NUMBERS = 16
"""Looked at in every weight; what was trained further differs in most of them."""


def fingerprint(model: PreTrainedModel) -> dict[str, str]:
    """What has to be equal for two models to make the same keys and values, by names that a person understands."""
    config = model.config.get_text_config(decoder=True)
    return {**make(type(model).__name__, config, model.dtype), "weights": _weights(model)}


def make(architecture: str, config: PreTrainedConfig, dtype: torch.dtype) -> dict[str, str]:
    """The same of a model that is not at hand, but for its weights."""
    rotation = getattr(config, "rope_parameters", None) or {}
    return {
        "architecture": architecture,
        "number of layers": str(config.num_hidden_layers),
        "hidden size": str(config.hidden_size),
        "precision": str(dtype).removeprefix("torch."),
        "rotation": json.dumps(rotation, sort_keys=True, default=str),
        "sliding window": str(getattr(config, "sliding_window", None)),
    }


def difference(theirs: Mapping[str, Any], ours: Mapping[str, str]) -> str:
    """Wherein two fingerprints differ, as the end of a sentence; "" where they do not.

    The first difference says it: what follows from it, such as the weights, differs too.
    """
    for name, here in ours.items():
        there = theirs.get(name, "unknown")
        if there != here:
            return "weights differ" if name == "weights" else f"{name} differs: {there} there, {here} here"
    return ""


def _weights(model: PreTrainedModel) -> str:
    digest = hashlib.sha256()
    for name, weight in model.named_parameters():
        digest.update(f"{name} {tuple(weight.shape)} {weight.dtype}".encode())
        flat = weight.detach().flatten()
        some = flat[:: max(len(flat) // _NUMBERS, 1)].contiguous()
        digest.update(some.view(torch.uint8).cpu().numpy().data)
    return digest.hexdigest()
