"""`keepset compare` and `keepset demo`: recipes and budgets against the full cache, on one text."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass, replace
from pathlib import Path
from typing import TYPE_CHECKING, Annotated, Any

from typer import Exit, Option

from keepset.errors import KeepsetError
from keepset.lab.cli.checks import (
    check_least,
    check_measured,
    check_writable,
    given_text,
    note_few_entries,
    offered_recipes,
    parse_budgets,
    say_advice,
    say_always,
    say_networks,
)
from keepset.lab.cli.console import counted, explain, interruptible, load, output, progress, say, show_table, write
from keepset.lab.cli.options import Html, Images, Json, ModelOptions, OneText, Recipes, takes_options
from keepset.lab.images import Pictured, read_images
from keepset.lab.texts import NEEDLE, Needle, essay, read, token_texts
from keepset.models import context_length, load_processor

if TYPE_CHECKING:
    from rich.progress import Progress
    from torch import Tensor

    from keepset.core.budget import Budget
    from keepset.lab.candidate import Candidate
    from keepset.lab.compare.comparison import Comparer, Comparison
    from keepset.lab.compare.text_task import TextTask

BUDGETS = "0.5,0.25,0.1"
DECODING = "streaming_llm, random, knorm, tova, snapkv, expected_attention, pyramid(snapkv), adakv(snapkv), ams(tova)"
DECODING_BUDGETS = "256,128"
_LEGEND = (
    "MB, of 16-bit: bytes of entries, counted in 16 bits, and their share of a full cache's; KL: distance of "
    "predictions from the full cache's, in nats; top-1: how often both predict the same token; prefill: time, as a "
    "share of the full cache's."
)
_PROMPT_TOKENS, _CONTINUATION, _LONG_CONTINUATION, _ANSWER_TOKENS, _EVERY = 1024, 64, 1024, 32, 64


@dataclass(frozen=True, kw_only=True)
class CompareOptions(ModelOptions):
    """Options of `keepset compare`."""

    recipes: Recipes = None
    budgets: Annotated[
        str | None,
        Option(
            help="For recipes without a budget, separated by commas: shares of a full 16-bit cache's bytes, or entries "
            f"per head as whole numbers. [default: {BUDGETS}; with --decode {DECODING_BUDGETS}]"
        ),
    ] = None
    text: OneText = None
    image: Images = None
    question: Annotated[str | None, Option(help="A question about your text.")] = None
    answer: Annotated[str | None, Option(help="Text that a right answer contains.")] = None
    prompt_tokens: Annotated[
        int | None,
        Option(
            help="Tokens of the prompt, which begins the text. "
            f"[default: {_PROMPT_TOKENS}; with --question as many as the text and the model have]"
        ),
    ] = None
    continuation: Annotated[
        int | None,
        Option(
            help="Tokens after the prompt, to measure fidelity. "
            f"[default: {_CONTINUATION}; with --decode {_LONG_CONTINUATION}; with --question what the full cache "
            "answers]"
        ),
    ] = None
    decode: Annotated[
        bool, Option("--decode", help="Compress while decoding: feed what follows the prompt token by token.")
    ] = False
    every: Annotated[
        int | None,
        Option(help=f"With --decode: tokens between compressions, for recipes without every=. [default: {_EVERY}]"),
    ] = None
    generate: Annotated[
        int | None, Option(help="With --decode: feed this many tokens of the full cache's answer, not the text.")
    ] = None
    json_file: Json = None
    html: Html = None


@takes_options
def compare(options: CompareOptions) -> None:
    """Compare recipes: the memory they take, and what they lose.

    The best come first, after the full cache. One prefill serves all recipes. Without a text of yours an essay is used:
    it hides a fact, for which a question asks after compression. With --decode nothing is asked: a long text is
    followed token by token.
    """
    from keepset.recipe import Recipe

    # The defaults of prompts depend on the model.
    recipes = DECODING if options.decode and options.recipes is None else options.recipes
    parsed = [] if recipes is None else Recipe.parse_list(recipes)
    default_budgets = DECODING_BUDGETS if options.decode else BUDGETS
    budgets = parse_budgets(default_budgets if options.budgets is None else options.budgets)
    note_few_entries(budgets)
    _check_lengths(options)
    _check_budgets(options, budgets)
    options = replace(options, question=given_text("--question", options.question))
    needle = _needle(options)
    text, images = essay() if options.text is None else read(options.text), read_images(options.image)
    if options.decode and images:
        raise KeepsetError("--decode follows a text token by token: leave --image out.")
    check_writable(options.json_file, options.html)

    from keepset.lab.candidate import grid
    from keepset.lab.compare.comparison import conclusion
    from keepset.lab.report.compare import render

    comparer: Comparer | None = None
    with interruptible() as ending:
        loaded, tokenizer = load(options.source)
        task = _task(options, loaded, tokenizer, text, needle, images)
        if not parsed:
            say_networks(loaded, options.source.called)
            parsed = offered_recipes(loaded)
        candidates = grid(parsed, budgets, (options.every or _EVERY) if options.decode else None)
        check_measured(loaded, (candidate.recipe for candidate in candidates))
        with progress("the full cache") as bar:
            if options.decode:
                advance = counted(bar, "recipes", len(candidates), foretells=False)  # the line of tokens does
                comparer, ids = _decoded(loaded, task, options, len(candidates), bar)
            else:
                name, ids = options.source.called, task.prompt
                comparer = _prefilled(loaded, tokenizer, task, name, candidates, bar)
                advance = counted(bar, "recipes", len(candidates))
            for _ in comparer.run(candidates):
                advance()
    if comparer is None or not (ending.finished or comparer.comparison.rows):
        raise KeyboardInterrupt
    comparison = comparer.comparison
    doubt = task.doubt(bool(comparison.full.get("needle_found")))
    sentence = (doubt or conclusion(comparison)) if ending.finished else ""  # rows that are missing might be the best
    output(
        {**comparison.to_json(), "conclusion": sentence}, options.json_file, lambda: print_table(comparison, sentence)
    )
    say_advice(parsed)
    for candidate in candidates:
        if candidate.recipe is not None and not options.decode:
            say_always(candidate.recipe, loaded, task.prompt.shape[1])
    write(options.html, lambda: render(comparison, token_texts(tokenizer, ids[0].tolist()), sentence))
    ending.say(f"after {len(comparison.rows)} of {len(candidates)} rows: nothing is concluded")
    if comparison.failed:
        raise Exit(1)


def demo(html: Annotated[Path, Option(help="Where the report goes.")] = Path("keepset-demo.html")) -> None:
    """Compare recipes on an essay with a fact in it; write a report."""
    compare(html=html)


def _check_budgets(options: CompareOptions, budgets: Sequence[Budget]) -> None:
    for budget in budgets:
        if options.decode and budget.bytes is not None:
            raise KeepsetError(
                f"--budgets {budget.bytes} is a share of what is left, which would shrink at every event: with "
                f"--decode give whole numbers of entries, such as {DECODING_BUDGETS}."
            )


def _check_lengths(options: CompareOptions) -> None:
    names = ("prompt_tokens", "continuation", "every", "generate")
    check_least(1, **{name: getattr(options, name) for name in names})
    if not options.decode and (options.every is not None or options.generate is not None):
        raise KeepsetError("--every and --generate are about decoding: give --decode too, or leave them out.")
    if options.generate is not None and options.continuation is not None:
        raise KeepsetError("--continuation is the text's own, --generate the model's: give one of them.")


def _continuation(options: CompareOptions) -> int:
    """Return how many tokens of the text follow the prompt; none if the full cache's answer to a question does."""
    if options.generate is not None:
        return 1
    default = 0 if options.question is not None else _LONG_CONTINUATION if options.decode else _CONTINUATION
    return options.continuation or default


