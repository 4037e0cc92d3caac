"""`keepset bench latency`: time to the first token, tokens per second and memory, by length of the prompt."""

from collections.abc import Callable, Sequence
from dataclasses import dataclass
from operator import itemgetter
from pathlib import Path
from statistics import median
from typing import Annotated, Any, NamedTuple

from typer import Exit, Option

from keepset.errors import KeepsetError
from keepset.lab.cli.checks import check_fits_context, check_least, check_measured, check_writable, parse_whole
from keepset.lab.cli.console import counted, interruptible, load, output, progress, say, show_table
from keepset.lab.cli.options import Json, ModelOptions, takes_options
from keepset.lab.report.table import Column, Line, Table, decimals, integer, megabytes
from keepset.lab.texts import essay, read

_LEAST_ROUNDS = 3
"""The fewest rounds that allow a conclusion."""
LatencyRow = dict[str, Any]
"""A recipe's figures at one length, in the JSON of `keepset bench latency --json`."""


@dataclass(frozen=True, kw_only=True)
class LatencyOptions(ModelOptions):
    """Options of `keepset bench latency`."""

    recipes: Annotated[str, Option(help="Recipes with their budgets, separated by commas.")] = (
        "snapkv(bytes=0.25), adakv(snapkv, bytes=0.25)"
    )
    prompt_tokens: Annotated[str, Option(help="Lengths of prompts, separated by commas.")] = "1024,4096"
    output_tokens: Annotated[int, Option("--output-tokens", "--max-new-tokens", help="Tokens to generate.")] = 64
    rounds: Annotated[int, Option(help="How often each recipe is measured.")] = 3
    text: Annotated[Path | None, Option(help="A UTF-8 text file for the prompts; essays if none is given.")] = None
    json_file: Json = None


@takes_options
def latency(options: LatencyOptions) -> None:
    """Measure one request at a time, beside the full cache.

    Recipes and the full cache take turns. Every round generates the same number of tokens from the same prompt,
    greedily. Ctrl-C shows what is done.
    """
    from keepset.recipe import Recipe

    parsed = [recipe.require_budget() for recipe in Recipe.parse_list(options.recipes)]
    lengths = sorted(parse_whole(options.prompt_tokens, "prompt-tokens"))
    check_least(1, prompt_tokens=lengths[0], output_tokens=options.output_tokens, rounds=options.rounds)
    check_writable(options.json_file)

    from keepset.lab.corpus import default_texts
    from keepset.lab.latency import Timing
    from keepset.lab.latency import latency as measure

    loaded, tokenizer = load(options.source)
    check_measured(loaded, parsed)
    check_fits_context(loaded, lengths[-1], options.output_tokens)
    whole = "\n\n".join([essay(), *default_texts()]) if options.text is None else read(options.text)
    ids = tokenizer(whole, return_tensors="pt", verbose=False)["input_ids"].to(loaded.device)
    if ids.shape[1] < lengths[-1]:
        raise KeepsetError(f"The text has {ids.shape[1]} tokens, fewer than {lengths[-1]}: give a longer --text.")
    prompts = [ids[:, :length] for length in lengths]
    timings: list[Timing] = []
    with interruptible() as ending, progress() as bar:
        # Longer prompts take longer, and the first round of each is short.
        generations = len(lengths) * (len(parsed) + 1) * (options.rounds + 1)
        advance = counted(bar, "generations", generations, foretells=False)
        for timings in measure(loaded, prompts, parsed, options.output_tokens, options.rounds):  # noqa: B007
            advance()
    rows = [timing.to_json() for timing in timings if timing.rounds or timing.error]
    if not rows:
        raise KeyboardInterrupt
    result = {
        "model": options.source.called,
        "device": str(loaded.device),
        "dtype": str(loaded.dtype).removeprefix("torch."),
        "rounds": options.rounds,
        "output_tokens": options.output_tokens,
        "rows": rows,
    }
    output(result, options.json_file, lambda: _print(result))
    ending.say("before the last round")
    if any(timing.error for timing in timings):
        raise Exit(1)


