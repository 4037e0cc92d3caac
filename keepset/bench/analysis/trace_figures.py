"""A trace in numbers."""

from __future__ import annotations

from itertools import pairwise
from typing import Any

import torch
from jaxtyping import Float
from torch import Tensor

from keepset.bench.analysis.bursts import gone, longest_run
from keepset.bench.analysis.middle import middle_retention
from keepset.bench.analysis.repetition import repetition_rate
from keepset.bench.analysis.stability import by_depth, retained_iou
from keepset.bench.analysis.trace import Moment, Trace
from keepset.bench.analysis.wipeout import REGION, wipeout_rate

Measures = dict[str, Float[Tensor, "events layers kv_heads"]]


def figures(trace: Trace, region: int = REGION) -> dict[str, Any]:
    """Figures for JSON: of every event, and their means over the events, by layer and by depth.

    An event's figures are means over layers and KV heads. IoU is that with the event before, so the first has none;
    along `events` it is IoU by the text's length.
    """
    snapshots = [moment.snapshot for moment in trace.moments]
    measures: Measures = {
        "wipeout": _stack([wipeout_rate(snapshot, region) for snapshot in snapshots]),
        "iou": _stack([retained_iou(earlier, later) for earlier, later in pairwise(snapshots)]),
        "middle": _stack([middle_retention(snapshot) for snapshot in snapshots]),
        "longest_gap": _stack([longest_run(gone(snapshot)).float() for snapshot in snapshots]),
    }
    rows = []
    for index, moment in enumerate(trace.moments):
        at = {name: index - (name == "iou") for name in measures}
        means = {name: float(values[at[name]].mean()) if at[name] >= 0 else None for name, values in measures.items()}
        rows.append({"length": moment.length, "entries": moment.entries, "kept": _kept(moment), **means})
    some = {name: values for name, values in measures.items() if len(values)}
    return {
        "recipe": trace.recipe,
        "prompt_tokens": trace.prompt,
        "tokens": len(trace.ids),
        "region": region,
        "repetition": repetition_rate(trace.ids[trace.prompt :]),
        "tokens_per_second": trace.tokens_per_second,
        "layers": list(snapshots[0].keep_set.layers) if snapshots else [],
        "kv_heads": snapshots[0].keep_set.counts.shape[2] if snapshots else 0,
        "events": rows,
        "mean": {name: float(values.mean()) for name, values in some.items()},
        "by_layer": {name: values.mean((0, 2)).tolist() for name, values in some.items()},
        "by_depth": {name: by_depth(values.mean(0)) for name, values in some.items()},
        "segments": _segments(trace),
    }


def _stack(parts: list[Tensor]) -> Tensor:
    """Of the trace's one request; `[0, 0, 0]` where there are none."""
    return torch.stack([part[:, 0] for part in parts]) if parts else torch.zeros(0, 0, 0)


def _kept(moment: Moment) -> int:
    return moment.snapshot.keep_set.entries


def _segments(trace: Trace) -> dict[str, float] | None:
    """Mean number and length of the segments (Table 14), over all events, layers and heads."""
    heads = [head for moment in trace.moments for told in moment.segments.values() for head in told]
    if not heads:
        return None
    count = sum(len(head.ends) for head in heads)
    return {"count": count / len(heads), "length": sum(len(head.mass) for head in heads) / count}
