"""`keepset tune`: which recipe suits a text."""

from dataclasses import dataclass
from pathlib import Path
from typing import Annotated, Any

from typer import Option

from keepset.errors import BudgetError, KeepsetError
from keepset.lab.cli.checks import check_whole, check_writable, note_few_entries, offered_recipes, parse_budgets
from keepset.lab.cli.console import interruptible, load, output, progress, say, show_table
from keepset.lab.cli.options import Json, ModelOptions, Recipes, takes_options
from keepset.lab.report.table import Column, Line, Table, decimals, megabytes, percent, times, whole_percent
from keepset.lab.texts import read
from keepset.models import context_length

_NATS = decimals(4)


@dataclass(frozen=True, kw_only=True)
class TuneOptions(ModelOptions):
    """Options of `keepset tune`."""

    text: Annotated[
        list[Path],
        Option(metavar="<path>", help="A UTF-8 text file like those that you use; may be given several times."),
    ]
    recipes: Recipes = None
    budget: Annotated[
        str, Option(help="A share of a full 16-bit cache's bytes, or entries per KV head (a whole number).")
    ] = "0.25"
    seed: Annotated[int, Option(help="Seed of the order of pieces.")] = 0
    json_file: Json = None


@takes_options
def tune(options: TuneOptions) -> None:
    """Find the recipe that suits your text.

    Recipes without budgets compete under one budget. The text is cut into pieces. All recipes are measured on a few of
    them, the better half on twice as many, and so on. What is measured is fidelity to the full cache over the text that
    follows each piece. Recipes that the intervals over pieces cannot tell apart are tied.
    """
    from keepset.recipe import Recipe

    parsed = [] if options.recipes is None else Recipe.parse_list(options.recipes)
    budgets = parse_budgets(options.budget)
    note_few_entries(budgets)
    if len(budgets) > 1:
        raise BudgetError(
            f"--budget {options.budget!r} has several values: give one, under which all recipes are compared."
        )
    check_whole(2**63, seed=(options.seed, 0))
    for path in options.text:
        if [file.resolve() for file in options.text].count(path.resolve()) > 1:
            raise KeepsetError(f"{str(path)!r} is given twice: give each text once.")
    sources = [read(path) for path in options.text]
    check_writable(options.json_file)

    from keepset.lab.tune import Tuner, cut

    tuner: Tuner | None = None

    def show_progress() -> None:
        assert tuner is not None
        race = tuner.race
        description = f"round {race.round} of {race.rounds}: {len(race.alive)} recipes"
        bar.update(line, description=description, total=race.planned, completed=race.done)

    with interruptible() as ending:
        loaded, tokenizer = load(options.source)
        pieces = cut(tokenizer, sources, longest=context_length(loaded), seed=options.seed)
        with progress("checking which recipes the model takes") as bar:
            tuner = Tuner(
                loaded, pieces, parsed or offered_recipes(loaded), budgets[0], options.source.called, show_progress
            )
            line = bar.add_task("")
            show_progress()
            tuner.run()
    if tuner is None or not any(entry.figures for entry in tuner.race.entries):
        raise KeyboardInterrupt
    result = tuner.to_json()
    output(result, options.json_file, lambda: print_result(result))
    ending.say(f"in round {result['round']} of {result['rounds']}")


def print_result(result: dict[str, Any]) -> None:
    """Print the figures of all recipes as a table, and which of them to use."""
    say(
        f"{result['model']}, {result['budget']}: {result['pieces']} pieces of {result['tokens']} tokens, "
        f"{result['continuation_tokens']} after each."
    )
    show_table(table(result))
    for sentence in result["verdict"]:
        say(sentence)


def table(result: dict[str, Any]) -> Table:
    """Return the figures of all recipes, the best first, then those that have none."""
    columns = [
        Column("pieces", lambda row: row["pieces"], rank=3),
        Column("MB", lambda row: row["counted_bytes"], megabytes, rank=2),
        Column("of 16-bit", lambda row: row["share"], percent),
        Column("KL", lambda row: row["kl"]["mean"], _NATS),
        Column("95 %", _ends, rank=1),
        Column("top-1", lambda row: row["top1"], whole_percent),
        Column("prefill", lambda row: row["prefill_seconds"] / row["prefill_seconds_full"], times, rank=4),
    ]
    recipe_table = Table("recipe", columns)
    for row in result["rows"]:
        style = "bold" if row["recipe"] in result["tied"] else "" if row["finalist"] else "dim"
        recipe_table.add(row["recipe"], row, style=style)
    recipe_table.lines += [Line(entry["recipe"], error=entry["reason"]) for entry in result["dropped"]]
    return recipe_table


def _ends(row: dict[str, Any]) -> str | None:
    low, high = row["kl"]["low"], row["kl"]["high"]
    return None if low is None or high is None else f"{_NATS(low)}..{_NATS(high)}"
