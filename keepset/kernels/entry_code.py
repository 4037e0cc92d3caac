"""The inputs of the networks for an entry, and the code that holds their outputs.

The code of an entry is one integer. It holds the logarithm of the entry's score at a distance of `MIDDLE` octaves, and
the slope: the change of the logarithm with each doubling of the distance.
"""

from __future__ import annotations

import torch
from jaxtyping import Float
from torch import Tensor

MIDDLE = 6.0
"""The distance from the end of the text at which codes hold log scores, in octaves: 64 tokens."""
SCORE_STEPS, SCORE_LIMIT = 512.0, 16.0
"""Steps per unit of a log score, and the largest log score."""
SLOPE_STEPS, SLOPE_LIMIT = 256.0, 2.0
"""Steps per unit of a slope, and the largest slope."""
_SLOPES = 2 * SLOPE_LIMIT * SLOPE_STEPS
"""How many slopes a code can hold: a code is `score step * _SLOPES + slope step`."""
SHORTEST = 1e-6
"""Shorter keys and values count as this long when the logarithm of their length is taken."""


def inputs_of(
    keys: Float[Tensor, "*entries head_dim"], values: Float[Tensor, "*entries value_dim"]
) -> Float[Tensor, "*entries inputs"]:
    """Return the networks' inputs: the key before rotation, the value, and the logarithms of their lengths."""
    inputs = torch.empty(*keys.shape[:-1], keys.shape[-1] + values.shape[-1] + 2, device=keys.device)
    key, value, lengths = inputs.split([keys.shape[-1], values.shape[-1], 2], -1)
    for part, given, length in zip((key, value), (keys, values), lengths.unbind(-1), strict=True):
        torch.linalg.vector_norm(part.copy_(given), dim=-1, out=length)
    lengths.clamp_(min=SHORTEST).log_()
    return inputs


def encode(outputs: Float[Tensor, "*entries 2"]) -> Float[Tensor, "*entries"]:
    """Return log scores and slopes as codes: integers from 1 on, exact in float32; NaN stays NaN.

    Holes, and entries without a code, have 0.
    """
    score, slope = outputs.float().unbind(-1)
    score, slope = _steps(score, SCORE_STEPS, SCORE_LIMIT), _steps(slope, SLOPE_STEPS, SLOPE_LIMIT)
    return score * _SLOPES + slope


def _steps(numbers: Float[Tensor, "*shape"], steps: float, limit: float) -> Float[Tensor, "*shape"]:
    return (numbers * steps).add_(limit * steps + 0.5).floor_().clamp_(1, 2 * limit * steps - 1)


def decode(codes: Float[Tensor, "*entries"]) -> tuple[Float[Tensor, "*entries"], Float[Tensor, "*entries"]]:
    """Return the log scores and the slopes that codes hold, to half a step; see `encode`."""
    score = (codes / _SLOPES).floor_()
    slope = torch.sub(codes, score, alpha=_SLOPES)
    return score.div_(SCORE_STEPS).sub_(SCORE_LIMIT), slope.div_(SLOPE_STEPS).sub_(SLOPE_LIMIT)
