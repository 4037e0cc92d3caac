"""`keepset trace`: one generation under a recipe, and what every compression of its cache kept."""

from __future__ import annotations

import json
from collections.abc import Sequence
from functools import partial
from pathlib import Path
from typing import TYPE_CHECKING, Annotated, Any

import typer

from keepset.errors import KeepsetError

if TYPE_CHECKING:
    from torch import Tensor

    from keepset.bench.analysis.trace import Trace, TraceEvent
    from keepset.cli.sampling import Sampling

RECIPE = "ams(tova, window=32, keep=256, every=128)"
REASON = "Please reason step by step, and put your final answer within \\boxed{}."


def trace(
    prompt: Annotated[str | None, typer.Argument(help="What to say to the model.")] = None,
    recipe: Annotated[str, typer.Option(help="What to keep, and after how many tokens again.")] = RECIPE,
    baseline: Annotated[str | None, typer.Option(help="A second recipe to compare with.")] = None,
    forced: Annotated[
        bool, typer.Option(help="Feed the baseline the first recipe's tokens instead of letting it write its own.")
    ] = False,
    text: Annotated[
        Path | None, typer.Option(help="A UTF-8 text file that goes before the prompt; alone it is written on.")
    ] = None,
    problem: Annotated[str | None, typer.Option(help="A problem to reason about step by step, as the prompt.")] = None,
    tokens: Annotated[int, typer.Option(help="Tokens to generate at most.")] = 512,
    temperature: Annotated[float, typer.Option(help="0 for greedy decoding.")] = 0.0,
    seed: Annotated[int, typer.Option(help="For sampling.")] = 0,
    region: Annotated[int, typer.Option(help="Tokens of a region, for the wipe-out rate.")] = 16,
    layers: Annotated[
        str | None, typer.Option(help="Layers on the page, separated by commas, or all; three of them if not given.")
    ] = None,
    model: Annotated[str | None, typer.Option(help="A folder or a hub name; a small embedded model if none.")] = None,
    as_json: Annotated[bool, typer.Option("--json", help="Print JSON instead of tables.")] = False,
    html: Annotated[Path | None, typer.Option(help="Write a page to look through the events.")] = None,
) -> None:
    """Generate under a recipe and tell what each compression kept: wiped-out regions, stability, the middle, gaps."""
    from keepset.cli.compare import check_writable
    from keepset.cli.console import check_said
    from keepset.cli.sampling import Sampling
    from keepset.recipe import Recipe
    from keepset.texts import read

    recipes = [Recipe.parse(each).require_budget() for each in (recipe, baseline) if each is not None]
    if prompt is not None and problem is not None:
        raise KeepsetError("A prompt and --problem are both given: leave one of them out.")
    if prompt is None and problem is None and text is None:
        raise KeepsetError("There is nothing to start from: give a prompt, --problem, or a file with --text.")
    if forced and baseline is None:
        raise KeepsetError("--forced says how the baseline is run: give one with --baseline.")
    for name, said in (("The prompt", prompt), ("--problem", problem)):
        if said is not None:
            check_said(name, said)
    sampling = Sampling(tokens, temperature, seed, option="--tokens")
    if region < 1:
        raise KeepsetError(f"--region {region} is not a number of tokens: use an integer from 1.")
    wanted = _layers(layers)
    before = "" if text is None else read(text)
    if html is not None:
        check_writable(html)
    asked = prompt if problem is None else f"{problem}\n{REASON}"
    _run(recipes, before, asked, sampling, wanted, region, model, forced=forced, as_json=as_json, html=html)


