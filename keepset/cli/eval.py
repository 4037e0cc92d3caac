"""`keepset eval`: benchmark tasks under recipes and budgets, beside the full cache and the honest baselines."""

from __future__ import annotations

from collections import Counter
from collections.abc import Sequence
from importlib.util import find_spec
from pathlib import Path
from typing import TYPE_CHECKING, Annotated, Any

from typer import Argument, Exit, Option

from keepset.cli.checks import check_writable
from keepset.cli.console import counted, load, note, output, progress, status
from keepset.cli.numbers import parse_budgets
from keepset.cli.options import Json, Model, Recipes, Temperature
from keepset.cli.results import print_summary
from keepset.cli.streaming import Sampling
from keepset.errors import BudgetError, KeepsetError
from keepset.models import EMBEDDED

if TYPE_CHECKING:
    from keepset.bench.candidate import Candidate
    from keepset.bench.sweep.store import Store
    from keepset.bench.sweep.sweep import Grid
    from keepset.bench.tasks.task import Task

RECIPES = "snapkv, adakv(expected_attention), kvzip"
KEEPS = "0.5,0.25"
DECODING = "snapkv, r_kv, ams(tova)"
DECODING_KEEPS = "256,128"
_EVERY = 64
_CHAT = "chat template"


def evaluate(
    tasks: Annotated[
        list[str],
        Argument(
            metavar="TASKS",
            help="Separated by commas: needle, ruler or one of its tasks, longbench or one of its tasks, gsm8k, "
            "math500, aime24, aime25, or any task of lm-evaluation-harness.",
        ),
    ],
    recipes: Recipes = None,
    keeps: Annotated[
        str | None,
        Option(
            help="Budgets for recipes that name none: fractions or entries per head, separated by commas; tasks that "
            f"decode use the entries only. [default: {KEEPS}; for tasks that decode {DECODING_KEEPS}]"
        ),
    ] = None,
    lengths: Annotated[str, Option(help="Tokens, separated by commas, for tasks made to a length.")] = "4096",
    limit: Annotated[int | None, Option(help="Examples of each task; all of them if not given.")] = None,
    seeds: Annotated[str, Option(help="For generated data and for sampling, separated by commas.")] = "0",
    mode: Annotated[
        str,
        Option(
            help="What is compressed: 'prompt', context and question together; 'agnostic', the context before its "
            "questions are known; 'task', the context by recipes that can be told a question (kvcompose, "
            "second_pass), by others context and question."
        ),
    ] = "prompt",
    no_chat: Annotated[
        bool, Option("--no-chat", help="Ask verbatim, though the tokenizer has a chat template.")
    ] = False,
    data: Annotated[Path | None, Option(help="A folder with the tasks' data, used in place of the hub.")] = None,
    temperature: Temperature = 0.0,
    every: Annotated[
        int | None,
        Option(help=f"In tasks that decode, for recipes that do not say it: after how many tokens. [{_EVERY}]"),
    ] = None,
    model: Model = None,
    out: Annotated[Path, Option(help="The sweep's file: begun, or gone on with.")] = Path("sweep.sqlite"),
    no_baselines: Annotated[
        bool, Option("--no-baselines", help="Do not add random and streaming_llm under the same budgets.")
    ] = False,
    ray: Annotated[bool, Option("--ray", help="Let the workers of a Ray cluster do it.")] = False,
    as_json: Json = False,
) -> None:
    """Measure recipes on benchmarks: every recipe and budget on every example, on one prefill of it.

    Each figure is written to a file as soon as it is there. The same command goes on where it was stopped; recipes,
    budgets, tasks, and seeds can be added to a file, and several processes may work on one at the same time.
    """
    _check_from_one(limit=limit, every=every)
    numbers = _whole(seeds, "seeds")
    for seed in numbers:
        Sampling(1, temperature, seed)
    check_writable(out)

    from keepset.bench.sweep import sweep
    from keepset.bench.sweep.prompts import checked_mode
    from keepset.bench.sweep.runner import Runner
    from keepset.bench.sweep.store import Store
    from keepset.bench.tasks.catalogue import Settings
    from keepset.bench.tasks.find import find
    from keepset.hf.fingerprint import fingerprint

    if ray and find_spec("ray") is None:
        raise KeepsetError(
            'Ray is not installed: run `pip install "keepset[ray]"`, or leave --ray out to use this machine alone.'
        )
    names = [name.strip() for word in tasks for name in word.split(",") if name.strip()]
    chosen = find(names, Settings(data, tuple(_whole(lengths, "lengths"))))
    if every is not None and not any(task.decodes for task in chosen):
        raise KeepsetError("--every is for tasks that decode, such as gsm8k, and none of these does: leave it out.")
    candidates = {task.name: _candidates(task, recipes, keeps, every or _EVERY, not no_baselines) for task in chosen}
    grid = sweep.Grid(chosen, numbers, candidates, limit)
    settings = {"--mode": checked_mode(mode), "--limit": limit, "--temperature": temperature}
    if out.exists() and out.stat().st_size > 0:
        with Store.open(out) as store:
            store.check(settings)
            same = store.model == (model or EMBEDDED) and store.configuration[_CHAT] is not no_chat
            if same and grid.is_done(store):
                raise Exit(1 if _show(store, grid, as_json) else 0)
    loaded, tokenizer = load(model)
    chat = not no_chat and tokenizer.chat_template is not None
    asking: dict[str, Any] = {"mode": mode, "chat": chat, "temperature": temperature}
    with Store.begin(out, model or EMBEDDED, {**settings, _CHAT: chat, **fingerprint(loaded)}) as store:
        with status("making examples"):
            groups = grid.groups(store, tokenizer)
        left, total = sweep.unfinished(groups, store.done()), sweep.count(groups)
        try:
            with progress() as bar:
                advance = counted(bar, "cells", total, total - sweep.count(left))
                if ray:
                    from keepset.bench.sweep import ray_sweep

                    nbytes = 2 * sum(parameter.nbytes for parameter in loaded.parameters())
                    lost = ray_sweep.run(store, left, ray_sweep.Loads(model, **asking), nbytes, advance)
                else:
                    lost = sweep.run(store, left, Runner(loaded, tokenizer, **asking), advance)
        except KeyboardInterrupt:
            note(
                f"stopped after {sweep.count(groups, store.done())} of {total} cells, which are in {str(out)!r}: the "
                "same command goes on"
            )
            raise Exit(130) from None
        failed = _show(store, grid, as_json)
    for each, times in Counter(lost).items():
        note(f"{each.task}: {each.recipe} was left out, {times} times ({each.reason}); the same command tries again")
    if failed or lost:
        raise Exit(1)


