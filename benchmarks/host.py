"""Processor time of a vLLM step with nothing due, without a recipe and with: what the host does beside the model."""

import argparse
import sys
from contextlib import ExitStack
from pathlib import Path
from statistics import median

from harness import progress
from harness.options import names
from harness.report import Section, machine, publish
from harness.summary import ratios, shown
from harness.worker import Answer, Worker

RECIPES = ["snapkv(keep=1024, every=512)", "pool(snapkv, keep=1024, every=512)"]
SHAPES = [(4, 64), (16, 64), (4, 256), (16, 256)]


def main() -> None:
    """Measure in turns, show, write."""
    parser = argparse.ArgumentParser(description=__doc__)
    parser.add_argument("--recipe", action="append", help=f"a recipe; may be repeated (default {', '.join(RECIPES)})")
    parser.add_argument("--shapes", default=",".join(f"{a}x{b}" for a, b in SHAPES), help="layers x requests, each")
    parser.add_argument("--rounds", type=int, default=5, help="rounds, of which each runs every engine (default 5)")
    args = parser.parse_args()
    recipes = args.recipe or RECIPES
    shapes = [tuple(map(int, shape.split("x"))) for shape in names(args.shapes)]
    figures, rows = [], []
    with progress.bar() as bar:
        work = bar.add_task("steps", total=len(shapes) * args.rounds)
        for layers, requests in shapes:
            with ExitStack() as stack:
                sides = ["plain", *recipes]
                arguments = [[side, str(layers), str(requests)] for side in sides]
                workers = [stack.enter_context(Worker("host", Path(sys.executable), each, 1)) for each in arguments]
                for worker in workers:
                    worker.ask("time")  # a round to warm up
                rounds: list[list[Answer]] = []
                for _ in range(args.rounds):
                    rounds.append([worker.ask("time") for worker in workers])
                    bar.advance(work)
                counts = [worker.ask("count")["calls"] for worker in workers]
            for side, recipe in enumerate(sides):
                row, record = [f"{layers} layers, {requests} requests: {recipe}"], {"recipe": recipe}
                for part in ("step", "host"):
                    values = [each[side][part] for each in rounds]
                    ratio = ratios(values, [each[0][part] for each in rounds])
                    row += [f"{median(values):.2f}", shown(ratio)]
                    record |= {part: values, f"{part}_ratio": ratio and ratio.as_json()}
                rows.append([*row, f"{counts[side]:.0f}"])
                figures.append({"layers": layers, "requests": requests, "calls": counts[side], **record})
    columns = ["engine", "step, ms", "/ plain", "without the model, ms", "/ plain", "keepset's calls"]
    section = Section("Processor time of a step with nothing due", columns, rows)
    publish("host", [section], {"machine": machine(), "figures": figures})


if __name__ == "__main__":
    main()
