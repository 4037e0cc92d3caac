"""Figures of a trace."""

from itertools import pairwise
from typing import Any

import torch
from jaxtyping import Float
from torch import Tensor

from keepset.bench.analysis import diagnostics
from keepset.bench.analysis.trace import Trace

Measures = dict[str, Float[Tensor, "events layers kv_heads"]]


def figures(trace: Trace, region: int = diagnostics.REGION) -> dict[str, Any]:
    """Return the figures of every event, and their means over the events by layer and by depth, for JSON.

    An event's figures are means over layers and KV heads. IoU is with the event before, so the first event has none.

    Args:
        trace: the trace.
        region: tokens of a region.
    """
    measures: Measures = {
        "wipeout": _stack([diagnostics.wipeout_rate(event, region) for event in trace.events]),
        "iou": _stack([diagnostics.retained_iou(earlier, later) for earlier, later in pairwise(trace.events)]),
        "middle": _stack([diagnostics.middle_retention(event) for event in trace.events]),
        "longest_gap": _stack([diagnostics.longest_run(diagnostics.gone(event)).float() for event in trace.events]),
    }
    rows = []
    for index, event in enumerate(trace.events):
        at = {name: index - (name == "iou") for name in measures}
        means = {name: float(values[at[name]].mean()) if at[name] >= 0 else None for name, values in measures.items()}
        rows.append({"length": event.length, "entries": event.entries, "kept": event.keep_set.entries, **means})
    some = {name: values for name, values in measures.items() if len(values)}
    return {
        "recipe": trace.recipe,
        "prompt_tokens": trace.prompt,
        "tokens": len(trace.ids),
        "region": region,
        "repetition": diagnostics.repetition_rate(trace.ids[trace.prompt :]),
        "tokens_per_second": trace.tokens_per_second,
        "layers": list(trace.events[0].keep_set.layers) if trace.events else [],
        "kv_heads": trace.events[0].keep_set.counts.shape[2] if trace.events else 0,
        "events": rows,
        "mean": {name: float(values.mean()) for name, values in some.items()},
        "by_layer": {name: values.mean((0, 2)).tolist() for name, values in some.items()},
        "by_depth": {name: diagnostics.by_depth(values.mean(0)) for name, values in some.items()},
        "segments": _segments(trace),
    }


def _stack(parts: list[Tensor]) -> Tensor:
    """Return the figures of the trace's one request, `[events, layers, kv_heads]`; `[0, 0, 0]` without events."""
    return torch.stack([part[:, 0] for part in parts]) if parts else torch.zeros(0, 0, 0)


def _segments(trace: Trace) -> dict[str, float] | None:
    """Return the mean number and length of the segments (Table 14) over all events, layers and heads."""
    heads = [head for event in trace.events for layer in event.segments.values() for head in layer]
    if not heads:
        return None
    count = sum(len(head.ends) for head in heads)
    return {"count": count / len(heads), "length": sum(len(head.mass) for head in heads) / count}
