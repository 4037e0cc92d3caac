"""The table of `keepset bench latency`, and its conclusion."""

from collections.abc import Callable, Sequence
from operator import itemgetter
from statistics import median
from typing import Any, NamedTuple

from keepset.bench.report.table import Column, Line, Table, decimals, integer, megabytes

_LEAST_ROUNDS = 3
"""The fewest rounds that allow a conclusion."""
LatencyRow = dict[str, Any]
"""A recipe's figures at one length, in the JSON of `keepset bench latency --json`."""


def table(rows: Sequence[LatencyRow]) -> Table:
    """Return the medians of every recipe, grouped by the prompt's length."""
    made = Table(
        "recipe",
        [
            Column("first token", itemgetter("first_seconds"), decimals(2, " s")),
            Column("tokens/s", itemgetter("tokens_per_second"), decimals(1)),
            Column("latency", itemgetter("seconds"), decimals(2, " s"), rank=1),
            Column("KV cache, MB", itemgetter("kv_bytes"), megabytes),
            Column("peak, MB", itemgetter("peak_bytes"), megabytes, rank=2),
        ],
    )
    for row in rows:
        tokens, recipe = integer(row["prompt_tokens"]), row["recipe"]
        if row["error"] is None:
            made.add(f"{recipe}, {tokens} tokens", row, heading=f"{tokens} tokens of prompt", short=recipe)
        else:
            made.lines.append(Line(f"{recipe}, {tokens} tokens", error=row["error"]))
    return made


def conclusion(rows: Sequence[LatencyRow]) -> str:
    """Return a sentence that compares the fastest recipe after the longest prompt with the full cache.

    The full cache is the first row. Rounds are compared one by one, because recipes and full cache took turns. Recipes
    whose ranges overlap are a tie, of which the one that holds least is named. The sentence is "" if the full cache or
    all recipes have no figures, or rounds are missing.
    """
    longest = max((row["prompt_tokens"] for row in rows), default=0)
    known = [row for row in rows if row["prompt_tokens"] == longest and row.get("tokens_per_second") is not None]
    if len(known) < 2 or known[0]["recipe"] != rows[0]["recipe"]:
        return ""
    full, *others = known
    rounds = len(full["rounds"])
    if any(len(row["rounds"]) != rounds for row in others):
        return ""
    if rounds < _LEAST_ROUNDS:
        return f"Nothing can be concluded from {rounds} of the {_LEAST_ROUNDS} rounds that a comparison needs."
    # All generate the same number of tokens.
    speeds = [_span(row, full, lambda own, others: others["rest_seconds"] / own["rest_seconds"]) for row in others]
    fastest = max(speeds, key=lambda speed: speed.middle)
    tied = [at for at, speed in enumerate(speeds) if speed.high >= fastest.low]
    at = min(tied, key=lambda at: others[at]["kv_bytes"])
    row, speed = others[at], speeds[at]
    first = _span(row, full, lambda own, others: own["first_seconds"] / others["first_seconds"])
    beside = [others[each]["recipe"] for each in tied if each != at]
    which = f"{row['recipe']}, a tie with {', '.join(beside)}," if beside else row["recipe"]
    return (
        f"After {longest:,} tokens {which} makes {speed} the full cache's tokens a second (more is better) and holds "
        f"{row['kv_bytes'] / full['kv_bytes']:.0%} of its bytes; the first token takes {first} as long (less is "
        f"better). Ranges are over {rounds} rounds; one that holds 1 is a tie."
    )


class _Span(NamedTuple):
    """The median, the smallest and the largest ratio of the rounds."""

    middle: float
    low: float
    high: float

    def __str__(self) -> str:
        return f"{self.middle:.2f} ({self.low:.2f}..{self.high:.2f}) times"


def _span(row: LatencyRow, full: LatencyRow, ratio: Callable[[LatencyRow, LatencyRow], float]) -> _Span:
    """Return a ratio of a recipe's rounds to those of the full cache, one by one."""
    ratios = [ratio(own, others) for own, others in zip(row["rounds"], full["rounds"], strict=True)]
    return _Span(median(ratios), min(ratios), max(ratios))
