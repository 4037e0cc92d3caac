"""`keepset compare`: recipes and budgets against the full cache, on one text."""

from __future__ import annotations

from collections.abc import Sequence
from contextlib import suppress
from pathlib import Path
from typing import TYPE_CHECKING, Annotated, Any

from typer import Exit, Option

from keepset.cli.checks import check_text, check_writable
from keepset.cli.console import cell, counted, load, megabytes, note, output, progress, say, show, table, write
from keepset.cli.numbers import parse_budgets
from keepset.cli.options import Html, Json, OneText, Recipes, takes_model
from keepset.errors import KeepsetError
from keepset.models import Source, context_length
from keepset.texts import NEEDLE, Needle, essay, read

if TYPE_CHECKING:
    from rich.progress import Progress
    from torch import Tensor

    from keepset.bench.candidate import Candidate
    from keepset.bench.compare.comparison import Comparer, Comparison
    from keepset.bench.compare.text_task import TextTask

ALL = (
    "streaming_llm, random, knorm, tova, snapkv, h2o, expected_attention, pyramid(snapkv), adakv(snapkv), "
    "adakv(expected_attention)"
)
KEEPS = "0.75,0.5,0.25"
DECODING = "streaming_llm, random, knorm, tova, snapkv, expected_attention, pyramid(snapkv), adakv(snapkv), ams(tova)"
DECODING_KEEPS = "256,128"


@takes_model
def compare(
    model: Source,
    recipes: Recipes = None,
    keeps: Annotated[
        str | None,
        Option(
            help="Budgets for recipes that name none: fractions or entries per head, separated by commas. "
            f"[default: {KEEPS}; with --decode {DECODING_KEEPS}]"
        ),
    ] = None,
    text: OneText = None,
    question: Annotated[str | None, Option(help="A question about your text.")] = None,
    answer: Annotated[str | None, Option(help="What a right answer to it contains.")] = None,
    tokens: Annotated[int, Option(help="Tokens of the prompt.")] = 1024,
    continuation: Annotated[
        int | None, Option(help="Tokens after it, for fidelity. [default: 64; with --decode 1024]")
    ] = None,
    decode: Annotated[
        bool, Option("--decode", help="Compress while decoding: what follows the prompt is fed as if decoded.")
    ] = False,
    every: Annotated[
        int | None, Option(help="With --decode, for recipes that do not say it: after how many tokens. [default: 64]")
    ] = None,
    generate: Annotated[
        int | None, Option(help="With --decode: feed so many tokens that the full cache generated, not the text.")
    ] = None,
    as_json: Json = False,
    html: Html = None,
) -> None:
    """Measure what recipes cost and what they keep: fidelity to the full cache, bytes, seconds.

    One prefill serves all recipes. With no text of your own an essay is used, with a fact hidden in it and a
    question that is asked after compression. With --decode nothing is asked: a long text is followed token by token.
    """
    from keepset.recipe import Recipe

    parsed = Recipe.parse_list((DECODING if decode else ALL) if recipes is None else recipes)
    budgets = parse_budgets((DECODING_KEEPS if decode else KEEPS) if keeps is None else keeps)
    _check_lengths(decode, tokens=tokens, continuation=continuation, every=every, generate=generate)
    if decode and (question is not None or answer is not None):
        raise KeepsetError("--decode follows a text and asks nothing: leave --question and --answer out.")
    needle = _needle(text, question, answer, decode)
    source = essay() if text is None else read(text)
    check_text("--question", question)
    check_text("--answer", answer)
    check_writable(html)

    from keepset.bench.candidate import grid
    from keepset.bench.compare.text_task import ANSWER_TOKENS, check_fits, make_text_task
    from keepset.bench.report.compare import render

    candidates = grid(parsed, budgets, (every or 64) if decode else None)
    loaded, tokenizer = load(model)
    longest = context_length(loaded)
    if generate is not None:
        check_fits(tokens, generate + ANSWER_TOKENS, longest)
    length = 1 if generate is not None else continuation or (1024 if decode else 64)
    task = make_text_task(tokenizer, source, tokens=tokens, continuation=length, needle=needle, longest=longest)
    task = task.to(loaded.device)
    comparer: Comparer | None = None
    finished = False
    with suppress(KeyboardInterrupt), progress() as bar:
        if decode:
            comparer, ids = _decoded(loaded, task, model.called, generate, bar)
        else:
            comparer, ids = _prefilled(loaded, tokenizer, task, model.called, candidates, bar), task.prompt
        advance = counted(bar, "recipes", len(candidates))
        for _ in comparer.run(candidates):
            advance()
        finished = True
    if comparer is None:
        raise KeyboardInterrupt
    comparison = comparer.comparison
    result, texts = comparison.to_json(), [str(tokenizer.decode([token])) for token in ids[0].tolist()]
    output(result, as_json, lambda: print_table(comparison))
    write(html, lambda: render(result, texts, comparison.kept))
    if not finished:
        note(f"interrupted after {len(comparison.rows)} of {len(candidates)} rows")
        raise Exit(130)
    if comparison.failed:
        raise Exit(1)


