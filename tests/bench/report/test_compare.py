import base64
import gzip
import json
import re
from pathlib import Path
from typing import Any

import numpy as np
import pytest
import torch

from keepset.bench.report import compare
from keepset.bench.report.page import script_json, write
from keepset.errors import KeepsetError

EVIL = "<script>window.pwned=1</script>"
EVIL_RECIPE = "</script><img src=x onerror=window.pwned=1>(keep=0.5, note='%{x} &lt;b&gt; $1')"
TOKENS = [
    *(
        "Once",
        " upon",
        " a",
        "  time",
        "\n\n",
        "\t",
        "",
        "a\r\nb",
        "日本",
        "\u202e",
        "\u2028",
        "\x00",
        " eat",
        " a",
    ),
    *(
        " sandwich",
        ".",
        EVIL,
        "</script>",
        "<img src=x onerror=window.pwned=1>",
        "<!--",
        "-->",
        "]]>",
        "&lt;",
        '"',
        "$data",
    ),
]
LAYERS, HEADS = 3, 2


def row(recipe: str, method: str, kl: float, share: float) -> dict[str, Any]:
    return {
        "recipe": recipe,
        "method": method,
        "requested": share,
        "keep": share,
        "kv_bytes": int(share * 1_000_000),
        "kv_bytes_full": 1_000_000,
        "kl": kl,
        "nll_delta": kl / 2 - 0.01,
        "top1": 1 - kl / 4,
        "prefill_seconds": 1.5,
        "prefill_seconds_full": 1.4,
        "select_seconds": 0.01,
        "decode_tokens_per_second": 20.0,
        "needle_found": kl < 0.1,
        "answer": EVIL,
    }


def comparison() -> dict[str, Any]:
    return {
        "model": f"model {EVIL}",
        "tokens": len(TOKENS),
        "continuation_tokens": 8,
        "needle": {"question": f"What? {EVIL}", "answer": "eat a sandwich"},
        "full": {
            "kv_bytes": 1_000_000,
            "answer": EVIL,
            "needle_found": True,
            "prefill_seconds": 1.4,
            "decode_tokens_per_second": 18.0,
            "nll": 2.5,
        },
        "rows": [
            row("tova(keep=0.25)", "tova", 0.2, 0.25),
            {"recipe": f"broken({EVIL})", "method": "broken", "error": f"no such thing as {EVIL}"},
            row(EVIL_RECIPE, EVIL, 0.05, 0.5),
            row("tova(keep=0.1)", "tova", float("inf"), 0.1),
            row("tova(keep=0.5)", "tova", 0.03, 0.5),
            row("none()", "none", 0.0, 1.0),
        ],
    }


def masks() -> list[torch.Tensor | None]:
    generator = torch.Generator().manual_seed(0)
    shape = (LAYERS, HEADS, len(TOKENS))
    return [
        None if "error" in item else torch.rand(shape, generator=generator) < item["keep"]
        for item in comparison()["rows"]
    ]


def data_block(page: str) -> str:
    found = re.search(r'<script type="application/json" id="data">(.*?)</script>', page, re.DOTALL)
    assert found
    return found[1]


# ---- without a browser


def test_json_is_inert_and_reads_back() -> None:
    value = {"text": [*TOKENS, "\ud800", "\u2029"], "n": 1, "x": 0.5, "none": None}
    text = script_json(value)
    assert text.isascii()
    assert not set(text) & set("<>&\n")
    assert json.loads(text) == value


def test_json_has_words_for_what_is_not_finite() -> None:
    values = (float("nan"), float("inf"), -float("inf"), 1.0)
    assert json.loads(script_json({"a": values})) == {"a": ["NaN", "Infinity", "-Infinity", 1.0]}


@pytest.mark.parametrize("tokens", [1, 7, 8, 25])
def test_bits_come_back(tokens: int) -> None:
    mask = torch.rand(3, 2, tokens) < 0.5
    packed = gzip.decompress(base64.b64decode(compare.pack(mask)))
    bits = np.unpackbits(np.frombuffer(packed, np.uint8), count=mask.numel())
    assert torch.equal(torch.from_numpy(bits).bool().view_as(mask), mask)


def test_page_holds_user_text_only_in_its_data_block() -> None:
    page = compare.render(comparison(), TOKENS, masks())
    block = data_block(page)
    assert json.loads(block)["tokens"] == TOKENS
    assert "pwned" in block
    assert "pwned" not in page.replace(block, "")
    assert "default-src 'none'" in page
    script_policy = re.search(r"script-src ([^;]*);", page)
    assert script_policy and "unsafe" not in script_policy[1]


