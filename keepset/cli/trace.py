"""`keepset trace`: one generation under a recipe, and what every compression of its cache kept."""

from __future__ import annotations

from pathlib import Path
from typing import Annotated, Any

from typer import Argument, Option

from keepset.bench.report.table import Column, Table, decimals, percent
from keepset.cli.checks import check_fits_context, check_text, check_writable, note_short
from keepset.cli.console import counted, explain, interruptible, load, output, progress, say, show_table
from keepset.cli.options import Json, OutputTokens, SamplingSeed, Temperature, takes_model
from keepset.cli.recipe_notes import say_always
from keepset.cli.streaming import Sampling
from keepset.embedded import Source
from keepset.errors import KeepsetError
from keepset.texts import chat_parts, read

RECIPE = "ams(tova, window=32, keep=256, every=128)"
_LEGEND = (
    "length: tokens so far; kept per head, of: entries that stayed, and entries before; wipe-out: share of regions of "
    "which nothing stayed; IoU: overlap with what the event before kept (intersection over union); middle: share of "
    "the text's middle third that stayed; longest gap: most tokens in a row of which nothing stayed."
)


@takes_model
def trace(
    model: Source,
    prompt: Annotated[str | None, Argument(metavar="[PROMPT]", help="What to say to the model.")] = None,
    recipe: Annotated[str, Option(help="What to keep, and how often to compress.")] = RECIPE,
    text: Annotated[
        Path | None, Option(help="A UTF-8 text file that goes before the prompt; without one it is continued.")
    ] = None,
    output_tokens: OutputTokens = 512,
    temperature: Temperature = 0.0,
    seed: SamplingSeed = 0,
    json_file: Json = None,
) -> None:
    """Generate a long answer, and tell what each compression kept.

    The table has a line for each compression, with means over layers and heads: length is the tokens so far; kept per
    head and of are the entries after and before it; wipe-out is the share of regions of which nothing stayed; IoU is
    the overlap with what the event before kept; middle is the share of the text's middle third that stayed; longest gap
    is the most tokens in a row of which nothing stayed.
    """
    from keepset.recipe import Recipe

    parsed = Recipe.parse(recipe).require_budget()
    if prompt is None and text is None:
        raise KeepsetError("There is nothing to start from: give a prompt, or a file with --text.")
    check_text("The prompt", prompt)
    sampling = Sampling(output_tokens, temperature, seed)
    before = "" if text is None else read(text)
    check_writable(json_file)

    import torch

    from keepset.bench.analysis.trace import Tracer

    loaded, tokenizer = load(model)
    ids = _encoded(tokenizer, before, prompt).to(loaded.device)
    length = ids.shape[1]
    check_fits_context(loaded, length, sampling.tokens)
    tracer = Tracer(loaded, parsed)
    torch.manual_seed(sampling.seed)
    with interruptible() as ending, progress() as bar:
        tracer.generate(ids, counted(bar, "tokens", sampling.tokens), **sampling.options)
    events = tracer.events.events
    if not events and not ending.finished:
        raise KeyboardInterrupt
    answer = str(tokenizer.decode(tracer.ids[length:], skip_special_tokens=True))
    result = {"model": model.called, **tracer.to_json(), "text": answer}
    output(result, json_file, lambda: _print(result))
    note_short(length, min((event.kept / event.entries for event in events if event.length == length), default=1.0))
    say_always(parsed, loaded, length)
    ending.say(f"after {len(tracer.ids) - length} of {sampling.tokens} tokens")


def _encoded(tokenizer: Any, before: str, question: str | None) -> Any:
    """Return the tokens of a user's message, or of a bare text if nothing is asked, `[1, tokens]`."""
    if question is None:
        return tokenizer(before, return_tensors="pt", verbose=False)["input_ids"]
    message = "".join(chat_parts(tokenizer, before, question))
    return tokenizer(message, add_special_tokens=False, return_tensors="pt", verbose=False)["input_ids"]


def _print(result: dict[str, Any]) -> None:
    """Print the events as a table, and their means."""
    generated = result["tokens"] - result["prompt_tokens"]
    say(f"{result['recipe']}: {result['prompt_tokens']} tokens of prompt, {generated} after it.")
    if result["events"]:
        show_table(events_table(result))
        explain(_LEGEND)
    else:
        say("Nothing was compressed: the text is shorter than the recipe's first event.")
    say(" ".join(_totals(result)))


def events_table(result: dict[str, Any]) -> Table:
    """Return a table with a line per event."""
    heads = max(result["heads"], 1)
    columns = [
        Column("kept per head", lambda event: event["kept"] / heads, decimals(1)),
        Column("of", lambda event: event["entries"] / heads, decimals(1)),
        Column("wipe-out", lambda event: event["wipeout"], percent),
        Column("IoU", lambda event: event.get("iou"), decimals(3)),
        Column("middle", lambda event: event["middle"], percent, rank=1),
        Column("longest gap", lambda event: event["longest_gap"], decimals(1), rank=2),
    ]
    made = Table("length", columns)
    for event in result["events"]:
        made.add(str(event["length"]), event)
    return made


def _totals(result: dict[str, Any]) -> list[str]:
    mean, parts = result["mean"], []
    if mean:
        parts.append(f"Means over the events: wipe-out {mean['wipeout']:.1%} (regions of {result['region']} tokens),")
        parts.append(f"IoU {mean['iou']:.3f}," if "iou" in mean else "no IoU (one event),")
        parts.append(f"middle {mean['middle']:.1%}.")
        parts.append(f"Segments: {mean['segments']:.1f} of {mean['segment_length']:.1f} entries.")
    parts.append(f"Repeated 4-grams: {result['repetition']:.1%}.")
    if (speed := result["tokens_per_second"]) is not None:
        parts.append(f"{speed:.1f} tokens/s.")
    return parts