def _candidates(task: Task, recipes: str | None, keeps: str | None, every: int, baselines: bool) -> Sequence[Candidate]:
    """What a task is to show: the full cache, the recipes, and under the same budgets what every method has to beat."""
    from keepset.bench.candidate import candidates
    from keepset.recipe import Recipe

    requested = Recipe.parse_list((DECODING if task.decodes else RECIPES) if recipes is None else recipes)
    budgets = parse_budgets((DECODING_KEEPS if task.decodes else KEEPS) if keeps is None else keeps)
    open_ended = [recipe for recipe in requested if recipe.budget.keep is None and recipe.method.needs_budget]
    named = [recipe.budget.keep for recipe in requested if recipe.budget.keep is not None]
    if task.decodes:
        budgets = [keep for keep in budgets if isinstance(keep, int)]
        named = [keep for keep in named if isinstance(keep, int)]
        if open_ended and not budgets:
            raise BudgetError(
                f"{task.name} is about decoding, where a fraction of what is left would shrink at every event: give "
                f"whole numbers too, such as --keeps {DECODING_KEEPS}."
            )
    interval = every if task.decodes else None
    chosen = candidates(requested, budgets, interval)
    if baselines:
        random = f"random(protect_prompt=True, every={every})" if task.decodes else "random"
        under = [*named, *(budgets if open_ended or not named else [])]
        chosen += candidates(Recipe.parse_list(f"{random}, streaming_llm"), under, interval)
    return list({candidate.text: candidate for candidate in chosen}.values())


def _show(store: Store, grid: Grid, as_json: bool) -> bool:
    """Prints what the file has of what was asked for; whether a recipe failed on anything."""
    from keepset.bench.analysis.summary import summarise

    summary = summarise(grid.of(store.cells()))
    output(summary.to_json(), as_json, lambda: print_summary(summary))
    note(f"all figures are in {str(store.path)!r}: keepset results shows them again")
    return any(row.failed for row in summary.rows)


def _check_from_one(**options: int | None) -> None:
    for name, value in options.items():
        if value is not None and value < 1:
            raise KeepsetError(f"--{name.replace('_', '-')} {value} is out of range: use an integer from 1.")


def _whole(text: str, option: str) -> list[int]:
    """Whole numbers from a list, each once."""
    try:
        return list(dict.fromkeys(int(part) for part in text.split(",")))
    except ValueError:
        raise KeepsetError(f"--{option} {text!r} is no list of whole numbers: write them as 1,2,3.") from None
