"""The table and the page of `keepset compare`."""

from collections.abc import Callable, Iterable, Sequence
from typing import Any, NamedTuple

from keepset.lab.compare.comparison import Comparison, by_budget
from keepset.lab.record import FULL, Record
from keepset.lab.report import plot
from keepset.lab.report.page import Section, choice, kept_text, page
from keepset.lab.report.table import (
    Column,
    Line,
    Show,
    Table,
    decimals,
    filled,
    integer,
    megabytes,
    percent,
    seconds,
    times,
    whole_percent,
    yes,
)

_HOLLOW = "Hollow markers: no measurable divergence, drawn at the axis's lower end."


class Metric(NamedTuple):
    """A measure of fidelity: its name, the figure, the axis, the format and what it means."""

    name: str
    figure: str
    axis: dict[str, Any]
    show: Show
    note: str


_LOG = plot.axis("KL divergence, nats (log scale)", type="log", zeroline=False, tickformat="~g")
_METRICS = (
    Metric("KL", "kl", _LOG, "{:.3g} nats".format, "Mean KL(full ‖ compressed) per token. Lower is better."),
    Metric(
        *("Top-1", "top1", plot.axis("Top-1 agreement", tickformat=".0%"), percent),
        "Share of tokens at which both predict the same next token. Higher is better.",
    ),
    Metric(
        *("NLL delta", "nll_delta", plot.axis("NLL delta, nats per token"), "{:+.4f} nats".format),
        "Negative log-likelihood of the text, minus the full cache's. Closer to zero is better.",
    ),
)


def table(comparison: Comparison) -> Table:
    """Return the full cache and all recipes, best first under each budget, then those that failed."""
    full = full_record(comparison)
    ran = [record for group in by_budget(comparison) for record in group]
    recipe_table = Table("recipe", filled(_COLUMNS, [full, *ran]))
    recipe_table.add(FULL, full, is_reference=True)
    methods = _methods(comparison)
    rows = {id(record): at for at, record in enumerate(comparison.rows)}
    for record in ran:
        budget = record.requested or "chosen by the method"
        at = methods.index(record.method)
        mark = (plot.entry("", at)[2], at)
        recipe_table.add(record.recipe, record, heading=budget, short=record.method, mark=mark, choice=rows[id(record)])
    recipe_table.lines += [Line(row.recipe, error=row.error) for row in comparison.rows if row.error is not None]
    return recipe_table


def full_record(comparison: Comparison) -> Record:
    """Return the full cache as one more record."""
    full = comparison.full
    nbytes, prefill = full["kv_bytes"], full["prefill_seconds"]
    figures = {
        "keep": 1.0,
        "share": 1.0,
        "counted_bytes": full["counted_bytes"],
        "kv_bytes": nbytes,
        "kv_bytes_full": nbytes,
        "kl": 0.0,
        "nll_delta": 0.0,
        "top1": 1.0,
        "prefill_seconds": prefill,
        "prefill_seconds_full": prefill,
        **{name: full[name] for name in ("kv_bytes_peak", "needle_found") if name in full},
    }
    return Record(FULL, FULL, figures=figures, replies=[full["answer"]] if "answer" in full else [])


def allocated(comparison: Comparison) -> str:
    """Return what is allocated for the full cache and under recipes, and what of it layers hold that none changes."""
    full = comparison.full
    recipes = [record.figures["kv_bytes"] for record in comparison.rows if record.error is None]
    ends = dict.fromkeys(megabytes(nbytes) for nbytes in (min(recipes), max(recipes))) if recipes else {}
    under = f", {' to '.join(ends)} MB under recipes" if ends else ""
    fixed = f", {megabytes(full['fixed_bytes'])} MB of each in windows and states" if full["fixed_bytes"] else ""
    return f"{megabytes(full['kv_bytes'])} MB for the full cache{under}{fixed}"


def _figure(name: str) -> Callable[[Record], float | None]:
    return lambda record: record.figures.get(name)


