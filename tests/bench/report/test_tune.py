from __future__ import annotations

import json
import re
from typing import Any

import pytest

from keepset.bench.report.page import assemble


def render(result: dict[str, Any]) -> str:
    return assemble("tune", "keepset tune", result)


EVIL = "</script><img src=x onerror=window.pwned=1><b>&lt; %{x} $data"


def row(
    recipe: str, kl: float, *, finalist: bool = True, pieces: int = 16, found: float | None = 0.5
) -> dict[str, Any]:
    interval = {"low": kl / 2, "high": 2 * kl} if pieces > 1 else {"low": None, "high": None}
    return {
        "recipe": recipe,
        "pieces": pieces,
        "finalist": finalist,
        "kl": {"mean": kl, **interval},
        "top1": 0.9,
        **({} if found is None else {"found": {"mean": found, "low": found / 2, "high": (1 + found) / 2}}),
        "keep": 0.25,
        "kv_bytes": 30e6,
        "kv_bytes_full": 100e6,
        "prefill_seconds": 3.0,
        "prefill_seconds_full": 2.0,
    }


def result(*rows: dict[str, Any], facts: int = 4, found: Any = None) -> dict[str, Any]:
    full = {"kv_bytes": 100_000_000, **({"found": found or {"mean": 0.75, "low": 0.5, "high": 1.0}} if facts else {})}
    return {
        "model": EVIL,
        "keep": 0.25,
        "tokens": 960,
        "continuation_tokens": 64,
        "pieces": 16,
        "facts": facts,
        "round": 4,
        "rounds": 4,
        "measured": 16,
        "full": full,
        "recipe": rows[0]["recipe"] if rows else None,
        "tied": [each["recipe"] for each in rows[:2]],
        "verdict": [EVIL, "Second."],
        "rows": list(rows),
        "dropped": [{"recipe": "gvote", "reason": EVIL}],
    }


ROWS = (
    row("tova(keep=0.25)", 0.2),
    row(EVIL, 0.1),
    row("h2o", 0.4, found=0.0),
    row("out", 0.8, finalist=False, pieces=1),
)


def test_text_is_only_in_the_data_block() -> None:
    page = render(result(*ROWS))
    block = re.search(r'<script type="application/json" id="data">(.*?)</script>', page, re.DOTALL)
    assert block and json.loads(block[1]) == result(*ROWS)
    assert "pwned" in block[1] and "pwned" not in page.replace(block[1], "")


def data_of(page: Any, plot: str) -> Any:
    return page.evaluate(
        "name => document.getElementById(name).data.map(({x, y, name, error_y}) => "
        "[name, x, y, error_y.arrayminus, error_y.array])",
        plot,
    )


def near(values: list[float]) -> Any:
    return pytest.approx(values)


def test_plots_show_costs_and_intervals(load: Any) -> None:
    page = load(render(result(*ROWS)))
    page.wait_for_selector("#found .point")
    used, tied, last, out = data_of(page, "kl")
    assert used[:3] == ["tova(keep=0.25)", [1.5], [0.2]] and used[3] == near([0.1]) and used[4] == near([0.2])
    assert (tied[0], tied[2], last[0], last[2]) == ("cannot be told from it", [0.1], "last round", [0.4])
    assert out == ["out before", [1.5], [0.8], [0], [0]]
    assert [trace[2] for trace in data_of(page, "found")] == [[0.5], [0.5], [0], [0.5]]


def test_what_is_said_and_the_figures(load: Any) -> None:
    page = load(render(result(*ROWS)))
    page.wait_for_selector("#found .point")
    assert page.locator("h1").text_content() == EVIL
    legend = page.locator(".series .entry").all_text_contents()
    assert legend == ["★tova(keep=0.25)", "◆cannot be told from it", "●last round", "○out before"]
    assert page.locator("#facts dd").all_text_contents() == ["keep=0.25", "4", "100.0 MB", "75.0 % (50.0 % to 100.0 %)"]
    assert page.locator("#rows tbody th").all_text_contents() == ["★ tova(keep=0.25)", f"◆ {EVIL}", "h2o", "out"]
    first, last = (page.locator("#rows tbody tr").nth(at).locator("td").all_text_contents() for at in (0, 3))
    assert first == [
        *("16", "30.0", "30.0 %", "0.2000 (0.1000 to 0.4000)", "90.0 %", "\N{MULTIPLICATION SIGN} 1.50"),
        "50.0 % (25.0 % to 75.0 %)",
    ]
    assert last[3] == "0.8000"
    assert page.locator("#errors li").all_text_contents() == [f"gvote: {EVIL}"]


def test_without_facts_nothing_is_shown_of_them(load: Any) -> None:
    rows = [row("tova", 0.2, found=None), row("h2o", 0.4, found=None)]
    page = load(render({**result(*rows, facts=0), "recipe": None, "tied": []}))
    page.wait_for_selector("#kl .point")
    assert not page.locator("#found-figure").is_visible()
    assert page.locator("#rows thead th").count() == 7 and page.locator("#facts dd").count() == 3
    assert [trace[0] for trace in data_of(page, "kl")] == ["last round"]


@pytest.mark.parametrize("width", [400, 1280])
def test_nothing_overflows_the_page(load: Any, width: int) -> None:
    page = load(render(result(*ROWS)), viewport={"width": width, "height": 800})
    page.wait_for_selector("#found .point")
    assert page.evaluate("document.documentElement.scrollWidth") <= width
    for name in ("kl", "found"):
        drawn, room = (page.locator(f"#{name}{inner}").first.bounding_box() for inner in (" .main-svg", ""))
        assert drawn["width"] <= room["width"] + 1
