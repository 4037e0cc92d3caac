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

from keepset.lab.artefacts.artefact import Artefact, Found

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


FORMATS: Sequence[Callable[[Found], Artefact | None]] = (duo_attention, qfilters, expected_attention, triattention)