def _check_lengths(decode: bool, **lengths: int | None) -> None:
    for name, value in lengths.items():
        if value is not None and value < 1:
            raise KeepsetError(f"--{name} {value} is not a number of tokens: use an integer from 1.")
    if not decode and (lengths["every"] is not None or lengths["generate"] is not None):
        raise KeepsetError("--every and --generate are about decoding: give --decode too, or leave them out.")
    if lengths["generate"] is not None and lengths["continuation"] is not None:
        raise KeepsetError("--continuation is the text's own, --generate the model's: give one of them.")


def _needle(text: Path | None, question: str | None, answer: str | None, decode: bool) -> Needle | None:
    """What is asked: the user's question about a text, or about a fact that is hidden in an essay."""
    if (question is None) != (answer is None):
        raise KeepsetError(
            "A question needs its answer and the reverse: give both --question and --answer, or neither."
        )
    if question is None or answer is None:
        return NEEDLE if text is None and not decode else None
    if text is None:
        raise KeepsetError("--question is about your own text: give it with --text.")
    return Needle(sentence="", question=question, answer=answer)


def _prefilled(
    model: Any, tokenizer: Any, task: TextTask, name: str, candidates: Sequence[Candidate], bar: Progress
) -> Comparer:
    """The comparer of prompts, whose full cache is there."""
    from keepset.bench.compare.prompt import PromptComparer

    layers = model.config.get_text_config().num_hidden_layers
    prefill = bar.add_task("prefill of the full cache", total=layers)
    recipes = [candidate.recipe for candidate in candidates if candidate.recipe is not None]
    comparer = PromptComparer(model, tokenizer, task, name, recipes, on_layer=lambda: bar.advance(prefill))
    bar.update(prefill, completed=layers)
    return comparer


def _decoded(model: Any, task: TextTask, name: str, generate: int | None, bar: Progress) -> tuple[Comparer, Tensor]:
    """The comparer of decoding, through whose full cache all has passed, and all that has."""
    import torch

    from keepset.bench.compare.decode import DecodeComparer, generated

    text = task.continuation
    if generate is not None:
        text = generated(model, task.prompt, generate, on_token=counted(bar, "tokens of the full cache", generate))
    advance = counted(bar, "text through the full cache", 1)
    comparer = DecodeComparer(model, task.prompt, text, name)
    advance()
    return comparer, torch.cat([task.prompt, text], 1)


def print_table(comparison: Comparison) -> None:
    """The rows as a table."""
    full = comparison.full
    lines = [
        f"{comparison.model}: {comparison.tokens} tokens of prompt, {comparison.continuation_tokens} after it.",
        f"Full cache: {megabytes(full['kv_bytes'])}, prefill {full['prefill_seconds']:.2f} s, "
        f"decode {full['decode_tokens_per_second']:.1f} tokens/s.",
    ]
    if comparison.needle is not None:
        lines += [f"Asked after compression: {comparison.needle.question}", f"Full cache answers: {full['answer']}"]
    say("\n".join(lines))
    decoding, asking = comparison.drift_tokens is not None, comparison.needle is not None
    titles = ("kept", "MB", *(["peak MB"] if decoding else []), "KL", "top-1", "prefill", "tok/s")
    grid = table("recipe", numbers=titles)
    if asking:
        grid.add_column("found", no_wrap=True)
    for row in comparison.rows:
        if row.error is not None:
            grid.add_row(cell(row.recipe, row.error))
            continue
        grid.add_row(
            cell(row.recipe),
            f"{row.keep:.1%}",
            f"{(row.kv_bytes or 0) / 1e6:.1f}",
            *([f"{(row.kv_bytes_peak or 0) / 1e6:.1f}"] if decoding else []),
            f"{row.kl:.3f}",
            f"{row.top1:.0%}",
            f"x{(row.prefill_seconds or 0) / (row.prefill_seconds_full or 1):.2f}",
            f"{row.decode_tokens_per_second:.1f}",
            *(["yes" if row.needle_found else "no"] if asking else []),
        )
    show(grid)
