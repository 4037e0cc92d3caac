"""Distance of predictions from the full cache's, token by token; in parts, because the vocabulary is large."""

import torch
import torch.nn.functional as F
from jaxtyping import Float, Int
from torch import Tensor

_PART = 256


def kl(full: Float[Tensor, "n vocabulary"], other: Float[Tensor, "n vocabulary"]) -> Float[Tensor, " n"]:
    """Return KL(full || other) after every token in nats, `[n]`."""
    parts = zip(full.split(_PART), other.split(_PART), strict=True)
    return torch.cat(
        [
            F.kl_div(b.float().log_softmax(-1), a.float().log_softmax(-1), log_target=True, reduction="none").sum(-1)
            for a, b in parts
        ]
    )


def nll(logits: Float[Tensor, "n vocabulary"], tokens: Int[Tensor, " n"]) -> Float[Tensor, " n_less_one"]:
    """Return the negative log-likelihood of every token but the first, which the prompt predicts the same way."""
    parts = zip(logits[:-1].split(_PART), tokens[1:].split(_PART), strict=True)
    return torch.cat([F.cross_entropy(a.float(), b, reduction="none") for a, b in parts])


def mean(figures: Float[Tensor, " n"]) -> float:
    """Return the mean of figures; 0 if there are none."""
    return float(figures.mean()) if figures.numel() else 0.0
