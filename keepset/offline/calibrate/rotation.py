"""How a layer rotates queries and keys, found out by rotating unit vectors."""

import torch
from jaxtyping import Float, Int
from torch import Tensor

from keepset.core.features.moments import Rotate
from keepset.errors import UnsupportedModelError

PROBE = 2
"""Tokens of the text whose end the unit vectors are rotated at: the fastest plane, one radian per position, has turned
by less than half a turn there, and a layer that does not rotate can be told from one that does."""


def measure_rotation(
    rotate: Rotate, unit: Float[Tensor, "head_dim head_dim"]
) -> tuple[Int[Tensor, " head_dim"], Float[Tensor, " head_dim"], Float[Tensor, " head_dim"]]:
    """Partner, frequency and gain of every number of a head (see `LayerStatistics`).

    Args:
        rotate: of a text of `PROBE` tokens.
        unit: the identity, on the model's device.

    Raises:
        UnsupportedModelError: it is no rotation of planes.
    """
    turned = rotate(unit[None, None], 1)[0, 0].float().cpu()
    straight = turned.diagonal()
    others = turned - straight.diag()
    crossed, partner = others.abs().max(0)
    itself = torch.arange(len(unit))
    partner = partner.where(crossed > 0, itself)
    sine = others[partner, itself]
    if not torch.equal(partner[partner], itself) or not torch.allclose(sine, -sine[partner]):
        raise UnsupportedModelError(
            "This model rotates queries in a way that keepset cannot describe: it has no statistics for methods that "
            "need them."
        )
    return partner, torch.atan2(sine, straight) / PROBE, torch.hypot(sine, straight)
