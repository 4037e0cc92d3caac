"""`keepset compile`: CompilerKV's tables, made of texts, or shown."""

from __future__ import annotations

from collections.abc import Callable
from pathlib import Path
from typing import TYPE_CHECKING, Annotated

import typer

from keepset.errors import KeepsetError

if TYPE_CHECKING:
    from keepset.core.tables import Tables


def compile(
    out: Annotated[Path | None, typer.Option(help="The file to write, such as tables.safetensors.")] = None,
    show: Annotated[
        Path | None, typer.Option(metavar="<path>", help="Print what a file of tables says, and compile nothing.")
    ] = None,
    model: Annotated[str | None, typer.Option(help="A folder or a hub name; a small embedded model if none.")] = None,
    corpus: Annotated[
        list[Path] | None,
        typer.Option(
            metavar="<path>",
            help='A UTF-8 text file, or a .jsonl file with a text in the field "text" of every line, as often as you '
            "like; essays if none.",
        ),
    ] = None,
    keep: Annotated[str, typer.Option(help="Budgets, entries per KV head.")] = "128,256,512",
    recipe: Annotated[
        str, typer.Option(help="Whose tables: compilerkv with its window and what is left out of it.")
    ] = "compilerkv",
    contexts: Annotated[int, typer.Option(help="Contexts that actions are tried on.")] = 64,
    tokens: Annotated[int, typer.Option(help="Tokens of a context.")] = 1024,
    continuation: Annotated[int, typer.Option(help="Tokens after it, which tell what an action was worth.")] = 48,
    seed: Annotated[int, typer.Option(help="Of the contexts' order and of the actions.")] = 0,
    log: Annotated[
        Path | None, typer.Option(metavar="<path>", help="Where rewards are kept; the same command then goes on there.")
    ] = None,
    html: Annotated[Path | None, typer.Option(metavar="<path>", help="A page with both tables as maps.")] = None,
    force: Annotated[bool, typer.Option("--force", help="Replace the file if it exists.")] = False,
) -> None:
    """Compile the tables that compilerkv(tables=...) looks things up in.

    Contexts run once each; then random head weights and thresholds are tried on them and rewarded by what the tokens
    that follow lose, and conservative Q-learning makes tables of it. The texts should be of many kinds, and not those
    that you evaluate on. A recipe names the file: compilerkv(tables='tables.safetensors', keep=512).
    """
    from keepset.cli.compare import check_writable
    from keepset.cli.console import check_out, printable
    from keepset.cli.console import out as results
    from keepset.core.tables import load

    def say(lines: list[str]) -> None:
        results.print(printable("\n".join(lines)), markup=False, highlight=False, soft_wrap=True)

    from keepset.offline.compile.describe import describe

    if (out is None) == (show is None):
        raise KeepsetError("Say either --out, the file to write, or --show, a file to look at.")
    if html is not None:
        check_writable(html)
    if show is not None:
        tables = load(str(show))
        say(describe(tables))
    else:
        assert out is not None
        check_out(out, force)
        tables = _compiled(model, corpus or [], keep, recipe, contexts, tokens, continuation, seed, log)

        from keepset.core.tables import save

        save(tables, out)
        say([f"{out}:", *describe(tables)])
    if html is not None:
        from keepset.bench.report.page import write
        from keepset.bench.report.tables import render

        write(html, render(tables))


def _compiled(
    model: str | None,
    files: list[Path],
    keep: str,
    recipe: str,
    contexts: int,
    tokens: int,
    continuation: int,
    seed: int,
    log: Path | None,
) -> Tables:
    from keepset.cli.console import err, load, progress
    from keepset.methods.compilerkv import CompilerKV
    from keepset.offline.calibrate.corpus import default_texts
    from keepset.offline.compile.compiler import POOL, Settings, compile_tables
    from keepset.offline.compile.corpus import Corpus, read_texts
    from keepset.recipe import Recipe

    for name, value, least in (
        ("--contexts", contexts, 1),
        ("--tokens", tokens, 2),
        ("--continuation", continuation, 2),
        ("--seed", seed, 0),
    ):
        if not least <= value < 2**31:
            raise KeepsetError(f"{name} {value} is out of range: use a whole number from {least} to {2**31 - 1}.")
    parsed = Recipe.parse(recipe)
    if not isinstance(parsed.method, CompilerKV) or parsed != Recipe.of(parsed.method):
        raise KeepsetError(
            f"--recipe {recipe!r} is not compilerkv with parameters of its own alone: write for example "
            "compilerkv(window=32), and the budgets as --keep."
        )
    settings = Settings(parsed.method, _budgets(keep), contexts, tokens, continuation, seed)
    texts = read_texts(files) if files else default_texts()
    loaded, tokenizer = load(model)
    longest = getattr(loaded.config.get_text_config(), "max_position_embeddings", None)
    if longest is not None and tokens + continuation > longest:
        raise KeepsetError(
            f"--tokens {tokens} and --continuation {continuation} are more than the model's context of {longest}: use "
            "fewer."
        )
    pool = Corpus.draw(tokenizer, texts, tokens=tokens, continuation=continuation, count=POOL * contexts, seed=seed)
    if len(pool.contexts) < contexts:
        err.print(
            f"The texts have {len(pool.contexts)} contexts, fewer than the {contexts} asked for.", highlight=False
        )

    try:
        with progress() as bar:

            def stage(what: str, count: int) -> Callable[[], None]:
                task = bar.add_task(what, total=count)
                return lambda: bar.advance(task)

            return compile_tables(loaded, pool, settings, log, stage)
    except KeyboardInterrupt:
        if log is not None:
            err.print("What was found is in the log: the same command goes on from there.", highlight=False)
        raise


def _budgets(text: str) -> tuple[int, ...]:
    parts = [part.strip() for part in text.split(",")]
    if not all(part.isascii() and part.isdigit() and len(part) < 10 for part in parts):
        raise KeepsetError(f"--keep {text!r} is no list of budgets: write whole numbers such as 128,256,512.")
    return tuple(sorted({int(part) for part in parts}))