def _needle(options: CompareOptions) -> Needle | None:
    """Return what is asked: the user's question about a text, or a question about a fact hidden in an essay."""
    question, answer = options.question, given_text("--answer", options.answer)
    if (question is None) != (answer is None):
        raise KeepsetError(
            "A question needs an answer, and an answer a question: give both --question and --answer, or neither."
        )
    if options.decode and question is not None:
        raise KeepsetError("--decode follows a text and asks nothing: leave --question and --answer out.")
    if question is None or answer is None:
        return NEEDLE if options.text is None and not options.decode else None
    if options.text is None:
        raise KeepsetError("--question is about your own text: give it with --text.")
    return Needle(sentence="", question=question, answer=answer)


def _task(
    options: CompareOptions, model: Any, tokenizer: Any, text: str, needle: Needle | None, images: Sequence[Any]
) -> TextTask:
    from keepset.lab.compare.text_task import ANSWER_TOKENS, check_fits, make_text_task

    longest = context_length(model)
    if options.generate is not None:
        check_fits(options.prompt_tokens or _PROMPT_TOKENS, options.generate + ANSWER_TOKENS, longest)
    return make_text_task(
        tokenizer,
        text,
        tokens=options.prompt_tokens or (None if options.question is not None else _PROMPT_TOKENS),
        continuation=_continuation(options),
        needle=needle,
        longest=longest,
        answer_tokens=ANSWER_TOKENS if options.question is None else _ANSWER_TOKENS,
        pictured=Pictured(model, load_processor(model), images) if images else None,
    ).to(model.device)


