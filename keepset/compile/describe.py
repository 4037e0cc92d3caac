"""Tables in words."""

from __future__ import annotations

import torch

from keepset.tables import Tables

ENOUGH = 2
"""Contexts of a bin from which on it is not called thin."""
_SHOWN = 5


def describe(tables: Tables) -> list[str]:
    """What a person wants to know of them, line by line."""
    known, budgets = tables.provenance, tables.budgets.tolist()
    layers, heads = tables.weights.shape[1:]
    model = known.get("model")
    name = model.get("name") if isinstance(model, dict) else model
    lines = [f"tables of {name or 'a model'}: {layers} layers of {heads} query heads, budgets {_list(budgets)}"]
    told = {
        "recipe": known.get("method"),
        "contexts": known.get("contexts"),
        "tokens": known.get("tokens"),
        "continuation": known.get("continuation"),
        "reward": known.get("reward"),
        "seed": known.get("seed"),
        "corpus": str(known.get("corpus", ""))[:12] or None,
        "keepset": known.get("keepset"),
    }
    lines.append(", ".join(f"{what} {value}" for what, value in told.items() if value is not None))
    lines += coverage(tables)
    for row, budget in enumerate(budgets):
        lines += ["", f"keep={budget}"]
        lines.append("  head weights: " + _spread(tables.weights[row]))
        order = tables.weights[row].flatten().argsort(descending=True, stable=True)[:_SHOWN].tolist()
        top = ", ".join(f"{i // heads}.{i % heads} ({tables.weights[row].flatten()[i]:g})" for i in order)
        lines.append(f"  first of the most trusted, layer.head: {top}")
        lines.append("  thresholds: " + _spread(tables.gate[row]))
    return lines


def coverage(tables: Tables) -> list[str]:
    """How many contexts each bin of risk has, and which have too few."""
    counts = tables.counts
    thin = [f"{e}.{p}" for e, p in (counts < ENOUGH).nonzero().tolist()]
    lines = ["contexts in the bins of risk, a row for each bin of perplexity, from low to high entropy:"]
    lines += [f"  {p}: " + " ".join(f"{int(count):2d}" for count in counts[:, p]) for p in range(counts.shape[1])]
    if thin:
        lines.append(
            f"{len(thin)} of {counts.numel()} bins have fewer than {ENOUGH} contexts and go by their layer and "
            f"neighbours (entropy.perplexity): {' '.join(thin)}"
        )
    return lines


def _spread(values: torch.Tensor) -> str:
    found, counts = values.unique(return_counts=True)
    if len(found) > 12:
        return f"{values.min():.3g} to {values.max():.3g}, mean {values.mean():.3g}"
    return ", ".join(f"{value:g} in {int(count)}" for value, count in zip(found.tolist(), counts.tolist(), strict=True))


def _list(values: list[int]) -> str:
    return ", ".join(map(str, values))
