"""What every page promises: text stays text, no script but its own, drawn as described, no wider than the window."""

import base64
import gzip
import json
import re
from pathlib import Path
from typing import Any

import numpy as np
import pytest
import torch

from keepset.errors import KeepsetError
from keepset.lab.report.page import asset, kept_text, pack, script_json, write
from keepset.lab.report.plot import MARKS
from tests.lab.report.pages import EVIL, PAGES, TOKENS, data_of, sections, traces


def test_json_is_inert_and_reads_back() -> None:
    value = {"text": [*TOKENS, "\ud800", "\u2029"], "n": 1, "x": 0.5, "none": None}
    text = script_json(value)
    assert text.isascii() and not set(text) & set("<>&\n")
    assert json.loads(text) == value
    values = (float("nan"), float("inf"), -float("inf"), 1.0)
    assert json.loads(script_json({"a": values})) == {"a": ["NaN", "Infinity", "-Infinity", 1.0]}


def test_a_page_is_written_whole_or_not_at_all(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    path = tmp_path / "report.html"
    path.write_text("old")
    write(path, "new ‖\n")
    assert path.read_bytes() == "new ‖\n".encode() and list(tmp_path.iterdir()) == [path]
    with pytest.raises(KeepsetError, match=r"cannot write the report to .*absent"):
        write(tmp_path / "absent" / "report.html", "new")

    def full_disk(*_: object) -> None:
        raise OSError(28, "No space left on device")

    monkeypatch.setattr("os.replace", full_disk)
    with pytest.raises(KeepsetError, match="No space left"):
        write(path, "newer")
    assert path.read_text() == "new ‖\n" and list(tmp_path.iterdir()) == [path]


@pytest.mark.parametrize("tokens", [1, 7, 8, 25])
def test_bits_come_back(tokens: int) -> None:
    mask = torch.rand(3, 2, tokens) < 0.5
    packed = gzip.decompress(base64.b64decode(pack(mask)))
    bits = np.unpackbits(np.frombuffer(packed, np.uint8), count=mask.numel())
    assert torch.equal(torch.from_numpy(bits).bool().view_as(mask), mask)


@pytest.mark.parametrize(
    ("answer", "place"), [("eat a sandwich", (12, 15)), ("b日", (7, 9)), ("never", None), ("", None)]
)
def test_the_answer_is_found_over_tokens(answer: str, place: tuple[int, int] | None) -> None:
    assert kept_text("", TOKENS, [], answer=answer)["needle"] == place


@pytest.mark.parametrize("name", PAGES)
def test_text_is_only_in_the_data_block(name: str) -> None:
    page = PAGES[name]()
    block = re.search(r'<script type="application/json" id="data">(.*?)</script>', page, re.DOTALL)
    assert block and EVIL in data_of(page)["model"]
    assert "pwned" in block[1] and "pwned" not in page.replace(block[1], "")
    policy = re.search(r"script-src ([^;]*);", page)
    assert policy and "unsafe" not in policy[1] and "default-src 'none'" in page


@pytest.mark.full
@pytest.mark.parametrize("name", PAGES)
@pytest.mark.parametrize("width", [400, 1280])
def test_text_stays_text_and_nothing_overflows_the_page(load: Any, name: str, width: int) -> None:
    made = PAGES[name]()
    page = load(made, viewport={"width": width, "height": 800}, color_scheme="dark" if width == 400 else "light")
    assert page.locator("h1").text_content() in (EVIL, f"model {EVIL}")
    assert page.title().endswith(page.locator("h1").text_content())
    assert page.locator("main img, main b").count() == 0
    assert page.locator(".js-plotly-plot .main-svg").count()
    assert page.evaluate("document.documentElement.scrollWidth") <= width
    assert page.locator("#origin dt").all_text_contents()[:5] == ["Command", "Date", "Machine", "Threads", "Versions"]
    check_drawn(page, data_of(made)["sections"])


def check_drawn(page: Any, described: list[Any]) -> None:
    """Plotly and tables have what the description says."""
    for section in sections(described, shown=True):
        for plot in section.get("plots", ()):
            for drawn, trace in zip(traces(page, plot["id"]), plot["traces"], strict=True):
                bars = trace.get("error_y", {})
                expected = {
                    **{name: trace.get(name) for name in ("x", "y", "z", "hovertext")},
                    **{"up": bars.get("array"), "down": bars.get("arrayminus")},
                    "symbol": trace.get("marker", {}).get("symbol"),
                    "dash": trace.get("line", {}).get("dash"),
                }
                assert {name: drawn[name] or None for name in expected} == {n: v or None for n, v in expected.items()}
        if section["kind"] == "table":
            rows = page.locator(f"#{section['id']} tbody tr")
            for row, line in zip(rows.all(), section["lines"], strict=True):
                assert row.locator("code, button").text_content() == line["name"]
                cells = [cell[0] for cell in line["cells"]] or [line["error"]]
                assert row.locator("td").all_text_contents() == cells
        for drawn, needles in zip(
            page.locator(".maps figure").all() if "maps" in section else (), section.get("maps", ()), strict=True
        ):
            cells = [cell for line in needles["lines"] for cell in line[1:]]
            heads = [needles["title"], *needles["head"], *(line[0] for line in needles["lines"])]
            assert drawn.locator("figcaption, th").all_text_contents() == heads
            assert drawn.locator("td").all_text_contents() == [text for text, *_ in cells]
            shares = drawn.locator("td").evaluate_all("cells => cells.map(c => c.style.getPropertyValue('--share'))")
            assert [float(share) if share else None for share in shares] == [share for _, share, _ in cells]


def test_series_differ_in_shape_and_colour() -> None:
    """Until the colours are used up no two series share a shape; the script draws the shapes that Python names."""
    for scheme in asset("page.css").split("@media")[:2]:  # light, dark
        colours = re.findall(r"--c\d: (#[0-9a-f]{6})", scheme)
        assert len({*colours}) == len(MARKS) == len({*MARKS}) == 8
    drawn = re.search(r"const MARKS = \{(.*?)\};", asset("page.js"), re.DOTALL)
    assert drawn and {*re.findall(r'"?([a-z-]+)"?: "M', drawn[1])} == {*MARKS}


def test_policy_stops_foreign_scripts(browser: Any, tmp_path: Path) -> None:
    path = tmp_path / "report.html"
    write(path, PAGES["results"]())
    page = browser.new_page()
    page.goto(path.as_uri())
    page.evaluate(
        """() => { const script = document.createElement("script");
            script.textContent = "window.pwned = 1"; document.body.append(script); }"""
    )
    assert page.evaluate("window.pwned") is None
    page.close()