def test_page_needs_only_the_required_keys() -> None:
    rows = [{"recipe": "tova(keep=0.5)", "keep": 0.5, "kv_bytes": 1, "kv_bytes_full": 2, "kl": 0.1}]
    assert "<!doctype html>" in compare.render({"model": "m", "tokens": 1, "rows": rows}, ["a"], [None])


def test_masks_must_fit_the_rows_and_the_tokens() -> None:
    two = {"model": "m", "tokens": 2, "rows": [{"recipe": "a"}, {"recipe": "b"}]}
    mask = torch.ones(1, 1, 2, dtype=torch.bool)
    with pytest.raises(KeepsetError, match="each of 2 rows, not 1"):
        compare.render(two, ["a", "b"], [mask])
    with pytest.raises(KeepsetError, match="one common shape"):
        compare.render(two, ["a", "b", "c"], [mask, None])
    with pytest.raises(KeepsetError, match="one common shape"):
        compare.render(two, ["a", "b"], [mask, mask.repeat(2, 1, 1)])


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
    assert path.read_text() == "old"
    assert list(tmp_path.iterdir()) == [path]


# ---- in Chromium


@pytest.fixture
def page(load: Any) -> Any:
    page = load(compare.render(comparison(), TOKENS, masks()))
    page.wait_for_selector("#plot .point")
    return page


def shading(page: Any) -> tuple[list[float], list[float]]:
    """The share that each token's style names, and the opacity that the browser makes of it."""
    shares, colours = page.evaluate(
        """() => { const spans = [...document.querySelectorAll("#text span")];
            return [spans.map((span) => Number(span.style.getPropertyValue("--share"))),
                    spans.map((span) => getComputedStyle(span).backgroundColor)]; }"""
    )
    opacities = [float(found[1]) if (found := re.search(r"/ ([\d.]+)", colour)) else 1.0 for colour in colours]
    return shares, opacities


def recipes_shown(page: Any) -> list[str]:
    return page.locator("#rows .results th").evaluate_all(
        "cells => cells.map(c => c.querySelector('button, code').textContent)"
    )


def test_text_stays_text(page: Any) -> None:
    assert page.locator("#text span").evaluate_all("spans => spans.map(s => s.textContent)") == TOKENS
    assert page.locator("#text").evaluate("box => box.textContent") == "".join(TOKENS)
    assert page.locator("h1").text_content() == f"model {EVIL}"
    assert page.title() == f"keepset compare: model {EVIL}"
    assert page.locator("#text *:not(span), main img").count() == 0
    assert page.locator("#text").evaluate("box => getComputedStyle(box).whiteSpace") in (
        "pre-wrap",
        "preserve",
    )
    assert page.locator("#text .needle").all_text_contents() == [" eat", " a", " sandwich"]


def test_shading_follows_the_controls(page: Any) -> None:
    kept = masks()
    for choice, layer, head in (
        (0, "all", "all"),
        (2, "all", "all"),
        (2, "1", "all"),
        (4, "all", "1"),
        (4, "2", "0"),
    ):
        page.select_option("#recipe", str(choice))
        page.select_option("#layer", layer)
        page.select_option("#head", head)
        mask = kept[choice]
        assert mask is not None
        mask = mask if layer == "all" else mask[int(layer)][None]
        mask = mask if head == "all" else mask[:, int(head)][:, None]
        expected = mask.float().mean(dim=(0, 1))
        shares, opacities = shading(page)
        assert shares == pytest.approx(expected.tolist(), abs=1e-4)
        assert opacities == pytest.approx(expected.tolist(), abs=0.01)
        assert page.locator("#text .dropped").count() == int((expected == 0).sum())
        heads = mask.shape[0] * mask.shape[1]
        said = page.locator("#share").text_content()
        assert said.startswith(f"{100 * mask.float().mean():.1f} % kept: {int(mask.sum())} of {mask.numel()} entries")
        assert f"in {heads} head{'s' if heads > 1 else ''}" in said
        assert comparison()["rows"][choice]["recipe"] == page.locator("#rows tr[aria-current] th button").text_content()


def test_recipe_in_the_table_shows_what_it_kept(page: Any) -> None:
    page.locator("#rows .results button", has_text="none()").click()
    assert page.locator("#recipe").input_value() == "5"


