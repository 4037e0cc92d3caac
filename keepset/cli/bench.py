"""`keepset bench serve`: a load on plain vLLM and on vLLM with a recipe."""

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
from keepset.cli.console import counted, note, output, progress, say, show_table, status, write
from keepset.cli.options import Html, Json, group
from keepset.embedded import EMBEDDED
from keepset.errors import KeepsetError

if TYPE_CHECKING:
    from keepset.recipe import Recipe
    from keepset.serving.documents import Document
    from keepset.serving.load import Load, ServedModel

_DAY = 86400

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
    recipe: Annotated[
        str | None,
        Option(help="A recipe, such as 'snapkv(keep=512, every=256)'. [default: as in keepset serve or context build]"),
    ] = None,
    requests: Annotated[int, Option(help="Number of requests in each round.")] = 28,
    prompt_tokens: Annotated[int, Option(help="Tokens of each prompt.")] = 512,
    output_tokens: Annotated[int, Option(help="Tokens of each answer.")] = 256,
    concurrency: Annotated[int | None, Option(help="The most requests at once. [default: a round]")] = None,
    rounds: Annotated[int, Option(help="How often all requests are made, with other texts.")] = 1,
    documents: Annotated[
        bool,
        Option(
            "--contexts",
            help="Treat texts as documents: each is compressed once into a context and asked one question a round. "
            "Plain vLLM has its prefix cache.",
        ),
    ] = False,
    question_tokens: Annotated[int, Option(help="Tokens of a question, with --contexts.")] = 32,
    seed: Annotated[int, Option(help="Seed of the choice of texts.")] = 0,
    url: Annotated[
        list[str] | None,
        Option(
            metavar="<str>",
            help="The address of a server on this machine that runs already, such as http://127.0.0.1:8000. It is "
            "measured, and no server is started. Given twice, two servers are compared.",
        ),
    ] = None,
    load_timeout: Annotated[float, Option(help="Seconds that the load may take on one server.")] = 3600.0,
    start_timeout: Annotated[float, Option(help="Seconds that a server may take to start.")] = 600.0,
    json_file: Json = None,
    html: Html = None,
) -> None:
    """Compare a recipe with plain vLLM under load.

    The table has throughput, latencies, requests at once and preemptions. A server without the recipe is started,
    measured with `vllm bench serve`, and stopped; then a server with the recipe. Each request has its own text. With
    --contexts the second server has the texts as saved contexts, which are built before.
    """
    from keepset.bench.report.serving import render
    from keepset.recipe import Recipe
    from keepset.serving.command import default_for, split
    from keepset.serving.load import MAX_CONCURRENCY, Load, local_url
    from keepset.serving.metrics import check_bench, import_http, import_parser
    from keepset.serving.server import ServerError
    from keepset.serving.start_checks import block_size_hint, check_options

    model, options = split(words or [])
    at_once = min(requests, MAX_CONCURRENCY) if concurrency is None else concurrency
    if documents and question_tokens < 1:
        raise KeepsetError(f"--question-tokens {question_tokens} is out of range: use an integer from 1 to 1000000.")
    question_tokens = question_tokens if documents else 0
    load = Load(requests, prompt_tokens, output_tokens, at_once, rounds, seed, question_tokens)
    for name, seconds in (("start", start_timeout), ("load", load_timeout)):
        if not 0 < seconds <= _DAY:
            raise KeepsetError(f"--{name}-timeout {seconds} is out of range: use seconds from above 0 to {_DAY}.")
    parsed = None if recipe is None else Recipe.parse(recipe).require_budget()
    urls = [local_url(each) for each in url or ()]
    if parsed is None and not urls:
        parsed, why = default_for(model, options, contexts=documents)
        note(why)
    _check_urls(urls, parsed, options, documents)
    check_options(options)
    check_writable(json_file, html)
    import_http()
    import_parser()
    check_bench()
    _prepare(model, parsed, options, load, started=not urls)
    if not documents and (hint := block_size_hint(parsed, options)) is not None:
        note(hint)
    try:
        with _terminable():
            name, servers = _measure(model, parsed, options, load, urls, start_timeout, load_timeout)
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
    output(result, json_file, lambda: print_table(result))
    write(html, lambda: render(result))
    if any(server["summary"]["failed"] for server in servers):
        raise Exit(1)


def _check_urls(urls: Sequence[str], recipe: Recipe | None, options: Sequence[str], documents: bool) -> None:
    """Raise KeepsetError if running servers are given together with what starts others, or too many of them."""
    if not urls:
        return
    if recipe is not None or options or documents:
        raise KeepsetError(
            "--url names a server that runs already: leave out --recipe, --contexts and options for vLLM."
        )
    if len(urls) > 2 or len({*urls}) < len(urls):
        raise KeepsetError("--url is given once, or twice for two servers that are compared.")


