"""The actions that tables choose from, and the behaviour policy that tries them."""

import hashlib

import torch
from jaxtyping import Int
from torch import Tensor

WEIGHTS = (1.0, 2.0, 0.5, 0.0, -1.0)
"""The weights that a head may get; the first of equally good ones is taken. The paper has bounded multipliers, some of
them negative (B.3), and does not say which. Relative lengths of values seldom differ by more than a factor of two
between heads; beyond it one head decides anyway. A head whose weight is not positive has no say in which entries stay,
unless no head of its layer has a positive one."""
THRESHOLDS = (0.8, 0.85, 0.9, 0.95, 1.0)
"""The thresholds that a layer may get: the paper's range, in steps."""


def draw(count: int, decisions: int, actions: int, seed: str) -> Int[Tensor, "count decisions"]:
    """Draw joint actions.

    Of a decision every action is equally likely, and comes equally often if `count` allows it. The rows in which it
    comes are independent from decision to decision. The probability of any single action is 1 / `actions`.

    Args:
        count: number of joint actions.
        decisions: number of decisions in each.
        actions: number of actions of a decision.
        seed: of the draw.
    """
    chance = torch.Generator().manual_seed(int.from_bytes(hashlib.sha256(seed.encode()).digest()[:7], "big"))
    places = torch.rand(count, decisions, generator=chance).argsort(0)
    # If count is no multiple of actions, the actions that come once more are drawn too.
    return (places + torch.randint(actions, (decisions,), generator=chance)) % actions
