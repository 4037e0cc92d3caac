"""What every page promises: text stays text, no script but its own, nothing wider than the window."""

from __future__ import annotations

import json
import re
from pathlib import Path
from typing import Any

import pytest

from keepset.bench.report.page import script_json, write
from keepset.errors import KeepsetError
from tests.bench.report.pages import EVIL, PAGES, TOKENS, data_of


def test_json_is_inert_and_reads_back() -> None:
    value = {"text": [*TOKENS, "\ud800", "\u2029"], "n": 1, "x": 0.5, "none": None}
    text = script_json(value)
    assert text.isascii() and not set(text) & set("<>&\n")
    assert json.loads(text) == value


def test_json_has_words_for_what_is_not_finite() -> None:
    values = (float("nan"), float("inf"), -float("inf"), 1.0)
    assert json.loads(script_json({"a": values})) == {"a": ["NaN", "Infinity", "-Infinity", 1.0]}


def test_write_replaces_and_leaves_nothing_else(tmp_path: Path) -> None:
    path = tmp_path / "report.html"
    path.write_text("old")
    write(path, "new ‖\n")
    assert path.read_bytes() == "new ‖\n".encode()
    assert list(tmp_path.iterdir()) == [path]


def test_write_that_fails_says_so_and_keeps_the_old(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    with pytest.raises(KeepsetError, match=r"cannot write the report to .*absent"):
        write(tmp_path / "absent" / "report.html", "new")

    def full_disk(*_: object) -> None:
        raise OSError(28, "No space left on device")

    path = tmp_path / "report.html"
    path.write_text("old")
    monkeypatch.setattr("os.replace", full_disk)
    with pytest.raises(KeepsetError, match="No space left"):
        write(path, "new")
    assert path.read_text() == "old" and list(tmp_path.iterdir()) == [path]


@pytest.mark.parametrize("name", PAGES)
def test_text_is_only_in_the_data_block(name: str) -> None:
    page = PAGES[name]()
    block = re.search(r'<script type="application/json" id="data">(.*?)</script>', page, re.DOTALL)
    assert block and EVIL in data_of(page)["model"]
    assert "pwned" in block[1] and "pwned" not in page.replace(block[1], "")
    policy = re.search(r"script-src ([^;]*);", page)
    assert policy and "unsafe" not in policy[1] and "default-src 'none'" in page


@pytest.mark.parametrize("name", PAGES)
@pytest.mark.parametrize("width", [400, 1280])
def test_text_stays_text_and_nothing_overflows_the_page(load: Any, name: str, width: int) -> None:
    page = load(PAGES[name](), viewport={"width": width, "height": 800})
    assert page.locator("h1").text_content() in (EVIL, f"model {EVIL}")
    assert page.title().endswith(page.locator("h1").text_content())
    assert page.locator("main img, main b").count() == 0
    assert page.locator(".js-plotly-plot .main-svg").count()
    assert page.evaluate("document.documentElement.scrollWidth") <= width
    assert page.locator("#origin dt").all_text_contents()[:5] == ["Command", "Date", "Machine", "Threads", "Versions"]
    page.locator("#json summary").click()
    page.wait_for_selector("#json pre:not(:empty)", state="attached")
    assert json.loads(page.locator("#json pre").text_content()) == data_of(PAGES[name]())["figures"]


def test_policy_stops_foreign_scripts(browser: Any, tmp_path: Path) -> None:
    path = tmp_path / "report.html"
    write(path, PAGES["latency"]())
    page = browser.new_page()
    page.goto(path.as_uri())
    page.evaluate(
        """() => { const script = document.createElement("script");
            script.textContent = "window.pwned = 1"; document.body.append(script); }"""
    )
    assert page.evaluate("window.pwned") is None
    page.close()
