"""The page of `keepset bench latency`."""

from __future__ import annotations

from typing import Any

from tests.bench.report.pages import EVIL, latency_page, latency_row, lines, traces


def test_plots_and_table(load: Any) -> None:
    rows = (latency_row("full cache", 10, None), latency_row("full cache", 20, None))
    page = load(latency_page(*rows, latency_row(EVIL, 10, None, EVIL)))
    (trace,) = traces(page, "first_seconds")
    assert (trace["x"], trace["y"], trace["up"], trace["down"]) == ([10, 20], [2, 2], [1, 1], [1, 1])
    assert traces(page, "kv_bytes")[0]["y"] == [4, 4]
    assert page.locator("#peak_bytes").count() == 0
    _, first, _, failed = lines(page)
    assert first[1:] == ["2.00 s", "2.0", "4.00 s", "4.0", ""] and failed == [f"{EVIL}, 10 tokens", EVIL]
    assert page.locator("#first_seconds").get_attribute("aria-label") == (
        "Chart of seconds by tokens of the prompt. full cache: 2 at 10, 2 at 20"
    )


def test_it_opens_with_the_fastest_after_the_longest_prompt(load: Any) -> None:
    slow, fast = latency_row("snapkv(keep=0.5)", 20), latency_row("tova(keep=0.25)", 20)
    fast.update(tokens_per_second=3.0, kv_bytes=10**6, first_seconds=2.2)
    page = load(latency_page(latency_row("full cache", 20), latency_row("tova(keep=0.25)", 10), slow, fast))
    said = page.locator("#conclusion").text_content()
    assert said.startswith("After 20 tokens tova(keep=0.25) makes 1.50 times the full cache's tokens a second")
    assert "25% of its bytes" in said and "1.10 times as long" in said
