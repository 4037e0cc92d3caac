"""What a model computes with: its tensors, wherever libraries keep them, and the adapters that are in use."""

from __future__ import annotations

import hashlib
import re
import sys
from collections.abc import Iterator
from itertools import accumulate
from operator import attrgetter
from typing import Any

import torch
from torch import Tensor, nn

from keepset.errors import UnsupportedModelError

_NUMBERS = 16
"""How many numbers of every weight are compared. A model that was trained further differs in most of them."""
BY_REQUEST = "one for each request"
"""The digest of adapters during a call in which every request has its own."""
_WRAPPED = re.compile(r"\.(base_layer|original_module|token_adapter\.base_layer)(?=\.)")
"""Parts of a weight's name that PEFT adds."""


def unwrapped(model: Any) -> Any:
    """Return the model in PEFT's wrapper, whose layers have the adapters; other models as they are."""
    inner = getattr(model, "get_base_model", None)
    return inner() if callable(inner) else model


def weights_of(model: nn.Module) -> dict[str, Tensor]:
    """Return the tensors that a model's files have, parameters and buffers, without those of adapters.

    Tied weights are there once. Names are those without adapters. Tensors may be of any type and on any device.

    Raises:
        UnsupportedModelError: weights are not loaded.
    """
    tuned = _tuner_layers(model)
    adapters = {path + name for path, layer in tuned.items() for name in layer.adapter_layer_names}
    return {
        _WRAPPED.sub("", name) if tuned else name: _loaded(model, name, tensor)
        for name, tensor in untied(model).items()
        if adapters.isdisjoint(_prefixes(name))
    }


def untied(model: nn.Module) -> dict[str, Tensor]:
    """Return the tensors that are saved with a model, as they are; tied ones once."""
    # Offloaded weights that are tied are different objects.
    tied = getattr(model, "all_tied_weights_keys", {})
    tensors, marked = dict[str, Tensor](), set[int | str]()
    for name, tensor in model.state_dict(keep_vars=True).items():
        marks = (
            {id(tensor), tied.get(name, name)} if isinstance(tensor, Tensor) and is_elsewhere(tensor) else {id(tensor)}
        )
        if isinstance(tensor, Tensor) and marked.isdisjoint(marks):
            tensors[name] = tensor
        marked |= marks
    return tensors


def adapters_digest(model: nn.Module) -> str:
    """Return a digest of the adapters that change what a model computes (PEFT); "" if none does.

    Adapters count by their weights and settings, not by their names. Those that are merged are part of the weights.

    Raises:
        UnsupportedModelError: weights are not loaded.
    """
    digest, unused = hashlib.sha256(), True
    for path, layer in _tuner_layers(model).items():
        if has_adapters_by_request(layer):
            return BY_REQUEST
        merged = bool(getattr(layer, "merged", False))
        if layer.disable_adapters != merged:
            continue  # the layer without adapters computes
        for adapter in layer.active_adapters:
            for name, part in _parts_of(layer, adapter):
                digest.update(f"{path}{name} {merged} ".encode())
                if isinstance(part, Tensor):
                    update(digest, _loaded(model, path + name, part))
                else:
                    digest.update(f"{part} ".encode())
                unused = False
    return "" if unused else digest.hexdigest()


def has_adapters_by_request(layer: nn.Module) -> bool:
    """Return whether a call is under way in which every request has its own adapter (PEFT's `adapter_names`)."""
    return any("adapter_names" in getattr(hook, "keywords", ()) for hook in layer._forward_pre_hooks.values())


def update(digest: Any, weight: Tensor, numbers: Tensor | None = None) -> None:
    """Add a few numbers of a weight to a digest, in the form in which they are stored.

    Args:
        digest: a digest of `hashlib`.
        weight: the weight.
        numbers: its numbers at every `step_of(weight)`, if they are not in the weight.
    """
    digest.update(f"{tuple(weight.shape)} {weight.dtype}".encode())
    if is_plain(weight):
        numbers = weight.detach().flatten()[:: step_of(weight)] if numbers is None else numbers
        digest.update(numbers.contiguous().view(torch.uint8).cpu().numpy().data)
        return
    names, settings = weight.__tensor_flatten__()  # type: ignore[attr-defined]
    digest.update(f" {type(weight).__name__} {settings}".encode())
    for name in names:
        update(digest, getattr(weight, name))


