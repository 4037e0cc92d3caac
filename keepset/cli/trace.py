"""`keepset trace`: one generation under a recipe, and what every compression of its cache kept."""

from __future__ import annotations

from collections.abc import Sequence
from contextlib import suppress
from pathlib import Path
from typing import TYPE_CHECKING, Annotated, Any

from typer import Argument, Exit, Option

from keepset.cli.checks import check_fits_context, check_least, check_text, check_writable, note_short, parse_indices
from keepset.cli.console import counted, explain, load, note, output, progress, say, show_table, write
from keepset.cli.options import Html, Json, OutputTokens, SamplingSeed, Temperature, takes_model
from keepset.cli.recipe_notes import say_always
from keepset.cli.streaming import Sampling
from keepset.errors import KeepsetError
from keepset.models import Source
from keepset.texts import chat_parts, read, token_texts

if TYPE_CHECKING:
    from keepset.bench.analysis.trace import Trace
    from keepset.recipe import Recipe

RECIPE = "ams(tova, window=32, keep=256, every=128)"
_LEGEND = (
    "length: tokens so far; kept per head, of: entries that stayed, of those that were there; wipe-out: regions of "
    "which nothing stayed; IoU: overlap with what the event before kept (intersection over union); middle: of the "
    "text's middle third, what stayed; longest gap: tokens in a row of which nothing stayed."
)
REASON = "Please reason step by step, and put your final answer within \\boxed{}."


@takes_model
def trace(
    model: Source,
    prompt: Annotated[str | None, Argument(metavar="[PROMPT]", help="What to say to the model.")] = None,
    recipe: Annotated[str, Option(help="What to keep, and after how many tokens again.")] = RECIPE,
    baseline: Annotated[str | None, Option(help="A second recipe to compare with.")] = None,
    forced: Annotated[
        bool, Option("--forced", help="Feed the baseline the first recipe's tokens; it writes none of its own.")
    ] = False,
    text: Annotated[
        Path | None, Option(help="A UTF-8 text file that goes before the prompt; alone it is written on.")
    ] = None,
    problem: Annotated[str | None, Option(help="A problem to reason about step by step, as the prompt.")] = None,
    output_tokens: OutputTokens = 512,
    temperature: Temperature = 0.0,
    seed: SamplingSeed = 0,
    region: Annotated[int, Option(help="Tokens of a region, for the wipe-out rate.")] = 16,
    layers: Annotated[
        str | None, Option(help="Layers on the page, separated by commas, or all; three of them if not given.")
    ] = None,
    json_file: Json = None,
    html: Html = None,
) -> None:
    """Generate a long answer, and tell what each compression kept.

    The table has a line for each compression, with means over layers and heads: length is the tokens so far; kept per
    head and of are the entries that stayed and those that were there; wipe-out is the share of regions of which nothing
    stayed; IoU is the overlap with what the event before kept; middle is what stayed of the text's middle third;
    longest gap is the most tokens in a row of which nothing stayed.
    """
    from keepset.recipe import Recipe

    recipes = [Recipe.parse(each).require_budget() for each in (recipe, baseline) if each is not None]
    if prompt is not None and problem is not None:
        raise KeepsetError("A prompt and --problem are both given: leave one of them out.")
    if prompt is None and problem is None and text is None:
        raise KeepsetError("There is nothing to start from: give a prompt, --problem, or a file with --text.")
    if forced and baseline is None:
        raise KeepsetError("--forced says how the baseline is run: give one with --baseline.")
    check_text("The prompt", prompt)
    check_text("--problem", problem)
    sampling = Sampling(output_tokens, temperature, seed)
    check_least(1, region=region)
    every_layer = layers is not None and layers.strip() == "all"
    wanted = None if layers is None or every_layer else parse_indices(layers)
    if layers is not None and not every_layer and wanted is None:
        raise KeepsetError(f"--layers {layers!r} is no list of layers: write numbers such as 0,14,29, or all.")
    before = "" if text is None else read(text)
    check_writable(json_file, html)

    import torch

    from keepset.bench.analysis.trace import Tracer, figures
    from keepset.bench.report.trace import render

    loaded, tokenizer = load(model)
    ids = _encoded(tokenizer, before, prompt if problem is None else f"{problem}\n{REASON}").to(loaded.device)
    check_fits_context(loaded, ids.shape[1], sampling.tokens)
    tracers = [Tracer(loaded, each) for each in recipes]
    compressed = list(tracers[0].layers)
    shown = compressed if every_layer else _shown(wanted, compressed)
    finished = False
    with suppress(KeyboardInterrupt), progress() as bar:
        for number, tracer in enumerate(tracers):
            tracer.on_token = counted(bar, str(recipes[number]), sampling.tokens)
            torch.manual_seed(sampling.seed)
            if forced and number:
                # The last token was never fed.
                tracer.follow(tracers[0].trace.ids[:-1], ids.shape[1])
            else:
                tracer.generate(ids, **sampling.options)
        finished = True
    traces = [tracer.trace for tracer in tracers if tracer.trace.events or finished]
    if not traces:
        raise KeyboardInterrupt
    runs = [
        {**figures(each, region), "text": str(tokenizer.decode(each.ids[each.prompt :], skip_special_tokens=True))}
        for each in traces
    ]
    result = {"model": model.called, "forced": forced, "runs": runs}
    output(result, json_file, lambda: _print(runs))
    write(html, lambda: render(result, traces, [token_texts(tokenizer, each.ids.tolist()) for each in traces], shown))
    _say_of_prompts(recipes, traces, loaded)
    if not finished:
        note(f"interrupted after {len(traces[-1].ids) - traces[-1].prompt} of {sampling.tokens} tokens")
        raise Exit(130)


