from __future__ import annotations

import json
import re
from typing import Any

import pytest

from keepset.bench.report.serving import conclusion, render

EVIL = "</script><img src=x onerror=window.pwned=1><b>&lt; %{x} $data"


def request(index: int, seconds: float | None, error: str | None = None) -> dict[str, Any]:
    return {
        "index": index,
        "start": 0.0,
        "first_token_seconds": seconds,
        "seconds_per_token": seconds,
        "seconds": seconds,
        "prompt_tokens": 5,
        "output_tokens": 4,
        "error": error,
        "chunks": [0.1, 0.2, 0.3],
    }


def server(name: str) -> dict[str, Any]:
    samples = [
        {"time": t, "running": t, "waiting": 0, "preemptions": 0, "kv_usage": t / 10} for t in (0.0, 1.0, 2.0, 2.5)
    ]
    samples.append({"time": 3.0, "running": None, "waiting": None, "preemptions": None, "kv_usage": None})
    requests = [request(0, 3.0), request(1, 1.0), request(2, 2.0), request(3, 0.5, EVIL), request(4, None, EVIL)]
    return {
        "name": name,
        "recipe": None,
        "command": [EVIL],
        "summary": {
            "errors": [EVIL],
            "requests": 10,
            "failed": 4,
            "output_tokens_per_second": 9.0 if name == "recipe" else 6.0,
            "first_token_seconds": {"p50": 2.0},
        },
        "rounds": [{"seconds": 2.5, "samples": samples, "requests": requests}] * 2,
    }


def result(*names: str) -> dict[str, Any]:
    load = {"requests": 5, "prompt_tokens": 5, "output_tokens": 4, "concurrency": 2, "rounds": 2, "seed": 0}
    head = {"model": EVIL, "recipe": EVIL, "load": load, "options": ["--x", EVIL], "keepset": "0"}
    return {**head, "servers": [server(name) for name in names]}


def test_text_is_only_in_the_data_block() -> None:
    page = render(result(EVIL, "recipe"), [["tokens", EVIL, "2", "x1"]])
    block = re.search(r'<script type="application/json" id="data">(.*?)</script>', page, re.DOTALL)
    assert block
    data = json.loads(block[1])
    assert data["model"] == EVIL and data["rows"] == [["tokens", EVIL, "2", "x1"]]
    assert data["servers"][0]["rounds"][0]["requests"][0]["chunks"] == 3
    assert "pwned" in block[1] and "pwned" not in page.replace(block[1], "")
    policy = re.search(r"script-src ([^;]*);", page)
    assert policy and "unsafe" not in policy[1]


def data_of(page: Any, plot: str) -> Any:
    return page.evaluate("name => document.getElementById(name).data.map(({x, y, name}) => ({x, y, name}))", plot)


def test_it_opens_with_what_the_load_has_shown() -> None:
    assert conclusion(result("plain", "recipe")).startswith(
        "With the recipe vLLM makes 1.50 times plain vLLM's output tokens a second"
    )
    assert conclusion(result("server")) == "6 of 10 requests were answered, 6.0 output tokens a second."
    nothing = result("plain", "recipe")
    nothing["servers"][0]["summary"]["output_tokens_per_second"] = None
    assert "plain vLLM answered none" in conclusion(nothing)


def test_plots_show_what_was_measured(load: Any) -> None:
    page = load(render(result("plain", "recipe"), [["tokens", "1", "2", "x2.00"]]))
    page.wait_for_selector("#request .lines")
    running = data_of(page, "running")
    assert [trace["name"] for trace in running] == ["plain", "recipe"]
    # The rounds follow one another, with a gap of a second.
    assert running[0]["x"] == [1, 2, 2.5, 3.5, 4.5, 5.5, 6]
    assert running[0]["y"] == [1, 2, 2.5, None, 1, 2, 2.5]
    assert data_of(page, "usage")[1]["y"][0] == 0.1
    # Of the requests that were answered.
    shares = data_of(page, "request")[0]
    assert shares["x"] == [1, 1, 1, 2, 2, 3, 3]
    assert shares["y"] == pytest.approx([0, *(i / 6 for i in range(1, 7))])


def test_text_stays_text(load: Any) -> None:
    page = load(render(result(EVIL, "recipe"), [["tokens", EVIL, "2", "x1"]]))
    page.wait_for_selector("#request .lines")
    assert page.locator("h1").text_content() == EVIL
    assert page.locator("#facts dd").first.text_content() == EVIL
    assert page.locator("#rows td").first.text_content() == EVIL
    assert page.locator("#errors li").first.text_content() == f"{EVIL}: {EVIL}"
    assert page.locator("main img").count() == 0


@pytest.mark.parametrize("width", [400, 1280])
def test_nothing_overflows_the_page(load: Any, width: int) -> None:
    page = load(
        render(result("plain", "recipe"), [["tokens", "1", "2", "x2"]]), viewport={"width": width, "height": 800}
    )
    page.wait_for_selector("#request .lines")
    assert page.evaluate("document.documentElement.scrollWidth") <= width


def test_one_server_of_which_nothing_is_known(load: Any) -> None:
    empty = {**result("server"), "recipe": None}
    empty["servers"][0]["rounds"] = [{"seconds": 0.1, "samples": [], "requests": [request(0, None, "gone")]}]
    page = load(render(empty, [["tokens", "1"]]))
    assert page.locator("#running").text_content() == "Nothing was measured."
    assert page.locator("#rows thead th").all_text_contents() == ["", "server"]