_COLUMNS = [
    Column("kept", _figure("keep"), percent, "entries", page_only=True),
    Column("MB", _figure("counted_bytes"), megabytes, "in 16 bits", rank=1),
    Column("of 16-bit", _figure("share"), percent, "full cache"),
    Column("allocated", _figure("kv_bytes"), megabytes, "MB", page_only=True),
    Column("peak MB", _figure("kv_bytes_peak"), megabytes, "allocated", rank=2),
    Column("KL", _figure("kl"), decimals(3), "nats"),
    Column("NLL delta", _figure("nll_delta"), "{:+.4f}".format, "nats", page_only=True),
    Column("top-1", _figure("top1"), whole_percent),
    Column("prefill", lambda record: record.ratio("prefill_seconds"), times, "of full", rank=3),
    Column("select", _figure("select_seconds"), seconds, "s", page_only=True),
    Column("found", _figure("needle_found"), yes, is_pinned=True),
    Column("answer", lambda record: next(iter(record.replies), None), page_only=True, is_text=True, is_pinned=True),
]


def render(comparison: Comparison, tokens: Sequence[str | None], conclusion: str = "") -> str:
    """Return the page of a comparison.

    Args:
        comparison: the records.
        tokens: the text of each token, which the page shades; see `token_texts`.
        conclusion: the sentence with which the page opens.
    """
    rows, full, needle = comparison.rows, comparison.full, comparison.needle
    ran = [record for record in rows if record.error is None]
    shown = [record for group in by_budget(comparison) for record in group if record.figures["keep"] < 1]
    # The best recipe of the smallest budget that still answers, because one that keeps everything shows nothing.
    best = min(
        shown,
        key=lambda record: (
            record.figures.get("needle_found") is False,
            round(record.figures["share"], 2),
            record.figures["kl"],
        ),
        default=ran[0] if ran else None,
    )
    first = next((at for at, record in enumerate(rows) if record is best), None)
    failed = len(rows) - len(ran)
    decoding = comparison.drift_tokens is not None
    needle_facts = [
        ("Asked after compression", needle.question if needle else None),
        ("A right answer contains", needle.answer if needle else None),
        ("The full cache answers", full.get("answer")),
    ]
    return page(
        "keepset compare",
        comparison.model,
        [
            *_fidelity(comparison, ran),
            table(comparison).section(
                "Recipes", note="A click on a column's name sorts; a click on a recipe shows what it kept, below."
            ),
            kept_text(
                "What is kept of the text",
                tokens,
                [(record.recipe, mask) for record, mask in zip(rows, comparison.kept, strict=True)],
                first=first,
                answer=needle.answer if needle else "",
                grids=comparison.grids,
            ),
        ],
        conclusion=conclusion,
        lead=_lead(comparison),
        facts=[
            ("Recipes", f"{len(rows)}, of which {failed} failed" if failed else str(len(rows))),
            (
                "Full KV cache: mean" if decoding else "Full KV cache",
                f"{megabytes(full['counted_bytes'])} MB in 16 bits",
            ),
            ("Allocated", allocated(comparison)),
            ("Full cache: prefill", f"{seconds(full['prefill_seconds'])} s"),
            ("Full cache: NLL", f"{full['nll']:.4f} nats/token"),
            *needle_facts,
        ],
    )


def _lead(comparison: Comparison) -> str:
    prompt, after = integer(comparison.tokens), integer(comparison.continuation_tokens)
    if comparison.drift_tokens is not None:
        return (
            f"A text of {after} tokens follows a prompt of {prompt}, fed as if decoded. Each recipe compresses the "
            "model's KV cache again and again on the way. Its predictions after its first compression are compared "
            "with those of the full cache; bytes are means over the same tokens."
        )
    return (
        f"Each recipe keeps part of the model's KV cache after a prompt of {prompt} tokens. Its predictions over the "
        f"next {after} tokens are compared with those of the full cache on the same text."
    )


