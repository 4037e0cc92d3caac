"""Equation 4 on bandits whose answer is known, and against its formula over every joint action."""

import itertools
import math

import pytest
import torch
from hypothesis import given
from hypothesis import strategies as st

from keepset.lab.compile.cql import Logged, best, learn
from tests.tiers import examples

STATES, ACTIONS = 3, 4


def bandit(seed: int, covered: int = ACTIONS) -> tuple[torch.Tensor, Logged]:
    """True rewards, all of them losses, and noisy ones of single decisions; the last actions may never be taken."""
    draw = torch.Generator().manual_seed(seed)
    true = -1 - torch.stack([torch.randperm(ACTIONS, generator=draw) for _ in range(STATES)]).float() / 2
    states = torch.randint(STATES, (600, 1), generator=draw)
    actions = torch.randint(covered, (600, 1), generator=draw)
    rewards = true[states[:, 0], actions[:, 0]] + 0.2 * torch.randn(600, generator=draw)
    return true, Logged(states, actions, rewards)


def alone(states: int) -> torch.Tensor:
    """Every state learns for itself."""
    return torch.arange(states)[:, None]


@pytest.mark.few(1)
@pytest.mark.cross
@pytest.mark.parametrize("seed", range(3))
@pytest.mark.parametrize("alpha", [0.0, 0.1, 1.0])
def test_finds_the_best_action_where_all_were_tried(seed: int, alpha: float) -> None:
    true, logged = bandit(seed)
    q, curve = learn(logged, alone(STATES), ACTIONS, alpha=alpha, decay=0.0)
    assert torch.equal(best(q), true.argmax(1))
    assert curve[-1]["bellman"] < curve[0]["bellman"] / 5


@pytest.mark.full
@pytest.mark.parametrize("seed", range(3))
def test_an_action_without_data_is_not_preferred_as_plain_regression_does(seed: int) -> None:
    true, logged = bandit(seed, covered=ACTIONS - 1)
    options = dict(features=alone(STATES), actions=ACTIONS, decay=0.0)
    plain, _ = learn(logged, alpha=0.0, **options)
    conservative, _ = learn(logged, alpha=0.5, **options)
    # Nothing says that the last one is as bad as the others, so regression leaves it where it began.
    assert best(plain).tolist() == [ACTIONS - 1] * STATES
    assert torch.equal(best(conservative), true[:, :-1].argmax(1))


def joint(seed: int, rows: int, decisions: int, actions: int) -> tuple[torch.Tensor, Logged]:
    draw = torch.Generator().manual_seed(seed)
    true = torch.rand(decisions, actions, generator=draw).argsort(1) - (actions - 1) / 2
    taken = torch.randint(actions, (rows, decisions), generator=draw)
    rewards = true[torch.arange(decisions), taken].sum(1) + torch.randn(rows, generator=draw)
    return true, Logged(torch.arange(decisions).expand(rows, -1), taken, rewards)


def test_one_reward_teaches_every_decision_its_share() -> None:
    true, logged = joint(0, 800, 20, 3)
    q, _ = learn(logged, alone(20), 3, alpha=0.1, decay=0.0)
    assert torch.equal(best(q), true.argmax(1))
    # The second state was never seen; what it shares with the first speaks for it.
    logged = Logged(torch.zeros(60, 1, dtype=torch.long), torch.arange(60)[:, None] % 3, torch.arange(60) % 3 - 1.0)
    shared = torch.tensor([[0, 1], [0, 2]])
    q, _ = learn(logged, shared, 3, alpha=0.0, decay=0.01)
    assert best(q).tolist() == [2, 2]


@pytest.mark.full
@examples(3)
@given(seed=st.integers(0, 99), alpha=st.sampled_from([0.0, 0.3]), decay=st.sampled_from([0.01, 0.3]))
def test_no_other_values_are_better_by_the_formula(seed: int, alpha: float, decay: float) -> None:
    """Equation 4 with its sum over every joint action: what was learned cannot be improved by a step anywhere."""
    decisions, actions = 3, 2
    _, logged = joint(seed, 12, decisions, actions)
    q, _ = learn(logged, alone(decisions), actions, alpha=alpha, decay=decay)

    def value(values: list[list[float]], taken: tuple[int, ...]) -> float:
        return sum(values[d][a] for d, a in enumerate(taken))

    def objective(values: list[list[float]]) -> float:
        everything = [value(values, each) for each in itertools.product(range(actions), repeat=decisions)]
        total = 0.0
        for taken, reward in zip(logged.actions.tolist(), logged.rewards.tolist(), strict=True):
            foretold = value(values, tuple(taken))
            total += alpha * (math.log(sum(map(math.exp, everything))) - foretold) + (foretold - reward) ** 2 / 2
        return total / len(logged.rewards) + decay / 2 * sum(x * x for row in values for x in row)

    learned = q.double().tolist()
    least = objective(learned)
    for d, a, step in itertools.product(range(decisions), range(actions), (-0.05, 0.05)):
        other = [row[:] for row in learned]
        other[d][a] += step
        assert objective(other) > least


@pytest.mark.full
def test_the_same_again_and_the_first_of_equal_ones() -> None:
    _, logged = joint(1, 50, 4, 3)
    runs = [learn(logged, alone(4), 3, alpha=0.1, decay=0.1) for _ in range(2)]
    assert torch.equal(runs[0][0], runs[1][0]) and runs[0][1] == runs[1][1]
    assert best(torch.tensor([[1.0, 1.0, 0.0], [0.0, 2.0, 2.0]])).tolist() == [0, 1]
