"""Prices of entries: counted example by example, and written on the page of papers as they are."""

from __future__ import annotations

import re
from pathlib import Path

import pytest

from keepset.bench.papers.catalogue import entries, entry_of
from keepset.bench.papers.price import price_of

PAGE = Path(__file__).parents[3] / "docs" / "papers.md"


def test_a_price_is_that_of_its_tokens_and_bytes() -> None:
    """GSM8K under small budgets: 1,319 problems of 100 tokens, 4 methods, 2 budgets, up to 1,024 tokens each."""
    price = price_of(entry_of("ams-table-2"))
    assert price.prompt_tokens == 1319 * 100 and price.answer_tokens == 1319 * 4 * 2 * 1024
    # Qwen2.5-7B: 28 layers, 4 KV heads of 128 numbers, 7.6e9 weights of 2 bytes, read once for 16 answers.
    seconds = 1319 * 100 * (2 * 7.6e9 + 2 * 28 * 28 * 128 * 100) / (0.4 * 989e12)
    for keep in (64, 128):
        held = keep + 512 / 2
        seconds += 1319 * 4 * 1024 * (2 * 7.6e9 / 16 + 2 * 2 * 28 * 4 * 128 * held) / (0.5 * 3.35e12)
    assert price.hours == pytest.approx(seconds / 3600)


def test_a_generations_price_is_of_all_its_rounds_and_caches() -> None:
    price = price_of(entry_of("compilerkv-table-a1"))
    assert price.prompt_tokens == 4 * 4 * (8192 + 16384 + 32768)
    assert price.answer_tokens == 4 * 4 * (8192 + 16384 + 32768) / 4


def test_the_page_of_papers_has_every_entry_with_its_price() -> None:
    """And with what else it needs."""
    rows = re.findall(
        r"^\| `keepset reproduce ([\w-]+)` \| .*? \| (.*?) \| ([\w. ]+) \|$", PAGE.read_text("utf-8"), re.M
    )
    said = {name: (state, price) for name, state, price in rows}
    assert said == {name: (entry.state, price_of(entry).text) for name, entry in entries().items()}
    for name in ("compilerkv-table-a1", "compilerkv-figure-a2"):
        assert "--tables (keepset compile)" in said[name][0]