def _say_of_prompts(recipes: Sequence[Recipe], traces: Sequence[Trace], model: Any) -> None:
    """Note where a prompt is short, or where what always stays of it fills the budget."""
    prompt = traces[0].prompt
    at_ends = (event for traced in traces for event in traced.events if event.length == prompt)
    note_short(prompt, min((event.keep_set.entries / event.entries for event in at_ends), default=1.0))
    for recipe in recipes[: len(traces)]:
        say_always(recipe, model, prompt)


def _encoded(tokenizer: Any, before: str, question: str | None) -> Any:
    """Return the tokens of a user's message, or of a bare text if nothing is asked, `[1, tokens]`."""
    if question is None:
        return tokenizer(before, return_tensors="pt", verbose=False)["input_ids"]
    message = "".join(chat_parts(tokenizer, before, question))
    return tokenizer(message, add_special_tokens=False, return_tensors="pt", verbose=False)["input_ids"]


def _print(runs: Sequence[dict[str, Any]]) -> None:
    """Print every recipe's events as a table, and their means."""
    from keepset.bench.report.trace import events_table

    for run in runs:
        generated = run["tokens"] - run["prompt_tokens"]
        say(f"{run['recipe']}: {run['prompt_tokens']} tokens of prompt, {generated} after it.")
        if run["events"]:
            show_table(events_table(run))
            explain(_LEGEND)
        else:
            say("Nothing was compressed: the text is shorter than the recipe's first event.")
        say(" ".join(_totals(run)) + "\n")


def _totals(run: dict[str, Any]) -> list[str]:
    mean, parts = run["mean"], []
    if "wipeout" in mean:
        parts.append(f"Means over the events: wipe-out {mean['wipeout']:.1%} (regions of {run['region']} tokens),")
        parts.append(f"IoU {mean['iou']:.3f}," if "iou" in mean else "no IoU (one event),")
        parts.append(f"middle {mean['middle']:.1%}.")
    if run["segments"] is not None:
        parts.append(f"Segments: {run['segments']['count']:.1f} of {run['segments']['length']:.1f} entries.")
    parts.append(f"Repeated 4-grams: {run['repetition']:.1%}.")
    speed = run["tokens_per_second"]
    parts.append("Followed, not generated." if speed is None else f"{speed:.1f} tokens/s.")
    return parts


def _shown(wanted: list[int] | None, compressed: list[int]) -> list[int]:
    """Return the layers that were asked for, or the first, one in the middle and the last."""
    if wanted is None:
        return sorted({compressed[0], compressed[len(compressed) // 2], compressed[-1]}) if compressed else []
    if missing := [layer for layer in wanted if layer not in compressed]:
        there = ", ".join(map(str, compressed))
        raise KeepsetError(f"--layers: layer {missing[0]} is not compressed; there are {there}.")
    return wanted
