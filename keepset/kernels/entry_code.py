"""What networks read of an entry, and the code that holds what they say of it.

The code of an entry is one whole number. It holds the logarithm of the entry's score at a distance of `MIDDLE` octaves,
and the slope: what each doubling of the distance adds to it.
"""

from __future__ import annotations

import torch
from jaxtyping import Float
from torch import Tensor

MIDDLE = 6.0
"""The distance from the end of the text that log scores in codes are of, in octaves: 64 tokens."""
SCORE_STEPS, SCORE_LIMIT = 512.0, 16.0
"""Parts of 1 that a log score is rounded to, and the largest one."""
SLOPE_STEPS, SLOPE_LIMIT = 256.0, 2.0
"""The same of a slope."""
_SLOPES = 2 * SLOPE_LIMIT * SLOPE_STEPS
"""How many slopes a code can hold: its score counts in these."""
SHORTEST = 1e-6
"""The least length of a key or value whose logarithm is taken."""


def inputs_of(
    keys: Float[Tensor, "*entries head_dim"], values: Float[Tensor, "*entries value_dim"]
) -> Float[Tensor, "*entries inputs"]:
    """Return what networks read of entries: key before rotation, value, and the logarithms of their lengths."""
    inputs = torch.empty(*keys.shape[:-1], keys.shape[-1] + values.shape[-1] + 2, device=keys.device)
    key, value, lengths = inputs.split([keys.shape[-1], values.shape[-1], 2], -1)
    for part, given, length in zip((key, value), (keys, values), lengths.unbind(-1), strict=True):
        torch.linalg.vector_norm(part.copy_(given), dim=-1, out=length)
    lengths.clamp_(min=SHORTEST).log_()
    return inputs


def encode(outputs: Float[Tensor, "*entries 2"]) -> Float[Tensor, "*entries"]:
    """Return log scores and slopes as codes: whole numbers from 1 on, exact in float32; NaN stays NaN.

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
