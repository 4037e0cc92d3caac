"""What pages are made of in tests: small results of every command, with hostile text wherever a text may be."""

import dataclasses
import json
import re
from collections.abc import Iterator
from typing import Any

import torch

from keepset.lab.analysis.summary import summarize
from keepset.lab.compare.comparison import Comparison
from keepset.lab.record import FULL, Record
from keepset.lab.report import compare, results
from keepset.lab.texts import Needle
from tests.lab.analysis.cells import cell, cells

EVIL = "</script><img src=x onerror=window.pwned=1><b>&lt; %{x} $data"


def data_of(page: str) -> Any:
    """The description that the page's script draws."""
    block = re.search(r'<script type="application/json" id="data">(.*?)</script>', page, re.DOTALL)
    assert block
    return json.loads(block[1])


Described = str | list[dict[str, Any]]
"""A page, or some of its sections."""


def sections(described: Described, shown: bool = False) -> Iterator[dict[str, Any]]:
    """All sections, also those inside choices; of a choice only the first option's if they must be seen at first."""
    for section in data_of(described)["sections"] if isinstance(described, str) else described:
        yield section
        for option in section.get("options", ())[: 1 if shown else None]:
            yield from sections(option["sections"], shown)


def chart(described: Described, name: str, at: int = 0) -> list[dict[str, Any]]:
    """The traces of the first chart of this id, or of another one."""
    plots = [plot for section in sections(described) for plot in section.get("plots", ()) if plot["id"] == name]
    return plots[at]["traces"]


def lines(described: Described, table: str = "rows") -> list[dict[str, Any]]:
    """The lines of the first table of this id."""
    return next(section["lines"] for section in sections(described) if section.get("id") == table)


def rows(described: Described, table: str = "rows") -> list[list[str]]:
    """The table's texts, row by row; the first row has the titles, a row without figures why there are none."""
    made = next(section for section in sections(described) if section.get("id") == table)
    texts = [[line["name"], *([cell[0] for cell in line["cells"]] or [line["error"]])] for line in made["lines"]]
    return [[made["head"], *(column["title"] for column in made["columns"])], *texts]


def traces(page: Any, plot: str) -> list[dict[str, Any]]:
    """What plotly was given for a plot in the browser."""
    return page.evaluate(
        """name => document.getElementById(name).data.map(({x, y, z, name, visible, hovertext, ...trace}) => (
            {x, y, z: z && z.map((row) => [...row]), name, visible, hovertext, dash: trace.line?.dash,
             symbol: trace.marker?.symbol, up: trace.error_y?.array, down: trace.error_y?.arrayminus}))""",
        plot,
    )


TOKENS = [
    *("Once", " upon", " a", "  time", "\n\n", "\t", "", "a\r\nb", "日本", "\u202e", "\u2028", "\x00", " eat", " a"),
    *(" sandwich", ".", EVIL, "</script>", "<!--", "-->", "]]>", "&lt;", '"', "$data"),
]
LAYERS, HEADS = 3, 2


def record(recipe: str, method: str, kl: float, share: float, **curves: Any) -> Record:
    figures = {
        "keep": share, "share": share, "counted_bytes": int(share * 5e5), "kv_bytes": int(share * 1e6),
        "kv_bytes_full": 1_000_000,
        "kl": kl, "nll_delta": kl / 2 - 0.01, "top1": 1 - kl / 4,
        "prefill_seconds": 1.5, "prefill_seconds_full": 1.4, "select_seconds": 0.01,
        "decode_tokens_per_second": 20.0, "needle_found": kl < 0.1,
    }  # fmt: skip
    return Record(recipe, method, f"keep={share}", figures=figures, replies=[EVIL], curves=curves)


def masks(rows: list[Record], tokens: int = len(TOKENS)) -> list[torch.Tensor | None]:
    generator = torch.Generator().manual_seed(0)
    shape = (LAYERS, HEADS, tokens)
    return [
        None if row.error is not None else torch.rand(shape, generator=generator) < row.figures["keep"] for row in rows
    ]


def comparison(*rows: Record, tokens: int = len(TOKENS), **more: Any) -> Comparison:
    """Recipes on one text; without rows of its own it has one that failed, and one that diverges without end."""
    made = list(rows) or [
        record("tova(keep=0.25)", "tova", 0.2, 0.25),
        Record(f"broken({EVIL})", "broken", error=f"no such thing as {EVIL}"),
        record(f"{EVIL}(keep=0.5)", EVIL, 0.05, 0.5),
        record("tova(keep=0.1)", "tova", float("inf"), 0.1),
        record("tova(keep=0.5)", "tova", 0.03, 0.5),
        record("none()", "none", 0.0, 1.0),
    ]
    full = {
        "counted_bytes": 500_000, "kv_bytes": 1_000_000, "fixed_bytes": 0,
        "answer": EVIL, "needle_found": True, "prefill_seconds": 1.4, "nll": 2.5,
    }  # fmt: skip
    needle = Needle("", f"What? {EVIL}", "eat a sandwich")
    return Comparison(f"model {EVIL}", tokens, 8, full, needle, made, masks(made, tokens), **more)


def sweep() -> list[Record]:
    made = [
        *(each for task in ("ruler_vt@64", "ruler_cwe@64") for each in cells(FULL, [1.0, 1.0, 1.0, 0.0], task=task)),
        *cells("snapkv(keep=0.5)", [1.0, 1.0, 0.0, 0.0], task="ruler_vt@64"),
        *cells("snapkv(keep=0.5)", [1.0, 0.0, 0.0, 0.0], task="ruler_cwe@64"),
        *cells("snapkv(keep=0.25)", [1.0, 0.0, 0.0, 0.0], task="ruler_vt@64"),
        *cells("tova(keep=0.5)", [1.0, None, 1.0], task="ruler_vt@64"),
        *cells("h2o(keep=0.5)", [None] * 4, task="ruler_vt@64"),
        *cells("gvote", [1.0, 1.0, 1.0, 1.0], task="ruler_vt@64", keep=0.3, share=0.31, kv_bytes=310),
        dataclasses.replace(cell(FULL, 0.25), task=EVIL, recipe=EVIL, method=EVIL),
    ]
    for length, depth, score in ((128, 0.05, 1.0), (64, 0.05, 0.0), (128, 0.95, None)):
        for recipe in ("snapkv(keep=0.5)", FULL):
            found = cell(recipe, score if recipe != FULL else 1.0, str(depth), f"needle@{length}")
            made.append(dataclasses.replace(found, facts={"length": length, "depth": depth}))
    return made


def results_page(made: list[Record] | None = None, baseline: str | None = None) -> str:
    summary = summarize(sweep() if made is None else made, baseline)
    return results.render(f"model {EVIL}", {"examples": 4, "why": EVIL, "data": None}, summary)


def latency_row(recipe: str, tokens: int, peak: int | None = 10**9, error: str | None = None) -> dict[str, Any]:
    measured = {"first_seconds": 1.0, "rest_seconds": 2.0, "kv_bytes": 4 * 10**6, "peak_bytes": peak}
    head = {"recipe": recipe, "prompt_tokens": tokens, "output_tokens": 5, "error": error}
    if error is not None:
        return {**head, "rounds": []}
    medians = {"first_seconds": 2.0, "tokens_per_second": 2.0, "seconds": 4.0}
    medians |= {"kv_bytes": 4 * 10**6, "peak_bytes": peak}
    return {**head, "rounds": [measured, {**measured, "first_seconds": 3.0}], **medians}


PAGES = {"compare": lambda: compare.render(comparison(), TOKENS), "results": results_page}
"""A page of every command."""
