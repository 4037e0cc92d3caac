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
    """An orthogonal matrix by which rows are mixed before they are rounded.

    Products of keys with queries stay as they are if both are mixed.

    Attributes:
        matrix: a key or value `x` is stored as `matrix @ x`.
    """

    matrix: Float[Tensor, "head_dim head_dim"]

    def mixed(self, rows: Float[Tensor, "*places head_dim"]) -> Float[Tensor, "*places head_dim"]:
        """Return mixed keys or values, ready to be rounded, in their own dtype.

        On a CPU sums are float64, so that a row's result does not depend on the other rows of the product. A difference
        in the last bit could make an engine and transformers round to different numbers.
        """
        return _times(rows, (self.matrix if uses_triton(rows.device) else _in_float64(self.matrix)).T)

    def mixed_queries(self, queries: Float[Tensor, "*places head_dim"]) -> Float[Tensor, "*places head_dim"]:
        """Return queries whose products with mixed keys equal those with the keys, in their own dtype."""
        return _times(queries, self.matrix.T)

    def unmixed(
        self, rows: Float[Tensor, "*places head_dim"], output: Float[Tensor, "*places head_dim"] | None = None
    ) -> Float[Tensor, "*places head_dim"]:
        """Return mixed rows, or sums of them, unmixed, in their own dtype.

        Args:
            rows: mixed rows.
            output: where the result goes, contiguous and apart from the rows; None for a new tensor.
        """
        return _times(rows, self.matrix, output)


@lru_cache(maxsize=16)
def _in_float64(matrix: Float[Tensor, "size size"]) -> Float[Tensor, "size size"]:
    """Return a matrix in float64; it is cached, because each layer mixes every new entry by it."""
    with torch.inference_mode(False):  # later calls may be outside of the caller's mode
        return matrix.double()


def _times(
    rows: Float[Tensor, "*places size"],
    matrix: Float[Tensor, "size size"],
    output: Float[Tensor, "*places size"] | None = None,
) -> Float[Tensor, "*places size"]:
    """Return each row times a matrix, in the row's dtype; sums have the matrix's. On a GPU this is one launch."""
    if uses_triton(rows.device) and matrix.dtype == torch.float32:
        from keepset.kernels.triton import mixing  # loads Triton

        made = torch.empty(rows.shape, dtype=rows.dtype, device=rows.device) if output is None else output
        with launched_on(rows.device):
            mixing.times(rows, matrix, made)
        return made
    product = rows.to(matrix.dtype) @ matrix
    return product.to(rows.dtype) if output is None else output.copy_(product)


@cache
def mixing_of(size: int, device: torch.device | str, dtype: torch.dtype = torch.float32) -> Mixing:
    """Return the mixing of rows of `size` numbers, which is the same in both runtimes.

    Args:
        size: numbers of a row.
        device: where rows are mixed.
        dtype: the dtype in which rows are mixed.
    """
    with torch.inference_mode(False):
        return Mixing(upload(mixing(size).to(dtype), torch.device(device)))


def mixing(size: int) -> Float[Tensor, "size size"]:
    """Return the orthogonal matrix that mixes rows of `size` numbers, in float64.

    Its columns have fixed random signs. For a power of two it is a Hadamard matrix. Other sizes are a power of two and
    an odd factor; the matrix is the Kronecker product of a Hadamard matrix and a discrete cosine transform of the odd
    size, so that every number is spread over the whole row.
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
