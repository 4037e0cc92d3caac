"""The formats in which others publish statistics of a model: one function recognises and reads each.

A function returns None for another format, and raises ValueError for damaged contents.
"""

from __future__ import annotations

import re
from collections.abc import Callable, Mapping, Sequence
from typing import Any

import torch
from jaxtyping import Float
from torch import Tensor

from keepset.core.hidden_predictor import HiddenGate, HiddenNetwork
from keepset.offline.artefacts.artefact import Artefact, Found

_KVZAP_NAME = re.compile(r"layers\.(0|[1-9]\d*)\.((?:[02]\.)?(?:weight|bias))")
_LINEAR = {"weight": "weight", "bias": "bias"}
_MLP = {"0.weight": "hidden_weight", "0.bias": "hidden_bias", "2.weight": "weight", "2.bias": "bias"}


def kvzap(found: Found) -> Artefact | None:
    """Return KVzap's modules (arXiv:2601.07891) from the safetensors file of kvpress' `KVzapModel.save_pretrained`.

    Tensors are `layers.N.weight` and `layers.N.bias` of linear modules, or `layers.N.0.*` and `layers.N.2.*` of
    networks with one hidden layer. The config has `input_dim`, `output_dim`, `hidden_dim` and `n_modules`.
    """
    names = {name: _KVZAP_NAME.fullmatch(name) for name in found.tensors}
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


_GATE = {
    "q_proj.weight": "query_weight",
    "q_proj.bias": "query_bias",
    "k_proj.weight": "key_weight",
    "q_norm.weight": "query_norm",
    "k_norm.weight": "key_norm",
    "k_base": "base",
    "b": "offset",
}


def fast_kvzip(found: Found) -> Artefact | None:
    """Return Fast KVzip's gates (arXiv:2601.17668) from the `.pt` file of its authors' `optim.py`.

    The file is a dictionary. `module` is a list with the state of each layer's gate; training curves beside it are left
    out. Gates without base keys, which the authors' program can train but not load, are refused.
    """
    if not isinstance(found.unpickled, dict) or not isinstance(states := found.unpickled.get("module"), list):
        return None
    return Artefact("Fast KVzip", modules=[_gate(state) for state in states])


def _gate(state: Mapping[str, Tensor]) -> HiddenGate:
    if not isinstance(state, Mapping) or set(state) != set(_GATE):
        raise ValueError("not the state of a gate")
    fields = {_GATE[name]: tensor for name, tensor in state.items()}
    # Both have an axis of length 1 for the tokens.
    if fields["base"].ndim != 4 or fields["offset"].ndim != 3:
        raise ValueError("base keys or offsets have another shape")
    return HiddenGate.of({**fields, "base": fields["base"].squeeze(1), "offset": fields["offset"].squeeze(1)})


TABLE = "full_attention_heads.tsv"


def duo_attention(found: Found) -> Artefact | None:
    """Return DuoAttention's gates (arXiv:2410.10819) from a `TABLE`, and its training's options from `config.json`.

    A row of the table is a layer, a column a KV head, a number the gate; gates are clipped to 0 to 1, as in the
    authors' program. The config gives the sinks and recent tokens with which the gates were trained.
    """
    if not found.table:
        return None
    if len({len(row) for row in found.table}) != 1:
        raise ValueError("rows of different lengths")
    gates = torch.tensor(found.table, dtype=torch.float64)
    names = {"sinks": "sink_size", "recent": "recent_size"}
    sizes = {name: found.config[field] for name, field in names.items() if type(found.config.get(field)) is int}
    options = ", ".join(f"{name}={size}" for name, size in sizes.items())
    advice = f"the gates were trained with duo_attention({options})" if sizes else ""
    # NaN is not clipped, and is refused later.
    return Artefact("DuoAttention", retrieval=gates.clamp(0, 1).float(), made=sizes, advice=advice)


