"""`keepset eval`: benchmark tasks under recipes and budgets, beside the full cache and baselines."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass, replace
from pathlib import Path
from typing import TYPE_CHECKING, Annotated

from typer import Argument, Exit, Option

from keepset.errors import BudgetError, KeepsetError
from keepset.lab.cli.checks import check_least, check_writable, note_few_entries, parse_budgets, parse_whole
from keepset.lab.cli.console import note, output, status
from keepset.lab.cli.options import Json, ModelOptions, Recipes, Temperature, takes_options
from keepset.lab.cli.results import print_summary
from keepset.lab.cli.streaming import Sampling
from keepset.lab.cli.sweep import check_ray, say_lost, sweep_grid
from keepset.lab.sweep.prompts import Asking, Mode
from keepset.lab.tasks.chat import Answers, ChatSettings, ChatTask

if TYPE_CHECKING:
    from keepset.core.budget import Budget
    from keepset.lab.candidate import Candidate
    from keepset.lab.sweep.sweep import Cost
    from keepset.lab.tasks.task import Task

RECIPES = "snapkv, adakv(expected_attention), kvzip"
BUDGETS = "0.5,0.25"
CHATS = "pool(snapkv), adakv(snapkv)"
DECODING = "snapkv, r_kv, ams(tova)"
DECODING_BUDGETS = "256,128"
_EVERY = 64
_GENERATED = 10
"""The examples of generated tasks if no limit is given: one at each depth of a needle."""
_LONG = 20_000
"""The tokens of a sweep from which on their number is said first."""


@dataclass(frozen=True, kw_only=True)
class EvalOptions(ModelOptions):
    """Options of `keepset eval`."""

    tasks: Annotated[
        list[str],
        Argument(
            metavar="TASKS",
            help="Separated by commas: needle, ruler, longbench, longbench2, or one of their tasks, gsm8k, math500, "
            "aime24, aime25, the conversations chat, chat_tools, chat_cleared, chat_kv, chat_kv_short, "
            "chat_prefix_suffix and chat_vt, or any task of lm-evaluation-harness.",
        ),
    ]
    recipes: Recipes = None
    budgets: Annotated[
        str | None,
        Option(
            help="For recipes without a budget, separated by commas: shares of a full 16-bit cache's bytes, or entries "
            "per head as whole numbers; tasks that decode take only whole numbers. "
            f"[default: {BUDGETS}; for tasks that decode {DECODING_BUDGETS}]"
        ),
    ] = None
    prompt_tokens: Annotated[
        str, Option(help="Lengths of prompts in tokens, separated by commas, for tasks that are made to a length.")
    ] = "1024"
    turns: Annotated[int, Option(help="How many turns of a conversation come before its questions.")] = 15
    compactions: Annotated[
        str,
        Option(help="How often conversations are compressed before their questions, each number in a task of its own."),
    ] = "1,8"
    questions: Annotated[int, Option(help="The most questions that are asked about a conversation.")] = 10
    answers: Annotated[
        Answers,
        Option(
            help="What of a question stays in a conversation for the next one: nothing ('none'), or the question with "
            "the right answer ('right') or with the model's own ('own')."
        ),
    ] = "none"
    file: Annotated[
        Path | None,
        Option(help="Recorded conversations for the task chat: a file of LoCoMo, ShareGPT or MT-Eval."),
    ] = None
    limit: Annotated[
        int | None, Option(help="Take the first examples of each task. [default: all; of generated tasks ten]")
    ] = None
    sample: Annotated[
        str | None,
        Option(help="Take a random sample of each task's examples, by the seed: a share such as 0.1, or a number."),
    ] = None
    output_tokens: Annotated[
        int | None,
        Option(
            "--output-tokens",
            "--max-new-tokens",
            help="The most tokens of an answer, for all tasks. [default: each task's own]",
        ),
    ] = None
    seeds: Annotated[str, Option(help="Seeds of generated data and of sampling, separated by commas.")] = "0"
    mode: Annotated[
        Mode,
        Option(
            help="What is compressed. 'prompt': context and question together. 'agnostic': the context before its "
            "questions are known. 'task': the context by recipes that take the question (kvcompose, second_pass); "
            "context and question by others."
        ),
    ] = "prompt"
    no_chat: Annotated[bool, Option("--no-chat", help="Ask without the tokenizer's chat template.")] = False
    data: Annotated[Path | None, Option(help="A folder with the tasks' data, in place of the hub.")] = None
    temperature: Temperature = 0.0
    every: Annotated[
        int | None,
        Option(
            help="The tokens between compressions in tasks that decode, for recipes without every=. 0 compresses the "
            f"prompt only, and then budgets may be shares. [default: {_EVERY}]"
        ),
    ] = None
    always: Annotated[
        str,
        Option(
            metavar="SINKS,RECENT",
            help="How many of the first and of the newest tokens always stay, such as 4,32, unless the recipe says.",
        ),
    ] = "0,0"
    out: Annotated[Path, Option(help="The sweep's file, new or begun before.")] = Path("sweep.jsonl")
    no_baselines: Annotated[
        bool, Option("--no-baselines", help="Leave out random and streaming_llm under the same budgets.")
    ] = False
    ray: Annotated[bool, Option("--ray", help="Measure on the workers of a Ray cluster.")] = False
    json_file: Json = None


@takes_options
def evaluate(options: EvalOptions) -> None:
    """Measure recipes on benchmarks.

    Every recipe runs under every budget on every example, and one prefill of an example serves all. Each figure is
    written to a file at once. The same command resumes after a stop. Recipes, budgets, tasks and seeds can be added to
    a file. One process adds to a file at a time; --ray uses many machines.
    """
    check_least(
        1, limit=options.limit, output_tokens=options.output_tokens, turns=options.turns, questions=options.questions
    )
    check_least(0, every=options.every)
    if options.limit is not None and options.sample is not None:
        raise KeepsetError("--limit takes the first examples and --sample random ones: leave one of them out.")
    numbers, stay = parse_whole(options.seeds, "seeds"), _stay(options.always)
    for seed in numbers:
        Sampling(1, options.temperature, seed)
    check_writable(options.out, options.json_file)
    check_ray(options.ray)

    from keepset.lab.tasks.find import find

    names = [name.strip() for word in options.tasks for name in word.split(",") if name.strip()]
    lengths = tuple(parse_whole(options.prompt_tokens, "prompt-tokens"))
    compactions = tuple(parse_whole(options.compactions, "compactions"))
    with status("reading the tasks"):
        chosen = find(
            names,
            ChatSettings(
                options.data, lengths, options.turns, compactions, options.questions, options.answers, options.file
            ),
        )
    has_chats = any(isinstance(task, ChatTask) for task in chosen)
    if has_chats:
        _check_chats(options)
    elif options.file is not None:
        raise KeepsetError("--file is for recorded conversations, and none of these tasks is one: ask for chat.")

    from keepset.lab.analysis.summary import summarize
    from keepset.lab.sweep.sweep import SweepGrid

    if options.every is not None and not any(task.decodes for task in chosen):
        raise KeepsetError("--every is for tasks that decode, such as gsm8k, and none of these does: leave it out.")
    budgets = None if options.budgets is None else parse_budgets(options.budgets)
    note_few_entries(budgets or [])
    candidates = {task.name: _candidates(task, options, budgets, stay) for task in chosen}
    limit, sample = options.limit, None if options.sample is None else _sample(options.sample)
    if limit is None and sample is None and all(hasattr(task, "length") for task in chosen):
        limit = _GENERATED
    grid = SweepGrid(chosen, numbers, candidates, limit, sample, options.output_tokens)
    asking = Asking(options.mode, not options.no_chat, options.temperature)

    def foretell(cost: Cost) -> None:
        if cost.prompt_tokens + cost.answer_tokens >= _LONG:
            note(str(cost))

    cells, lost = sweep_grid(options.out, grid, options.source, asking, options.ray, foretell)
    summary = summarize(cells)
    output(summary.to_json(), options.json_file, lambda: print_summary(summary))
    note(f"all figures are in {str(options.out)!r}: keepset results shows them again")
    if any(name.startswith("told ") for cell in cells for name in cell.scores):
        note("with --by told it shows them by the turn in which an answer was told")
    say_lost(lost)
    if lost or any(row.failed for row in summary.rows):
        raise Exit(1)


def _check_chats(options: EvalOptions) -> None:
    """Refuse options that conversations do not have."""
    given = {"--mode": options.mode != "prompt", "--no-chat": options.no_chat, "--temperature": options.temperature > 0}
    if wrong := [name for name, is_given in given.items() if is_given]:
        raise KeepsetError(f"Conversations are chats that are answered greedily: leave {', '.join(wrong)} out.")


def _candidates(
    task: Task, options: EvalOptions, budgets: Sequence[Budget] | None, always: tuple[int, int]
) -> Sequence[Candidate]:
    from keepset.core.budget import Budget
    from keepset.lab.candidate import candidates, text_of
    from keepset.lab.sweep import chats
    from keepset.recipe import Recipe

    is_chat = isinstance(task, ChatTask)
    every = _EVERY if options.every is None else options.every
    interval = every if every and task.decodes else None
    default = DECODING if interval else CHATS if is_chat else RECIPES
    requested = Recipe.parse_list(default if options.recipes is None else options.recipes)
    if is_chat:
        requested = [replace(recipe, schedule=replace(recipe.schedule, turns=True)) for recipe in requested]
    if budgets is None:
        budgets = parse_budgets(DECODING_BUDGETS if interval else BUDGETS)
    open_ended = [recipe for recipe in requested if not recipe.budget.is_given and recipe.method.traits.needs_budget]
    of_recipes = [recipe.budget for recipe in requested if recipe.budget.is_given]
    named = [Budget(budget.keep, bytes=budget.bytes) for budget in of_recipes]
    if interval:
        budgets = [budget for budget in budgets if isinstance(budget.keep, int)]
        named = [budget for budget in named if isinstance(budget.keep, int)]
        if open_ended and not budgets:
            raise BudgetError(
                f"{task.name} is about decoding, where a share of what is left would shrink at every event: give "
                f"whole numbers too, such as --budgets {DECODING_BUDGETS}, or compress the prompt only with --every 0."
            )
    chosen = candidates(requested, budgets, interval, always)
    if not options.no_baselines:
        random = f"random(protect_prompt=True, every={interval})" if interval else "random"
        others = "streaming_llm(turns=True)" if is_chat else f"{random}, streaming_llm"
        under = [*named, *(budgets if open_ended or not named else [])]
        chosen += candidates(Recipe.parse_list(others), under, interval, always)
        if is_chat:
            chosen += chats.baselines(list(filter(None, map(text_of, under))))
    return list({candidate.text: candidate for candidate in chosen}.values())


def _stay(text: str) -> tuple[int, int]:
    """Return the two numbers of `--always`."""
    counts = [int(part) for part in text.split(",") if part.strip().isdecimal() and len(part.strip()) < 10]
    if len(counts) != 2 or text.count(",") != 1:
        raise KeepsetError(
            f"--always {text!r} is not two numbers of tokens, the first and the newest: write them as 4,32."
        )
    return counts[0], counts[1]


def _sample(text: str) -> int | float:
    """Return the number or the share of `--sample`."""
    try:
        sample = int(text) if text.isdecimal() else float(text)
    except ValueError:
        sample = 0
    if not (sample >= 1 if isinstance(sample, int) else 0 < sample <= 1):
        raise KeepsetError(f"--sample {text!r} is neither a share of the examples, such as 0.1, nor how many to take.")
    return sample
