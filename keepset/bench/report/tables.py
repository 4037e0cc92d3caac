"""The HTML page of CompilerKV's tables."""

from keepset.bench.report.page import assemble
from keepset.core.tables import Tables
from keepset.recipe import shown

_CURVES = ("head", "gate")
_FIGURES = ("step", "bellman", "conservative")


def render(tables: Tables) -> str:
    """The page as one self-contained HTML text."""
    known = {**tables.provenance}
    if "method" in known:
        known["method"] = shown(str(known["method"]))
    model = known.get("model")
    name = model.get("name") if isinstance(model, dict) else model
    curves = known.get("curves")
    data = {
        "model": str(name or "a model"),
        "facts": [[what.capitalize(), str(known[what])] for what in _FACTS if known.get(what) is not None],
        "budgets": tables.budgets.tolist(),
        # What is a float32 is not written with the digits of a float64.
        "weights": [[[round(x, 4) for x in row] for row in layers] for layers in tables.weights.tolist()],
        "gate": [[[[round(x, 4) for x in row] for row in bins] for bins in layers] for layers in tables.gate.tolist()],
        "entropy_edges": [round(x, 3) for x in tables.entropy_edges.tolist()],
        "perplexity_edges": [round(x, 3) for x in tables.perplexity_edges.tolist()],
        "counts": tables.counts.tolist(),
        "curves": {each: _curve(curves, each) for each in _CURVES},
    }
    means = zip(tables.gate.mean((1, 2, 3)).tolist(), tables.budgets.tolist(), strict=True)
    thresholds = ", ".join(f"{mean:.3f} at a budget of {budget}" for mean, budget in means)
    low, high = float(tables.weights.min()), float(tables.weights.max())
    weigh = f"from {low:.2f} to {high:.2f}".replace("-", "\N{MINUS SIGN}")
    conclusion = f"Heads weigh {weigh}; the mean threshold is {thresholds}."
    return assemble("tables", "keepset compile", data, conclusion)


_FACTS = ("method", "contexts", "tokens", "continuation", "reward", "seed", "alpha", "beta", "keepset")


def _curve(curves: object, name: str) -> list[dict[str, float]]:
    """The learning curve of that table; none where the file, which may be anybody's, tells none."""
    points = curves.get(name) if isinstance(curves, dict) else None
    if not isinstance(points, list):
        return []
    return [
        {figure: float(point[figure]) for figure in _FIGURES}
        for point in points
        if isinstance(point, dict) and all(isinstance(point.get(figure), int | float) for figure in _FIGURES)
    ]
