"""`RotaryLayout`: how an attention module rotates its queries, found by asking the module itself."""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import dataclass

import torch
from jaxtyping import Float, Int
from torch import Tensor

from keepset.core.shapes import Queries

Rotation = tuple[Tensor, Tensor]
"""Cosines and signed sines of every number of a query, `[batch, n, head_dim]`; see `RotaryLayout.rotation`."""

Probe = Callable[[Tensor, Tensor], Queries]
"""`(cosines, sines) [n, rotary_dim] -> [samples, query_heads, n, head_dim]`: queries of the same few hidden states,
each once per row of cosines and sines."""


@dataclass(frozen=True, eq=False)
class RotaryLayout:
    """Layout of a rotation: which two numbers of a query rotate together, and by which cosine and sine of the model.

    Attributes:
        cos, sin: of each number of a query the index of its cosine and of its sine.
        partner: the number that each one rotates with.
        sign: with which the partner's part counts; 0 for numbers that stay as they are.
        scales: whether queries are multiplied by a number that depends on their position, too.
        changes: whether a position changes a query at all.
        in_order: whether each number has the cosine and the sine of its own index, and all rotate.
    """

    cos: Int[Tensor, " head_dim"]
    sin: Int[Tensor, " head_dim"]
    partner: Int[Tensor, " head_dim"]
    sign: Int[Tensor, " head_dim"]
    scales: bool
    changes: bool
    in_order: bool

    @classmethod
    def found(cls, probe: Probe, size: int, scales: bool) -> RotaryLayout:
        """Return the layout of a module.

        Rotation is linear in cosines and sines. So cosines and sines of 0 and 1 tell where each of them goes: bit by
        bit of their indices they say which one it is. Zeros stay exact in every precision.

        Args:
            probe: asks the module.
            size: number of cosines, and of sines, that the module takes.
            scales: whether the module multiplies queries by a number that depends on their position.
        """
        bits = torch.arange(size) >> torch.arange(size.bit_length())[:, None] & 1
        none, one = torch.zeros(len(bits), size), torch.ones(1, size)
        cos = torch.cat([one, 0 * one, 0 * one, bits, none])
        queries = probe(cos, torch.cat([0 * one, 0 * one, one, none, bits])).float()
        plain, turned = (queries[:, :, at].abs().flatten(0, 1).T for at in (0, 2))
        there = (queries != 0).any(0).any(0)
        still, (cos_bits, sin_bits) = there[1], there[3:].split(len(bits))
        partner = torch.cdist(turned, plain, p=1).argmin(-1)
        sign = (queries[:, :, 2] * queries[:, :, 0, partner]).sum((0, 1)).sign().int().masked_fill(still, 0)
        worth = 2 ** torch.arange(len(bits), device=queries.device)[:, None]
        cos, sin = ((each * worth).sum(0).clamp(max=size - 1).masked_fill(still, 0) for each in (cos_bits, sin_bits))
        index = torch.arange(len(cos), device=cos.device)
        in_order = len(cos) == size and bool(((cos == index) & (sin == index) & ~still).all())
        return cls(cos, sin, partner.masked_fill(still, 0), sign, scales, scales or bool(sign.any()), in_order)

    def rotation(
        self,
        cos: Float[Tensor, "batch n rotary_dim"],
        sin: Float[Tensor, "batch n rotary_dim"],
        scale: Float[Tensor, "batch n"] | None,
    ) -> Rotation:
        """Return the rotation that a model's cosines and sines make.

        Args:
            cos, sin: as the model gives them to the module.
            scale: factor of the queries; None where they have none.

        Returns:
            Cosines and signed sines of every number of a query, `[batch, n, head_dim]`.
        """
        if not self.in_order:
            cos, sin = cos[..., self.cos].masked_fill(self.sign == 0, 1), sin[..., self.sin]
        sin = sin * self.sign
        return (cos, sin) if scale is None else (cos * scale[..., None], sin * scale[..., None])

    def rotate(self, queries: Queries, rotation: Rotation) -> Queries:
        """Return rotated queries.

        Args:
            queries: `[batch, query_heads, n, head_dim]`.
            rotation: of their positions.
        """
        cos, sin = rotation
        return queries * cos[:, None] + queries[..., self.partner] * sin[:, None]
