"""What the tables may say, and the behaviour policy that tries it out."""

import hashlib

import torch
from jaxtyping import Int
from torch import Tensor

WEIGHTS = (1.0, 2.0, 0.5, 0.0, -1.0)
"""Of a head; of equally good ones the first is taken. The paper has bounded multipliers, some of them negative (B.3),
and does not say which. Relative lengths of values hardly ever differ by more than a factor of two between heads:
beyond it one head decides anyway. A head whose weight is not positive speaks for no entry, unless its whole layer is
so."""
THRESHOLDS = (0.8, 0.85, 0.9, 0.95, 1.0)
"""Of a layer: the paper's range, in steps."""


def draw(count: int, decisions: int, actions: int, seed: str) -> Int[Tensor, "count decisions"]:
    """So many joint actions: every action of a decision equally likely, and equally often where `count` allows it.

    Which row has which is independent from decision to decision. The probability of any single action is 1 / `actions`.
    """
    chance = torch.Generator().manual_seed(int.from_bytes(hashlib.sha256(seed.encode()).digest()[:7], "big"))
    places = torch.rand(count, decisions, generator=chance).argsort(0)
    # Where count is no multiple of actions, which of them come once more is chance, too.
    return (places + torch.randint(actions, (decisions,), generator=chance)) % actions
