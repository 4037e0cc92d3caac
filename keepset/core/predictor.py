"""`Predictor`: a layer's small networks, which compute an entry's score from its own key and value."""

from __future__ import annotations

from typing import NamedTuple

import torch
import torch.nn.functional as F
from jaxtyping import Float, Int
from torch import Tensor

from keepset.kernels.entry_code import MIDDLE, decode
from keepset.kernels.predictor import outputs_of


class Predictor(NamedTuple):
    """A network with one hidden layer for each KV head of a layer.

    With x an entry's key before rotation, its value, and the logarithms of both norms, the network gives two numbers,
    `linear x + output gelu(hidden x + hidden_bias) + output_bias`: the logarithm of the entry's score at a distance of
    64 tokens from the end of the text, and the slope, which is what each doubling of the distance adds. The weights
    contain the scales of the inputs.

    Most heads look less at entries far from the end of the text, whatever these hold, and in long texts more so. So a
    number that depends only on the distance and the text's length is added to all log scores: `age` has it for the
    lengths 1, 2, 4, ... and the distances 1, 2, 4, .... Between them it is interpolated linearly in both logarithms.
    Beyond the last of them it stays constant, and so does what slopes add.

    Attributes:
        linear: the weights from the inputs to both outputs.
        hidden: the weights of the hidden layer.
        hidden_bias: the biases of the hidden layer.
        output: the weights of both outputs.
        output_bias: the biases of both outputs.
        age: what the distances 1, 2, 4, ... from the end of texts of the lengths 1, 2, 4, ... add.
    """

    linear: Float[Tensor, "kv_heads 2 inputs"]
    hidden: Float[Tensor, "kv_heads width inputs"]
    hidden_bias: Float[Tensor, "kv_heads width"]
    output: Float[Tensor, "kv_heads 2 width"]
    output_bias: Float[Tensor, "kv_heads 2"]
    age: Float[Tensor, "kv_heads lengths knots"]

    def of_heads(self, heads: slice) -> Predictor:
        """Return the networks of some KV heads."""
        return Predictor(*(part[heads] for part in self))

    def outputs_of(self, inputs: Float[Tensor, "kv_heads entries inputs"]) -> Float[Tensor, "kv_heads entries 2"]:
        """Return each entry's log score at a distance of 64 tokens, and its slope."""
        return outputs_of(inputs, *self[:5])


def scores_at(
    codes: Float[Tensor, "*rows kv_heads entries"],
    age: Float[Tensor, "*rows kv_heads lengths knots"],
    distances: Int[Tensor, "*rows #kv_heads entries"],
    lengths: Int[Tensor, "*rows"],
) -> Float[Tensor, "*rows kv_heads entries"]:
    """Return the scores of entries at their distances from the end of the text, 1 for the newest token.

    Args:
        codes: the networks' outputs for the entries, as `keepset.kernels.entry_code.encode` returns them.
        age: as in `Predictor`.
        distances: from the end of the text.
        lengths: tokens of each text.
    """
    last = age.shape[-1] - 1
    of_length = _interpolated(age.transpose(-1, -2), _places(lengths, age.shape[-2] - 1)[..., None, None, None])
    octaves = _places(distances, last)
    by_age = _interpolated(of_length.squeeze(-1), octaves)
    scores, slopes = decode(codes)
    return by_age.addcmul_(slopes, octaves - MIDDLE).add_(scores).exp_()


def _interpolated(
    knots: Float[Tensor, "*rows knots"], places: Float[Tensor, "*#rows entries"]
) -> Float[Tensor, "*rows entries"]:
    """Return values at places between knots, by linear interpolation between the two neighbouring knots."""
    below = places.long().expand(*knots.shape[:-1], -1)
    rise = F.pad(knots.diff(dim=-1), (0, 1))
    at_zero = knots - rise * torch.arange(knots.shape[-1], device=knots.device)
    return at_zero.gather(-1, below).addcmul_(rise.gather(-1, below), places)


def knot_weights(numbers: Int[Tensor, " entries"], knots: int) -> Float[Tensor, "entries knots"]:
    """Return the interpolation weights of the knots 1, 2, 4, ... at distances or lengths."""
    places = _places(numbers, knots - 1)[:, None]
    return (1 - (places - torch.arange(knots, device=numbers.device)).abs()).clamp(min=0)


def _places(numbers: Int[Tensor, "*shape"], last: int) -> Float[Tensor, "*shape"]:
    return numbers.clamp(min=1).float().log2().clamp(max=last)
