"""Proofs by many random steps: some of them in a test, and as many as time allows by hand."""

from __future__ import annotations

import argparse
import time
import traceback
from collections import Counter
from collections.abc import Callable


def take_steps(
    step: Callable[[str], None],
    counts: Counter[str],
    seed: int,
    steps: range,
    minutes: float | None = None,
    show: bool = False,
) -> None:
    """Take steps, for some minutes at most.

    Args:
        step: takes one, drawn by the text that it is given; raises where something is wrong.
        counts: what it counts.
        seed: of all steps.
        steps: which of them.
        minutes: after which no further one is taken.
        show: print the counts every minute.

    Raises:
        AssertionError: something was wrong; says in which step.
    """
    begun = shown = time.monotonic()
    for number in steps:
        try:
            step(f"{seed} {number}")
        except Exception as error:
            raise AssertionError(f"seed {seed}, step {number}: {type(error).__name__}: {error}") from error
        now = time.monotonic()
        if show and now - shown > 60:
            print(f"{(now - begun) / 60:.0f} min:", dict(counts), flush=True)
            shown = now
        if minutes is not None and now - begun > 60 * minutes:
            return


def by_hand(prove: Callable[[int, range, float], Counter[str]]) -> None:
    """Run a proof as the command line says, and end with 1 where something was wrong."""
    parser = argparse.ArgumentParser()
    parser.add_argument("--minutes", type=float, default=60)
    parser.add_argument("--seed", type=int, default=1)
    parser.add_argument("--first", type=int, default=0, help="the step to begin with")
    arguments = parser.parse_args()
    try:
        print(dict(prove(arguments.seed, range(arguments.first, 10**9), arguments.minutes)))
    except AssertionError:
        traceback.print_exc()
        raise SystemExit(1) from None
