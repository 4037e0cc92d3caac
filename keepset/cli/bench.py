"""`keepset bench serve`: a load on plain vLLM and on vLLM with a recipe, and what came of it."""

from __future__ import annotations

import signal
from collections.abc import Iterator, Sequence
from contextlib import contextmanager
from dataclasses import asdict
from pathlib import Path
from tempfile import TemporaryDirectory
from types import FrameType
from typing import TYPE_CHECKING, Annotated, Any
from urllib.parse import urlsplit

from typer import Argument, Exit, Option

import keepset
from keepset.cli.checks import check_writable
from keepset.cli.console import cell, counted, foretold, note, output, progress, say, show, status, table, write
from keepset.cli.options import Html, Json, group
from keepset.errors import KeepsetError
from keepset.models import EMBEDDED

if TYPE_CHECKING:
    from keepset.recipe import Recipe
    from keepset.serving.documents import Document
    from keepset.serving.load import Load

_ERRORS = 5

bench = group("bench", "Measure how fast recipes are.")


@bench.command()
def serve(
    words: Annotated[
        list[str] | None,
        Argument(
            metavar="MODEL [-- VLLM OPTIONS]",
            help="A folder or a hub name, a small embedded model if none; after -- options of `vllm serve`.",
        ),
    ] = None,
    recipe: Annotated[str | None, Option(help="What to keep, such as 'snapkv(keep=512, every=256)'.")] = None,
    requests: Annotated[int, Option(help="Requests in each round.")] = 28,
    prompt_tokens: Annotated[int, Option(help="Tokens of each prompt.")] = 512,
    output_tokens: Annotated[int, Option(help="Tokens of each answer.")] = 256,
    concurrency: Annotated[int | None, Option(help="Requests at once; all of them if not given.")] = None,
    rounds: Annotated[int, Option(help="How often all requests are made, with other texts.")] = 1,
    documents: Annotated[
        bool,
        Option(
            "--contexts",
            help="Texts are documents, each compressed once into a context and asked one question a round; "
            "plain vLLM has them in its prefix cache.",
        ),
    ] = False,
    question_tokens: Annotated[int, Option(help="Tokens of a question, with --contexts.")] = 32,
    seed: Annotated[int, Option(help="For the choice of texts.")] = 0,
    url: Annotated[
        list[str] | None,
        Option(
            metavar="<str>",
            help="A server on this machine that runs already, such as http://127.0.0.1:8000: it is measured, and none "
            "is started; given twice, two are compared.",
        ),
    ] = None,
    request_timeout: Annotated[float, Option(help="Seconds that a request may take.")] = 600.0,
    start_timeout: Annotated[float, Option(help="Seconds that a server may take to start.")] = 600.0,
    json_file: Json = None,
    html: Html = None,
) -> None:
    """Compare a recipe with plain vLLM under load.

    Throughput, latencies, requests at once, preemptions. Starts a server without the recipe, sends it requests, stops
    it; then the same with the recipe: that takes two starts, because plain vLLM runs its own code. Requests are
    streamed, as many at once as --concurrency allows, and each has a text of its own. With --contexts the second
    server has the texts as saved contexts, which are built before.
    """
    from keepset.bench.report.serving import render
    from keepset.recipe import Recipe
    from keepset.serving.command import block_size_hint, check_options, split
    from keepset.serving.load import MAX_CONCURRENCY, Load, local_url
    from keepset.serving.optional_imports import import_http, import_parser
    from keepset.serving.server import ServerError
    from keepset.serving.table import documents_rows, table_rows

    model, options = split(words or [])
    at_once = min(requests, MAX_CONCURRENCY) if concurrency is None else concurrency
    if documents and question_tokens < 1:
        raise KeepsetError(f"--question-tokens {question_tokens} is out of range: use an integer from 1 to 1000000.")
    question_tokens = question_tokens if documents else 0
    load = Load(requests, prompt_tokens, output_tokens, at_once, rounds, seed, request_timeout, question_tokens)
    if not 0 < start_timeout <= 86400:
        raise KeepsetError(f"--start-timeout {start_timeout} is out of range: use seconds from above 0 to 86400.")
    parsed = None if recipe is None else Recipe.parse(recipe).require_budget()
    urls = [local_url(each) for each in url or ()]
    if urls:
        if parsed is not None or options or documents:
            raise KeepsetError(
                "--url names a server that runs already: leave out --recipe, --contexts and options for vLLM."
            )
        if len(urls) > 2 or len({*urls}) < len(urls):
            raise KeepsetError("--url is given once, or twice for two servers that are compared.")
    elif parsed is None:
        raise KeepsetError("--recipe is missing: write what to keep, such as --recipe 'snapkv(keep=512, every=256)'.")
    check_options(options)
    check_writable(json_file, html)
    import_http()
    import_parser()
    if not urls:
        _prepare(model, parsed, options, load)
    if not documents and (hint := block_size_hint(parsed, options)) is not None:
        note(hint)
    try:
        with _terminable():
            name, servers = _measure(model, parsed, options, load, urls, start_timeout)
    except ServerError as error:
        for line in error.log:
            note(f"| {line}")
        note(f"keepset: {error}")
        raise Exit(1) from None
    except KeyboardInterrupt:
        note("interrupted: nothing is reported")
        raise Exit(130) from None
    result = {
        "model": name,
        "recipe": None if parsed is None else str(parsed),
        "load": asdict(load),
        "options": options,
        "keepset": keepset.__version__,
        "servers": servers,
    }
    rows = [*documents_rows(servers), *table_rows([server["summary"] for server in servers])]
    output(result, json_file, lambda: print_table(result, rows))
    write(html, lambda: render(result, rows))
    if any(server["summary"]["failed"] for server in servers):
        raise Exit(1)


