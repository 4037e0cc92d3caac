"""Conversations on vLLM, plain and with a recipe: tokens computed, time to the first token, and pages held."""

import argparse
import sys
from contextlib import ExitStack
from pathlib import Path
from statistics import median
from typing import Any

from harness import progress
from harness.options import names
from harness.report import Section, machine, publish
from harness.worker import Answer, Worker

RECIPES = ["pool(distilled, bytes=0.25, turns=True)", "adakv(snapkv, bytes=0.25, turns=True)"]
KINDS = {
    "plain": "each turn adds to the one before",
    "thinking": "three quarters of each answer are left out of the next prompt",
    "cleared": "a tool's result is left out after three turns",
}
_PER_TURN, _RESULT = 120 + 24, 160
"""Tokens of a turn, and those of a tool's result; see the worker."""


def main() -> None:
    """Measure in turns, show, write."""
    parser = argparse.ArgumentParser(description=__doc__)
    parser.add_argument("--recipe", action="append", help=f"a recipe; may be repeated (default {', '.join(RECIPES)})")
    parser.add_argument("--chats", type=int, default=4, help="conversations that take turns (default 4)")
    parser.add_argument("--turns", type=int, default=20, help="turns of each (default 20)")
    parser.add_argument("--rounds", type=int, default=1, help="rounds, of which each runs every engine (default 1)")
    parser.add_argument("--pools", default="all:1,plain:0.25", help="kinds and shares of the tokens that pools hold")
    args = parser.parse_args()
    recipes = args.recipe or RECIPES
    figures: list[dict[str, Any]] = []
    rows: list[list[str]] = []
    runs = []
    for named in names(args.pools):
        kind, _, share = named.partition(":")
        runs += [(one, float(share)) for one in (KINDS if kind == "all" else [kind])]
    with progress.bar() as bar:
        work = bar.add_task("conversations", total=len(runs) * args.rounds * (1 + len(recipes)))
        for kind, share in runs:
            tokens = int(args.chats * args.turns * (_PER_TURN + _RESULT * (kind == "cleared")) * share)
            with ExitStack() as stack:
                sides = ["plain", *recipes]
                workers = [
                    stack.enter_context(Worker("chat", Path(sys.executable), [side, str(tokens)], 1)) for side in sides
                ]
                answers: list[list[Answer]] = [[] for _ in sides]
                for seed in range(args.rounds):
                    for worker, taken in zip(workers, answers, strict=True):
                        asked = {"chats": args.chats, "turns": args.turns, "kind": kind, "seed": seed}
                        taken.append(worker.ask("chats", **asked))
                        bar.advance(work)
            for side, taken in zip(sides, answers, strict=True):
                row = {"kind": kind, "pool": share, "engine": side, **_summary(taken, answers[0])}
                figures.append(row)
                rows.append([f"{kind}, pool for {share:.0%}: {side}", *_shown(row)])
    columns = ["", "computed / new", "last first token, s", "/ plain", "in all, s", "/ plain", "held / plain"]
    sections = [Section("Conversations", columns, rows)]
    publish("chat", sections, {"machine": machine(), "kinds": KINDS, "figures": figures})


def _summary(taken: list[Answer], plain: list[Answer]) -> dict[str, float]:
    """Return an engine's figures and their ratios to plain vLLM's: medians over rounds."""

    def figure(answer: Answer) -> dict[str, float]:
        computed, new = (sum(map(sum, answer[name])) for name in ("computed", "new"))
        return {
            "computed": computed / new,
            "first": median(answer["first"][-1]),
            "seconds": answer["seconds"],
            "held": answer["held"],
        }

    mine = [figure(answer) for answer in taken]
    others = [figure(answer) for answer in plain]
    medians = {name: median(one[name] for one in mine) for name in mine[0]}
    ratios = {
        f"{name}_ratio": median(one[name] / other[name] for one, other in zip(mine, others, strict=True))
        for name in ("first", "seconds", "held")
    }
    return medians | ratios


def _shown(row: dict[str, Any]) -> list[str]:
    return [
        f"{row['computed']:.2f}",
        *(text for name in ("first", "seconds") for text in (f"{row[name]:.2f}", f"{row[f'{name}_ratio']:.2f}")),
        f"{row['held_ratio']:.3f}",
    ]


if __name__ == "__main__":
    main()
