"""`keepset compare`: recipes and budgets against the full cache, on one text."""

from __future__ import annotations

import json
from collections.abc import Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import TYPE_CHECKING, Annotated, Any

import typer

from keepset.errors import KeepsetError

if TYPE_CHECKING:
    from jaxtyping import Int
    from rich.progress import Progress
    from torch import Tensor

    from keepset.bench.candidate import Candidate
    from keepset.bench.compare.comparison import Comparer, Comparison
    from keepset.bench.compare.decode import DecodeComparer
    from keepset.bench.compare.prompt import PromptComparer
    from keepset.bench.compare.text_task import TextTask
    from keepset.recipe import Recipe

ALL = (
    "streaming_llm, random, knorm, tova, snapkv, h2o, expected_attention, pyramid(snapkv), adakv(snapkv), "
    "adakv(expected_attention)"
)
KEEPS = "0.75,0.5,0.25"
DECODING = "streaming_llm, random, knorm, tova, snapkv, expected_attention, pyramid(snapkv), adakv(snapkv), ams(tova)"
DECODING_KEEPS = "256,128"


def compare(
    recipes: Annotated[str | None, typer.Option(help="Recipes, separated by commas; a choice if none.")] = None,
    keeps: Annotated[
        str | None,
        typer.Option(
            help="Budgets for recipes that name none: fractions or entries per head, separated by commas. "
            f"[default: {KEEPS}; with --decode {DECODING_KEEPS}]"
        ),
    ] = None,
    text: Annotated[Path | None, typer.Option(help="A UTF-8 text file; an essay if none is given.")] = None,
    question: Annotated[str | None, typer.Option(help="A question about your text.")] = None,
    answer: Annotated[str | None, typer.Option(help="What a right answer to it contains.")] = None,
    tokens: Annotated[int, typer.Option(help="Tokens of the prompt.")] = 1024,
    continuation: Annotated[
        int | None,
        typer.Option(help="Tokens after it, for fidelity. [default: 64; with --decode 1024]"),
    ] = None,
    decode: Annotated[
        bool, typer.Option("--decode", help="Compress while decoding: what follows the prompt is fed as if decoded.")
    ] = False,
    every: Annotated[
        int | None,
        typer.Option(help="With --decode, for recipes that do not say it: after how many tokens. [default: 64]"),
    ] = None,
    generate: Annotated[
        int | None, typer.Option(help="With --decode: feed so many tokens that the full cache generated, not the text.")
    ] = None,
    model: Annotated[str | None, typer.Option(help="A folder or a hub name; a small embedded model if none.")] = None,
    as_json: Annotated[bool, typer.Option("--json", help="Print JSON instead of a table.")] = False,
    html: Annotated[Path | None, typer.Option(help="Write the report to this file.")] = None,
) -> None:
    """Measure what recipes cost and what they keep: fidelity to the full cache, bytes, seconds.

    One prefill serves all recipes. With no text of your own an essay is used, with a fact hidden in it and a
    question that is asked after compression. With --decode nothing is asked: a long text is followed token by token.
    """
    from keepset.cli.budgets import keeps as budgets_in
    from keepset.cli.console import check_said
    from keepset.recipe import Recipe
    from keepset.texts import NEEDLE, Needle, essay, read

    parsed = Recipe.parse_list((DECODING if decode else ALL) if recipes is None else recipes)
    budgets = budgets_in((DECODING_KEEPS if decode else KEEPS) if keeps is None else keeps)
    for name, value in (("tokens", tokens), ("continuation", continuation), ("every", every), ("generate", generate)):
        if value is not None and value < 1:
            raise KeepsetError(f"--{name} {value} is not a number of tokens: use an integer from 1.")
    if not decode and (every is not None or generate is not None):
        raise KeepsetError("--every and --generate are about decoding: give --decode too, or leave them out.")
    if decode and (question is not None or answer is not None):
        raise KeepsetError("--decode follows a text and asks nothing: leave --question and --answer out.")
    if generate is not None and continuation is not None:
        raise KeepsetError("--continuation is the text's own, --generate the model's: give one of them.")
    if (question is None) != (answer is None):
        raise KeepsetError(
            "A question needs its answer and the reverse: give both --question and --answer, or neither."
        )
    if question is not None and text is None:
        raise KeepsetError("--question is about your own text: give it with --text.")
    source = essay() if text is None else read(text)
    needle = NEEDLE if text is None and not decode else None
    if question is not None and answer is not None:
        check_said("--question", question)
        check_said("--answer", answer)
        needle = Needle(sentence="", question=question, answer=answer)
    length = 1 if generate is not None else continuation or (1024 if decode else 64)
    decoding = _Decoding(every or 64, generate) if decode else None
    _run(parsed, budgets, source, needle, tokens, length, model, decoding, as_json=as_json, html=html)


@dataclass(frozen=True)
class _Decoding:
    """After how many tokens recipes compress that do not say it, and how many the model generates to be fed."""

    every: int
    generate: int | None


