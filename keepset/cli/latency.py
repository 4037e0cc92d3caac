"""`keepset bench latency`: time to the first token, tokens per second, latency and memory, by length of the prompt."""

from __future__ import annotations

import json
from collections.abc import Sequence
from pathlib import Path
from typing import TYPE_CHECKING, Annotated, Any

import typer

from keepset.errors import KeepsetError

if TYPE_CHECKING:
    from keepset.bench.latency import Timing


def latency(
    recipes: Annotated[str, typer.Option(help="Recipes with their budgets, separated by commas.")] = (
        "snapkv(keep=0.25), adakv(snapkv, keep=0.25)"
    ),
    tokens: Annotated[str, typer.Option(help="Lengths of prompts, separated by commas.")] = "1024,4096",
    output_tokens: Annotated[int, typer.Option(help="Tokens to generate.")] = 64,
    rounds: Annotated[int, typer.Option(help="How often each is measured, in turns.")] = 3,
    text: Annotated[
        Path | None, typer.Option(help="A UTF-8 text file for the prompts; essays if none is given.")
    ] = None,
    model: Annotated[str | None, typer.Option(help="A folder or a hub name; a small embedded model if none.")] = None,
    json_file: Annotated[Path | None, typer.Option("--json", help="Write all that was measured to this file.")] = None,
    html: Annotated[Path | None, typer.Option(help="Write a report with plots to this file.")] = None,
) -> None:
    """Measure one request at a time: recipes beside the full cache, in turns.

    Every round generates the same number of tokens from the same prompt, greedily. Ctrl-C shows what is done.
    """
    from keepset.cli.compare import check_writable
    from keepset.recipe import Recipe

    parsed = [recipe.require_budget() for recipe in Recipe.parse_list(recipes)]
    lengths = _lengths(tokens)
    for name, value in (("--output-tokens", output_tokens), ("--rounds", rounds)):
        if value < 1:
            raise KeepsetError(f"{name} {value} is too few: use an integer from 1.")
    for file in (json_file, html):
        if file is not None:
            check_writable(file)

    from keepset.bench.latency import latency as measure
    from keepset.cli.console import err, load, printable, progress
    from keepset.cli.sampling import check_fit
    from keepset.models import EMBEDDED

    loaded, tokenizer = load(model)
    check_fit(loaded, max(lengths), output_tokens)
    prompts = _prompts(tokenizer, text, lengths, loaded.device)
    timings: list[Timing] = []
    interrupted = False
    try:
        with progress() as bar:
            steps = bar.add_task("generations", total=len(lengths) * (len(parsed) + 1) * (rounds + 1))
            for made in measure(loaded, prompts, parsed, output_tokens, rounds):
                timings = made
                bar.advance(steps)
    except KeyboardInterrupt:
        interrupted = True
    result = {
        "model": model or EMBEDDED,
        "device": str(loaded.device),
        "dtype": str(loaded.dtype).removeprefix("torch."),
        "rounds": rounds,
        "output_tokens": output_tokens,
        "rows": [timing.to_json() for timing in timings if timing.rounds or timing.error],
    }
    _print(result)
    from keepset.bench.report.page import assemble, write

    if json_file is not None:
        write(json_file, json.dumps(result, indent=1) + "\n")
    if html is not None:
        write(html, assemble("latency", "keepset bench latency", result))
    for file in (json_file, html):
        if file is not None:
            err.print(f"written: {printable(str(file))}", markup=False, highlight=False, soft_wrap=True)
    if interrupted:
        err.print("interrupted: this is what was measured until then", highlight=False)
        raise typer.Exit(130)
    if any(timing.error for timing in timings):
        raise typer.Exit(1)


def _lengths(text: str) -> list[int]:
    try:
        lengths = [int(word) for word in text.split(",")]
    except ValueError:
        lengths = []
    if not lengths or min(lengths) < 1 or len(set(lengths)) < len(lengths):
        raise KeepsetError(f"--tokens {text!r} is no list of lengths: write different whole numbers such as 1024,4096.")
    return sorted(lengths)


def _prompts(tokenizer: Any, file: Path | None, lengths: Sequence[int], device: Any) -> list[Any]:
    """The text's first tokens, and shorter prompts of the same text."""
    from keepset.offline.calibrate.corpus import default_texts
    from keepset.texts import essay, read

    whole = "\n\n".join([essay(), *default_texts()]) if file is None else read(file)
    ids = tokenizer(whole, return_tensors="pt", verbose=False)["input_ids"].to(device)
    if ids.shape[1] < lengths[-1]:
        raise KeepsetError(f"The text has {ids.shape[1]} tokens, fewer than {lengths[-1]}: give a longer --text.")
    return [ids[:, :length] for length in lengths]


def _print(result: dict[str, Any]) -> None:
    from rich.table import Table
    from rich.text import Text

    from keepset.cli.console import megabytes, out, printable

    out.print(
        f"{printable(result['model'])} on {result['device']}, {result['dtype']}: {result['output_tokens']} tokens "
        f"after the prompt, medians of {result['rounds']} rounds.",
        markup=False,
        highlight=False,
    )
    table = Table(box=None, pad_edge=False, header_style="bold")
    for title in ("prompt", "recipe", "first token", "tokens/s", "latency", "KV cache", "peak memory"):
        table.add_column(title, justify="left" if title == "recipe" else "right", overflow="fold")
    for row in result["rows"]:
        if row["error"] is not None:
            table.add_row(str(row["prompt_tokens"]), printable(row["recipe"]), Text(printable(row["error"]), "red"))
            continue
        table.add_row(
            str(row["prompt_tokens"]),
            printable(row["recipe"]),
            f"{row['first_seconds']:.2f} s",
            "-" if row["tokens_per_second"] is None else f"{row['tokens_per_second']:.1f}",
            f"{row['seconds']:.2f} s",
            megabytes(row["kv_bytes"]),
            "-" if row["peak_bytes"] is None else megabytes(row["peak_bytes"]),
        )
    out.print(table)
