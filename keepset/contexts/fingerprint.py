"""What identifies a model and a text: a fingerprint of configuration and weights, and the digest of token ids."""

from __future__ import annotations

import hashlib
import json
from collections.abc import Iterable, Mapping, Sequence
from math import prod
from pathlib import Path
from typing import Any

import numpy as np
import torch
from safetensors import safe_open
from torch import Tensor
from transformers import AutoModelForCausalLM, PreTrainedConfig, PreTrainedModel

from keepset.contexts.weights import adapters_digest, is_plain, step_of, untied, unwrapped, update, weights_of
from keepset.core.statistics import Statistics
from keepset.core.tables import Tables


def token_bytes(tokens: Sequence[int]) -> bytes:
    """Return the bytes whose digest identifies a text."""
    return np.asarray(tokens, dtype="<i8").tobytes()


def text_digest(tokens: Sequence[int]) -> str:
    """Return the digest that a file has of a text's tokens."""
    return hashlib.sha256(token_bytes(tokens)).hexdigest()


_PRECISION = 2.0**-8
"""Half the relative distance of two neighbouring bfloat16 numbers: rounding moves a weight no further."""
_TINY = 1e-6
"""Size below which float16 has no exact numbers."""
_SAMPLED, _EACH = 64, 4
"""Numbers of weights in a sample, and of numbers taken from each."""
_ADAPTERS = "adapters"
"""Name of the digest of a model's adapters, in fingerprints and samples of models that have some in use."""
CHANGED = "weights changed in place"
"""Name of the digest of a server's weights, in fingerprints of servers whose weights are not those of their files."""
_QUANTIZATION = ("quant_method", "quant_type", "bits", "group_size", "weight_block_size", "load_in_4bit")
"""Those settings of quantized weights that every library writes alike."""


def fingerprint(model: PreTrainedModel) -> dict[str, str]:
    """Return the facts that two models must share to make the same keys and values, by names that people understand.

    Everything that changes what the model computes is among them: weights, the adapters in use, quantization.

    Raises:
        UnsupportedModelError: weights are not loaded.
    """
    model = unwrapped(model)
    config, adapters = model.config.get_text_config(decoder=True), adapters_digest(model)
    facts = make(type(model).__name__, config, model.dtype, getattr(model.config, "quantization_config", None))
    return {**facts, **({_ADAPTERS: adapters} if adapters else {}), "weights": _weights(model)}


def make(architecture: str, config: PreTrainedConfig, dtype: torch.dtype, quantization: Any = None) -> dict[str, str]:
    """Return the fingerprint of a model that is not loaded, without its weights.

    Args:
        architecture: the name of the model's class.
        config: the configuration of its decoder.
        dtype: its precision.
        quantization: the settings by which its weights are quantized; None if they are not.
    """
    rotation = getattr(config, "rope_parameters", None) or {}
    settings = quantization if isinstance(quantization, Mapping) else getattr(quantization, "to_dict", dict)()
    stored = {name: settings[name] for name in _QUANTIZATION if settings.get(name)}
    return {
        **({"quantization": json.dumps(stored, sort_keys=True, default=str)} if stored else {}),
        "architecture": architecture,
        "number of layers": str(config.num_hidden_layers),
        "hidden size": str(config.hidden_size),
        "precision": str(dtype).removeprefix("torch."),
        "rotation": json.dumps(rotation, sort_keys=True, default=str),
        "sliding window": str(getattr(config, "sliding_window", None)),
    }


def difference(saved: Mapping[str, Any], ours: Mapping[str, str]) -> str:
    """Return how two fingerprints differ, as the end of a sentence; "" if they do not.

    Only the first difference is given: facts that depend on it, such as the weights, differ too. Weights may be unknown
    here.

    Args:
        saved: the fingerprint in a file.
        ours: the fingerprint of the model in use.
    """
    for name in {**ours, **saved}:
        saved_value, served_value = saved.get(name, "unknown"), ours.get(name, "none")
        if saved_value != served_value and (name in ours or name != "weights"):
            if name in ("weights", CHANGED, _ADAPTERS):
                return f"{_ADAPTERS if name == _ADAPTERS else 'weights'} differ"
            # A damaged file may say anything: escaped, it breaks no line and controls no terminal.
            return f"{name} differs: {str(saved_value).encode('unicode_escape').decode()} there, {served_value} here"
    return ""


