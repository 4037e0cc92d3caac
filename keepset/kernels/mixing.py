"""`Mixing`: an orthogonal matrix by which keys and values are mixed before they are rounded to few bits."""

from __future__ import annotations

import hashlib
import math
from functools import cache, lru_cache
from typing import NamedTuple

import torch
from jaxtyping import Float
from torch import Tensor

from keepset.kernels.dispatch import launched_on, upload, uses_triton


class Mixing(NamedTuple):
    """An orthogonal matrix, up to a factor, by which rows are mixed before they are rounded.

    Products of keys with queries stay as they are if both are mixed.

    Attributes:
        mix: a key or value `x` is stored as `x @ mix`.
        unmix: the inverse of `mix`, its transpose up to a factor.
    """

    mix: Float[Tensor, "head_dim head_dim"]
    unmix: Float[Tensor, "head_dim head_dim"]

    def mixed(self, rows: Float[Tensor, "*places head_dim"]) -> Float[Tensor, "*places head_dim"]:
        """Return keys or values as they are rounded, in their own type.

        On a CPU sums are float64, so that they are the same in every product, whatever rows it has beside: where a last
        bit decides between two steps, an engine and transformers would store different numbers.
        """
        return _times(rows, self.mix if uses_triton(rows.device) else _in_float64(self.mix))

    def mixed_queries(self, queries: Float[Tensor, "*places head_dim"]) -> Float[Tensor, "*places head_dim"]:
        """Return queries whose products with mixed keys are those with the keys themselves, in their own type."""
        return _times(queries, self.unmix.T)

    def unmixed(
        self, rows: Float[Tensor, "*places head_dim"], output: Float[Tensor, "*places head_dim"] | None = None
    ) -> Float[Tensor, "*places head_dim"]:
        """Return what mixed rows, or sums of them, stand for, in their own type.

        Args:
            rows: mixed rows.
            output: where the result goes, contiguous and not where the rows are; None for a new tensor.
        """
        return _times(rows, self.unmix, output)


@lru_cache(maxsize=16)
def _in_float64(matrix: Float[Tensor, "size size"]) -> Float[Tensor, "size size"]:
    """Return a matrix in float64, made once: each layer mixes every new entry by it."""
    with torch.inference_mode(False):  # kept for later calls, which may be outside of the caller's mode
        return matrix.double()


def _times(
    rows: Float[Tensor, "*places size"],
    matrix: Float[Tensor, "size size"],
    output: Float[Tensor, "*places size"] | None = None,
) -> Float[Tensor, "*places size"]:
    """Return each row times a matrix, in the row's type; sums are in the matrix's. On a GPU this is one launch."""
    if uses_triton(rows.device) and matrix.dtype == torch.float32:
        from keepset.kernels.triton import mixing  # loads Triton

        made = torch.empty(rows.shape, dtype=rows.dtype, device=rows.device) if output is None else output
        with launched_on(rows.device):
            mixing.times(rows, matrix, made)
        return made
    product = rows.to(matrix.dtype) @ matrix
    return product.to(rows.dtype) if output is None else output.copy_(product)


@cache
def mixing_of_stores(size: int, device: torch.device | str, dtype: torch.dtype = torch.float32) -> Mixing:
    """Return how rows of so many numbers are mixed under transformers, and wherever their bits are to be the same.

    Args:
        size: numbers of a row.
        device: where rows are mixed.
        dtype: in which they are.
    """
    with torch.inference_mode(False):
        matrix = upload(mixing(size).to(dtype), torch.device(device))
        return Mixing(matrix.T, matrix)


def mixing(size: int) -> Float[Tensor, "size size"]:
    """Return the orthogonal matrix that mixes rows of so many numbers, in float64.

    Its columns have random signs, which are the same for ever. For a power of two it is a Hadamard matrix. Other sizes
    are a power of two times an odd number, and the matrix is the Kronecker product of a Hadamard matrix and a discrete
    cosine transform of that odd size, so that every number is spread over the whole row.
    """
    power = size & -size
    odd = size // power
    at = torch.arange(odd, dtype=torch.float64)
    matrix = torch.cos(math.pi / odd * at[:, None] * (at + 0.5)) * math.sqrt(2 / odd)
    matrix[0] = math.sqrt(1 / odd)
    step = torch.tensor([[1.0, 1.0], [1.0, -1.0]], dtype=torch.float64) * math.sqrt(0.5)
    for _ in range(power.bit_length() - 1):
        matrix = torch.kron(step, matrix)
    digest = hashlib.shake_256(b"keepset").digest(size)
    return matrix * torch.tensor([1.0 if byte & 1 else -1.0 for byte in digest], dtype=torch.float64)
