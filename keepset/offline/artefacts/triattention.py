"""TriAttention's statistics (arXiv:2604.04921), as its authors' `calibrate.py` saves them: a `.pt` file.

The file is a dictionary of `metadata` and `stats`. The latter has `layerNN_headNN` for each query head, with
`q_mean_real`, `q_mean_imag` and `q_abs_mean`: mean and mean norm of the queries before rotation, in each plane. Planes
are made of the two halves of a head, or of neighbours if `rope_style` is "interleaved".
"""

from __future__ import annotations

import re
from collections.abc import Mapping
from typing import Any

import torch
from jaxtyping import Float
from torch import Tensor

from keepset.offline.artefacts.artefact import Artefact, Found

_NAME = re.compile(r"layer(\d{2,})_head(\d{2,})")
_PARTS = ("q_mean_real", "q_mean_imag", "q_abs_mean")
_INTERLEAVED = "interleaved"


def read(found: Found) -> Artefact | None:
    """Return mean and norms; None if what was found is something else.

    Raises:
        ValueError: if heads are missing, or a head's numbers are damaged.
    """
    if not isinstance(found.unpickled, dict) or not {"metadata", "stats"} <= set(found.unpickled):
        return None
    metadata, stats = found.unpickled["metadata"], found.unpickled["stats"]
    style = metadata.get("rope_style", "half")
    if style not in ("half", _INTERLEAVED):
        raise ValueError("an unknown style of rotation")
    places = {tuple(map(int, match.groups())): name for name in stats if (match := _NAME.fullmatch(name))}
    layers, heads = (1 + max(numbers) for numbers in zip(*places, strict=True))
    if len(places) != layers * heads:
        raise ValueError("heads are missing")
    parts = {
        part: torch.stack(
            [
                torch.stack([_numbers(stats[places[layer, head]], part) for head in range(heads)])
                for layer in range(layers)
            ]
        )
        for part in _PARTS
    }
    real, imaginary, norm = parts.values()
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
    """Return the numbers of a head from the first and the second coordinates of its planes."""
    return torch.stack([first, second], -1).flatten(-2) if style == _INTERLEAVED else torch.cat([first, second], -1)
