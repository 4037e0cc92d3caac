"""`keepset tune`: which recipe suits a text."""

from __future__ import annotations

import json
from pathlib import Path
from typing import TYPE_CHECKING, Annotated, Any

import typer

from keepset.errors import KeepsetError

if TYPE_CHECKING:
    from rich.progress import Progress

    from keepset.bench.tune.tune import Tuner


def tune(
    text: Annotated[
        list[Path],
        typer.Option(metavar="<path>", help="A UTF-8 text file like those that you use; as often as you like."),
    ],
    keep: Annotated[str, typer.Option(help="The budget: a fraction or entries per KV head.")] = "0.25",
    retrieval: Annotated[
        bool,
        typer.Option("--retrieval", help="Hide facts in the text, ask for them after compression, rank by them first."),
    ] = False,
    model: Annotated[str | None, typer.Option(help="A folder or a hub name; a small embedded model if none.")] = None,
    seed: Annotated[int, typer.Option(help="Of the order of the text's pieces and of the facts.")] = 0,
    as_json: Annotated[bool, typer.Option("--json", help="Print JSON instead of a table.")] = False,
    html: Annotated[Path | None, typer.Option(help="Write the report to this file.")] = None,
) -> None:
    """Find the recipe for your text: all methods, and what the best of them compose to, under one budget.

    The text is cut into pieces. All recipes are measured on few of them, the better half on twice as many, and so on:
    fidelity to the full cache over the text that follows and, with --retrieval, facts that are found after the text was
    compressed. What the intervals over pieces cannot tell apart is said to be tied.
    """
    from keepset.cli.compare import check_writable
    from keepset.cli.console import err, load, printable, progress
    from keepset.texts import read

    budget = _keep(keep)
    if not 0 <= seed < 2**63:
        raise KeepsetError(f"--seed {seed} is out of range: use a whole number from 0 to {2**63 - 1}.")
    for path in text:
        if [other.resolve() for other in text].count(path.resolve()) > 1:
            raise KeepsetError(f"{str(path)!r} is given twice: give each text once.")
    sources = [read(path) for path in text]
    if html is not None:
        check_writable(html)

    from keepset.bench.tune.pieces import cut
    from keepset.bench.tune.tune import Tuner
    from keepset.models import EMBEDDED

    loaded, tokenizer = load(model)
    longest = getattr(loaded.config.get_text_config(), "max_position_embeddings", None)
    pieces = cut(tokenizer, sources, retrieval=retrieval, longest=longest, seed=seed)
    interrupted = False
    with progress() as bar:
        tuner = Tuner(loaded, tokenizer, pieces, budget, model or EMBEDDED, on_step=lambda: _show_progress(bar, tuner))
        _show_progress(bar, tuner)
        try:
            tuner.run()
        except KeyboardInterrupt:
            interrupted = True
            if not any(entry.figures for entry in tuner.race.entries):
                raise
    result = tuner.to_json()
    if as_json:
        print(json.dumps(result, indent=2))
    else:
        print_result(result)
    if html is not None:
        from keepset.bench.report.page import assemble, write

        write(html, assemble("tune", "keepset tune", result))
        err.print(f"report: {printable(str(html))}", markup=False, highlight=False, soft_wrap=True)
    if interrupted:
        err.print(f"interrupted in round {result['round']} of {result['rounds']}", highlight=False)
        raise typer.Exit(130)


def print_result(result: dict[str, Any]) -> None:
    """The recipe to use, and the figures of all as a table."""
    from rich.table import Table
    from rich.text import Text

    from keepset.cli.console import out, printable

    lines = [
        f"{printable(result['model'])}, keep={result['keep']}: {result['pieces']} pieces of {result['tokens']} tokens, "
        f"{result['continuation_tokens']} after each.",
    ]
    if result["facts"]:
        full = result["full"]["found"]
        lines.append(f"Found of {result['facts']} facts in each piece by the full cache: {_percent(full)}.")
    out.print("\n".join(lines), markup=False, highlight=False, soft_wrap=True)
    table = Table(box=None, pad_edge=False, header_style="bold")
    table.add_column("recipe", overflow="fold")
    for title in (
        "pieces",
        "kept",
        "MB",
        "KL",
        "95 %",
        "top-1",
        "prefill",
        *(["found", "95 %"] if result["facts"] else []),
    ):
        table.add_column(title, justify="right", no_wrap=True)
    for row in result["rows"]:
        style = "bold" if row["recipe"] in result["tied"] else "" if row["finalist"] else "dim"
        table.add_row(Text(printable(row["recipe"])), *_cells(row), style=style)
    out.print(table)
    for each in result["dropped"]:
        out.print(Text.assemble(printable(each["recipe"]), "  ", (printable(each["reason"]), "red")), soft_wrap=True)
    for sentence in result["verdict"]:
        out.print(printable(sentence), markup=False, highlight=False, soft_wrap=True)


def _cells(row: dict[str, Any]) -> list[str]:
    kl, found = row["kl"], row.get("found")
    cells = [
        str(row["pieces"]),
        f"{row['keep']:.1%}",
        f"{row['kv_bytes'] / 1e6:.1f}",
        f"{kl['mean']:.4f}",
        "" if kl["low"] is None else f"{kl['low']:.4f}..{kl['high']:.4f}",
        f"{row['top1']:.0%}",
        f"x{row['prefill_seconds'] / row['prefill_seconds_full']:.2f}",
    ]
    if found is not None:
        cells += [f"{found['mean']:.0%}", f"{found['low']:.0%}..{found['high']:.0%}"]
    return cells


def _percent(figure: dict[str, float | None]) -> str:
    if figure["mean"] is None:
        return "not asked yet"
    return f"{figure['mean']:.0%} ({figure['low']:.0%}..{figure['high']:.0%})"


def _show_progress(bar: Progress, tuner: Tuner) -> None:
    race = tuner.race
    said = f"round {race.round} of {race.rounds}: {len(race.alive)} recipes"
    if not bar.tasks:
        bar.add_task(said, total=race.planned)
    bar.update(bar.tasks[0].id, description=said, completed=race.done, total=race.planned)


def _keep(text: str) -> int | float:
    from keepset.cli.budgets import keeps as budgets_in

    keeps = budgets_in(text)
    if len(keeps) > 1:
        raise KeepsetError(f"keep={text!r} is more than one budget: all recipes are compared under one, give that.")
    return keeps[0]
