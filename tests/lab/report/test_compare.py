"""The page of `keepset compare`: its data, and in Chromium against the records and masks that it was made of."""

import dataclasses
import json
import re
from typing import Any

import pytest
import torch

from keepset.lab.record import Record
from keepset.lab.report import compare
from tests.lab.report.pages import EVIL, HEADS, LAYERS, TOKENS, chart, comparison, data_of, masks, record, rows, traces

MASKS = masks(comparison().rows)
NAMES = [row.recipe for row in comparison().rows]


def test_table_shows_figures_failures_and_needles() -> None:
    _, full, *others = rows(compare.render(comparison(), TOKENS))
    # The full cache, then the largest budget first, under each the best; what failed is last.
    assert [full[0], *(row[0] for row in others)] == ["full cache", *(NAMES[i] for i in (5, 4, 2, 0, 3, 1))]
    assert full[-2:] == ["yes", EVIL] and "inf" in others[4]
    assert others[3][1:7] == ["25.0%", "0.1", "25.0%", "0.2", "0.200", "+0.0900"] and others[3][-2:] == ["no", EVIL]
    assert others[5][1:] == [f"no such thing as {EVIL}"]
    content = compare.render(comparison(Record("tova(", "tova(", error="it has no end")), TOKENS)
    assert rows(content)[-1] == ["tova(", "it has no end"]
    assert not any("plots" in section for section in data_of(content)["sections"])


def test_drift_has_a_line_per_recipe() -> None:
    kls = {"tova(keep=0.5)": 0.5, "tova(keep=0.25)": 0.25, "tova(keep=0.1)": 0.1, "knorm(keep=0.5)": 0.4}
    drifting = [record(name, name.split("(")[0], kl, kl, kl_drift=[kl, 0.0, float("nan")]) for name, kl in kls.items()]
    content = compare.render(
        dataclasses.replace(comparison(*drifting), drift_tokens=256, continuation_tokens=600), TOKENS
    )
    drawn = chart(content, "drift")
    # Budgets of one method differ in their dashes.
    assert [line["line"]["dash"] for line in drawn] == ["solid", "dash", "dot", "solid"]
    for line, kl in zip(drawn, kls.values(), strict=True):
        assert line["x"] == [256, 512, 600] and line["y"] == [kl, pytest.approx(0.025), None]
    assert "600 tokens follows a prompt" in data_of(content)["lead"]


# --- in a browser


@pytest.fixture
def page(load: Any) -> Any:
    return load(compare.render(comparison(), TOKENS))


def mean_kept(number: int) -> list[float]:
    mask = MASKS[number]
    assert mask is not None
    return mask.float().mean(dim=(0, 1)).tolist()


def shading(page: Any, of: str = "#text span") -> tuple[list[float], list[float]]:
    """The share that each token's style names, and the opacity that the browser makes of it."""
    shares, colours = page.locator(of).evaluate_all(
        """all => [all.map((span) => Number(span.style.getPropertyValue("--share"))),
                   all.map((span) => getComputedStyle(span).backgroundColor)]"""
    )
    opacities = [float(found[1]) if (found := re.search(r"/ ([\d.]+)", colour)) else 1.0 for colour in colours]
    return shares, opacities


def test_shading_follows_the_controls(page: Any) -> None:
    assert page.locator("#text span").all_text_contents() == TOKENS
    assert page.locator("#text").evaluate("box => getComputedStyle(box).whiteSpace") in ("pre-wrap", "preserve")
    assert page.locator("#text .needle").all_text_contents() == [" eat", " a", " sandwich"]
    assert page.locator("#recipe").input_value() == "4"  # the smallest that answers, and keeps not all
    for choice, layer, head in ((0, "all", "all"), (2, "1", "all"), (4, "all", "1"), (4, "2", "0")):
        for control, value in (("recipe", str(choice)), ("layer", layer), ("head", head)):
            page.select_option(f"#{control}", value)
        mask = MASKS[choice]
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
        assert said.startswith(f"{100 * mask.float().mean():.1f}% kept: {int(mask.sum())} of {mask.numel()} entries")
        assert f"in {heads} head{'s' if heads > 1 else ''}" in said
        assert page.locator("#rows tr[aria-current] th button").text_content() == NAMES[choice]
    page.locator("#rows button", has_text="none()").click()
    assert page.locator("#recipe").input_value() == "5"


def test_an_image_is_a_grid_of_its_patches(load: Any) -> None:
    """Text of the model stays text beside it, and each patch is shaded by its own token."""
    page = load(compare.render(dataclasses.replace(comparison(), grids=[(1, 2, 3)]), TOKENS))
    page.select_option("#recipe", "2")
    image = page.locator("#text > .image")
    assert image.count() == 1 and image.locator(".patch").count() == 6 and not image.text_content()
    assert page.locator("#text > span:not(.image)").all_text_contents() == [TOKENS[0], *TOKENS[7:]]
    boxes = [image.locator(".patch").nth(number).bounding_box() for number in range(6)]
    assert len({round(box["x"]) for box in boxes}) == 3 and len({round(box["y"]) for box in boxes}) == 2
    assert shading(page, "#text .patch")[0] == pytest.approx(mean_kept(2)[1:7], abs=1e-4)
    image.locator(".patch").nth(4).hover()
    said = page.locator("#tip").text_content()
    assert said.startswith("token 5 ") and "row 2, column 2 of image 1: kept by" in said


