from __future__ import annotations

import json
import re
from typing import Any

import pytest

from keepset.bench.report.latency import render

EVIL = "</script><img src=x onerror=window.pwned=1><b>&lt; %{x} $data"


def row(recipe: str, tokens: int, peak: int | None = 10**9, error: str | None = None) -> dict[str, Any]:
    measured = {"first_seconds": 1.0, "rest_seconds": 2.0, "kv_bytes": 4 * 10**6, "peak_bytes": peak}
    slower = {**measured, "first_seconds": 3.0}
    head = {"recipe": recipe, "prompt_tokens": tokens, "output_tokens": 5, "error": error}
    if error is not None:
        return {**head, "rounds": []}
    medians = {
        "first_seconds": 2.0,
        "tokens_per_second": 2.0,
        "seconds": 4.0,
        "kv_bytes": 4 * 10**6,
        "peak_bytes": peak,
    }
    return {**head, "rounds": [measured, slower], **medians}


def result(*rows: dict[str, Any]) -> dict[str, Any]:
    head = {"model": EVIL, "device": "cpu", "dtype": "float32", "rounds": 2, "output_tokens": 5}
    return {**head, "rows": list(rows)}


def test_text_is_only_in_the_data_block() -> None:
    page = render(result(row(EVIL, 10)))
    block = re.search(r'<script type="application/json" id="data">(.*?)</script>', page, re.DOTALL)
    assert block and "pwned" in block[1] and "pwned" not in page.replace(block[1], "")


def test_plots_and_table(load: Any) -> None:
    page = load(
        render(
            result(row("full cache", 10, None), row("full cache", 20, None), row(EVIL, 10, None, EVIL)),
        )
    )
    page.wait_for_selector("#seconds .point")
    (trace,) = page.evaluate("document.getElementById('first_seconds').data")
    assert (trace["x"], trace["y"]) == ([10, 20], [2, 2])
    assert (trace["error_y"]["array"], trace["error_y"]["arrayminus"]) == ([1, 1], [1, 1])
    assert page.evaluate("document.getElementById('kv_bytes').data[0].y") == [4, 4]
    assert page.locator("#peak_bytes").is_hidden() and page.locator("#kv_bytes").is_visible()
    assert page.locator("#rows tbody tr").first.locator("td").all_text_contents() == [
        "2.00 s",
        "2.0",
        "4.00 s",
        "4.0 MB",
        "\N{EN DASH}",
    ]
    assert page.locator("#errors li").all_text_contents() == [f"{EVIL}, 10: {EVIL}"]
    assert page.locator("h1").text_content() == EVIL
    assert page.locator("#origin dt").all_text_contents() == ["Command", "Date", "Machine", "Threads", "Versions"]
    assert page.locator("#first_seconds").get_attribute("aria-label") == (
        "Chart of seconds by tokens of the prompt. full cache: 2 at 10, 2 at 20"
    )
    page.locator("#json summary").click()
    page.wait_for_selector("#json pre:not(:empty)", state="attached")
    assert json.loads(page.locator("#json pre").text_content())["rows"][0]["recipe"] == "full cache"


def test_it_opens_with_the_fastest_after_the_longest_prompt(load: Any) -> None:
    slow, fast = row("snapkv(keep=0.5)", 20), row("tova(keep=0.25)", 20)
    fast.update(tokens_per_second=3.0, kv_bytes=10**6, first_seconds=2.2)
    page = load(render(result(row("full cache", 20), row("tova(keep=0.25)", 10), slow, fast)))
    assert page.locator("#conclusion").text_content() == (
        "After 20 tokens tova(keep=0.25) makes 1.50 times the full cache's tokens a second (more is better) and holds "
        "25% of its bytes; the first token takes 1.10 times as long (less is better)."
    )


@pytest.mark.full
def test_nothing_overflows_the_page(load: Any) -> None:
    page = load(
        render(result(row("a", 10), row(EVIL, 10))),
        viewport={"width": 400, "height": 800},
    )
    page.wait_for_selector("#seconds .point")
    assert page.evaluate("document.documentElement.scrollWidth") <= 400