def _methods(comparison: Comparison) -> list[str]:
    return list(dict.fromkeys(record.method for record in comparison.rows if record.error is None))


def _fidelity(comparison: Comparison, ran: Sequence[Record]) -> list[Section]:
    if not ran:
        return []
    legend = [plot.entry(method, at) for at, method in enumerate(_methods(comparison))]
    metrics = []
    for metric in _METRICS:
        chart, is_clipped = _against_bytes(metric, comparison, ran)
        note = metric.note + (f" {_HOLLOW}" if is_clipped else "")
        metrics.append((metric.name, [plot.plots("", [chart], legend, note)]))
    sections = [{**choice("metric", "Fidelity measure", metrics, radio=True), "title": "Fidelity against bytes"}]
    if any(len(record.curves.get("kl_drift", ())) > 1 for record in ran):
        sections.append(_drift(comparison, ran))
    return sections


def _against_bytes(metric: Metric, comparison: Comparison, ran: Sequence[Record]) -> tuple[dict[str, Any], bool]:
    """Return a metric's chart, and whether values are drawn at its lower end because a log axis has no zero."""
    is_log = metric.axis.get("type") == "log"
    floor = _floor(record.figures[metric.figure] for record in ran)

    def point(record: Record) -> plot.Point:
        share, value = record.figures["share"], record.figures[metric.figure]
        is_hollow = is_log and value <= 0
        hover = (
            f"{plot.wrapped(record.recipe)}<br>{metric.name} {metric.show(value)}<br>{percent(share)} of a full "
            f"16-bit cache, {megabytes(record.figures['counted_bytes'])} MB"
        )
        return plot.Point(share, floor if is_hollow else value, hover, is_hollow=is_hollow)

    lines = [
        (method, sorted((point(record) for record in ran if record.method == method), key=lambda drawn: drawn.x))
        for method in _methods(comparison)
    ]
    x = plot.axis("KV cache bytes, share of a full 16-bit cache", tickformat=".0%", rangemode="tozero", zeroline=False)
    traces = [plot.line(method, points, at) for at, (method, points) in enumerate(lines)]
    is_clipped = any(point.is_hollow for _, points in lines for point in points)
    return plot.plot("plot", traces, x, metric.axis, height="430px"), is_clipped


def _drift(comparison: Comparison, ran: Sequence[Record]) -> Section:
    size = comparison.drift_tokens or 1
    methods, line_counts = _methods(comparison), dict.fromkeys(_methods(comparison), 0)
    drifting = [record for record in ran if len(record.curves.get("kl_drift", ())) > 1]
    floor = _floor(value for record in drifting for value in record.curves["kl_drift"])
    lines = []
    for record in drifting:
        points = []
        for part, value in enumerate(record.curves["kl_drift"]):
            end = min((part + 1) * size, comparison.continuation_tokens)
            hover = f"{plot.wrapped(record.recipe)}<br>KL {value:.3g} nats<br>tokens {part * size} to {end}"
            points.append(plot.Point(end, floor if value <= 0 else value, hover, is_hollow=value <= 0))
        dash = plot.DASHES[line_counts[record.method] % len(plot.DASHES)]
        line_counts[record.method] += 1
        lines.append(plot.line(record.recipe, points, methods.index(record.method), group=record.method, dash=dash))
    note = (
        f"Mean KL(full ‖ compressed) of every {integer(size)} tokens after the prompt, one line per recipe; budgets of "
        "one method differ in their dashes."
    )
    if any(value <= 0 for record in drifting for value in record.curves["kl_drift"]):
        note += f" {_HOLLOW}"
    x = plot.axis("Tokens after the prompt", rangemode="tozero", zeroline=False)
    chart = plot.plot("drift", lines, x, _LOG, height="430px")
    return plot.plots("Drift over the text", [chart], note=note)


def _floor(values: Iterable[float]) -> float:
    """Return the place of non-positive values on a log axis: below the smallest positive value."""
    return min((value for value in values if value > 0), default=4e-6) / 4