def test_pointer_and_keys_tell_of_tokens_and_sort_the_table(page: Any) -> None:
    page.select_option("#recipe", "0")
    index = TOKENS.index(EVIL)
    page.locator("#text span").nth(index).hover()
    count = round(mean_kept(0)[index] * LAYERS * HEADS)
    share = f"kept by {count} of {LAYERS * HEADS} heads ({100 * count / (LAYERS * HEADS):.1f}%)"
    assert page.locator("#tip").text_content() == f"token {index} {json.dumps(EVIL)}{share}"
    page.mouse.move(0, 0)
    assert page.locator("#tip").is_hidden()
    page.locator("#text").focus()
    page.keyboard.press("ArrowRight")
    page.keyboard.press("ArrowRight")
    assert page.locator("#tip").text_content().startswith('token 1 " upon"')
    page.keyboard.press("Escape")
    assert page.locator("#tip").is_hidden()
    header = page.locator("#rows thead th", has_text="KL")
    for direction, reverse in (("ascending", False), ("descending", True)):
        header.locator("button").click()
        ran = [row for row in comparison().rows if row.figures]
        ran.sort(key=lambda row: row.figures["kl"], reverse=reverse)
        shown = page.locator("#rows tbody th").locator("code, button").all_text_contents()
        assert shown == ["full cache", *(row.recipe for row in ran), NAMES[1]]
        assert header.get_attribute("aria-sort") == direction
    page.locator("#rows thead th button", has_text="recipe").press("Enter")
    assert page.locator("#rows thead th[aria-sort=ascending]").count() == 1


def test_metric_switches_the_plot_whose_labels_are_text(page: Any) -> None:
    def trace(name: str) -> Any:
        return next(each for each in traces(page, "plot") if each["name"] == name)

    def axis() -> str:
        return page.evaluate("document.getElementById('plot').layout.yaxis.type")

    index = next(i for i, each in enumerate(traces(page, "plot")) if "onerror" in each["hovertext"][0])
    page.locator("#plot .trace").nth(index).locator(".point").first.hover(force=True)
    hover = page.locator("#plot .hovertext")
    hover.wait_for()
    # Plotly draws spaces as non-breaking ones and each line on its own.
    shown = re.sub(r"\s", "", hover.text_content())
    assert re.sub(r"\s", "", f"{EVIL}(keep=0.5)") in shown and "KL0.05nats50.0%ofafull16-bitcache" in shown
    assert page.locator(".methods button").nth(1).text_content() == EVIL
    assert trace("tova")["x"] == [0.1, 0.25, 0.5] and trace("tova")["y"] == [None, 0.2, 0.03]
    assert axis() == "log" and 0 < trace("none")["y"][0] < 0.03
    assert "Hollow markers" in page.locator("main").text_content()
    page.get_by_label("Top-1").check(force=True)
    assert trace("tova")["y"][1:] == pytest.approx([0.95, 0.9925]) and axis() == "linear"
    page.get_by_label("NLL delta").check(force=True)
    assert trace("none")["y"] == pytest.approx([-0.01])
    page.locator(".methods button", has_text="tova").click()
    assert trace("tova")["visible"] is False
    page.get_by_label("KL").check(force=True)  # what was hidden stays so
    assert trace("tova")["visible"] is False
    assert page.locator(".methods button[aria-pressed=false]").text_content().endswith("tova")
    assert page.locator("#drift").count() == 0  # nothing was decoded


def test_characters_of_several_tokens_are_drawn_whole(load: Any) -> None:
    """A token that goes on with a character is None; a family is one character of several, joined."""
    tokens = ["a", " 日", None, "👩", "\u200d", None, "👧", "क", "\u094d"]
    kept = torch.zeros(1, 2, len(tokens), dtype=torch.bool)
    kept[:, :, 1] = True
    kept[:, 0, 2] = True
    page = load(
        compare.render(dataclasses.replace(comparison(record("tova(keep=0.5)", "tova", 0.1, 0.5)), kept=[kept]), tokens)
    )
    assert page.locator("#text span").all_text_contents() == ["a", " 日", "👩\u200d👧", "क\u094d"]
    assert shading(page)[0] == [0, 0.75, 0, 0]
    page.locator("#text span").nth(1).hover()
    said = 'tokens 1 to 2 " 日"kept by 75.0% of 2 heads, on the mean of its tokens'
    assert page.locator("#tip").text_content() == said
