"""What tells one model from another, cheaply: its make, and a few numbers of every weight."""

from __future__ import annotations

import hashlib
import json
from collections.abc import Callable, Mapping
from pathlib import Path
from typing import Any

import torch
from safetensors import safe_open
from torch import Tensor
from transformers import AutoModelForCausalLM, PreTrainedConfig, PreTrainedModel

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
            if name == "weights":
                return "weights differ"
            # What a file says may be anything: a damaged one breaks no line and steers no terminal.
            return f"{name} differs: {str(there).encode('unicode_escape').decode()} there, {here} here"
    return ""


def stored_weights(folder: Path, config: PreTrainedConfig, dtype: torch.dtype) -> str | None:
    """The same of the weights in a model's folder; None where they are not stored under the names that they have.

    Args:
        folder: with safetensors files.
        config: of the model.
        dtype: that the weights are loaded in.
    """
    files = [safe_open(path, framework="pt") for path in sorted(folder.glob("*.safetensors"))]
    stored = {name: file.get_slice(name) for file in files for name in sorted(file.keys())}
    with torch.device("meta"):
        model = AutoModelForCausalLM.from_config(config, dtype=dtype)
    weights = dict(model.named_parameters())
    if any(name not in stored or stored[name].get_shape() != list(weights[name].shape) for name in weights):
        return None

    def numbers(name: str) -> Tensor:
        weight, row = weights[name], max(weights[name].shape[1:].numel(), 1)
        places = range(0, weight.numel(), _step(weight))
        some = [stored[name][place // row : place // row + 1].flatten()[place % row] for place in places]
        return torch.stack(some).to(dtype)

    return _digest(weights, numbers)


def _weights(model: PreTrainedModel) -> str:
    weights = dict(model.named_parameters())
    return _digest(weights, lambda name: weights[name].detach().flatten()[:: _step(weights[name])].contiguous())


def _step(weight: Tensor) -> int:
    return max(weight.numel() // _NUMBERS, 1)


def _digest(weights: Mapping[str, Tensor], numbers: Callable[[str], Tensor]) -> str:
    digest = hashlib.sha256()
    for name, weight in weights.items():
        digest.update(f"{name} {tuple(weight.shape)} {weight.dtype}".encode())
        digest.update(numbers(name).view(torch.uint8).cpu().numpy().data)
    return digest.hexdigest()
