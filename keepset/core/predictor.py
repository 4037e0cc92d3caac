"""`Predictor`: a layer's small networks, which tell an entry's score from the entry's own key and value."""

from __future__ import annotations

import dataclasses
from dataclasses import dataclass

import torch
from jaxtyping import Float, Int
from torch import Tensor

from keepset.kernels.predictor import log_scores


@dataclass(frozen=True, eq=False)
class Predictor:
    """A network with one hidden layer for each KV head of a layer.

    With x an entry's key before rotation followed by its value, the network gives the logarithm of the entry's score,
    `linear . x + output . gelu(hidden x + hidden_bias) + output_bias`. The weights contain the scales of the inputs.

    Most heads look less at what is far from the end of the text, whatever it holds, and in long texts more so. So what
    an entry's distance from the end is worth in a text of some length is added: `age` has it for the lengths 1, 2, 4,
    ... and the distances 1, 2, 4, .... Between them it is interpolated linearly in both logarithms. Beyond the last of
    them it stays as it is.

    Attributes:
        linear: the weights from the inputs to the output.
        hidden: the weights of the hidden layer.
        hidden_bias: the biases of the hidden layer.
        output: the weights of the output.
        output_bias: the bias of the output.
        age: what the distances 1, 2, 4, ... from the end of texts of the lengths 1, 2, 4, ... add.
    """

    linear: Float[Tensor, "*rows kv_heads inputs"]
    hidden: Float[Tensor, "*rows kv_heads width inputs"]
    hidden_bias: Float[Tensor, "*rows kv_heads width"]
    output: Float[Tensor, "*rows kv_heads width"]
    output_bias: Float[Tensor, "*rows kv_heads"]
    age: Float[Tensor, "*rows kv_heads lengths knots"]

    def of_heads(self, heads: slice) -> Predictor:
        """Return the networks of some KV heads."""
        return Predictor(
            self.linear[..., heads, :],
            self.hidden[..., heads, :, :],
            self.hidden_bias[..., heads, :],
            self.output[..., heads, :],
            self.output_bias[..., heads],
            self.age[..., heads, :, :],
        )

    def log_scores(
        self, inputs: Float[Tensor, "*rows kv_heads entries inputs"]
    ) -> Float[Tensor, "*rows kv_heads entries"]:
        """Return the logarithm of each entry's score without its age's part, from its unrotated key and its value."""
        return log_scores(inputs, self.linear, self.hidden, self.hidden_bias, self.output, self.output_bias)


def interpolated(
    age: Float[Tensor, "*rows kv_heads lengths knots"],
    distances: Int[Tensor, "*rows #kv_heads entries"],
    lengths: Int[Tensor, "*rows"],
) -> Float[Tensor, "*rows kv_heads entries"]:
    """Return what distances from the end of the text, 1 for the newest token, add; see `Predictor.age`."""
    size, last = age.shape[-2] - 1, age.shape[-1] - 1
    places = _places(lengths, size)[..., None, None, None]
    low = places.long()
    row = [age.take_along_dim((low + step).clamp(max=size), -2) for step in (0, 1)]
    of_length = row[0].lerp(row[1], places - low).squeeze(-2)
    places = _places(distances, last).expand(*of_length.shape[:-1], -1)
    low = places.long()
    return of_length.gather(-1, low).lerp(of_length.gather(-1, (low + 1).clamp(max=last)), places - low)


def knot_weights(numbers: Int[Tensor, " entries"], knots: int) -> Float[Tensor, "entries knots"]:
    """Return the weights of the knots 1, 2, 4, ... at distances or lengths: `interpolated` is linear in the knots."""
    places = _places(numbers, knots - 1)[:, None]
    return (1 - (places - torch.arange(knots, device=numbers.device)).abs()).clamp(min=0)


def _places(numbers: Int[Tensor, "*shape"], last: int) -> Float[Tensor, "*shape"]:
    return numbers.clamp(min=1).float().log2().clamp(max=last)


PREDICTOR_FIELDS = tuple(field.name for field in dataclasses.fields(Predictor))
