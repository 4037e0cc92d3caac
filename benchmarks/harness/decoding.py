"""Seconds per decoded token after a prefill: the full cache, a uniform cache, and one with ragged heads."""

from collections import defaultdict
from collections.abc import Iterator
from dataclasses import dataclass, field
from typing import Any

from harness.report import Section
from harness.summary import Summary, ratios, shown, verdict
from harness.worker import Worker, WorkerError

FULL, UNIFORM, RAGGED = METHODS = ("full", "snapkv", "adakv(snapkv)")
KEEP = 0.5
RAGGED_OVER_UNIFORM = 1.10
LONG = 4096  # from here on the ragged cache must be faster than the full one
WARM_UP_STEPS = 2  # of the workers, at the first request
STEP_IN_TOKENS = 20  # one decode step takes about as long as this many tokens of a prefill

Key = tuple[str, int, str]  # method, tokens, side


@dataclass
class Table:
    """Seconds per token, one figure for each round, and errors."""

    seconds: dict[Key, list[float]] = field(default_factory=lambda: defaultdict(list))
    errors: dict[Key, str] = field(default_factory=dict)


def measure(table: Table, workers: list[Worker], lengths: list[int], rounds: int, steps: int) -> Iterator[int]:
    """Fill `table` round by round, all methods in each; yield the weight of the finished work."""
    for tokens in lengths:
        for number in range(rounds):
            for worker in workers:
                for method in METHODS if number % 2 == 0 else reversed(METHODS):
                    _ask(table, worker, method, tokens, steps)
                    yield steps * STEP_IN_TOKENS + (tokens if number == 0 else 0)
        for worker in workers:
            worker.ask("forget")


def planned(workers: list[Worker], lengths: list[int], rounds: int, steps: int) -> int:
    """Return the weight of all requests."""
    per_length = (rounds * steps * STEP_IN_TOKENS + tokens for tokens in lengths)
    return len(METHODS) * len(workers) * sum(per_length)


def tokens_needed(lengths: list[int], rounds: int, steps: int) -> int:
    """Return the length that the text needs: the prompt and all tokens decoded after it."""
    return max(lengths) + WARM_UP_STEPS + rounds * steps


def rows(table: Table) -> list[dict[str, Any]]:
    """Return all figures for the JSON file."""
    found = []
    for key in sorted(table.seconds.keys() | table.errors.keys()):
        method, tokens, side = key
        summary = Summary.of(table.seconds.get(key, []))
        found.append(
            {
                "method": method,
                "keep": 1.0 if method == FULL else KEEP,
                "tokens": tokens,
                "side": side,
                "seconds_per_token": summary.as_json() if summary else None,
                "error": table.errors.get(key),
            }
        )
    return found


def section(table: Table, lengths: list[int]) -> Section:
    """Return the table of times and ratios."""
    columns = ["side", "tokens", *(f"{method} ms" for method in METHODS)]
    columns += [f"{RAGGED} / {UNIFORM}", "", f"{RAGGED} / {FULL}", ""]
    made = Section(f"Decoding one token, keep {KEEP}", columns)
    for tokens in lengths:
        for side in ("keepset", "kvpress"):
            full, uniform, ragged = (table.seconds.get((method, tokens, side), []) for method in METHODS)
            if not full:
                continue
            judged = side == "keepset"
            to_uniform, to_full = ratios(ragged, uniform), ratios(ragged, full)
            made.rows.append(
                [
                    side,
                    str(tokens),
                    *(shown(Summary.of([1000 * s for s in times]), 1) for times in (full, uniform, ragged)),
                    shown(to_uniform),
                    verdict(to_uniform, RAGGED_OVER_UNIFORM if judged else None),
                    shown(to_full),
                    verdict(to_full, 1.0 if judged and tokens >= LONG else None),
                ]
            )
    made.notes.append(
        f"Targets for keepset: ≤ {RAGGED_OVER_UNIFORM} of {UNIFORM}; from {LONG} tokens on, < the full cache."
    )
    made.notes += [
        f"{side}, {method}, {tokens} tokens: {error}" for (method, tokens, side), error in table.errors.items()
    ]
    return made


def _ask(table: Table, worker: Worker, method: str, tokens: int, steps: int) -> None:
    key = method, tokens, worker.name
    if key in table.errors:
        return
    try:
        table.seconds[key] += worker.ask("decode", method, keep=KEEP, tokens=tokens, steps=steps)["seconds"]
    except WorkerError as error:
        table.errors[key] = str(error)
