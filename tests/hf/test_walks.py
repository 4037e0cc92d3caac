"""Random walks over what a cache can do; `python -m tests.hf.test_walks --minutes 60 --seed 1` goes on by hand."""

from __future__ import annotations

from collections import Counter

import pytest

import tests.hf.walks.reference  # noqa: F401
from tests.hf.walks.walk import Walk
from tests.proof import by_hand, take_steps


def walked(seed: int, steps: range, minutes: float | None = None, show: bool = False) -> Counter[str]:
    """Take so many walks; what goes wrong says how to see it again."""
    counts = Counter[str]()

    def step(drawn_by: str) -> None:
        walk = Walk(drawn_by, counts)
        try:
            walk.run()
        except Exception as error:
            raise AssertionError("\n".join([repr(error), str(walk.plan), *walk.trace])) from error

    take_steps(step, counts, seed, steps, minutes, show)
    return counts


def test_a_few_walks() -> None:
    assert walked(1, range(9, 13))["forwards"] > 20


@pytest.mark.full
def test_many_walks() -> None:
    counts = walked(2, range(75))
    assert len([name for name in counts if name.startswith("model ")]) >= 20
    assert len([name for name in counts if name.startswith("operation ")]) >= 11
    assert counts["events"] > 100 and counts["replays"] > 30 and counts["ties"] <= 3


@pytest.mark.full
def test_walks_with_numbers_as_real_models_have_them(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr("tests.hf.walks.draw.ARCHITECTURES", ("llama_real",))
    assert walked(3, range(15))["forwards"] > 60


if __name__ == "__main__":
    by_hand(lambda seed, steps, minutes: walked(seed, steps, minutes, show=True))
