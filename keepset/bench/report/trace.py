"""The tables and the page of `keepset trace`."""

from collections.abc import Callable, Sequence
from typing import Any

from keepset.bench.analysis.trace import HeadSegments, Trace, TraceEvent
from keepset.bench.report import plot
from keepset.bench.report.page import Section, pack, page
from keepset.bench.report.table import Column, Line, Show, Table, decimals, integer, percent

Run = dict[str, Any]
"""One run's figures, as `keepset trace --json` writes them."""
_THREE, _ONE = decimals(3), decimals(1)
_MEANS: tuple[tuple[str, Callable[[Run], float | None], Show], ...] = (
    ("regions wiped out", lambda run: run["mean"].get("wipeout"), percent),
    ("IoU with the event before", lambda run: run["mean"].get("iou"), _THREE),
    ("IoU, early layers", lambda run: run["by_depth"].get("iou", {}).get("early"), _THREE),
    ("IoU, middle layers", lambda run: run["by_depth"].get("iou", {}).get("middle"), _THREE),
    ("IoU, late layers", lambda run: run["by_depth"].get("iou", {}).get("late"), _THREE),
    ("kept again at the next event", lambda run: run["mean"].get("survived"), percent),
    ("kept of the middle third", lambda run: run["mean"].get("middle"), percent),
    ("longest gap, tokens", lambda run: run["mean"].get("longest_gap"), _ONE),
    # A text that was only followed is not the recipe's own.
    ("repeated 4-grams", lambda run: None if run["tokens_per_second"] is None else run["repetition"], percent),
    ("segments per head", lambda run: (run["segments"] or {}).get("count"), _ONE),
    ("entries per segment", lambda run: (run["segments"] or {}).get("length"), _ONE),
    ("tokens after the prompt", lambda run: run["tokens"] - run["prompt_tokens"], integer),
    ("tokens per second", lambda run: run["tokens_per_second"], _ONE),
)
"""Names of figures over all events, what they are of a run, and their formats."""
_CURVES = (
    ("wipeout", "Regions wiped out", "share of regions", {"tickformat": ".0%", "rangemode": "tozero"}),
    ("iou", "IoU with the event before", "IoU", {"range": [0, 1.05]}),
    ("middle", "Kept of the middle third", "share of the third", {"tickformat": ".0%", "rangemode": "tozero"}),
    ("longest_gap", "Longest gap in a head's text", "tokens", {"rangemode": "tozero"}),
)


def events_table(run: Run) -> Table:
    """Return one run's events, a line per event."""
    heads = max(len(run["layers"]) * run["kv_heads"], 1)
    columns = [
        Column("kept per head", lambda event: event["kept"] / heads, _ONE),
        Column("of", lambda event: event["entries"] / heads, _ONE),
        Column("wipe-out", lambda event: event["wipeout"], percent),
        Column("IoU", lambda event: event["iou"], _THREE),
        Column("middle", lambda event: event["middle"], percent, rank=1),
        Column("longest gap", lambda event: event["longest_gap"], _ONE, rank=2),
    ]
    made = Table("length", columns)
    for event in run["events"]:
        made.add(str(event["length"]), event)
    return made


def means_table(runs: Sequence[Run]) -> Table:
    """Return means over all events, a column per run; figures that no run has are left out."""
    made = Table("", [Column(run["recipe"], lambda _: None) for run in runs])
    for name, value_of, show in _MEANS:
        values = [value_of(run) for run in runs]
        if any(value is not None for value in values):
            made.lines.append(Line(name, [("" if value is None else show(value), value) for value in values]))
    return made


