"""`output_projection`: the weights of an attention module that its heads' values are multiplied with."""

from __future__ import annotations

from jaxtyping import Float
from torch import Tensor, nn
from transformers.pytorch_utils import Conv1D

from keepset.errors import UnsupportedModelError

_NAMES = ("o_proj", "out_proj", "dense", "c_proj")


def output_projection(
    module: nn.Module, query_heads: int, value_dim: int
) -> Float[Tensor, "query_heads value_dim hidden"]:
    """Return a view of the output projection's weights, for each query head what its values are multiplied with.

    Args:
        module: of a model's attention.
        query_heads: number of its query heads.
        value_dim: numbers of a value.

    Raises:
        UnsupportedModelError: the weights were not found, or are quantised.
    """
    for name in _NAMES:
        projection = getattr(module, name, None)
        weight = getattr(projection, "weight", None)
        if not isinstance(weight, Tensor) or weight.ndim != 2 or not weight.is_floating_point():
            continue
        # `Conv1D` multiplies from the right, all others from the left.
        inwards = weight if isinstance(projection, Conv1D) else weight.t()
        if inwards.shape[0] == query_heads * value_dim:
            return inwards.detach().unflatten(0, (query_heads, value_dim))
    raise UnsupportedModelError(
        f"keepset could not find the output projection of {type(module).__name__} ({', '.join(_NAMES)}, with "
        "unquantized weights); methods that look at it do not support this model."
    )
