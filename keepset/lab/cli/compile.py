"""`keepset compile`: makes CompilerKV's tables of texts, or shows them."""

from __future__ import annotations

from dataclasses import dataclass
from functools import partial
from pathlib import Path
from typing import TYPE_CHECKING, Annotated, Literal

from typer import Exit, Option

from keepset.errors import KeepsetError, RecipeError
from keepset.lab.cli.checks import check_fits_context, check_tensor_file, check_whole, parse_whole
from keepset.lab.cli.console import counted, load, note, progress, say
from keepset.lab.cli.options import Force, ModelOptions, takes_options
from keepset.lab.embedded import Source

if TYPE_CHECKING:
    from keepset.core.tables import Tables
    from keepset.lab.compile.compiler import CompileSettings
    from keepset.methods.compilerkv import CompilerKV


@dataclass(frozen=True, kw_only=True)
class CompileOptions(ModelOptions):
    """Options of `keepset compile`."""

    out: Annotated[Path | None, Option(help="The file to write, such as tables.safetensors.")] = None
    show: Annotated[
        Path | None, Option(metavar="<path>", help="Print what a file of tables says, and compile nothing.")
    ] = None
    text: Annotated[
        list[Path] | None,
        Option(
            metavar="<path>",
            help='A UTF-8 text file, or a .jsonl file with a text in the field "text" of every line; may be given '
            "several times. [default: essays]",
        ),
    ] = None
    budgets: Annotated[str, Option(help="Budgets in entries per KV head, separated by commas.")] = "128,256,512"
    recipe: Annotated[str, Option(help="The method to compile for: compilerkv with its window and switches.")] = (
        "compilerkv"
    )
    sample: Annotated[int, Option(help="Number of contexts that are drawn from the texts to try actions on.")] = 64
    prompt_tokens: Annotated[int, Option(help="Tokens of a context.")] = 1024
    continuation: Annotated[int, Option(help="Tokens after a context, by which an action is judged.")] = 48
    weights: Annotated[str, Option(help="Weights that a head may get.")] = "1,2,0.5,0,-1"
    reward: Annotated[
        Literal["expected", "said"],
        Option(help="said: the loss on the text's own tokens, as in the paper; expected: its expectation."),
    ] = "said"
    gate: Annotated[
        Literal["table", "sum"],
        Option(help="table: a value for each pair of layer and risk, as in the paper; sum: one for each of both."),
    ] = "table"
    seed: Annotated[int, Option(help="Seed of the contexts' order and of the actions.")] = 0
    log: Annotated[
        Path | None,
        Option(
            metavar="<path>",
            help="A file for rewards, from which the same command resumes. Several processes may share it.",
        ),
    ] = None
    force: Force = False


@takes_options
def compile(options: CompileOptions) -> None:
    """Compile the tables that compilerkv(tables=...) needs.

    Each context runs once. Random head weights and thresholds are tried on it and rewarded by the loss of the tokens
    that follow. Conservative Q-learning makes the tables of these rewards. The texts should be of many kinds, and not
    those that you evaluate on. A recipe names the file: compilerkv(tables='tables.safetensors', keep=512).
    """
    from keepset.core.tables import load as load_tables
    from keepset.core.tables import save
    from keepset.lab.compile.compiler import CompileSettings
    from keepset.lab.compile.describe import describe_tables

    if (options.out is None) == (options.show is None):
        raise KeepsetError("Give either --out, the file to write, or --show, a file to look at.")
    if options.out is None:
        lines = describe_tables(load_tables(str(options.show)))
    else:
        check_tensor_file(options.out, options.force)
        check_whole(
            2**31,
            sample=(options.sample, 1),
            prompt_tokens=(options.prompt_tokens, 2),
            continuation=(options.continuation, 2),
            seed=(options.seed, 0),
        )
        settings = CompileSettings(
            method=_method(options.recipe),
            budgets=tuple(sorted(parse_whole(options.budgets, "budgets"))),
            contexts=options.sample,
            tokens=options.prompt_tokens,
            continuation=options.continuation,
            seed=options.seed,
            weights=_weights(options.weights),
            reward=options.reward,
            gate=options.gate,
        )
        tables = _compiled(options.source, options.text or [], settings, options.log)
        save(tables, options.out)
        lines = [f"{options.out}:", *describe_tables(tables)]
    say("\n".join(lines))


def _weights(text: str) -> tuple[float, ...]:
    try:
        return tuple(map(float, text.split(",")))
    except ValueError:
        raise KeepsetError(f"--weights {text!r} is no list of numbers: write some such as 1,2,0.5,0,-1.") from None


def _method(recipe: str) -> CompilerKV:
    from keepset.methods.compilerkv import CompilerKV
    from keepset.recipe import Recipe

    parsed = Recipe.parse(recipe)
    if not isinstance(parsed.method, CompilerKV) or parsed != Recipe.of(parsed.method):
        raise RecipeError(
            f"--recipe {recipe!r} is not compilerkv with only its own parameters: write for example "
            "compilerkv(window=32), and give budgets by --budgets."
        )
    return parsed.method


def _compiled(model: Source, files: list[Path], settings: CompileSettings, log: Path | None) -> Tables:
    from keepset.lab.compile.compiler import POOL, compile_tables
    from keepset.lab.compile.corpus import ContextPool, read_texts
    from keepset.lab.corpus import default_texts

    tokens, continuation, contexts = settings.tokens, settings.continuation, settings.contexts
    texts = read_texts(files) if files else default_texts()
    loaded, tokenizer = load(model)
    check_fits_context(loaded, tokens, continuation)
    pool = ContextPool.draw(
        tokenizer, texts, tokens=tokens, continuation=continuation, count=POOL * contexts, seed=settings.seed
    )
    if len(pool.contexts) < contexts:
        note(f"The texts have {len(pool.contexts)} contexts, fewer than the {contexts} asked for.")
    try:
        with progress() as bar:
            return compile_tables(loaded, pool, settings, log, partial(counted, bar))
    except KeyboardInterrupt:
        if log is None or not log.exists():
            raise
        note("interrupted: all results so far are in the log, and the same command goes on from there")
        raise Exit(130) from None
