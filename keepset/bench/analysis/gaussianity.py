"""How near hidden states are to a normal distribution, channel by channel, as GVote assumes."""

from collections.abc import Callable
from dataclasses import dataclass
from typing import Any

import torch
from jaxtyping import Float, Int
from torch import Tensor
from transformers import PreTrainedModel

from keepset.errors import KeepsetError


@dataclass(frozen=True, eq=False)
class Gaussianity:
    """Shape of one layer's hidden states along a text, per channel; NaN for a channel that never changes.

    Attributes:
        distance: Kolmogorov-Smirnov distance `[channels]` between a channel's values and the normal distribution with
            their mean and variance: the largest difference of the two cumulative distributions, from 0 to 1.
        skewness: `[channels]`, 0 for a normal distribution.
        kurtosis: excess kurtosis `[channels]`, 0 for a normal distribution.
    """

    distance: Float[Tensor, " channels"]
    skewness: Float[Tensor, " channels"]
    kurtosis: Float[Tensor, " channels"]


def gaussianity(hidden: Float[Tensor, "tokens channels"]) -> Gaussianity:
    """Return the shape of every channel's values over the tokens."""
    values = hidden.double()
    values = (values - values.mean(0)) / values.std(0, unbiased=False)
    ordered = values.sort(dim=0).values
    normal = torch.special.ndtr(ordered)
    steps = torch.arange(len(values) + 1, device=values.device).double()[:, None] / len(values)
    # A step of the empirical distribution is compared at both its ends.
    distance = torch.maximum(steps[1:] - normal, normal - steps[:-1]).amax(0)
    return Gaussianity(distance, values.pow(3).mean(0), values.pow(4).mean(0) - 3)


@torch.no_grad()
def hidden_gaussianity(model: PreTrainedModel, ids: Int[Tensor, "1 tokens"], skip: int) -> dict[int, Gaussianity]:
    """Return the shape of what enters each layer's attention, which is the layer norm's output.

    Args:
        model: the model.
        ids: a text, `[1, tokens]`.
        skip: the first tokens, which are left out.

    Returns:
        The shapes by layer.

    Raises:
        KeepsetError: there are fewer than `skip` + 3 tokens.
    """
    if ids.shape[1] < skip + 3:
        raise KeepsetError(f"{ids.shape[1]} tokens are too few: the first {skip} are left out, so give {skip + 3}.")
    layers: dict[int, Gaussianity] = {}

    def look(layer: int) -> Callable[..., None]:
        def enter(module: Any, args: tuple[Any, ...], kwargs: dict[str, Any]) -> None:
            hidden = kwargs["hidden_states"] if "hidden_states" in kwargs else args[0]
            layers[layer] = gaussianity(hidden[0, skip:])

        return enter

    attention: list[Any] = [module for module in model.modules() if hasattr(module, "layer_idx")]
    hooks = [module.register_forward_pre_hook(look(module.layer_idx), with_kwargs=True) for module in attention]
    try:
        model(ids, use_cache=False, logits_to_keep=1)
    finally:
        for hook in hooks:
            hook.remove()
    return layers
