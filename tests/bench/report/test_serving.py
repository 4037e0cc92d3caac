"""The page of `keepset bench serve`."""

from __future__ import annotations

from typing import Any

import pytest

from keepset.bench.report.serving import conclusion, render
from tests.bench.report.pages import EVIL, data_of, lines, request, served, traces


def test_chunks_are_counted_only() -> None:
    data = data_of(render(served(EVIL, "recipe"), [["tokens", EVIL, "2", "x1"]]))
    assert data["figures"]["servers"][0]["rounds"][0]["requests"][0]["chunks"] == 3


def test_it_opens_with_what_the_load_has_shown() -> None:
    assert conclusion(served("plain", "recipe")).startswith(
        "With the recipe vLLM makes 1.50 times plain vLLM's output tokens a second"
    )
    assert conclusion(served("server")) == "6 of 10 requests were answered, 6.0 output tokens a second."
    nothing = served("plain", "recipe")
    nothing["servers"][0]["summary"]["output_tokens_per_second"] = None
    assert "plain vLLM answered none" in conclusion(nothing)


def test_plots_show_what_was_measured(load: Any) -> None:
    page = load(render(served("plain", "recipe"), [["tokens", EVIL, "2", "x2.00"]]))
    running = traces(page, "running")
    assert [trace["name"] for trace in running] == ["plain", "recipe"]
    # The rounds follow one another, with a gap of a second.
    assert running[0]["x"] == [1, 2, 2.5, 3.5, 4.5, 5.5, 6]
    assert running[0]["y"] == [1, 2, 2.5, None, 1, 2, 2.5]
    assert traces(page, "usage")[1]["y"][0] == 0.1
    # Of the requests that were answered.
    shares = traces(page, "request")[0]
    assert shares["x"] == [1, 1, 1, 2, 2, 3, 3]
    assert shares["y"] == pytest.approx([0, *(i / 6 for i in range(1, 7))])
    assert lines(page)[1] == ["tokens", EVIL, "2", "x2.00"]
    assert page.locator("#facts dd").first.text_content() == EVIL
    assert page.locator(".errors li").first.text_content() == f"plain: {EVIL}"


def test_one_server_of_which_nothing_is_known(load: Any) -> None:
    empty = {**served("server"), "recipe": None}
    empty["servers"][0]["rounds"] = [{"seconds": 0.1, "samples": [], "requests": [request(0, None, "gone")]}]
    page = load(render(empty, [["tokens", "1"]]))
    assert page.locator("#running").text_content() == "Nothing was measured."
    assert lines(page)[1:] == [["tokens", "1"]]
