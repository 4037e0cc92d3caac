"""Conservative Q-learning (equation 4) from rewards that are each for many decisions at once."""

from dataclasses import dataclass

import torch
import torch.nn.functional as F
from jaxtyping import Float, Int
from torch import Tensor

STEPS, RATE = 400, 0.02
"""Adam's steps, each over all rows, and its learning rate."""
_EVERY = 10


@dataclass(frozen=True, eq=False)
class Logged:
    """Joint actions and their rewards.

    Attributes:
        states: the state in which each decision of a row was made.
        actions: the action that was taken.
        rewards: one for all decisions of a row together.
    """

    states: Int[Tensor, "rows decisions"]
    actions: Int[Tensor, "rows decisions"]
    rewards: Float[Tensor, " rows"]


def learn(
    logged: Logged,
    features: Int[Tensor, "states kinds"],
    actions: int,
    *,
    alpha: float,
    decay: float,
) -> tuple[Float[Tensor, "states actions"], list[dict[str, float]]]:
    """Learn Q of every state and action.

    The value of a joint action is the sum of its decisions' values, so one reward teaches all of them: a contextual
    bandit that is linear in (state, action). Under a sum the log-sum-exp over all joint actions is the sum of those
    over each decision's actions, so this is equation 4 as it stands, with nothing left out. Q(s, a) is the sum of one
    learned number for each of the state's features: states that share a feature learn from one another.

    Args:
        logged: joint actions. Their rewards should have a mean near 0 and a spread near 1.
        features: the index of a learned number for each state and kind of feature.
        actions: number of actions in every state.
        alpha: how conservative the learning is, as in the paper; 0 is plain regression.
        decay: a pull of all learned numbers towards 0, which the paper does not have. Without it, features that
            mean the same share a value by chance, and features of few rows learn noise.

    Returns:
        Q, and both terms of equation 4 without their factors at every tenth step.
    """
    states = len(features)
    index = logged.states * actions + logged.actions
    taken = torch.bincount(index.flatten(), minlength=states * actions).float() / len(index)
    visited = taken.view(states, actions).sum(1)
    learned = torch.zeros(int(features.max()) + 1, actions, requires_grad=True)
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
    """Return the action of highest value (equation 9); the first of equal ones."""
    return (q == q.amax(1, keepdim=True)).long().argmax(1)
