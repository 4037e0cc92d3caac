"""Walk for some minutes: `python -m tests.hf.walks --minutes 60 --seed 1`; one walk again: `--seed 1 --walk 17`."""

from __future__ import annotations

import argparse
import sys
import time
import traceback
from itertools import count

import tests.hf.walks.reference  # noqa: F401
from tests.hf.walks.walk import Counts, Walk


def main() -> int:
    """Walk until the time is over, or until the first failure."""
    parser = argparse.ArgumentParser(prog="python -m tests.hf.walks", description=__doc__)
    parser.add_argument("--minutes", type=float, default=60.0)
    parser.add_argument("--seed", type=int, default=1)
    parser.add_argument("--walk", type=int, help="only this one")
    parser.add_argument("--go-on", action="store_true", help="list failures and go on")
    arguments = parser.parse_args()
    counts, failures, begin, shown = Counts(), 0, time.monotonic(), time.monotonic()
    for number in count() if arguments.walk is None else [arguments.walk]:
        if time.monotonic() - begin > 60 * arguments.minutes:
            break
        walk = Walk(arguments.seed, number, counts)
        try:
            walk.run()
        except Exception as error:
            failures += 1
            if arguments.go_on:
                about = f"{walk.plan.architecture} {walk.plan.recipe}"
                last = walk.trace[-1][:60] if walk.trace else ""
                print(f"--walk {number}: {type(error).__name__} {str(error)[:150]} | {last} | {about}", flush=True)
                continue
            traceback.print_exc(file=sys.stdout)
            print(f"failed: python -m tests.hf.walks --seed {arguments.seed} --walk {number}")
            print(walk.plan)
            print(*walk.trace, sep="\n")
            return 1
        if time.monotonic() - shown > 60:
            shown = time.monotonic()
            print(_line(counts, begin), flush=True)
    print(_line(counts, begin))
    for message, number in counts.messages.most_common():
        print(f"{number:6} {message}")
    return int(failures > 0)


def _line(counts: Counts, begin: float) -> str:
    parts = [
        f"{time.monotonic() - begin:.0f} s: {counts.walks} walks, {counts.forwards} forwards, {counts.events} events",
        f"{counts.replays} replays ({counts.ties} near ties), gap {counts.gap:.1e}",
        "operations " + ", ".join(f"{name} {n}" for name, n in counts.operations.most_common()),
        "refused " + ", ".join(f"{name} {n}" for name, n in counts.refusals.most_common()),
        "models " + ", ".join(f"{name} {n}" for name, n in counts.architectures.most_common()),
    ]
    return "; ".join(parts)


if __name__ == "__main__":
    sys.exit(main())
