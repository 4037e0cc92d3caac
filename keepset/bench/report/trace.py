"""The HTML page of `keepset trace`: a generation's events to look through."""

from collections.abc import Sequence
from typing import Any

from keepset.bench.analysis.trace import HeadSegments, Trace, TraceEvent
from keepset.bench.report.compare import pack
from keepset.bench.report.page import assemble


def render(
    result: dict[str, Any], traces: Sequence[Trace], tokens: Sequence[Sequence[str | None]], layers: list[int]
) -> str:
    """The page as one self-contained HTML text of what `keepset trace --json` prints, and of these layers of its runs.

    For each of the runs, in the same order, there are the trace and `token_texts`, the prompt's first.
    """
    drawn = [
        {"tokens": list(texts), "events": [_event(event, layers) for event in trace.events]}
        for trace, texts in zip(traces, tokens, strict=True)
    ]
    return assemble(
        "trace", "keepset trace", {"trace": result, "drawn": drawn, "layers": layers}, _conclusion(result["runs"])
    )


def _conclusion(runs: Sequence[dict[str, Any]]) -> str:
    known = [(run["recipe"], run["mean"]["wipeout"], run["region"]) for run in runs if "wipeout" in run["mean"]]
    if not known:
        return "Nothing was compressed: the text is shorter than the first event."
    shares = " and ".join(f"{share:.1%} under {recipe}" for recipe, share, _ in known)
    return f"Of the text's regions of {known[0][2]} tokens a head loses {shares}, a mean over events (less is better)."


def _event(event: TraceEvent, layers: list[int]) -> dict[str, Any]:
    """Which tokens of the text so far each layer and KV head kept, and their segments; none where a method has none."""
    kept = event.kept()[[event.keep_set.layers.index(layer) for layer in layers], 0]
    return {"kept": pack(kept), "segments": [list(map(_head, event.segments.get(layer, []))) for layer in layers]}


def _head(head: HeadSegments) -> dict[str, Any]:
    # Four digits are more than a curve shows.
    mass = [float(f"{x:.3e}") for x in head.mass.tolist()]
    return {"mass": mass, "ends": head.ends.tolist(), "quotas": head.quotas.tolist()}