def _prepare(model: str | None, recipe: Recipe | None, options: list[str], load: Load, *, started: bool) -> None:
    """Refuse what would keep servers or the load from starting, and note what happens next."""
    from keepset.serving.command import folder, name_statistics
    from keepset.serving.start_checks import check_installed, check_model, check_recipe, limit_cpu_pool

    check_installed(started)
    if not started:
        return
    # A context's recipe compresses before any server starts.
    check_recipe(None if load.question_tokens else name_statistics(recipe, model), folder(model))
    check_model(folder(model))
    rounds = f", {load.rounds} times" if load.rounds > 1 else ""
    if load.question_tokens:
        note(f"First {load.requests} documents of {load.prompt_tokens} tokens are compressed, one after the other.")
    tokens = load.prompt_tokens + load.question_tokens
    note(
        f"Two servers, one after the other, plain and with the recipe: each takes up to a minute to start and gets "
        f"{load.requests} requests of {tokens} + {load.output_tokens} tokens{rounds}."
    )
    if (limited := limit_cpu_pool(options)) is not None:
        note(limited)


def _measure(
    model: str | None,
    recipe: Recipe | None,
    options: list[str],
    load: Load,
    urls: list[str],
    start_timeout: float,
    load_timeout: float,
) -> tuple[str, list[dict[str, Any]]]:
    """Return the model's name and the figures of each server. All servers get the same prompts."""
    from keepset.serving.command import command, folder, option
    from keepset.serving.documents import build, held
    from keepset.serving.figures import figures, first_tokens
    from keepset.serving.load import check_fits, served_model
    from keepset.serving.prompts import make_prompts, text_source
    from keepset.serving.server import ServerProcess, free_port
    from keepset.serving.vllm_bench import measure

    running = [served_model(url) for url in urls]
    if len({each.root or each.name for each in running}) > 1:
        raise KeepsetError(f"{' and '.join(urls)} serve different models: give two servers of the same model.")
    place = folder(model) if model is not None or not running else running[0].root or running[0].name
    source = text_source(place)
    if source.note is not None:
        note(source.note)
    prompts = make_prompts(source, load)

    def under_load(
        name: str, url: str, served: ServedModel, documents: Sequence[Document] = (), saved: bool = False
    ) -> dict[str, Any]:
        """Put the load on a server, and return its figures; `saved` says whether the server has the documents."""
        check_fits(load, served)
        with progress() as bar:
            advance = counted(bar, f"requests to the {name} server", load.rounds * load.requests)
            measured = measure(url, served, place, load, prompts, advance, load_timeout)
        result = figures(measured)
        if documents:
            sizes = held(load.prompt_tokens, documents, url, saved)
            result["documents"] = {**sizes, "first_token_seconds": first_tokens(measured)}
        return result

    if running:
        names = ["server"] if len(urls) == 1 else [urlsplit(url).netloc for url in urls]
        return running[0].name, [
            {"name": name, "recipe": None, "command": None, **under_load(name, url, each)}
            for name, url, each in zip(names, urls, running, strict=True)
        ]
    servers = []
    with TemporaryDirectory(prefix="keepset-contexts-") as contexts:
        documents: list[Document] = []
        if load.question_tokens and recipe is not None:
            tokens = [source.encode(text) for text in prompts.documents]
            built = build(place, option(options, "--dtype"), recipe, tokens, Path(contexts))
            with progress() as bar:
                advance = counted(bar, "documents compressed", load.requests)
                for document in built:
                    documents.append(document)
                    advance()
        for name, each in (("plain", None), ("contexts" if documents else "recipe", recipe)):
            port, saved = free_port(), bool(documents) and each is not None
            forced = ("--host", "127.0.0.1", "--port", str(port))
            words = command(model, None if saved else each, options, forced, Path(contexts) if saved else None)
            with ServerProcess(words, port) as server:
                with status(f"starting the {name} server"):
                    server.wait(start_timeout)
                measured = under_load(name, server.url, served_model(server.url), documents, saved)
                server.check()
            servers.append({"name": name, "recipe": None if each is None else str(each), "command": words, **measured})
    return model or EMBEDDED, servers


def print_table(result: dict[str, Any]) -> None:
    """Print the figures, and why requests failed."""
    from keepset.bench.report.serving import failures, table

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
    show_table(table(servers))
    for failure in failures(servers):
        say(failure, style="red")


@contextmanager
def _terminable() -> Iterator[None]:
    """Let SIGTERM unwind the stack within the block, so that no server is left behind."""

    def stop(number: int, frame: FrameType | None) -> None:
        raise SystemExit(128 + number)

    before = signal.signal(signal.SIGTERM, stop)
    try:
        yield
    finally:
        signal.signal(signal.SIGTERM, before)
