"""Conservative Q-learning (equation 4) from rewards that each cover many decisions."""

from __future__ import annotations

import hashlib
from dataclasses import dataclass

import torch
import torch.nn.functional as F
from jaxtyping import Float, Int
from torch import Tensor

STEPS, RATE = 400, 0.02
"""Number of Adam's steps, each over all rows, and the learning rate."""
_EVERY = 10


@dataclass(frozen=True, eq=False)
class Logged:
    """Joint actions and their rewards.

    Attributes:
        states: the state of each decision of a row.
        actions: the action of each decision.
        rewards: one reward for all decisions of a row together.
    """

    states: Int[Tensor, "rows decisions"]
    actions: Int[Tensor, "rows decisions"]
    rewards: Float[Tensor, " rows"]


def learn(
    logged: Logged, features: Int[Tensor, "states kinds"], actions: int, *, alpha: float, decay: float
) -> tuple[Float[Tensor, "states actions"], list[dict[str, float]]]:
    """Learn Q of every state and action.

    The value of a joint action is the sum of its decisions' values, so one reward teaches all of them: a contextual
    bandit that is linear in (state, action). For such a sum the log-sum-exp over all joint actions is the sum of the
    log-sum-exps over each decision's actions, so this is exactly equation 4. Q(s, a) is the sum of one learned number
    for each of the state's features: states that share a feature learn from one another.

    Args:
        logged: joint actions. Their rewards should have a mean near 0 and a spread near 1.
        features: the index of a learned number for each state and kind of feature.
        alpha: how conservative the learning is, as in the paper; 0 is plain regression.
        decay: a pull of all learned numbers towards 0, which the paper does not have. Without it, equivalent features
            divide a value arbitrarily, and features of few rows learn noise.

    Returns:
        Q, and at every tenth step both terms of equation 4 without their factors.
    """
    states = len(features)
    index = logged.states * actions + logged.actions
    taken = torch.bincount(index.flatten(), minlength=states * actions).float() / len(index)
    visited = taken.view(states, actions).sum(1)
    learned = torch.zeros(int(features.max()) + 1, actions, requires_grad=True, dtype=torch.float32)
    optimizer = torch.optim.Adam([learned], lr=RATE)
    curve: list[dict[str, float]] = []
    for step in range(STEPS + 1):
        q = learned[features].sum(1)
        foretold = F.embedding_bag(index, q.view(-1, 1), mode="sum")[:, 0]
        bellman = (foretold - logged.rewards).square().mean() / 2
        conservative = (visited * q.logsumexp(1)).sum() - (taken * q.flatten()).sum()
        if step % _EVERY == 0:
            curve.append({"step": step, "bellman": bellman.item(), "conservative": conservative.item()})
        loss = bellman + alpha * conservative + decay / 2 * learned.square().sum()
        (learned.grad,) = torch.autograd.grad(loss, [learned])
        if step < STEPS:
            optimizer.step()
    return q.detach(), curve


def best(q: Float[Tensor, "states actions"]) -> Int[Tensor, " states"]:
    """Return the action of highest value for each state (equation 9); the first of equal ones."""
    return (q == q.amax(1, keepdim=True)).long().argmax(1)


WEIGHTS = (1.0, 2.0, 0.5, 0.0, -1.0)
"""The possible weights of a head; of equally good ones the first is taken. The paper has bounded multipliers, some of
them negative (B.3), and does not list them. Relative lengths of values rarely differ by more than a factor of two
between heads; beyond it one head decides anyway. A head whose weight is not positive does not influence which entries
stay, unless no head of its layer has a positive one."""
THRESHOLDS = (0.8, 0.85, 0.9, 0.95, 1.0)
"""The possible thresholds of a layer: the paper's range, in steps."""


def draw(count: int, decisions: int, actions: int, seed: str) -> Int[Tensor, "count decisions"]:
    """Draw joint actions.

    Every action of a decision is equally likely, and occurs equally often if `count` allows it. The rows of its
    occurrence are independent between decisions. The probability of any single action is 1 / `actions`.

    Args:
        count: how many joint actions to draw.
        decisions: decisions of a joint action.
        actions: possible actions of a decision.
        seed: the seed of the draw.
    """
    chance = torch.Generator().manual_seed(int.from_bytes(hashlib.sha256(seed.encode()).digest()[:7], "big"))
    permutations = torch.rand(count, decisions, generator=chance, dtype=torch.float32).argsort(0)
    # If count is no multiple of actions, the actions that occur once more are also drawn.
    return (permutations + torch.randint(actions, (decisions,), generator=chance)) % actions