def test_token_under_pointer_and_keys(page: Any) -> None:
    mask = masks()[0]
    assert mask is not None
    for control, choice in (("#recipe", "0"), ("#layer", "all"), ("#head", "all")):
        page.select_option(control, choice)
    index = TOKENS.index(EVIL)
    page.locator("#text span").nth(index).hover()
    count = int(mask[:, :, index].sum())
    share = f"kept by {count} of {LAYERS * HEADS} heads ({100 * count / (LAYERS * HEADS):.1f} %)"
    assert page.locator("#tip").text_content() == f"token {index} {json.dumps(EVIL)}{share}"
    page.mouse.move(0, 0)
    assert page.locator("#tip").is_hidden()
    page.locator("#text").focus()
    page.keyboard.press("ArrowRight")
    page.keyboard.press("ArrowRight")
    assert page.locator("#tip").text_content().startswith('token 1 " upon"')
    page.keyboard.press("Escape")
    assert page.locator("#tip").is_hidden()


def test_table_sorts_and_keeps_failures_last(page: Any) -> None:
    rows = comparison()["rows"]
    failure = rows[1]["recipe"]
    # The largest budget first, under each the best.
    assert recipes_shown(page) == [rows[i]["recipe"] for i in (5, 4, 2, 0, 3, 1)]
    header = page.locator("#rows thead th", has_text="KL")
    for direction, reverse in (("ascending", False), ("descending", True)):
        header.locator("button").click()
        ran = sorted((item for item in rows if "kl" in item), key=lambda item: item["kl"], reverse=reverse)
        assert recipes_shown(page) == [item["recipe"] for item in ran] + [failure]
        assert header.get_attribute("aria-sort") == direction
    page.locator("#rows thead th button", has_text="Recipe").press("Enter")
    assert recipes_shown(page)[-1] == failure
    assert page.locator("#rows thead th[aria-sort=ascending]").count() == 1


def test_table_shows_figures_failures_and_needles(page: Any) -> None:
    lines = page.locator("#rows .results tr")
    quarter = lines.nth(3).locator("td").all_text_contents()
    assert quarter[:6] == ["25.0 %", "0.25 MB", "25.0 %", "0.2000", "+0.0900", "95.0 %"]
    assert quarter[-2:] == ["✗ lost", EVIL]
    failed = page.locator("#rows td.failed")
    assert failed.all_text_contents() == [f"failed: no such thing as {EVIL}"]
    assert page.locator("#rows .reference td").all_text_contents()[-2:] == ["✓ found", EVIL]
    assert "Infinity" in lines.nth(4).text_content()


def test_metric_switches_the_plot(page: Any) -> None:
    def trace(name: str) -> Any:
        return page.evaluate("name => document.getElementById('plot').data.find(t => t.name === name)", name)

    def axis() -> str:
        return page.evaluate("document.getElementById('plot').layout.yaxis.type")

    assert trace("tova")["x"] == [0.25, 0.5]
    assert trace("tova")["y"] == [0.2, 0.03]
    assert axis() == "log"
    assert 0 < trace("none")["y"][0] < 0.03
    assert "Hollow markers" in page.locator("#plot-note").text_content()
    page.get_by_label("Top-1").check(force=True)
    assert trace("tova")["y"] == pytest.approx([0.95, 0.9925])
    assert axis() == "linear"
    page.get_by_label("NLL delta").check(force=True)
    assert trace("none")["y"] == pytest.approx([-0.01])
    page.locator("#methods button", has_text="tova").click()
    assert trace("tova")["visible"] is False
    assert page.locator("#methods button[aria-pressed=false]").text_content().endswith("tova")


def test_drift_has_a_line_per_recipe(load: Any) -> None:
    compared = comparison()
    compared |= {"drift_tokens": 256, "continuation_tokens": 600}
    ran = [item for item in compared["rows"] if "kl" in item]
    for i, item in enumerate(ran):
        item["kl_drift"], item["kv_bytes_peak"] = [0.1 * (i + 1), 0.0, float("nan")], 2_000_000
    page = load(compare.render(compared, TOKENS, masks()))
    page.wait_for_selector("#drift-plot .point")
    lines = page.evaluate("document.getElementById('drift-plot').data.map(t => [t.x, t.y, t.visible, t.line.dash])")
    assert len(lines) == len(ran)
    assert [dash for *_, dash in lines if dash != "solid"] == ["dash", "dot"]  # The three budgets of tova.
    for i, (x, y, visible, _) in enumerate(lines):
        assert x == [256, 512, 600] and visible is True
        assert y == [pytest.approx(0.1 * (i + 1)), pytest.approx(0.025), None]
    assert "of every 256 tokens" in page.locator("#drift-note").text_content()
    assert "600 tokens follows a prompt" in page.locator("#lead").text_content()
    page.locator("#methods button", has_text="tova").click()
    shown = page.evaluate("document.getElementById('drift-plot').data.map(t => t.visible)")
    assert shown.count(False) == 3
    assert "2.0 MB" in page.locator("#rows .results tr").first.text_content()


