"""Random walks over what a cache can do; `python -m tests.hf.walks` goes on for as long as one likes."""

from __future__ import annotations

import pytest

from tests.hf.walks.walk import Counts, Walk


def walk(seed: int, numbers: range) -> Counts:
    """So many walks; what goes wrong says how to see it again."""
    counts = Counts()
    for number in numbers:
        walked = Walk(seed, number, counts)
        try:
            walked.run()
        except Exception as error:
            error.add_note(f"python -m tests.hf.walks --seed {seed} --walk {number}\n{walked.plan}")
            error.add_note("\n".join(walked.trace))
            raise
    return counts


def test_a_few_walks() -> None:
    counts = walk(1, range(9, 13))
    assert counts.forwards > 20


@pytest.mark.full
def test_many_walks() -> None:
    counts = walk(2, range(150))
    assert len(counts.architectures) >= 20 and len(counts.operations) >= 11
    assert counts.events > 100 and counts.replays > 30 and counts.ties <= 3
