"""The gain of CompilerKV's compiled tables: held-out contexts under compiled and under neutral tables."""

import argparse
import dataclasses
import sys
import tempfile
import time
from collections.abc import Callable
from pathlib import Path
from statistics import fmean
from typing import Any

import torch
from harness import progress
from harness.report import Section, machine, publish

from keepset import Recipe, models
from keepset.core.tables import Tables, neutral, save
from keepset.lab import texts
from keepset.lab.analysis import intervals
from keepset.lab.compile.compiler import POOL, CompileSettings, compile_tables
from keepset.lab.compile.corpus import ContextPool, is_contaminated
from keepset.lab.compile.judge import Judge, Verdict
from keepset.methods.compilerkv import THRESHOLD, CompilerKV

RECIPES = "compilerkv, compilerkv(threshold='utility'), compilerkv(global_mean=False)"
REWARDS = ("expected", "said")


def main() -> int:
    """Compile from half of the essays, measure on the other half, show, write."""
    parser = argparse.ArgumentParser(description=__doc__)
    parser.add_argument("--sample", type=int, default=64, help="contexts to compile from (default 64)")
    parser.add_argument("--held-out", type=int, default=48, help="contexts to measure on (default 48)")
    parser.add_argument("--tokens", type=int, default=1024, help="tokens of a context (default 1024)")
    parser.add_argument("--continuation", type=int, default=48, help="tokens after it, to learn from (default 48)")
    parser.add_argument("--measured", type=int, default=128, help="tokens after it, to measure on (default 128)")
    parser.add_argument("--budgets", default="128,256,512", help="budgets (default 128,256,512)")
    parser.add_argument("--recipes", default=RECIPES, help="separated by commas")
    parser.add_argument("--logs", type=Path, help="a folder for logs and tables; with it a run goes on where it was")
    parser.add_argument("--threads", type=int, default=2, help="torch threads (default 2)")
    args = parser.parse_args()
    torch.set_num_threads(args.threads)
    model, tokenizer = models.load()
    names = texts.essays()
    halves = [[texts.essay(name) for name in names[first::2]] for first in (0, 1)]
    keeps = tuple(map(int, args.budgets.split(",")))

    def corpus(half: int, continuation: int, count: int) -> ContextPool:
        size = dict(tokens=args.tokens, continuation=continuation)
        return ContextPool.draw(tokenizer, halves[half], **size, count=count, seed=0)

    pool, held_out = corpus(0, args.continuation, POOL * args.sample), corpus(1, args.measured, args.held_out)
    sections, data = [], []
    with tempfile.TemporaryDirectory() as temporary, progress.bar() as bar:
        folder = args.logs or Path(temporary)
        folder.mkdir(exist_ok=True)

        def stage(what: str, count: int) -> Callable[[], None]:
            task = bar.add_task(what, total=count)
            return lambda: bar.advance(task)

        for number, recipe in enumerate(Recipe.parse_list(args.recipes)):
            method = recipe.method
            assert isinstance(method, CompilerKV)
            start, tables = time.perf_counter(), {}
            for reward in REWARDS:
                settings = CompileSettings(method, keeps, args.sample, args.tokens, args.continuation, 0, reward)
                tables[reward] = compile_tables(model, pool, settings, folder / f"{number}.sqlite", stage)
                save(tables[reward], folder / f"{number}-{reward}.safetensors")
            seconds = time.perf_counter() - start
            found = _measure(
                model, tokenizer, method, held_out, tables, keeps, stage("held-out contexts", args.held_out)
            )
            sections.append(_section(str(recipe), found, keeps, seconds))
            data.append({"recipe": str(recipe), "compile_seconds": seconds, "verdicts": found})
    settings_json = {name: str(value) for name, value in vars(args).items() if name != "logs"}
    publish("compile", sections, {"machine": machine(), "settings": settings_json, "recipes": data})
    return 0


def _measure(
    model: Any,
    tokenizer: Any,
    method: CompilerKV,
    held_out: ContextPool,
    compiled: dict[str, Tables],
    keeps: tuple[int, ...],
    done: Callable[[], None],
) -> dict[str, list[dict[str, float]]]:
    """Return verdicts of every context by table, budget, and whether the threshold has an effect."""
    layers, heads = compiled[REWARDS[0]].weights.shape[1:]
    plain = neutral(layers, heads, THRESHOLD)
    found: dict[str, list[dict[str, float]]] = {}
    for context in held_out.contexts:
        if any(is_contaminated(tables, tokenizer.decode(context.ids)) for tables in compiled.values()):
            done()
            continue
        judge = Judge(model, method, context)
        for keep in keeps:
            for elastic in (False, True):
                for name, tables in {"neutral": plain, **compiled}.items():
                    verdict: Verdict = judge.verdict(tables, keep, elastic=elastic)
                    key = f"{name} {keep} {'elastic' if elastic else 'exact'}"
                    found.setdefault(key, []).append(dataclasses.asdict(verdict))
        done()
    return found


def _section(recipe: str, found: dict[str, list[dict[str, float]]], keeps: tuple[int, ...], seconds: float) -> Section:
    contexts = len(found[f"neutral {keeps[0]} exact"])
    columns = ["keep", "tables", "kept", "NLL lost", "less than neutral, 95 %", "KL", "less than neutral, 95 %"]
    section = Section(f"{recipe}: {contexts} held-out contexts, compiled in {seconds / 60:.0f} minutes", columns)
    for keep in keeps:
        for kind in ("exact", "elastic"):
            before = found[f"neutral {keep} {kind}"]
            for name in ("neutral", *REWARDS):
                rows = found[f"{name} {keep} {kind}"]
                cells = [f"{keep} {kind}", name, f"{fmean(row['kept'] for row in rows):.0f}"]
                for figure in ("said", "expected"):
                    gains = [row[figure] - other[figure] for row, other in zip(rows, before, strict=True)]
                    interval = intervals.of_mean(gains)
                    cells.append(f"{-fmean(row[figure] for row in rows):.4f}")
                    shown = "" if interval is None else f" ({interval.low:.4f}..{interval.high:.4f})"
                    cells.append("" if name == "neutral" else f"{fmean(gains):.4f}{shown}")
                section.rows.append(cells)
    section.notes.append(
        "Tables named by the reward that they were learned from. Per token that follows, in nats; differences are of "
        f"the same contexts, intervals bootstrapped over them ({intervals.DRAWS} draws)."
    )
    return section


if __name__ == "__main__":
    sys.exit(main())
