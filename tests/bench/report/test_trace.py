"""The page of `keepset trace`, in Chromium, against the sets that it was made of."""

from __future__ import annotations

import json
import re
from typing import Any

import pytest
import torch

from keepset import KeepSet
from keepset.bench.analysis.trace import HeadSegments, Trace, TraceEvent
from keepset.bench.report.trace import render
from keepset.core.keep_set import LayerKeepSet

EVIL = "</script><img src=x onerror=window.pwned=1><b>&lt; %{x} $data"
TOKENS = ["Once", EVIL, "\n", "", " $data", *(f" word{i}" for i in range(25))]
LENGTHS, PROMPT, LAYERS, HEADS = [12, 20, 27], 12, [0, 7], 3
Kept = list[torch.Tensor]


def history(seed: int) -> Kept:
    """Three events; what is gone does not come back."""
    draw = torch.Generator().manual_seed(seed)
    held, kept = torch.ones(len(LAYERS), HEADS, 0, dtype=torch.bool), []
    for length in LENGTHS:
        new = torch.ones(len(LAYERS), HEADS, length - held.shape[-1], dtype=torch.bool)
        held = torch.cat([held, new], -1) & (torch.rand(len(LAYERS), HEADS, length, generator=draw) < 0.6)
        kept.append(held)
    return kept


def entries(kept: Kept, event: int, layer: int, head: int) -> list[int]:
    """Positions that a head held before the event."""
    if event == 0:
        return list(range(LENGTHS[0]))
    before = kept[event - 1][layer, head].nonzero()[:, 0].tolist()
    return before + list(range(LENGTHS[event - 1], LENGTHS[event]))


def traced(kept: Kept, telling: bool) -> Trace:
    def head(event: int, layer: int, index: int) -> HeadSegments:
        size = len(entries(kept, event, layer, index))
        return HeadSegments(torch.rand(size) + 0.01, torch.tensor([3, size]), torch.tensor([2, 4]))

    def event(number: int, length: int, masks: torch.Tensor) -> TraceEvent:
        positions = torch.arange(length).expand(1, HEADS, length)
        parts = [
            LayerKeepSet.from_mask(layer, mask[None], positions, 8) for layer, mask in zip(LAYERS, masks, strict=True)
        ]
        segments = {layer: [head(number, row, index) for index in range(HEADS)] for row, layer in enumerate(LAYERS)}
        return TraceEvent(KeepSet(parts), torch.tensor([length]), 60, segments if telling else {})

    events = [event(number, length, masks) for number, (length, masks) in enumerate(zip(LENGTHS, kept, strict=False))]
    return Trace("recipe", torch.arange(len(TOKENS)), PROMPT, events, None)


def run(recipe: str) -> dict[str, Any]:
    means = {"wipeout": 0.25, "iou": 0.5, "middle": 0.125, "longest_gap": 4.0}
    rows = [{"length": n, "entries": 60, "kept": 30, **means, "iou": 0.5 if i else None} for i, n in enumerate(LENGTHS)]
    return {
        "recipe": recipe,
        "prompt_tokens": PROMPT,
        "tokens": len(TOKENS),
        "region": 16,
        "repetition": 0.1,
        "tokens_per_second": None,
        "layers": [0, 3, 7],
        "kv_heads": HEADS,
        "events": rows,
        "mean": means,
        "by_depth": {"iou": {"early": 0.4, "middle": 0.5, "late": 0.6}},
        "segments": {"count": 2.0, "length": 6.0},
        "text": EVIL,
    }


HISTORIES = [history(0), history(1)]


def page_of(*recipes: str) -> str:
    traces = [traced(HISTORIES[i], telling=i == 0) for i in range(len(recipes))]
    result = {"model": EVIL, "forced": False, "runs": [run(recipe) for recipe in recipes]}
    return render(result, traces, [TOKENS] * len(traces), LAYERS)


def test_text_is_only_in_the_data_block() -> None:
    page = page_of(EVIL)
    block = re.search(r'<script type="application/json" id="data">(.*?)</script>', page, re.DOTALL)
    assert block
    data = json.loads(block[1])
    assert data["drawn"][0]["tokens"] == TOKENS and data["trace"]["model"] == EVIL
    about = re.search(r'<script type="application/json" id="about">(.*?)</script>', page, re.DOTALL)
    assert about and EVIL in json.loads(about[1])["conclusion"]
    assert "pwned" in block[1] and "pwned" not in page.replace(block[1], "").replace(about[1], "")
    policy = re.search(r"script-src ([^;]*);", page)
    assert policy and "unsafe" not in policy[1]


def classes(page: Any, name: str) -> list[int]:
    found = page.locator(f"#text .{name}").evaluate_all("spans => spans.map(s => Number(s.dataset.piece))")
    return sorted(found)


def shaded(page: Any) -> list[int]:
    shares = page.evaluate(
        "[...document.querySelectorAll('#text span')].map(s => Number(s.style.getPropertyValue('--share')))"
    )
    return [t for t, share in enumerate(shares) if share]


