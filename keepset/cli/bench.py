"""`keepset bench serve`: a load on plain vLLM and on vLLM with a recipe, and what came of it."""

from __future__ import annotations

import json
import signal
from collections.abc import Callable, Iterator
from contextlib import contextmanager
from pathlib import Path
from types import FrameType
from typing import TYPE_CHECKING, Annotated, Any

import typer

from keepset.errors import KeepsetError

if TYPE_CHECKING:
    from keepset.recipe import Recipe
    from keepset.serving.bench import Measured, Watcher
    from keepset.serving.load import Load

_ERRORS = 5

bench = typer.Typer(
    name="bench",
    help="Measure how fast recipes are.",
    no_args_is_help=True,
    rich_markup_mode=None,
    add_completion=False,
)


@bench.callback()
def _bench() -> None:
    """Measure how fast recipes are."""


@bench.command()
def serve(
    words: Annotated[
        list[str] | None,
        typer.Argument(
            metavar="MODEL [-- VLLM OPTIONS]",
            help="A folder or a hub name, a small embedded model if none; after -- options of `vllm serve`.",
        ),
    ] = None,
    recipe: Annotated[str | None, typer.Option(help="What to keep, such as 'snapkv(keep=512, every=256)'.")] = None,
    requests: Annotated[int, typer.Option(help="Requests in each round.")] = 28,
    prompt_tokens: Annotated[int, typer.Option(help="Tokens of each prompt.")] = 512,
    output_tokens: Annotated[int, typer.Option(help="Tokens of each answer.")] = 256,
    concurrency: Annotated[int | None, typer.Option(help="Requests at once; all of them if not given.")] = None,
    rounds: Annotated[int, typer.Option(help="How often all requests are made, with other texts.")] = 1,
    seed: Annotated[int, typer.Option(help="For the choice of texts.")] = 0,
    url: Annotated[
        str | None,
        typer.Option(
            help="A server on this machine that runs already, such as http://127.0.0.1:8000: only it is measured."
        ),
    ] = None,
    request_timeout: Annotated[float, typer.Option(help="Seconds that a request may take.")] = 600.0,
    start_timeout: Annotated[float, typer.Option(help="Seconds that a server may take to start.")] = 600.0,
    json_file: Annotated[Path | None, typer.Option("--json", help="Write all that was measured to this file.")] = None,
    html: Annotated[Path | None, typer.Option(help="Write a report with plots to this file.")] = None,
) -> None:
    """Compare a recipe with plain vLLM under load: throughput, latencies, requests at once, preemptions.

    Starts a server without the recipe, sends it requests, stops it; then the same with the recipe. Requests are
    streamed, as many at once as --concurrency allows, and each has a text of its own.
    """
    from keepset.recipe import Recipe
    from keepset.serving.bench import check_options
    from keepset.serving.client import http
    from keepset.serving.command import check_installed, split
    from keepset.serving.load import MOST_AT_ONCE, Load, local
    from keepset.serving.metrics import parser

    model, options = split(words or [])
    at_once = min(requests, MOST_AT_ONCE) if concurrency is None else concurrency
    load = Load(requests, prompt_tokens, output_tokens, at_once, rounds, seed, request_timeout)
    if not 0 < start_timeout <= 86400:
        raise KeepsetError(f"--start-timeout {start_timeout} is out of range: use seconds from above 0 to 86400.")
    parsed = None if recipe is None else Recipe.parse(recipe).require_budget()
    if url is not None:
        url = local(url)
        if parsed is not None or options:
            raise KeepsetError("--url names a server that runs already: leave out --recipe and options for vLLM.")
    elif parsed is None:
        raise KeepsetError("--recipe is missing: write what to keep, such as --recipe 'snapkv(keep=512, every=256)'.")
    check_options(options)
    for file in (json_file, html):
        if file is not None:
            from keepset.cli.compare import check_writable

            check_writable(file)
    http()
    parser()
    if url is None:
        check_installed(parsed)
    _run(model, parsed, options, load, url, start_timeout, json_file, html)