def qfilters(found: Found) -> Artefact | None:
    """Return Q-Filters' directions (arXiv:2503.02812) from the file of its authors' `QFilters.save_pretrained`.

    The only tensor is `q_filters`, `[layers, kv_heads, head_dim]`. The published directions point away from most
    queries: the authors' `make_filters.py` negates them, and their cache keeps the keys with the smallest products. In
    keepset they point along the queries, so their sign is reversed.
    """
    if set(found.tensors) != {"q_filters"}:
        return None
    return Artefact("Q-Filters", fields={"direction": -found.tensors["q_filters"].float()})


_SAID = ("dataset_name", "num_samples", "sample_seq_len", "n_sink")


def expected_attention(found: Found) -> Artefact | None:
    """Return Expected Attention's statistics (arXiv:2510.00636) from the file of kvpress' `ExpectedAttentionStats`.

    Tensors are `query_mean`, `[layers, query_heads, head_dim]`, and `query_cov`, `[layers, query_heads, head_dim,
    head_dim]`, of queries before rotation. The config names the texts, and how many first tokens were left out.
    """
    if set(found.tensors) != {"query_mean", "query_cov"}:
        return None
    fields = {"mean": found.tensors["query_mean"].float(), "covariance": found.tensors["query_cov"].float()}
    made = {name: found.config[name] for name in _SAID if isinstance(found.config.get(name), str | int)}
    return Artefact("Expected Attention", fields=fields, made=made)


_HEAD = re.compile(r"layer(\d{2,})_head(\d{2,})")
_INTERLEAVED = "interleaved"


def triattention(found: Found) -> Artefact | None:
    """Return TriAttention's means and norms (arXiv:2604.04921) from the `.pt` file of its authors' `calibrate.py`.

    The file is a dictionary of `metadata` and `stats`. The latter has `layerNN_headNN` for each query head, with
    `q_mean_real`, `q_mean_imag` and `q_abs_mean`: mean and mean norm of the queries before rotation, in each plane.
    Planes are made of the two halves of a head, or of neighbours if `rope_style` is "interleaved".
    """
    if not isinstance(found.unpickled, dict) or not {"metadata", "stats"} <= set(found.unpickled):
        return None
    metadata, stats = found.unpickled["metadata"], found.unpickled["stats"]
    style = metadata.get("rope_style", "half")
    if style not in ("half", _INTERLEAVED):
        raise ValueError("an unknown style of rotation")
    places = {tuple(map(int, match.groups())): name for name in stats if (match := _HEAD.fullmatch(name))}
    layers, heads = (1 + max(numbers) for numbers in zip(*places, strict=True))
    if len(places) != layers * heads:
        raise ValueError("heads are missing")

    def stacked(part: str) -> Float[Tensor, "layers heads planes"]:
        ordered = [stats[places[layer, head]] for layer in range(layers) for head in range(heads)]
        return torch.stack([_numbers(head, part) for head in ordered]).unflatten(0, (layers, heads))

    real, imaginary, norm = map(stacked, ("q_mean_real", "q_mean_imag", "q_abs_mean"))
    half = torch.arange(real.shape[-1])
    first, second = half, half + len(half)
    return Artefact(
        "TriAttention",
        fields={"mean": _joined(real, imaginary, style), "norm": _joined(norm, norm, style)},
        partner=_joined(second, first, style) if style == "half" else _joined(2 * half + 1, 2 * half, style),
        made={name: metadata[name] for name in ("model_name", "rope_style") if isinstance(metadata.get(name), str)},
    )


def _numbers(head: Mapping[str, Any], part: str) -> Float[Tensor, " planes"]:
    numbers = head[part]
    if not isinstance(numbers, Tensor) or numbers.ndim != 1:
        raise ValueError("no row of numbers")
    return numbers.float()


def _joined(first: Tensor, second: Tensor, style: str) -> Tensor:
    """Return the numbers of a head, given the first and the second coordinates of its planes."""
    return torch.stack([first, second], -1).flatten(-2) if style == _INTERLEAVED else torch.cat([first, second], -1)


FORMATS: Sequence[Callable[[Found], Artefact | None]] = (
    kvzap,
    fast_kvzip,
    duo_attention,
    qfilters,
    expected_attention,
    triattention,
)