def _run(
    recipes: list[Any],
    before: str,
    asked: str | None,
    sampling: Sampling,
    wanted: list[int] | None,
    region: int,
    model: str | None,
    *,
    forced: bool,
    as_json: bool,
    html: Path | None,
) -> None:
    import torch

    from keepset.bench.analysis.trace import Tracer
    from keepset.bench.analysis.trace_figures import figures
    from keepset.cli.console import err, load, printable, progress
    from keepset.cli.sampling import check_fit
    from keepset.models import EMBEDDED

    loaded, tokenizer = load(model)
    ids = torch.tensor([_encoded(tokenizer, before, asked)])
    check_fit(loaded, ids.shape[1], sampling.tokens)
    tracers = [Tracer(loaded, recipe) for recipe in recipes]
    shown = _shown(wanted, tracers[0].layers)
    interrupted = False
    try:
        with progress() as bar:
            for number, tracer in enumerate(tracers):
                task = bar.add_task(str(recipes[number]), total=sampling.tokens)
                tracer.on_token = partial(bar.advance, task)
                torch.manual_seed(sampling.seed)
                if forced and number:
                    # The last token was never fed.
                    first = tracers[0].trace
                    tracer.follow(first.ids[:-1], first.prompt)
                else:
                    tracer.generate(ids, **sampling.options)
    except KeyboardInterrupt:
        interrupted = True
    traces = [tracer.trace for tracer in tracers if tracer.trace.events or not interrupted]
    if not traces:
        raise KeyboardInterrupt
    runs = [{**figures(each, region), "text": _text(tokenizer, each)} for each in traces]
    result = {"model": model or EMBEDDED, "forced": forced, "runs": runs}
    if as_json:
        print(json.dumps(result, indent=2))
    else:
        for run in runs:
            print_run(run)
    if html is not None:
        from keepset.bench.report.page import write

        write(html, _page(result, traces, tokenizer, shown))
        err.print(f"report: {printable(str(html))}", markup=False, highlight=False, soft_wrap=True)
    if interrupted:
        err.print(
            f"interrupted after {len(traces[-1].ids) - traces[-1].prompt} of {sampling.tokens} tokens", highlight=False
        )
        raise typer.Exit(130)


def _encoded(tokenizer: Any, before: str, asked: str | None) -> list[int]:
    """A user's message, or a bare text where nothing is asked."""
    from keepset.texts import chat_parts

    if asked is None:
        return tokenizer(before, verbose=False)["input_ids"]
    said = "".join(chat_parts(tokenizer, before, asked))
    return tokenizer(said, add_special_tokens=False, verbose=False)["input_ids"]


def print_run(run: dict[str, Any]) -> None:
    """One recipe's events as a table, and what they come to."""
    from rich.table import Table

    from keepset.cli.console import out, printable

    generated = run["tokens"] - run["prompt_tokens"]
    out.print(
        f"{printable(run['recipe'])}: {run['prompt_tokens']} tokens of prompt, {generated} after it.",
        markup=False,
        highlight=False,
    )
    table = Table(box=None, pad_edge=False, header_style="bold")
    for title in ("length", "kept per head", "of", "wipe-out", "IoU", "middle", "longest gap"):
        table.add_column(title, justify="right", no_wrap=True)
    heads = max(len(run["layers"]) * run["kv_heads"], 1)
    for event in run["events"]:
        table.add_row(
            str(event["length"]),
            f"{event['kept'] / heads:.1f}",
            f"{event['entries'] / heads:.1f}",
            f"{event['wipeout']:.1%}",
            "-" if event["iou"] is None else f"{event['iou']:.3f}",
            f"{event['middle']:.1%}",
            f"{event['longest_gap']:.1f}",
        )
    if run["events"]:
        out.print(table)
    else:
        out.print("Nothing was compressed: the text is shorter than the recipe's first event.", highlight=False)
    out.print(" ".join(_totals(run)) + "\n", markup=False, highlight=False)


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


def _layers(text: str | None) -> list[int] | None:
    """Layers as a user writes them; an empty list for all, None where nothing is said."""
    if text is None or text.strip() == "all":
        return None if text is None else []
    parts = [part.strip() for part in text.split(",")]
    if not all(part.isascii() and part.isdigit() and len(part) < 10 for part in parts):
        raise KeepsetError(f"--layers {text!r} is no list of layers: write numbers such as 0,14,29, or all.")
    return sorted({int(part) for part in parts})


def _shown(wanted: list[int] | None, layers: Sequence[int]) -> list[int]:
    if wanted is None:
        return sorted({layers[0], layers[len(layers) // 2], layers[-1]}) if layers else []
    if missing := [layer for layer in wanted if layer not in layers]:
        raise KeepsetError(f"--layers: layer {missing[0]} is not compressed; there are {', '.join(map(str, layers))}.")
    return wanted or list(layers)


def _text(tokenizer: Any, trace: Trace) -> str:
    return str(tokenizer.decode(trace.ids[trace.prompt :], skip_special_tokens=True))


def _page(result: dict[str, Any], traces: Sequence[Trace], tokenizer: Any, layers: Sequence[int]) -> str:
    from keepset.bench.report.trace import Drawn, render

    drawn = [
        Drawn(
            tokens=[str(tokenizer.decode([token])) for token in trace.ids.tolist()],
            kept=[_kept(event, layers) for event in trace.events],
            segments=[[event.segments.get(layer, []) for layer in layers] for event in trace.events],
        )
        for trace in traces
    ]
    return render(result, drawn, layers)


def _kept(event: TraceEvent, layers: Sequence[int]) -> Tensor:
    return event.kept()[[event.keep_set.layers.index(layer) for layer in layers], 0]