def render(
    result: dict[str, Any], traces: Sequence[Trace], tokens: Sequence[Sequence[str | None]], layers: list[int]
) -> str:
    """Return the page of a generation's events.

    Args:
        result: what `keepset trace --json` prints.
        traces: the trace of each of its runs.
        tokens: `token_texts` of each of its runs, the prompt's first.
        layers: indices of the layers to show.
    """
    runs = result["runs"]
    legend = [plot.entry(run["recipe"], at) for at, run in enumerate(runs)] if len(runs) > 1 else []
    compressed = any(run["events"] for run in runs) and layers
    region = integer(runs[0]["region"])
    return page(
        "keepset trace",
        result["model"],
        [
            means_table(runs).section(
                "Figures",
                note=f"Means over events, layers and KV heads. A region is {region} tokens; it is wiped out if a head "
                "keeps none of them. IoU is over the positions that existed at the event before.",
            ),
            *([plot.plots("Along the text", _curves(runs), legend)] if compressed else []),
            _events(result, traces, tokens, layers),
        ],
        result,
        conclusion=_conclusion(runs),
        lead=_lead(result),
    )


def _lead(result: dict[str, Any]) -> str:
    first, *others = result["runs"]
    after = integer(first["tokens"] - first["prompt_tokens"])
    lead = f"{integer(first['prompt_tokens'])} tokens of prompt, {after} after it, under {first['recipe']}"
    if not others:
        return f"{lead}."
    again = "; then the same tokens under " if result["forced"] else "; and the same prompt under "
    return f"{lead}{again}{others[0]['recipe']}."


def _conclusion(runs: Sequence[Run]) -> str:
    known = [(run["recipe"], run["mean"]["wipeout"], run["region"]) for run in runs if "wipeout" in run["mean"]]
    if not known:
        return "Nothing was compressed: the text is shorter than the first event."
    shares = " and ".join(f"{share:.1%} under {recipe}" for recipe, share, _ in known)
    return f"Of the text's regions of {known[0][2]} tokens a head loses {shares}, a mean over events (less is better)."


def _curves(runs: Sequence[Run]) -> list[dict[str, Any]]:
    charts = []
    for name, title, unit, options in _CURVES:
        lines = []
        for at, run in enumerate(runs):
            points = [plot.Point(each["length"], each[name]) for each in run["events"] if each[name] is not None]
            template = "at %{x} tokens: %{y:.3~f}"
            lines.append(plot.line(run["recipe"], points, at, dash=plot.DASHES[at], size=6, template=template))
        charts.append(plot.plot(name, lines, plot.axis("tokens of text"), plot.axis(unit, **options), title=title))
    return [chart for chart in charts if any(line["x"] for line in chart["traces"])]


def _events(
    result: dict[str, Any], traces: Sequence[Trace], tokens: Sequence[Sequence[str | None]], layers: list[int]
) -> Section:
    runs = [
        {
            "name": run["recipe"],
            "prompt": run["prompt_tokens"],
            "tokens": list(texts),
            "events": [_event(event, layers) for event in trace.events],
        }
        for run, trace, texts in zip(result["runs"], traces, tokens, strict=True)
    ]
    return {
        "kind": "events",
        "title": "Event by event",
        "runs": runs,
        "layers": layers,
        "heads": max(run["kv_heads"] for run in result["runs"]),
        "note": "One head's cache is drawn before the event: ticks are the entries that stay. With segments, "
        "bands are the segments, the curve is the mass of every entry, and numbers are the segments' quotas. In the "
        "map a row is an event and a column a token of the text; the outlined row is the chosen event. In the text, "
        "struck out is what this event drops, pale what was dropped before, faint what is not there yet; a bar stands "
        "where the prompt ends.",
    }


def _event(event: TraceEvent, layers: list[int]) -> dict[str, Any]:
    """Return which tokens of the text so far each layer and KV head kept, and the segments of methods that have any."""
    kept = event.kept()[[event.keep_set.layers.index(layer) for layer in layers], 0]
    segments = [list(map(_head, event.segments.get(layer, []))) for layer in layers]
    return {"length": event.length, "kept": pack(kept), "segments": segments}


def _head(head: HeadSegments) -> dict[str, Any]:
    # Four digits are more than a curve shows.
    mass = [float(f"{value:.3e}") for value in head.mass.tolist()]
    return {"mass": mass, "ends": head.ends.tolist(), "quotas": head.quotas.tolist()}
