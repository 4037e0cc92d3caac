"""The grid that is swept for an entry, with a user's options."""

from dataclasses import replace

from keepset.bench.papers.entry import Options, Sweep
from keepset.bench.sweep.sweep import SweepGrid
from keepset.bench.tasks.find import find
from keepset.bench.tasks.task import Task, TaskSettings


def grid_of(sweep: Sweep, options: Options) -> SweepGrid:
    """Return the tasks and recipes of a sweep.

    Args:
        sweep: what the paper has.
        options: what the user wants otherwise.

    Raises:
        KeepsetError: if a task is unknown or an option out of range.
    """
    tasks = find(sweep.tasks, TaskSettings(options.data, options.lengths or sweep.lengths))
    for task in tasks:
        tokens = sweep.answer_tokens.get(_name(task))
        if tokens is not None:
            task.generation = replace(task.generation, tokens=tokens)
    candidates = list({line.candidate.text: line.candidate for line in sweep.lines(options.files)}.values())
    limit, sample = (sweep.limit, sweep.sample) if options.limit is None else (options.limit, None)
    return SweepGrid(tasks, [options.seed], {task.name: candidates for task in tasks}, limit, sample)


def count_idle(asked: SweepGrid) -> dict[str, int]:
    """Return by task how many recipes never compress, because answers end before their first event.

    Such a recipe compresses no prompt, and its interval is at least as long as the longest answer.
    """
    recipes = {
        task.name: sum(
            not recipe.schedule.prefill and (recipe.schedule.every or 0) >= task.generation.tokens
            for candidate in asked.candidates[task.name]
            if (recipe := candidate.recipe) is not None
        )
        for task in asked.tasks
    }
    return {task: count for task, count in recipes.items() if count}


def _name(task: Task) -> str:
    return task.name.partition("@")[0]