def test_slider_layer_and_head_choose_what_is_shown(load: Any) -> None:
    page = load(page_of("ams(tova)", "tova"))
    page.wait_for_selector("#maps .heatmaplayer")
    assert page.locator("#layer option").all_text_contents() == ["0", "7"]
    assert page.locator("#event").input_value() == "2"
    for event, layer, head, chosen in ((2, 0, 0, 0), (0, 1, 2, 0), (1, 1, 0, 1)):
        page.locator("#event").fill(str(event))
        page.select_option("#layer", str(layer))
        page.select_option("#head", str(head))
        page.locator("#run input").nth(chosen).check(force=True)
        kept = HISTORIES[chosen]
        stays = kept[event][layer, head].nonzero()[:, 0].tolist()
        held = entries(kept, event, layer, head)
        now = [t for t in held if t not in stays]
        gone = [t for t in range(LENGTHS[event]) if t not in held]
        assert shaded(page) == stays
        assert classes(page, "now") == now
        assert classes(page, "dropped") == gone
        assert classes(page, "ahead") == list(range(LENGTHS[event], len(TOKENS)))
        assert page.locator("#share").text_content() == (
            f"Event {event + 1}, at {LENGTHS[event]} tokens: {len(stays)} kept, {len(now)} dropped, "
            f"{len(gone)} dropped before."
        )
        for i, each in enumerate(HISTORIES):
            plot, chart = (page.locator(f"{box} figure > div").nth(i) for box in ("#caches", "#maps"))
            ticks = plot.evaluate("box => Array.from(box.data[0].x)")
            assert [entries(each, event, layer, head)[x] for x in ticks] == each[event][layer, head].nonzero()[
                :, 0
            ].tolist()
            rows = chart.evaluate("box => box.data[0].z.map(row => Array.from(row))")
            for number, row in enumerate(rows):
                had = entries(each, number, layer, head)
                expected = [2 - 2 * (t in had) for t in range(LENGTHS[number])]
                for t in had:
                    expected[t] = 0 if each[number][layer, head, t] else 1
                assert row == expected


def test_segments_are_bands_with_quotas(load: Any) -> None:
    page = load(page_of("ams(tova)", "tova"))
    page.wait_for_selector("#caches .scatterlayer")
    plots = page.locator("#caches figure > div")
    size = len(entries(HISTORIES[0], 2, 0, 0))
    ticks, mass, quotas = plots.first.evaluate("box => box.data.map(({x, y, text}) => ({x: [...x], y: [...y], text}))")
    assert mass["x"] == list(range(size)) and min(mass["y"]) > 0
    assert quotas["x"] == [1, (3 + size - 1) / 2] and quotas["text"] == ["2", "4"]
    shapes = plots.first.evaluate("box => box.layout.shapes.map(({type, x0, x1}) => [type, x0, x1])")
    assert shapes == [["rect", 2.5, size - 0.5], ["line", 2.5, 2.5]]
    assert plots.nth(1).evaluate("box => [box.data.length, box.layout.shapes.length]") == [1, 0]
    caption = page.locator("#caches figcaption").first.text_content()
    assert caption == f"ams(tova)at 27 tokens: keeps {len(ticks['x'])} of {size} entries in 2 segments"


def test_keys_move_through_events_and_tokens(load: Any) -> None:
    page = load(page_of("ams(tova)"))
    page.wait_for_selector("#caches .scatterlayer")
    page.locator("#event").focus()
    page.keyboard.press("ArrowLeft")
    assert page.locator("#event-label").text_content() == "Event 2 of 3"
    assert page.locator("#share").text_content().startswith("Event 2, at 20 tokens")
    assert page.locator("#run").is_hidden()
    page.locator("#text").focus()
    page.keyboard.press("ArrowRight")
    page.keyboard.press("ArrowRight")
    assert page.locator("#tip").text_content().startswith(f"token 1 {json.dumps(EVIL)}")
    page.keyboard.press("Escape")
    assert page.locator("#tip").is_hidden()


def test_text_stays_text(load: Any) -> None:
    page = load(page_of(EVIL, "tova"))
    page.wait_for_selector("#caches .scatterlayer")
    assert page.locator("h1").text_content() == EVIL
    assert page.locator("#rows thead th").nth(1).text_content() == EVIL
    assert page.locator("#text").text_content() == "".join(TOKENS)
    assert page.locator("#run label").first.text_content() == EVIL
    assert page.locator("main img, main b").count() == 0
    assert classes(page, "start") == [PROMPT]


def test_figures_and_curves(load: Any) -> None:
    page = load(page_of("ams(tova)", "tova"))
    page.wait_for_selector("#longest_gap .point")
    rows = {
        cells[0]: cells[1:]
        for cells in page.locator("#rows tbody tr").evaluate_all(
            "rows => rows.map(row => [...row.children].map(cell => cell.textContent))"
        )
    }
    assert rows["Regions wiped out"] == ["25.0 %"] * 2
    assert rows["IoU, late layers"] == ["0.600"] * 2
    assert rows["Longest gap, tokens"] == ["4.0"] * 2
    assert "Tokens per second" not in rows
    for name, x in (("wipeout", LENGTHS), ("iou", LENGTHS[1:])):
        assert page.evaluate("name => document.getElementById(name).data.map(({x}) => x)", name) == [x, x]


@pytest.mark.parametrize("width", [400, 1280])
def test_nothing_overflows_the_page(load: Any, width: int) -> None:
    page = load(page_of("ams(tova, keep=256, every=128)", "tova"), viewport={"width": width, "height": 800})
    page.wait_for_selector("#maps .heatmaplayer")
    assert page.evaluate("document.documentElement.scrollWidth") <= width


def test_a_text_in_which_nothing_was_compressed(load: Any) -> None:
    bare = {**run("tova"), "events": [], "mean": {}, "by_depth": {}, "segments": None, "layers": [], "kv_heads": 0}
    page = load(render({"model": "m", "forced": False, "runs": [bare]}, [traced([], telling=False)], [TOKENS], LAYERS))
    assert page.locator("#share").text_content() == "Nothing was compressed."
    assert page.locator("#text").text_content() == "".join(TOKENS)
    assert page.locator("#events").is_hidden() and page.locator("#curves").is_hidden()
