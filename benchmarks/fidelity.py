"""Quality of recipes: fidelity to the full cache over several texts, and a fact found in each text."""

import argparse
import sys
from collections import defaultdict
from dataclasses import dataclass, field
from statistics import fmean
from typing import Any

import torch
from harness import progress
from harness.report import Section, machine, publish

from keepset import Budget, Recipe, models
from keepset.lab import texts
from keepset.lab.analysis import intervals
from keepset.lab.candidate import grid
from keepset.lab.compare.prompt import PromptComparer
from keepset.lab.compare.text_task import TextTask, make_text_task
from keepset.lab.record import Record

RECIPES = (
    "streaming_llm, random, knorm, keydiff, lagkv, tova, snapkv, h2o, expected_attention, "
    "expected_attention(epsilon=0.0), pyramid(snapkv), chunkkv(snapkv), adakv(snapkv), adakv(expected_attention), "
    "adakv(expected_attention(epsilon=0.0)), criticalkv(snapkv), zigzag(snapkv), dynamic(snapkv), "
    "duo_attention, kvzip, kvcompose, kvcompose(floor=0.2), kvcompose(structured=False), kvcompose(task='self'), "
    "pool(second_pass(statistic='rms'), sinks=4, recent=32), pool(prompt_queries), reread, glance, gvote"
)
KEEPS = (0.5, 0.25, 0.1)


@dataclass
class Figures:
    """One recipe under one budget: a figure for every text; bytes are shares of the full cache's."""

    kl: list[float] = field(default_factory=list)
    top1: list[float] = field(default_factory=list)
    found: list[bool] = field(default_factory=list)
    bytes_share: list[float] = field(default_factory=list)
    error: str | None = None


def main() -> int:
    """Measure, show, write; fail if a recipe failed."""
    parser = argparse.ArgumentParser(description=__doc__)
    parser.add_argument("--texts", type=int, default=5, help="essays, the longest first (default 5)")
    parser.add_argument("--essays", default="", help="their names, separated by commas, instead of the longest")
    parser.add_argument("--tokens", type=int, default=2048, help="tokens of the prompt (default 2048)")
    parser.add_argument("--continuation", type=int, default=256, help="tokens after it (default 256)")
    parser.add_argument("--recipes", default=RECIPES, help="separated by commas")
    parser.add_argument("--threads", type=int, default=1, help="torch threads (default 1)")
    args = parser.parse_args()
    torch.set_num_threads(args.threads)
    model, tokenizer = models.load()
    recipes = Recipe.parse_list(args.recipes)
    candidates = grid(recipes, [Budget(keep) for keep in KEEPS])
    longest = sorted(texts.essays(), key=lambda name: -len(texts.essay(name)))[: args.texts]
    names = [name.strip() for name in args.essays.split(",")] if args.essays else longest
    table: dict[str, Figures] = defaultdict(Figures)
    full_found: list[bool] = []
    done: list[str] = []
    try:
        with progress.bar() as bar:
            bars = bar.add_task("", total=len(names) * (len(candidates) + 1))
            for number, name in enumerate(names):
                bar.update(bars, description=name)
                task = _task(tokenizer, name, number, len(names), args)
                comparer = PromptComparer(model, tokenizer, task, "embedded", recipes)
                bar.advance(bars)
                rows = []
                for row in comparer.run(candidates):
                    rows.append(row)
                    bar.advance(bars)
                # A text counts with all its rows or not at all.
                for row in rows:
                    _add(table[row.recipe], row)
                full_found.append(comparer.comparison.full["needle_found"])
                done.append(name)
    except KeyboardInterrupt:
        print("interrupted: whole texts follow", file=sys.stderr)

    title = f"{len(done)} texts of {args.tokens} tokens, {args.continuation} after them"
    columns = ["recipe", "bytes", "KL, nats", "95 %", "top-1", "facts found"]
    section = Section(title, columns)
    for recipe, figures in table.items():
        if figures.error is not None:
            section.notes.append(f"{recipe}: {figures.error}")
            continue
        interval = intervals.of_mean(figures.kl)
        section.rows.append(
            [
                recipe,
                f"{fmean(figures.bytes_share):.3f}",
                f"{fmean(figures.kl):.4f}",
                "" if interval is None else f"{interval.low:.4f}..{interval.high:.4f}",
                f"{fmean(figures.top1):.1%}",
                f"{sum(figures.found)} of {len(figures.found)}",
            ]
        )
    section.notes.append(
        f"The full cache finds {sum(full_found)} of {len(full_found)} facts; all were asked for after compression. "
        f"Intervals: bootstrap over texts, {intervals.DRAWS} draws."
    )
    rows_json: list[dict[str, Any]] = [{"recipe": recipe, **vars(figures)} for recipe, figures in table.items()]
    data = {"machine": machine(), "texts": done, "settings": vars(args), "rows": rows_json, "full_found": full_found}
    publish("fidelity", [section], data)
    return 1 if any(figures.error for figures in table.values()) else 0


def _task(tokenizer: Any, name: str, number: int, count: int, args: Any) -> TextTask:
    """Return each essay with its own fact, deeper in each further essay."""
    # Names and numbers are short enough for the few tokens of an answer.
    city = texts.CITIES[number % len(texts.CITIES)]
    answer = str(1000 + 7919 * (number + 1) % 9000)
    needle = texts.secret_number(city, answer)
    depth = (number + 0.5) / count
    return make_text_task(
        tokenizer, texts.essay(name), tokens=args.tokens, continuation=args.continuation, needle=needle, depth=depth
    )


def _add(figures: Figures, row: Record) -> None:
    if row.error is not None:
        figures.error = row.error
        return
    figures.kl.append(row.figures["kl"])
    figures.top1.append(row.figures["top1"])
    figures.bytes_share.append(row.ratio("kv_bytes") or 0.0)
    figures.found.append(bool(row.figures["needle_found"]))


if __name__ == "__main__":
    sys.exit(main())
