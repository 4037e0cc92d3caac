"""The page of `keepset trace`, in Chromium, against the sets that it was made of."""

from __future__ import annotations

import json
from typing import Any

from keepset.bench.report.trace import render
from tests.bench.report.pages import (
    EVIL,
    HISTORIES,
    LENGTHS,
    PROMPT,
    SHOWN,
    TRACED,
    chart,
    entries,
    rows,
    run,
    trace_page,
    traced,
)


def classes(page: Any, name: str) -> list[int]:
    return page.locator(f"#text .{name}").evaluate_all("spans => spans.map(s => Number(s.dataset.piece))")


def shaded(page: Any) -> list[int]:
    shares = page.evaluate(
        "[...document.querySelectorAll('#text span')].map(s => Number(s.style.getPropertyValue('--share')))"
    )
    return [t for t, share in enumerate(shares) if share]


def test_slider_layer_and_head_choose_what_is_shown(load: Any) -> None:
    page = load(trace_page("ams(tova)", "tova"))
    assert page.locator("#layer option").all_text_contents() == ["0", "7"]
    assert page.locator("#event").input_value() == "2"
    assert page.locator("#run label").all_text_contents() == ["ams(tova)", "tova"]
    for event, layer, head, chosen in ((2, 0, 0, 0), (0, 1, 2, 0), (1, 1, 0, 1)):
        page.locator("#event").fill(str(event))
        page.select_option("#layer", str(layer))
        page.select_option("#head", str(head))
        page.locator("#run input").nth(chosen).check(force=True)
        kept = HISTORIES[chosen]
        stays, held = kept[event][layer, head].nonzero()[:, 0].tolist(), entries(kept, event, layer, head)
        now = [t for t in held if t not in stays]
        gone = [t for t in range(LENGTHS[event]) if t not in held]
        assert shaded(page) == stays and classes(page, "now") == now and classes(page, "dropped") == gone
        assert classes(page, "ahead") == list(range(LENGTHS[event], len(TRACED)))
        assert page.locator("#share").text_content() == (
            f"Event {event + 1}, at {LENGTHS[event]} tokens: {len(stays)} kept, {len(now)} dropped, "
            f"{len(gone)} dropped before."
        )
        for i, each in enumerate(HISTORIES):
            plot, fates = (page.locator(".run").nth(i).locator("> div").nth(place) for place in (0, 1))
            ticks = plot.evaluate("box => Array.from(box.data[0].x)")
            left = each[event][layer, head].nonzero()[:, 0].tolist()
            assert [entries(each, event, layer, head)[x] for x in ticks] == left
            drawn = fates.evaluate("box => box.data[0].z.map(row => Array.from(row))")
            for number, row in enumerate(drawn):
                had = entries(each, number, layer, head)
                assert row == [
                    2 if t not in had else 0 if each[number][layer, head, t] else 1 for t in range(LENGTHS[number])
                ]


def test_segments_are_bands_with_quotas(load: Any) -> None:
    page = load(trace_page("ams(tova)", "tova"))
    plots = page.locator(".run > div:nth-of-type(1)")
    size = len(entries(HISTORIES[0], 2, 0, 0))
    ticks, mass, quotas = plots.first.evaluate("box => box.data.map(({x, y, text}) => ({x: [...x], y: [...y], text}))")
    assert mass["x"] == list(range(size)) and min(mass["y"]) > 0
    assert quotas["x"] == [1, (3 + size - 1) / 2] and quotas["text"] == ["2", "4"]
    shapes = plots.first.evaluate("box => box.layout.shapes.map(({type, x0, x1}) => [type, x0, x1])")
    assert shapes == [["rect", 2.5, size - 0.5], ["line", 2.5, 2.5]]
    assert plots.nth(1).evaluate("box => [box.data.length, box.layout.shapes.length]") == [1, 0]
    caption = page.locator(".run figcaption").first.text_content()
    assert caption == f"ams(tova)at 27 tokens: keeps {len(ticks['x'])} of {size} entries in 2 segments"


def test_keys_move_through_events_and_tokens(load: Any) -> None:
    page = load(trace_page("ams(tova)"))
    page.locator("#event").focus()
    page.keyboard.press("ArrowLeft")
    assert page.locator("#event-label").text_content() == "Event 2 of 3"
    assert page.locator("#share").text_content().startswith("Event 2, at 20 tokens")
    assert page.locator("#run").is_hidden()
    page.locator("#text").focus()
    page.keyboard.press("ArrowRight")
    page.keyboard.press("ArrowRight")
    assert page.locator("#tip").text_content().startswith(f"token 1 {json.dumps(EVIL)}")


def test_figures_and_curves() -> None:
    page = trace_page(EVIL, "tova")
    titles, *others = rows(page)
    figures = {name: told for name, *told in others}
    assert titles[1:] == [EVIL, "tova"]
    assert figures["regions wiped out"] == ["25.0%"] * 2 and figures["IoU, late layers"] == ["0.600"] * 2
    assert figures["longest gap, tokens"] == ["4.0"] * 2 and figures["tokens after the prompt"] == ["18"] * 2
    assert "tokens per second" not in figures
    for name, x in (("wipeout", LENGTHS), ("iou", LENGTHS[1:])):
        assert [trace["x"] for trace in chart(page, name)] == [x, x]


def test_a_text_in_which_nothing_was_compressed(load: Any) -> None:
    bare = {**run("tova"), "events": [], "mean": {}, "by_depth": {}, "segments": None, "layers": [], "kv_heads": 0}
    result = {"model": "m", "forced": False, "runs": [bare]}
    page = load(render(result, [traced([], has_segments=False)], [TRACED], SHOWN))
    assert page.locator("#share").text_content() == "Nothing was compressed."
    assert page.locator("#text").text_content() == "".join(TRACED) and classes(page, "start") == [PROMPT]
    assert page.locator("#charts").is_hidden() and page.locator("#wipeout").count() == 0