def _run(
    recipes: Sequence[Recipe],
    keeps: Sequence[int | float],
    source: str,
    needle: Any,
    tokens: int,
    continuation: int,
    model: str | None,
    decoding: _Decoding | None,
    *,
    as_json: bool,
    html: Path | None,
) -> None:
    if html is not None:
        check_writable(html)
    from keepset.bench.candidate import grid
    from keepset.bench.compare.text_task import ANSWER_TOKENS, check_fits, make_text_task
    from keepset.cli.console import err, load, progress
    from keepset.models import EMBEDDED

    candidates = grid(recipes, keeps, None if decoding is None else decoding.every)
    loaded, tokenizer = load(model)
    longest = getattr(loaded.config.get_text_config(), "max_position_embeddings", None)
    if decoding is not None and decoding.generate is not None:
        check_fits(tokens, decoding.generate + ANSWER_TOKENS, longest)
    task = make_text_task(tokenizer, source, tokens=tokens, continuation=continuation, needle=needle, longest=longest)
    name = model or EMBEDDED
    comparer: Comparer | None = None
    interrupted = False
    try:
        with progress() as bar:
            if decoding is None:
                comparer, ids = _prefilled(loaded, tokenizer, task, name, candidates, bar), task.prompt
            else:
                comparer, ids = _decoded(loaded, task, name, decoding.generate, bar)
            rows = bar.add_task("recipes", total=len(candidates))
            for _ in comparer.run(candidates):
                bar.advance(rows)
    except KeyboardInterrupt:
        interrupted = True
        if comparer is None:
            raise
    comparison = comparer.comparison
    _show(comparison, [str(tokenizer.decode([token])) for token in ids[0].tolist()], as_json=as_json, html=html)
    if interrupted:
        err.print(f"interrupted after {len(comparison.rows)} of {len(candidates)} rows", highlight=False)
        raise typer.Exit(130)
    if comparison.failed:
        raise typer.Exit(1)


def _prefilled(
    model: Any, tokenizer: Any, task: TextTask, name: str, candidates: Sequence[Candidate], bar: Progress
) -> PromptComparer:
    """The comparer of prompts, whose full cache is there."""
    from keepset.bench.compare.prompt import PromptComparer

    layers = model.config.get_text_config().num_hidden_layers
    prefill = bar.add_task("prefill of the full cache", total=layers)
    recipes = [candidate.recipe for candidate in candidates if candidate.recipe is not None]
    comparer = PromptComparer(model, tokenizer, task, name, recipes, on_layer=lambda: bar.advance(prefill))
    bar.update(prefill, completed=layers)
    return comparer


def _decoded(
    model: Any, task: TextTask, name: str, generate: int | None, bar: Progress
) -> tuple[DecodeComparer, Int[Tensor, "1 tokens"]]:
    """The comparer of decoding, through whose full cache all has passed, and all that has."""
    import torch

    from keepset.bench.compare.decode import DecodeComparer, generated

    text = task.continuation
    if generate is not None:
        said = bar.add_task("tokens of the full cache", total=generate)
        text = generated(model, task.prompt, generate, on_token=lambda: bar.advance(said))
    fed = bar.add_task("text through the full cache", total=1)
    comparer = DecodeComparer(model, task.prompt, text, name)
    bar.advance(fed)
    return comparer, torch.cat([task.prompt, text], 1)


def _show(comparison: Comparison, tokens: list[str], *, as_json: bool, html: Path | None) -> None:
    """Prints the rows; writes the report."""
    from keepset.cli.console import err, printable

    if as_json:
        print(json.dumps(comparison.to_json(), indent=2))
    else:
        print_table(comparison)
    if html is not None:
        from keepset.bench.report.compare import render
        from keepset.bench.report.page import write

        write(html, render(comparison.to_json(), tokens, comparison.kept))
        err.print(f"report: {printable(str(html))}", markup=False, highlight=False, soft_wrap=True)


def check_writable(path: Path) -> None:
    """Refuses an output file that could not be written, before any work is done.

    Raises:
        KeepsetError: its folder is missing or it is a folder itself.
    """
    if path.is_dir() or not path.resolve().parent.is_dir():
        raise KeepsetError(f"{str(path)!r} cannot be written: give a file in a folder that exists.")


def print_table(comparison: Comparison) -> None:
    """The rows as a table."""
    from rich.table import Table
    from rich.text import Text

    from keepset.cli.console import megabytes, out, printable

    full = comparison.full
    lines = [
        f"{printable(comparison.model)}: {comparison.tokens} tokens of prompt, "
        f"{comparison.continuation_tokens} after it.",
        f"Full cache: {megabytes(full['kv_bytes'])}, prefill {full['prefill_seconds']:.2f} s, "
        f"decode {full['decode_tokens_per_second']:.1f} tokens/s.",
    ]
    if comparison.question is not None:
        lines += [
            f"Asked after compression: {printable(comparison.question)}",
            f"Full cache answers: {printable(full['answer'])}",
        ]
    out.print("\n".join(lines), markup=False, highlight=False)
    table = Table(box=None, pad_edge=False, header_style="bold")
    table.add_column("recipe", overflow="fold")
    decoding = comparison.drift_tokens is not None
    for title in ("kept", "MB", *(["peak MB"] if decoding else []), "KL", "top-1", "prefill", "tok/s"):
        table.add_column(title, justify="right", no_wrap=True)
    if comparison.question is not None:
        table.add_column("found", no_wrap=True)
    for row in comparison.rows:
        if row.error is not None:
            table.add_row(Text.assemble(printable(row.recipe), (f"\n{printable(row.error)}", "red")))
            continue
        cells = [
            f"{row.keep:.1%}",
            f"{(row.kv_bytes or 0) / 1e6:.1f}",
            *([f"{(row.kv_bytes_peak or 0) / 1e6:.1f}"] if decoding else []),
            f"{row.kl:.3f}",
            f"{row.top1:.0%}",
            f"x{(row.prefill_seconds or 0) / (row.prefill_seconds_full or 1):.2f}",
            f"{row.decode_tokens_per_second:.1f}",
        ]
        if comparison.question is not None:
            cells.append("yes" if row.needle_found else "no")
        table.add_row(Text(printable(row.recipe)), *cells)
    out.print(table)
