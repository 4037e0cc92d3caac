"""The rotation of a layer's queries and keys, measured by rotating unit vectors."""

import torch
from jaxtyping import Float, Int
from torch import Tensor

from keepset.core.features.moments import Rotate
from keepset.errors import UnsupportedModelError

PROBE = 2
"""The number of tokens at whose end the unit vectors are rotated. The fastest plane, with one radian per position, has
turned by less than half a turn there, and a layer that does not rotate can be told from one that does."""


def measure_rotation(
    rotate: Rotate, unit: Float[Tensor, "head_dim head_dim"]
) -> tuple[Int[Tensor, " head_dim"], Float[Tensor, " head_dim"], Float[Tensor, " head_dim"]]:
    """Measure a rotation.

    Args:
        rotate: the layer's rotation in a text of `PROBE` tokens.
        unit: the identity matrix, on the model's device.

    Returns:
        Partner, frequency and gain of every number of a head; see `LayerStatistics`.

    Raises:
        UnsupportedModelError: the layer does not rotate planes.
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