def test_without_decoding_there_is_no_drift(page: Any) -> None:
    assert page.locator("#drift").is_hidden()


def test_plot_labels_are_text(page: Any) -> None:
    index = page.evaluate("document.getElementById('plot').data.findIndex(t => t.hovertext[0].includes('onerror'))")
    page.locator("#plot .trace").nth(index).locator(".point").first.hover(force=True)
    hover = page.locator("#plot .hovertext")
    hover.wait_for()
    # Plotly draws spaces as non-breaking ones and each line on its own.
    shown = re.sub(r"\s", "", hover.text_content())
    assert re.sub(r"\s", "", EVIL_RECIPE) in shown
    assert "KL0.0500nats50.0%offull" in shown
    assert page.locator("#methods button").nth(1).text_content() == f"■{EVIL}"


@pytest.mark.parametrize("width", [400, 1280])
def test_nothing_overflows_the_page(load: Any, width: int) -> None:
    page = load(compare.render(comparison(), TOKENS, masks()), viewport={"width": width, "height": 800})
    page.wait_for_selector("#plot .point")
    assert page.evaluate("document.documentElement.scrollWidth") <= width


def test_policy_stops_foreign_scripts(browser: Any, tmp_path: Path) -> None:
    path = tmp_path / "report.html"
    write(path, compare.render(comparison(), TOKENS, masks()))
    page = browser.new_page()
    page.goto(path.as_uri())
    page.evaluate(
        """() => { const script = document.createElement("script");
            script.textContent = "window.pwned = 1"; document.body.append(script); }"""
    )
    assert page.evaluate("window.pwned") is None
    page.close()


def test_sparse_comparisons_load(load: Any) -> None:
    bare = {"recipe": "tova(keep=0.5)", "keep": 0.5, "kv_bytes": 1, "kv_bytes_full": 2, "kl": 0.1}
    page = load(compare.render({"model": "m", "tokens": 2, "rows": [bare]}, ["a", "b"], [torch.ones(1, 1, 2)]))
    page.wait_for_selector("#plot .point")
    assert page.locator("#rows thead").text_content().count("Fact") == 0
    broken = {"recipe": "tova(", "error": "it has no end"}
    page = load(compare.render({"model": "m", "tokens": 2, "needle": None, "rows": [broken]}, ["a", "b"], [None]))
    assert page.locator("#rows td.failed").text_content() == "failed: it has no end"
    assert page.locator("#recipe").is_disabled()
    assert page.locator("#text").text_content() == "ab"


def test_long_text(load: Any) -> None:
    tokens = [f" word{i}" if i % 40 else "\n\n" for i in range(2048)]
    kept = [torch.rand(30, 3, 2048) < (0.5, 0.25, 0.1)[i % 3] for i in range(30)]
    rows = [row(f"m{i % 10}(keep={i})", f"m{i % 10}", 1 / (i + 1), (i + 1) / 31) for i in range(30)]
    content = compare.render({"model": "m", "tokens": 2048, "rows": rows}, tokens, kept)
    assert len(content.encode()) < 1_500_000
    page = load(content)
    assert page.locator("#text").text_content() == "".join(tokens)
    page.select_option("#recipe", "20")
    expected = kept[20].float().mean(dim=(0, 1)).tolist()
    assert shading(page)[0] == pytest.approx(expected, abs=1e-4)


def test_characters_of_several_tokens_are_drawn_whole(load: Any) -> None:
    """A token that goes on with a character is None; a family is one character of several, joined."""
    tokens = ["a", " 日", None, "👩", "\u200d", None, "👧", "क", "\u094d"]
    kept = torch.zeros(1, 2, len(tokens), dtype=torch.bool)
    kept[:, :, 1] = True
    kept[:, 0, 2] = True
    bare = {"recipe": "tova(keep=0.5)", "keep": 0.5, "kv_bytes": 1, "kv_bytes_full": 2, "kl": 0.1}
    page = load(compare.render({"model": "m", "tokens": len(tokens), "rows": [bare]}, tokens, [kept]))
    assert page.locator("#text span").all_text_contents() == ["a", " 日", "👩\u200d👧", "क\u094d"]
    assert shading(page)[0] == [0, 0.75, 0, 0]
    page.locator("#text span").nth(1).hover()
    said = 'tokens 1 to 2 " 日"kept by 75.0 % of 2 heads, on the mean of its tokens'
    assert page.locator("#tip").text_content() == said