def _run(
    model: str | None,
    recipe: Recipe | None,
    options: list[str],
    load: Load,
    url: str | None,
    patience: float,
    json_file: Path | None,
    html: Path | None,
) -> None:
    from keepset.cli.console import err, printable
    from keepset.serving.command import hint
    from keepset.serving.server import ServerError
    from keepset.serving.table import table

    def say(sentence: str) -> None:
        err.print(printable(sentence), markup=False, highlight=False, soft_wrap=True)

    advice = hint(recipe, options)
    if advice is not None:
        say(advice)
    try:
        with _terminable():
            name, measured = _measure(model, recipe, options, load, url, patience, say)
    except ServerError as error:
        for line in error.log:
            say(f"| {line}")
        say(f"keepset: {error}")
        raise typer.Exit(1) from None
    except KeyboardInterrupt:
        say("interrupted: nothing is reported")
        raise
    result = to_json(name, recipe, options, load, measured)
    rows = table([server["summary"] for server in result["servers"]])
    print_table(result, rows)
    if json_file is not None or html is not None:
        from keepset.bench.report.page import write

        if json_file is not None:
            write(json_file, json.dumps(result, indent=1) + "\n")
            say(f"all figures: {json_file}")
        if html is not None:
            from keepset.bench.report.serving import render

            write(html, render(result, rows))
            say(f"report: {html}")
    if any(server["summary"]["failed"] for server in result["servers"]):
        raise typer.Exit(1)


def _measure(
    model: str | None,
    recipe: Recipe | None,
    options: list[str],
    load: Load,
    url: str | None,
    patience: float,
    say: Callable[[str], None],
) -> tuple[str, list[Measured]]:
    from keepset.models import EMBEDDED
    from keepset.serving.bench import Bench, tokens_of
    from keepset.serving.command import folder
    from keepset.serving.measure import served

    if url is not None:
        running = served(url)
        tokens = tokens_of(folder(model) if model is not None else running.root or running.name)
    else:
        tokens = tokens_of(folder(model))
    if tokens.note is not None:
        say(tokens.note)
    runner = Bench(load, tokens, _watcher())
    if url is not None:
        return running.name, [runner.running(url, running)]
    return model or EMBEDDED, [
        runner.started("plain", model, None, options, patience),
        runner.started("recipe", model, recipe, options, patience),
    ]


def to_json(
    model: str, recipe: Recipe | None, options: list[str], load: Load, measured: list[Measured]
) -> dict[str, Any]:
    """Everything that is known about a run."""
    from dataclasses import asdict

    import keepset

    return {
        "model": model,
        "recipe": None if recipe is None else str(recipe),
        "load": asdict(load),
        "options": options,
        "keepset": keepset.__version__,
        "servers": [each.to_json() for each in measured],
    }


def print_table(result: dict[str, Any], rows: list[list[str]]) -> None:
    """The figures, and why requests failed."""
    from rich.table import Table
    from rich.text import Text

    from keepset.cli.console import out, printable

    load, servers = result["load"], result["servers"]
    out.print(
        f"{printable(result['model'])}: {load['requests']} requests of {load['prompt_tokens']} + "
        f"{load['output_tokens']} tokens, at most {load['concurrency']} at once"
        + (f", {load['rounds']} rounds." if load["rounds"] > 1 else "."),
        markup=False,
        highlight=False,
    )
    if result["recipe"] is not None:
        out.print(f"recipe: {printable(result['recipe'])}", markup=False, highlight=False)
    grid = Table(box=None, pad_edge=False, header_style="bold")
    grid.add_column("")
    for title in [server["name"] for server in servers] + (["ratio"] if len(servers) > 1 else []):
        grid.add_column(title, justify="right", no_wrap=True)
    for row in rows:
        grid.add_row(*(Text(printable(cell)) for cell in row))
    out.print(grid)
    for server in servers:
        for error in server["summary"]["errors"][:_ERRORS]:
            out.print(f"{server['name']}: {printable(error)}", style="red", markup=False, highlight=False)


@contextmanager
def _terminable() -> Iterator[None]:
    """Lets a termination unwind the stack, so that no server is left behind."""

    def stop(number: int, frame: FrameType | None) -> None:
        raise SystemExit(128 + number)

    before = signal.signal(signal.SIGTERM, stop)
    try:
        yield
    finally:
        signal.signal(signal.SIGTERM, before)


def _watcher() -> Watcher:
    from keepset.cli.console import err, progress
    from keepset.serving.bench import Watcher

    @contextmanager
    def starting(name: str) -> Iterator[None]:
        with err.status(f"starting the {name} server"):
            yield

    @contextmanager
    def loading(name: str, total: int) -> Iterator[Callable[[], None]]:
        with progress() as bar:
            task = bar.add_task(f"requests to the {name} server", total=total)
            yield lambda: bar.advance(task)

    return Watcher(starting, loading)