def _prefilled(
    model: Any, tokenizer: Any, task: TextTask, name: str, candidates: Sequence[Candidate], bar: Progress
) -> Comparer:
    from keepset.lab.compare.prompt import PromptComparer

    layers = model.config.get_text_config().num_hidden_layers
    # The last step is what follows the prefill: what recipes look at beside it, and the full cache's answer.
    advance = counted(bar, "full cache", layers + 1, foretells=False)
    recipes = [candidate.recipe for candidate in candidates if candidate.recipe is not None]
    comparer = PromptComparer(model, tokenizer, task, name, recipes, on_layer=advance)
    bar.update(bar.task_ids[-1], completed=layers + 1)
    return comparer


def _decoded(
    model: Any, task: TextTask, options: CompareOptions, recipes: int, bar: Progress
) -> tuple[Comparer, Tensor]:
    """Return the comparer, after the full cache has read the text, and all tokens of prompt and text.

    The text is what the full cache generates, if --generate says how many tokens.

    Args:
        model: the model.
        task: the prompt and its text.
        options: the options of the command.
        recipes: the number of recipes.
        bar: counts the tokens that the full cache and then all recipes read.
    """
    import torch
    from transformers import DynamicCache

    from keepset.lab.compare.decode import DecodeComparer
    from keepset.lab.generation import greedy

    text = task.continuation
    if options.generate is not None:
        advance = counted(bar, "tokens of the full cache", options.generate, foretells=False)
        ids, _ = greedy(model, DynamicCache(config=model.config), task.prompt, options.generate, advance)
        text = torch.tensor([ids], dtype=torch.long, device=task.prompt.device)
    advance = counted(bar, "tokens", text.shape[1] * (1 + recipes))
    comparer = DecodeComparer(model, task.prompt, text, options.source.called, on_tokens=advance)
    return comparer, torch.cat([task.prompt, text], 1)


def print_table(comparison: Comparison, sentence: str) -> None:
    """Print the records as a table, best first under each budget, and a sentence that concludes from them.

    Args:
        comparison: the records.
        sentence: the conclusion; empty for none.
    """
    from keepset.lab.report.compare import allocated, table

    full, needle = comparison.full, comparison.needle
    lines = [f"{comparison.model}: {comparison.tokens} tokens of prompt, {comparison.continuation_tokens} after it."]
    if needle is not None:
        lines += [f"Asked after compression: {needle.question}", f"Full cache answers: {full['answer']}"]
    say("\n".join(lines))
    show_table(table(comparison))
    say(f"Allocated: {allocated(comparison)}.")
    explain(_LEGEND)
    if sentence:
        say(sentence)
