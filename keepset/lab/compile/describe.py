"""A description of tables in words."""

import torch

from keepset.core.budget import runs
from keepset.core.tables import Tables
from keepset.recipe import shown

ENOUGH = 2
"""The contexts that a bin needs; one with fewer is called thin."""
_SHOWN = 5
_FACTS = ("recipe", "contexts", "tokens", "continuation", "reward", "seed", "corpus", "keepset")


def describe_tables(tables: Tables) -> list[str]:
    """Return lines that describe tables: their model, how they were made, and their values."""
    provenance, budgets = tables.provenance, tables.budgets.tolist()
    layers, heads = tables.weights.shape[1:]
    model = provenance.get("model")
    name = model.get("name") if isinstance(model, dict) else model
    lines = [
        f"tables of {name or 'a model'}: {layers} layers of {heads} query heads, budgets {', '.join(map(str, budgets))}"
    ]
    facts = {
        **provenance,
        "recipe": shown(provenance.get("method", "")) or None,
        "corpus": str(provenance.get("corpus", ""))[:12] or None,
    }
    lines.append(", ".join(f"{fact} {facts[fact]}" for fact in _FACTS if facts.get(fact) is not None))
    lines += coverage(tables)
    for row, budget in enumerate(budgets):
        weights = tables.weights[row].flatten()
        order = weights.argsort(descending=True, stable=True)[:_SHOWN].tolist()
        top = ", ".join(f"{i // heads}.{i % heads} ({weights[i]:g})" for i in order)
        lines += ["", f"keep={budget}", f"  head weights: {_spread(weights)}"]
        lines += [f"  first of the most trusted, layer.head: {top}", f"  thresholds: {_spread(tables.gate[row])}"]
    return lines


def coverage(tables: Tables) -> list[str]:
    """Return lines with the number of contexts in each bin of risk, and the bins that have too few."""
    counts = tables.counts
    lines = ["contexts in the bins of risk, a row for each bin of perplexity, from low to high entropy:"]
    lines += [f"  {p}: " + " ".join(f"{int(count):2d}" for count in counts[:, p]) for p in range(counts.shape[1])]
    thin = (counts < ENOUGH).T
    if thin.any():
        named = "; ".join(f"{p}: {_ranges(row)}" for p, row in enumerate(thin.tolist()) if any(row))
        lines.append(
            f"{int(thin.sum())} of {counts.numel()} bins have fewer than {ENOUGH} contexts and rely on other bins of "
            f"their layer (perplexity: entropy): {named}"
        )
    return lines


def _ranges(flags: list[bool]) -> str:
    """Return the indices of true flags as text, such as `0-3, 7`."""
    ranges = runs([index for index, flag in enumerate(flags) if flag])
    return ", ".join(f"{first}-{end - 1}" if end - first > 1 else str(first) for first, end in ranges)


def _spread(values: torch.Tensor) -> str:
    distinct, counts = values.unique(return_counts=True)
    if len(distinct) > 12:
        return f"{values.min():.3g} to {values.max():.3g}, mean {values.mean():.3g}"
    pairs = zip(distinct.tolist(), counts.tolist(), strict=True)
    return ", ".join(f"{value:g} in {count}" for value, count in pairs)
