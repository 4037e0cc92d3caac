"""KVzap's modules (arXiv:2601.07891), as kvpress' `KVzapModel.save_pretrained` writes them: safetensors and a config.

Tensors are `layers.N.weight` and `layers.N.bias` of linear modules, or `layers.N.0.*` and `layers.N.2.*` of networks
with one hidden layer. The config has `model_type` "kvzap", `input_dim`, `output_dim`, `hidden_dim` and `n_modules`.
"""

from __future__ import annotations

import re

from torch import Tensor

from keepset.core.hidden_predictor import HiddenNetwork
from keepset.offline.artefacts.artefact import Artefact, Found

_LINEAR = {"weight": "weight", "bias": "bias"}
_MLP = {"0.weight": "hidden_weight", "0.bias": "hidden_bias", "2.weight": "weight", "2.bias": "bias"}
_NAME = re.compile(r"layers\.(0|[1-9]\d*)\.((?:[02]\.)?(?:weight|bias))")


def read(found: Found) -> Artefact | None:
    """Return KVzap's modules; None if what was found is something else.

    Raises:
        ValueError: if modules are missing, damaged, or other than the config says.
    """
    names = {name: _NAME.fullmatch(name) for name in found.tensors}
    if not names or not all(names.values()):
        return None
    layers: dict[int, dict[str, Tensor]] = {}
    for name, match in names.items():
        assert match is not None
        layers.setdefault(int(match[1]), {})[match[2]] = found.tensors[name]
    if sorted(layers) != list(range(len(layers))):
        raise ValueError("modules are missing")
    fields = _LINEAR if "weight" in layers[0] else _MLP
    if any(set(each) != set(fields) for each in layers.values()):
        raise ValueError("modules are of different kinds")
    modules = [
        HiddenNetwork.of({fields[name]: each for name, each in layers[index].items()}) for index in range(len(layers))
    ]
    width = None if modules[0].hidden_bias is None else len(modules[0].hidden_bias)
    are = {
        "n_modules": len(modules),
        "input_dim": modules[0].inputs,
        "output_dim": modules[0].kv_heads,
        "hidden_dim": width,
    }
    if any(found.config[name] != value for name, value in are.items() if name in found.config):
        raise ValueError("the config is of other modules")
    return Artefact("KVzap", modules=modules, made={"hidden_dim": width})
