"""`matrix_of`: the matrix by which a linear module multiplies, with adapters, and whatever holds its weights."""

from __future__ import annotations

import torch
from jaxtyping import Float
from torch import Tensor, nn
from transformers.pytorch_utils import Conv1D

from keepset.contexts.weights import has_adapters_by_request, is_elsewhere, is_plain

_SAMPLES, _TOLERANCE = 4, 0.05
"""Random inputs by which a module is checked to be linear, and the largest difference of their outputs: activations of
quantized layers are rounded."""


@torch.no_grad()
def matrix_of(module: object, like: Float[Tensor, "*shape"], inputs: int) -> Float[Tensor, "inputs outputs"] | None:
    """Return the matrix by which a module multiplies, from the right.

    A linear layer's weight is read. Any other module, such as a layer with adapters, is applied to the basis vectors:
    so nothing can be out of date.

    Args:
        module: the module, if it is one.
        like: numbers of the type, on the device and of the size of its usual input.
        inputs: how many numbers it takes.

    Returns:
        The matrix; None if this is no linear module, or one of other inputs.
    """
    if not isinstance(module, nn.Module):
        return None
    weight = getattr(module, "weight", None)
    if (
        type(module) in (nn.Linear, Conv1D)
        and isinstance(weight, Tensor)
        and is_plain(weight)
        and not is_elsewhere(weight)
    ):
        # `Conv1D` multiplies from the right, `Linear` from the left.
        matrix = weight.detach() if isinstance(module, Conv1D) else weight.detach().t()
        return matrix if len(matrix) == inputs and matrix.is_floating_point() else None
    if getattr(module, "in_features", inputs) != inputs or has_adapters_by_request(module):
        return None
    size = like[..., -1:, :].float().abs().mean().clamp(min=1e-3)
    draw = torch.Generator().manual_seed(0)
    samples = (torch.randn(_SAMPLES, inputs, generator=draw, dtype=torch.float32).to(like.device) * size).to(like.dtype)
    basis = torch.eye(inputs, dtype=like.dtype, device=like.device)
    # `forward` leaves out hooks, which may be anybody's.
    outputs = module.forward(torch.cat([torch.zeros_like(basis[:1]), samples, basis])[None])[0]
    offset, sample_outputs, matrix = outputs[:1], outputs[1 : 1 + _SAMPLES], outputs[1 + _SAMPLES :]
    matrix, sample_outputs = matrix - offset, (sample_outputs - offset).float()
    error = torch.linalg.vector_norm(samples.float() @ matrix.float() - sample_outputs)
    return matrix if bool(error <= _TOLERANCE * torch.linalg.vector_norm(sample_outputs)) else None
