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
    from torch import Tensor

    from keepset.core.tables import Tables
    from keepset.lab.compile.compiler import CompileSettings
    from keepset.methods.compilerkv import CompilerKV

ENOUGH = 2
"""The contexts that a bin needs; one with fewer is called thin."""
_SHOWN = 5
_FACTS = ("recipe", "contexts", "tokens", "continuation", "reward", "seed", "corpus", "keepset")


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


def describe_tables(tables: Tables) -> list[str]:
    """Return lines that describe tables: their model, how they were made, and their values."""
    from keepset.recipe import shown

    provenance, budgets = tables.provenance, tables.budgets.tolist()
    layers, heads = tables.weights.shape[1:]
    model = provenance.get("model")
    name = model.get("name") if isinstance(model, dict) else model
    lines = [
        f"tables of {name or 'a model'}: {layers} layers of {heads} query heads, budgets {', '.join(map(str, budgets))}"
    ]
    facts = {
        **provenance,
        "recipe": shown(provenance.get("method", "")) or None,
        "corpus": str(provenance.get("corpus", ""))[:12] or None,
    }
    lines.append(", ".join(f"{fact} {facts[fact]}" for fact in _FACTS if facts.get(fact) is not None))
    lines += coverage(tables)
    for row, budget in enumerate(budgets):
        weights = tables.weights[row].flatten()
        order = weights.argsort(descending=True, stable=True)[:_SHOWN].tolist()
        top = ", ".join(f"{i // heads}.{i % heads} ({weights[i]:g})" for i in order)
        lines += ["", f"keep={budget}", f"  head weights: {_spread(weights)}"]
        lines += [f"  first of the most trusted, layer.head: {top}", f"  thresholds: {_spread(tables.gate[row])}"]
    return lines


def coverage(tables: Tables) -> list[str]:
    """Return lines with the number of contexts in each bin of risk, and the bins that have too few."""
    counts = tables.counts
    lines = ["contexts in the bins of risk, a row for each bin of perplexity, from low to high entropy:"]
    lines += [f"  {p}: " + " ".join(f"{int(count):2d}" for count in counts[:, p]) for p in range(counts.shape[1])]
    thin = (counts < ENOUGH).T
    if thin.any():
        named = "; ".join(f"{p}: {_ranges(row)}" for p, row in enumerate(thin.tolist()) if any(row))
        lines.append(
            f"{int(thin.sum())} of {counts.numel()} bins have fewer than {ENOUGH} contexts and rely on other bins of "
            f"their layer (perplexity: entropy): {named}"
        )
    return lines


def _ranges(flags: list[bool]) -> str:
    """Return the indices of true flags as text, such as `0-3, 7`."""
    from keepset.core.budget import runs

    ranges = runs([index for index, flag in enumerate(flags) if flag])
    return ", ".join(f"{first}-{end - 1}" if end - first > 1 else str(first) for first, end in ranges)


def _spread(values: Tensor) -> str:
    distinct, counts = values.unique(return_counts=True)
    if len(distinct) > 12:
        return f"{values.min():.3g} to {values.max():.3g}, mean {values.mean():.3g}"
    pairs = zip(distinct.tolist(), counts.tolist(), strict=True)
    return ", ".join(f"{value:g} in {count}" for value, count in pairs)
