"""The page of CompilerKV's tables."""

from itertools import pairwise
from typing import Any

from keepset.bench.report import plot
from keepset.bench.report.page import Section, choice, page
from keepset.bench.report.table import integer
from keepset.core.tables import Tables
from keepset.recipe import shown

_FACTS = ("method", "contexts", "tokens", "continuation", "reward", "seed", "alpha", "beta", "keepset")
_FIGURES = ("step", "bellman", "conservative")


def render(tables: Tables) -> str:
    """Return the page of a model's tables."""
    known = {**tables.provenance}
    if "method" in known:
        known["method"] = shown(str(known["method"]))
    model = known.get("model")
    name = str((model.get("name") if isinstance(model, dict) else model) or "a model")
    _, layers, heads = tables.weights.shape
    budgets = list(map(integer, tables.budgets.tolist()))
    curves = known.get("curves")
    learning = {each: _curve(curves, each) for each in ("head", "gate")}
    means = zip(tables.gate.mean((1, 2, 3)).tolist(), tables.budgets.tolist(), strict=True)
    thresholds = ", ".join(f"{mean:.3f} at a budget of {budget}" for mean, budget in means)
    low, high = float(tables.weights.min()), float(tables.weights.max())
    return page(
        "keepset compile",
        name,
        [
            choice("budget", "Budget", [(budget, _budget(tables, at)) for at, budget in enumerate(budgets)]),
            *([_learning(learning)] if any(learning.values()) else []),
        ],
        conclusion=f"Heads weigh from {low:.2f} to {high:.2f}; the mean threshold is {thresholds}.",
        lead=f"The decision tables of {layers} layers of {heads} query heads, compiled for budgets of "
        f"{', '.join(budgets)} entries per KV head.",
        facts=[(each.capitalize(), str(known[each])) for each in _FACTS if known.get(each) is not None],
    )


def _budget(tables: Tables, at: int) -> list[Section]:
    """Return the head weights and the thresholds of one budget."""
    layers = tables.weights.shape[1]
    height = f"{max(180, min(640, 60 + 14 * layers))}px"
    # Cold below 1, warm above it; the scale is symmetric, up to the farther of the two ends.
    far = max(1e-3, float((tables.weights - 1).abs().max()))
    weights = plot.heatmap(
        _rounded(tables.weights[at].tolist()), "difference", "layer %{y}, head %{x}: %{z}", zmin=1 - far, zmax=1 + far
    )
    entropy, perplexity = _bins(tables.entropy_edges.tolist()), _bins(tables.perplexity_edges.tolist())
    lowest = min(0.8, float(tables.gate.min()))
    gates = [
        plot.plot(
            f"gate-{number}",
            [
                plot.heatmap(
                    _rounded(tables.gate[at, :, :, number].tolist()),
                    "share",
                    "layer %{y}, entropy %{text}: %{z}",
                    zmin=lowest,
                    zmax=1,
                    text=[entropy] * layers,
                )
            ],
            _bare("bin of entropy"),
            _bare("layer", autorange="reversed"),
            title=f"Perplexity {name}",
            height=height,
        )
        for number, name in enumerate(perplexity)
    ]
    heads = plot.plot(
        "heads",
        [weights],
        _bare("query head", dtick=1 + tables.weights.shape[2] // 16),
        _bare("layer", autorange="reversed"),
        height=height,
    )
    return [
        plot.plots(
            "Head weights",
            [heads],
            note="A head's utility is multiplied by its weight. Only ratios within a layer matter.",
        ),
        plot.plots(
            "Thresholds",
            gates,
            note="The share of a layer's entries that rank too low to stay: a higher threshold keeps fewer. Thresholds "
            "have an effect only with elastic=True.",
        ),
    ]


def _learning(curves: dict[str, list[dict[str, float]]]) -> Section:
    charts = [
        plot.plot(
            figure,
            [
                plot.line(
                    name,
                    [plot.Point(point["step"], point[figure]) for point in points],
                    at,
                    mode="lines",
                    dash=plot.DASHES[at],
                    template="step %{x}: %{y:.4f}",
                )
                for at, (name, points) in enumerate(curves.items())
            ],
            plot.axis("step"),
            plot.axis(unit),
            title=title,
        )
        for figure, unit, title in (
            ("bellman", "squared error", "Bellman error, of a variance of 1"),
            ("conservative", "nats", "Conservative term"),
        )
    ]
    return plot.plots("How they were learned", charts, [plot.entry(name, at) for at, name in enumerate(curves)])


def _bare(title: str, **options: Any) -> dict[str, Any]:
    return plot.axis(title, showgrid=False, zeroline=False, tickformat="d", **options)


def _bins(edges: list[float]) -> list[str]:
    """Return the names of bins: below the first edge, between two, from the last on."""
    named = [f"{round(edge, 3):g}" for edge in edges]
    between = [f"{low} to {high}" for low, high in pairwise(named)]
    return [f"below {named[0]}", *between, f"from {named[-1]}"]


def _rounded(rows: list[list[float]]) -> list[list[float]]:
    # A float32 has no more digits to show.
    return [[round(value, 4) for value in row] for row in rows]


def _curve(curves: object, name: str) -> list[dict[str, float]]:
    """Return the learning curve of a table; empty if the file, which may come from others, has none."""
    points = curves.get(name) if isinstance(curves, dict) else None
    if not isinstance(points, list):
        return []
    return [
        {figure: float(point[figure]) for figure in _FIGURES}
        for point in points
        if isinstance(point, dict) and all(isinstance(point.get(figure), int | float) for figure in _FIGURES)
    ]
