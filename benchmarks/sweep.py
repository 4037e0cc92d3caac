"""The cost of a sweep, compared with its least possible cost, and with kvpress, which runs one press after another."""

import argparse
import sys
from collections.abc import Sequence
from contextlib import ExitStack
from time import perf_counter, process_time
from typing import Any

import torch
from harness.options import names
from harness.progress import bar
from harness.report import Section, machine, publish
from harness.summary import ratios, shown, verdict
from harness.worker import PEER_PYTHON, Worker, check_peer
from transformers import DynamicCache

from keepset import Budget, Recipe, models
from keepset.lab.candidate import candidates
from keepset.lab.embedded import embedded_folder
from keepset.lab.record import Record
from keepset.lab.sweep.engine import Engine, Portion
from keepset.lab.sweep.prompts import Asking, PromptBuilder
from keepset.lab.tasks.find import find
from keepset.lab.tasks.task import Example, Generation, Task, TaskSettings

RECIPES = "snapkv,knorm,tova,expected_attention,adakv(snapkv)"
KEEPS = (0.5, 0.25, 0.1)
TASK = "niah_single_2"
LEAST_TARGET, PEER_TARGET = 1.5, 0.4
ASKING = Asking(mode="agnostic")

Times = dict[str, float]
"""Seconds of wall-clock time, and of processor time."""


def main() -> int:
    """Measure, show, write."""
    parser = argparse.ArgumentParser(description=__doc__)
    parser.add_argument("--limit", type=int, default=20, help="examples of the task (default 20)")
    parser.add_argument("--task", default=TASK, help=f"with answers to generate (default {TASK})")
    parser.add_argument("--tokens", type=int, default=1024, help="tokens of an example (default 1024)")
    parser.add_argument("--recipes", type=names, default=names(RECIPES), help=f"with commas (default {RECIPES})")
    parser.add_argument("--threads", type=int, default=1, help="threads of each side (default 1)")
    parser.add_argument("--no-peer", dest="peer", action="store_false", help="leave kvpress out")
    args = parser.parse_args()
    torch.set_num_threads(args.threads)
    model, tokenizer = models.load()
    [task] = find([args.task], TaskSettings(lengths=(args.tokens,)))
    examples = task.examples(tokenizer, limit=args.limit)
    recipes = [Recipe.parse(text) for text in args.recipes]
    engine = Engine(model, tokenizer, ASKING)
    todo = candidates(recipes, [Budget(keep) for keep in KEEPS])
    rows: list[dict[str, Any]] = []
    with ExitStack() as stack:
        peer = None
        if args.peer:
            check_peer()
            folder = embedded_folder()
            peer = stack.enter_context(Worker("kvpress_sweep", PEER_PYTHON, [folder], args.threads))
        shown_bar = stack.enter_context(bar())
        progress = shown_bar.add_task("contexts", total=len(examples))
        warm_up(model)
        try:
            for example in examples:
                began, cpu_began = perf_counter(), process_time()
                cells = [
                    cell for cell in engine.answer(Portion(task, [(0, example)], todo)) if isinstance(cell, Record)
                ]
                row = {"example": example.id, "keepset": _since(began, cpu_began), **_cells(cells)}
                row["least"] = least(model, tokenizer, task, example, row["tokens"])
                if peer is not None:
                    row["kvpress"] = _peer(peer, example, task.generation, args.recipes)
                rows.append(row)
                shown_bar.advance(progress)
        except KeyboardInterrupt:
            print("interrupted: whole contexts follow", file=sys.stderr)
    if not rows:
        return 1
    section = _section(f"{len(rows)} contexts of {task.name}, {len(todo) - 1} recipes and the full cache", rows)
    versions = {} if peer is None else peer.versions
    settings = {"task": args.task, "recipes": args.recipes, "keeps": KEEPS, "threads": args.threads}
    publish("sweep", [section], {"machine": machine(), "kvpress": versions, **settings, "contexts": rows})
    return 0


@torch.no_grad()
def warm_up(model: Any) -> None:
    """Warm up, so that cold caches, thread pools and allocators do not slow the first prefill."""
    model(torch.full((1, 64), 5))


@torch.no_grad()
def least(model: Any, tokenizer: Any, task: Task, example: Example, tokens: Sequence[float]) -> Times:
    """Time one prefill of plain transformers, and as many answers with as many tokens; the question is not timed."""
    [prompt] = PromptBuilder(tokenizer, task, ASKING, longest=None).of(example)
    question = torch.tensor([prompt.questions[0].ids])
    model.set_attn_implementation("sdpa")
    cache = DynamicCache(config=model.config)
    began, cpu_began = perf_counter(), process_time()
    model(torch.tensor([prompt.ids]), past_key_values=cache, use_cache=True, logits_to_keep=1)
    total = _since(began, cpu_began)
    for count in tokens:
        logits = model(question, past_key_values=cache, use_cache=True, logits_to_keep=1).logits
        began, cpu_began = perf_counter(), process_time()
        for _ in range(round(count) - 1):
            logits = model(logits[:, -1].argmax(-1, keepdim=True), past_key_values=cache, use_cache=True).logits
        for clock, seconds in _since(began, cpu_began).items():
            total[clock] += seconds
        cache.crop(len(prompt.ids) - cache.get_seq_length())
    return total


def _peer(worker: Worker, example: Example, generation: Generation, recipes: Sequence[str]) -> Any:
    [question] = example.questions
    said = {"context": example.context, "question": question.text, "prefix": question.prefix}
    return worker.ask("evaluate", **said, recipes=recipes, keeps=KEEPS, tokens=generation.tokens)


def _cells(cells: Sequence[Record]) -> dict[str, Any]:
    assert all(cell.error is None for cell in cells), [cell.error for cell in cells]
    return {
        "tokens": [cell.figures["tokens"] for cell in cells],
        "replies": [cell.replies[0] for cell in cells],
        "select_seconds": sum(cell.figures["select_seconds"] for cell in cells),
    }


def _section(title: str, rows: Sequence[dict[str, Any]]) -> Section:
    section = Section(title, ["keepset's time /", "target", "measured", "", "processor time"])

    for name, part, target in (
        ("one plain prefill, and as many tokens from the full cache", "least", LEAST_TARGET),
        ("kvpress's pipeline, one press after another", "kvpress", PEER_TARGET),
    ):
        if part in rows[0]:
            wall, cpu = (
                ratios([row["keepset"][clock] for row in rows], [row[part][clock] for row in rows])
                for clock in ("seconds", "cpu_seconds")
            )
            section.rows.append([name, f"≤ {target:g}", shown(wall, 2), verdict(wall, target), shown(cpu, 2)])
    times = {
        part: sum(row[part]["seconds"] for row in rows) for part in ("keepset", "least", "kvpress") if part in rows[0]
    }
    tokens = sum(sum(row["tokens"]) for row in rows) / len(rows)
    in_sum = ", ".join(
        f"{times['keepset'] / seconds:.2f} of {part}" for part, seconds in times.items() if part != "keepset"
    )
    section.notes.append(f"In sum over all contexts {in_sum}; {tokens:.0f} tokens are generated for a context.")
    if "kvpress" in rows[0]:
        pairs = [pair for row in rows for pair in zip(row["replies"], row["kvpress"]["replies"], strict=True)]
        same = sum(own.strip() == other.strip() for own, other in pairs)
        section.notes.append(f"{same} of {len(pairs)} answers are the same on both sides.")
    return section


def _since(began: float, cpu_began: float) -> Times:
    return {"seconds": perf_counter() - began, "cpu_seconds": process_time() - cpu_began}


if __name__ == "__main__":
    sys.exit(main())