def step_of(weight: Tensor) -> int:
    """Return the distance of those numbers of a weight that are compared."""
    return max(weight.numel() // _NUMBERS, 1)


def is_elsewhere(weight: Tensor) -> bool:
    """Return whether a tensor only stands for numbers that are kept elsewhere, or nowhere."""
    return weight.is_meta and type(weight) in (Tensor, nn.Parameter, nn.Buffer)


def is_plain(weight: Tensor) -> bool:
    """Return whether a tensor's numbers can be read as they are stored. Those of libraries' own types cannot."""
    return type(weight) in (Tensor, nn.Parameter, nn.Buffer) or not hasattr(weight, "__tensor_flatten__")


def device_of(module: nn.Module) -> torch.device | None:
    """Return the device on which a module computes, also if its weights are offloaded; None if nothing tells it."""
    for part in module.modules():
        for weight in part.parameters(recurse=False):
            if not is_elsewhere(weight):
                return weight.device
            for hook in _hooks_of(part):
                if (device := getattr(hook, "execution_device", None)) is not None:
                    return torch.device(device)
    return None


def _tuner_layers(model: nn.Module) -> dict[str, Any]:
    """Return the layers to which PEFT has added adapters, by the beginning of their weights' names."""
    if "peft" not in sys.modules:
        return {}
    from peft.tuners.tuners_utils import BaseTunerLayer
    from peft.utils.other import AuxiliaryTrainingWrapper

    kinds = BaseTunerLayer, AuxiliaryTrainingWrapper
    return {f"{path}.": layer for path, layer in model.named_modules() if isinstance(layer, kinds)}


def _parts_of(layer: Any, adapter: str) -> Iterator[tuple[str, Any]]:
    """Yield what a layer has of an adapter, weights and settings, with names that do not depend on the adapter's.

    Args:
        layer: a layer with adapters (PEFT).
        adapter: the adapter's name.
    """
    for name in (*layer.adapter_layer_names, *layer.other_param_names):
        parts = attrgetter(name)(layer)
        part = parts[adapter] if hasattr(parts, "keys") and adapter in parts else None
        if isinstance(part, nn.Module):
            yield from ((f"{name}.{inner}", tensor) for inner, tensor in part.state_dict(keep_vars=True).items())
        elif isinstance(part, Tensor | int | float | str | list | tuple):
            yield name, part


def _prefixes(name: str) -> Iterator[str]:
    return accumulate(name.split("."), "{}.{}".format)


def _loaded(model: nn.Module, name: str, tensor: Tensor) -> Tensor:
    """Return a tensor of a model from where it is kept while the model does not compute (accelerate).

    Args:
        model: the model.
        name: the tensor's name in the model.
        tensor: the tensor, on the meta device if its numbers are elsewhere.

    Raises:
        UnsupportedModelError: it is not loaded.
    """
    if not is_elsewhere(tensor):
        return tensor
    whole: nn.Module | None = model
    for path in ("", *_prefixes(name)):
        whole = model if not path else getattr(whole, path.rpartition(".")[2], None)
        for hook in _hooks_of(whole):
            kept, parameter_name = getattr(hook, "weights_map", None), name[len(path) :].lstrip(".")
            if kept is not None and parameter_name in kept:
                return kept[parameter_name]  # type: ignore[no-any-return]
    raise UnsupportedModelError(
        f"{type(model).__name__} has weights that are not loaded ({name!r:.80}), so keepset cannot tell which model it "
        "is: load it whole, or let accelerate offload it."
    )


def _hooks_of(module: Any) -> Iterator[Any]:
    """Yield accelerate's hooks of a module."""
    hook = getattr(module, "_hf_hook", None)
    yield from getattr(hook, "hooks", (hook,))