def _print(result: dict[str, Any]) -> None:
    """Print the medians of every recipe at every length, and what they show."""
    say(
        f"{result['model']} on {result['device']}, {result['dtype']}: {result['output_tokens']} tokens "
        f"after the prompt, medians of {result['rounds']} rounds."
    )
    show_table(table(result["rows"]))
    if sentence := conclusion(result["rows"]):
        say(sentence)


def table(rows: Sequence[LatencyRow]) -> Table:
    """Return the medians of every recipe, grouped by the prompt's length."""
    recipe_table = Table(
        "recipe",
        [
            Column("first token", itemgetter("first_seconds"), decimals(2, " s")),
            Column("tokens/s", itemgetter("tokens_per_second"), decimals(1)),
            Column("latency", itemgetter("seconds"), decimals(2, " s"), rank=1),
            Column("allocated, MB", itemgetter("kv_bytes"), megabytes),
            Column("peak, MB", itemgetter("peak_bytes"), megabytes, rank=2),
        ],
    )
    for row in rows:
        tokens, recipe = integer(row["prompt_tokens"]), row["recipe"]
        if row["error"] is None:
            recipe_table.add(f"{recipe}, {tokens} tokens", row, heading=f"{tokens} tokens of prompt", short=recipe)
        else:
            recipe_table.lines.append(Line(f"{recipe}, {tokens} tokens", error=row["error"]))
    return recipe_table


def conclusion(rows: Sequence[LatencyRow]) -> str:
    """Return a sentence that compares the fastest recipe after the longest prompt with the full cache.

    The full cache is the first row. Rounds are compared one by one, because recipes and full cache took turns. Recipes
    whose ranges overlap are a tie, of which the one that holds least is named. The sentence is "" if the full cache or
    all recipes have no figures, or rounds are missing.
    """
    longest = max((row["prompt_tokens"] for row in rows), default=0)
    timed = [row for row in rows if row["prompt_tokens"] == longest and row.get("tokens_per_second") is not None]
    if len(timed) < 2 or timed[0]["recipe"] != rows[0]["recipe"]:
        return ""
    full, *recipe_rows = timed
    rounds = len(full["rounds"])
    if any(len(row["rounds"]) != rounds for row in recipe_rows):
        return ""
    if rounds < _LEAST_ROUNDS:
        return f"Nothing can be concluded from {rounds} of the {_LEAST_ROUNDS} rounds that a comparison needs."
    # All generate the same number of tokens.
    speeds = [
        _span(row, full, lambda recipe_round, full_round: full_round["rest_seconds"] / recipe_round["rest_seconds"])
        for row in recipe_rows
    ]
    fastest = max(speeds, key=lambda speed: speed.middle)
    tied = [at for at, speed in enumerate(speeds) if speed.high >= fastest.low]
    at = min(tied, key=lambda at: recipe_rows[at]["kv_bytes"])
    row, speed = recipe_rows[at], speeds[at]
    first = _span(
        row, full, lambda recipe_round, full_round: recipe_round["first_seconds"] / full_round["first_seconds"]
    )
    tied_names = [recipe_rows[index]["recipe"] for index in tied if index != at]
    which = f"{row['recipe']}, a tie with {', '.join(tied_names)}," if tied_names else row["recipe"]
    return (
        f"After {longest:,} tokens {which} makes {speed} the full cache's tokens a second (more is better) and holds "
        f"{row['kv_bytes'] / full['kv_bytes']:.0%} of its bytes, room for later tokens included; the first token "
        f"takes {first} as long (less is better). Ranges are over {rounds} rounds; one that holds 1 is a tie."
    )


class _Span(NamedTuple):
    """The median, the smallest and the largest ratio of the rounds."""

    middle: float
    low: float
    high: float

    def __str__(self) -> str:
        return f"{self.middle:.2f} ({self.low:.2f}..{self.high:.2f}) times"


def _span(row: LatencyRow, full: LatencyRow, ratio: Callable[[LatencyRow, LatencyRow], float]) -> _Span:
    ratios = [
        ratio(recipe_round, full_round) for recipe_round, full_round in zip(row["rounds"], full["rounds"], strict=True)
    ]
    return _Span(median(ratios), min(ratios), max(ratios))