def sample(model: PreTrainedModel) -> dict[str, Any]:
    """Return a few numbers of some weights, which identify a model in any precision; plain JSON.

    A model with adapters in use has their digest too.
    """
    model = unwrapped(model)
    weights, adapters = _readable(model), adapters_digest(model)
    names = list(weights)[:: max(len(weights) // _SAMPLED, 1)]
    numbers = {name: [float(f"{x:.6g}") for x in _few(weights[name]).tolist()] for name in names}
    return {**numbers, **({_ADAPTERS: adapters} if adapters else {})}


def sample_of(source: Statistics | Tables) -> Mapping[str, Any]:
    """Return the sample of the model that statistics or tables were made of; empty if they have none."""
    model = source.provenance.get("model")
    return model.get("sample", {}) if isinstance(model, Mapping) else {}


def has_other_weights(model: PreTrainedModel, sampled: Mapping[str, Any]) -> bool:
    """Return whether a sample is of other adapters or weights than a model's, as far as these are not quantized.

    Args:
        model: the model, loaded.
        sampled: the sample, as `sample` returns it.
    """
    if sampled and sampled.get(_ADAPTERS, "") != adapters_digest(model):
        return True
    weights = _readable(model)
    return bool(sampled and weights) and _differ(sampled, {name: weights[name] for name in sampled if name in weights})


def stores_other_weights(folder: Path, sampled: Mapping[str, Any]) -> bool:
    """Return whether a sample is of other weights than those in a model's folder, without loading these.

    Args:
        folder: the folder with the model's safetensors files.
        sampled: the sample, as `sample` returns it.
    """
    stored = _slices(folder)
    if _ADAPTERS in sampled:
        return True
    few = {name: _stored_numbers(stored[name], _places(stored[name].get_shape())) for name in sampled if name in stored}
    return bool(sampled and few) and _differ(sampled, few)


def _differ(sampled: Mapping[str, Any], weights: Mapping[str, Tensor]) -> bool:
    pairs = [(torch.tensor(sampled[name], dtype=torch.float32), _few(weight)) for name, weight in weights.items()]
    matches = [x.shape == y.shape and torch.allclose(x, y, rtol=_PRECISION, atol=_TINY) for x, y in pairs]
    return not (matches and all(matches))


def _readable(model: PreTrainedModel) -> dict[str, Tensor]:
    weights = weights_of(model).items()
    return {name: w for name, w in weights if w.is_floating_point() and is_plain(w) and not w.is_meta}


def _few(weight: Tensor) -> Tensor:
    """Return a few numbers of a weight; all of them if there are few."""
    return weight.detach().flatten()[_places(weight.shape)].float().cpu()


def _places(shape: Sequence[int]) -> list[int]:
    count = prod(shape)
    return list(range(0, count, max(count // _EACH, 1)))[:_EACH]


def _slices(folder: Path) -> dict[str, Any]:
    files = [safe_open(path, framework="pt") for path in sorted(folder.glob("*.safetensors"))]
    return {name: file.get_slice(name) for file in files for name in sorted(file.keys())}


def _stored_numbers(stored: Any, indices: Iterable[int]) -> Tensor:
    if prod(stored.get_shape()) < 2:  # which may have no axis to take a part of
        return stored[...].flatten()
    row = max(prod(stored.get_shape()[1:]), 1)
    return torch.stack([stored[index // row : index // row + 1].flatten()[index % row] for index in indices])


def stored_weights(folder: Path, config: PreTrainedConfig, dtype: torch.dtype) -> str | None:
    """Return the fingerprint of the weights in a model's folder; None if their names are not the model's.

    Args:
        folder: the folder with the model's safetensors files.
        config: the model's configuration.
        dtype: the precision in which the model is served.
    """
    stored = _slices(folder)
    with torch.device("meta"):
        model = AutoModelForCausalLM.from_config(config, dtype=dtype)
    weights, digest = untied(model), hashlib.sha256()
    if any(name not in stored or stored[name].get_shape() != list(weights[name].shape) for name in weights):
        return None
    wide = model._get_dtype_plan(dtype)  # parts of the names of weights that keep a precision of their own
    for name, weight in weights.items():
        precision = next((wide[part] for part in wide if part in name), weight.dtype)
        numbers = _stored_numbers(stored[name], range(0, weight.numel(), step_of(weight)))
        digest.update(f"{name} ".encode())
        update(digest, weight.to(precision), numbers.to(precision))
    return digest.hexdigest()


def _weights(model: PreTrainedModel) -> str:
    digest = hashlib.sha256()
    for name, weight in weights_of(model).items():
        digest.update(f"{name} ".encode())
        update(digest, weight)
    return digest.hexdigest()