def _prepare(model: str | None, recipe: Recipe | None, options: list[str], load: Load) -> None:
    """Finds out beforehand what would keep servers from starting, and says what is about to happen."""
    from keepset.serving.checks import check_model, check_recipe, limit_cpu_pool
    from keepset.serving.command import check_installed, folder
    from keepset.serving.spelling import check_spelling

    check_installed(recipe)
    check_spelling(options)
    # Documents are compressed before, by whatever recipe, and no server has it.
    check_recipe(None if load.question_tokens else recipe, folder(model))
    check_model(folder(model))
    rounds = f", {load.rounds} times" if load.rounds > 1 else ""
    if load.question_tokens:
        note(f"First {load.requests} documents of {load.prompt_tokens} tokens are compressed, one after the other.")
    tokens = load.prompt_tokens + load.question_tokens
    note(
        f"Two servers, one after the other, plain and with the recipe: each takes up to a minute to start and gets "
        f"{load.requests} requests of {tokens} + {load.output_tokens} tokens{rounds}."
    )
    if (sparing := limit_cpu_pool(options)) is not None:
        note(sparing)


def _measure(
    model: str | None, recipe: Recipe | None, options: list[str], load: Load, urls: list[str], start_timeout: float
) -> tuple[str, list[dict[str, Any]]]:
    """What to call the model, and everything about each server; all get the same prompts."""
    from keepset.serving.command import command, folder, option
    from keepset.serving.documents import build, held
    from keepset.serving.measure import ServedModel, check_fits, measure, served_model, to_json
    from keepset.serving.server import ServerProcess, free_port
    from keepset.serving.summary import summary
    from keepset.serving.workload import prompts, token_source

    running = [served_model(url) for url in urls]
    if len({each.root or each.name for each in running}) > 1:
        raise KeepsetError(f"{' and '.join(urls)} serve different models: give two servers of one.")
    tokens = token_source(folder(model) if model is not None or not running else running[0].root or running[0].name)
    if tokens.note is not None:
        note(tokens.note)
    texts = prompts(tokens, load)

    def under_load(
        name: str, url: str, model: ServedModel, documents: Sequence[Document] = (), saved: bool = False
    ) -> dict[str, Any]:
        check_fits(load, model)
        with progress() as bar:
            on_reply = counted(bar, f"requests to the {name} server", load.rounds * load.requests)
            named = [document.path.stem for document in documents] if saved else None
            rounds = measure(url, model.name, load, texts, on_reply, named)
        figures: dict[str, Any] = {"summary": summary(rounds), "rounds": to_json(rounds)}
        if documents:
            each = {"first": rounds[:1], "later": rounds[1:]}
            times = {when: summary(some)["first_token_seconds"] for when, some in each.items()}
            figures["documents"] = {**held(load.prompt_tokens, documents, url, saved), "first_token_seconds": times}
        return figures

    if running:
        names = ["server"] if len(urls) == 1 else [urlsplit(url).netloc for url in urls]
        measured = [under_load(*server) for server in zip(names, urls, running, strict=True)]
        nothing = {"recipe": None, "command": None}
        return running[0].name, [
            {"name": name, **nothing, **of_server} for name, of_server in zip(names, measured, strict=True)
        ]
    servers = []
    with TemporaryDirectory(prefix="keepset-contexts-") as place:
        documents: list[Document] = []
        if load.question_tokens and recipe is not None:
            tokens_of = [text[: load.prompt_tokens] for text in texts[1]]
            dtype = option(options, "--dtype")
            documents = _compressed(build(folder(model), dtype, recipe, tokens_of, Path(place)), load)
        for name, each in (("plain", None), ("contexts" if documents else "recipe", recipe)):
            port, saved = free_port(), bool(documents) and each is not None
            forced = ("--host", "127.0.0.1", "--port", str(port))
            if saved:
                words = command(model, None, options, forced, Path(place))
            else:
                words = command(model, each, options, forced)
            with ServerProcess(words, port) as server:
                with status(f"starting the {name} server"):
                    server.wait(start_timeout)
                figures = under_load(name, server.url, served_model(server.url), documents, saved)
                server.check()
            servers.append({"name": name, "recipe": None if each is None else str(each), "command": words, **figures})
    return model or EMBEDDED, servers


def _compressed(documents: Iterator[Document], load: Load) -> list[Document]:
    """All of them; how far that has come is shown."""
    what = "documents compressed"
    done: list[Document] = []
    with progress() as bar:
        advance = foretold(counted(bar, what, load.requests), what, load.requests)
        for document in documents:
            done.append(document)
            advance()
    return done


def print_table(result: dict[str, Any], rows: list[list[str]]) -> None:
    """The figures, and why requests failed."""
    load, servers = result["load"], result["servers"]
    what = f"requests of {load['prompt_tokens']}"
    if load["question_tokens"]:
        what = f"documents of {load['prompt_tokens']} + {load['question_tokens']}"
    say(
        f"{result['model']}: {load['requests']} {what} + {load['output_tokens']} tokens, "
        f"at most {load['concurrency']} at once" + (f", {load['rounds']} rounds." if load["rounds"] > 1 else ".")
    )
    if result["recipe"] is not None:
        say(f"recipe: {result['recipe']}")
    ratio = ["ratio"] if len(servers) > 1 else []
    grid = table("", numbers=[*(server["name"] for server in servers), *ratio])
    for row in rows:
        grid.add_row(*map(cell, row))
    show(grid)
    for server in servers:
        for error in server["summary"]["errors"][:_ERRORS]:
            say(f"{server['name']}: {error}", style="red")


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
