"""Recipes where none is named: by whether the model has networks, and how it gets them if it has none."""

import json
import re
from collections.abc import Iterator
from dataclasses import replace
from pathlib import Path
from typing import Any

import pytest
import torch

import keepset
from keepset import defaults
from keepset.core import statistics
from keepset.core.statistics import save
from keepset.defaults import ANSWERED_AT_ONCE, ASKED_LATER, NETWORKS, default_recipe
from keepset.hf import cache
from keepset.lab.cli import checks
from keepset.lab.embedded import embedded_folder
from keepset.recipe import Recipe
from tests.lab.cli.conftest import Run
from tests.methods.naive import Shape, random_statistics

TAKEN = "No recipe is named, so the default is taken: "
ADVICE = (
    r"here are no networks for SmolLM2-135M-Instruct: `keepset calibrate --model SmolLM2-135M-Instruct --teacher "
    r"reread --teacher prompt_queries --out stats\.safetensors` makes them, and "
    r"distilled\(stats='stats\.safetensors'\) names them\."
)
COMMANDS = {
    "generate": ("generate", "Go on.", "--text", "text", "--output-tokens", "2"),
    "build": ("context", "build", "--text", "text", "--out", "saved"),
}


@pytest.fixture
def networks(tiny: tuple[Any, Any], tmp_path_factory: pytest.TempPathFactory) -> Iterator[None]:
    """The tiny model is offered statistics with networks."""
    measured = random_statistics(Shape((1,), 2, 2, 8, 8), (0, 1))
    path, name = tmp_path_factory.mktemp("networks") / "stats.safetensors", tiny[0].config.name_or_path
    save(replace(measured, provenance={"model": {"name": name, "layers": [0, 1]}}), path)
    statistics.offer(name, lambda: path)
    yield
    del statistics._offers[name]


def used(run: Run, command: str) -> tuple[str, str]:
    """The recipe that a command names, and what else it says on standard error."""
    done = run(*COMMANDS[command])
    assert done.code == 0
    if command == "generate":
        match = re.search(r"^(.*): kept [\d.]+% of \d+ prompt tokens; .*\n", done.err, re.MULTILINE)
        assert match
        return match[1], done.err.replace(match[0], "")
    match = re.match(r"saved: \d+ tokens under (.*?\)) in ", done.out)
    assert match
    return match[1], done.err


@pytest.mark.usefixtures("text", "networks")
def test_a_model_with_networks_uses_them(run: Run) -> None:
    said = f"{TAKEN}{NETWORKS}, because there are networks for SmolLM2-135M-Instruct.\n"
    assert all(used(run, command) == (NETWORKS, said) for command in COMMANDS)


@pytest.mark.parametrize(("command", "recipe"), [("generate", ANSWERED_AT_ONCE), ("build", ASKED_LATER)])
def test_a_model_without_is_told_how_to_get_them(run: Run, text: Path, tiny: Any, command: str, recipe: str) -> None:
    named, said = used(run, command)
    assert named == recipe and re.fullmatch(f"{re.escape(TAKEN + recipe)}, because t{ADVICE}\n", said)


@pytest.mark.parametrize(
    ("fixture", "recipe", "number"), [("networks", NETWORKS, ""), ("tiny", ANSWERED_AT_ONCE, "no ")]
)
def test_a_cache_takes_the_same_and_says_so_once(
    fixture: str, recipe: str, number: str, tiny: Any, request: pytest.FixtureRequest, caplog: pytest.LogCaptureFixture
) -> None:
    request.getfixturevalue(fixture)
    cache._say_once.cache_clear()
    assert [str(keepset.Cache(tiny[0]).recipe) for _ in range(2)] == [recipe] * 2
    with pytest.raises(keepset.KeepsetError, match=r"keepset\.Cache takes a model"):
        keepset.Cache("a/model")  # type: ignore[arg-type]
    (said,) = caplog.messages
    assert said.startswith(f"keepset: {TAKEN}{recipe}, because there are {number}networks for")


@pytest.mark.parametrize("padding", [0, 30])
def test_the_default_leaves_short_prompts_whole_each_by_itself(tiny: tuple[Any, Any], padding: int) -> None:
    model, held = tiny[0], keepset.Cache(tiny[0], ANSWERED_AT_ONCE)
    lengths = [256, 255 - padding]
    mask = torch.arange(256) >= 256 - torch.tensor(lengths)[:, None]
    ids = torch.randint(3, 500, (2, 256), generator=torch.Generator().manual_seed(0))
    with torch.no_grad():
        model(ids, attention_mask=mask.long(), past_key_values=held)
    counts = held.keep_set.counts  # [layers, requests, heads]
    size = model.config.hidden_size // model.config.num_attention_heads
    share = 0.25 * 2 * 2 * size / (2 * size + 4 + 4)
    assert int(counts[:, 0].sum()) == int(share * 256 * counts[:, 0].numel())
    assert (counts[:, 1] == lengths[1]).all()


@pytest.mark.few(1)
@pytest.mark.parametrize(("fixture", "recipes"), [("networks", [NETWORKS]), ("tiny", [ASKED_LATER, ANSWERED_AT_ONCE])])
def test_comparisons_have_the_defaults_among_the_others(
    run: Run, text: Path, fixture: str, recipes: list[str], request: Any, monkeypatch: pytest.MonkeyPatch
) -> None:
    request.getfixturevalue(fixture)
    monkeypatch.setattr(defaults, "COMPARED", ("random",))
    monkeypatch.setattr(checks, "_FEW", 1)  # of small budgets nothing is said
    words = ("--prompt-tokens", "60", "--continuation", "4", "--budgets", "0.25,20", "--json", "-")
    done = run("compare", "--text", "text", *words)
    rows = [row["recipe"] for row in json.loads(done.out)["rows"]]
    methods = [Recipe.of(Recipe.parse(recipe).written) for recipe in recipes]
    pairs = [(str(method.with_budget(bytes=0.25)), str(method.with_budget(keep=20))) for method in methods]
    assert rows == [*(each for pair in pairs for each in pair), "random(bytes=0.25)", "random(keep=20)"]
    assert bool(done.err) == (fixture == "tiny")


def test_statistics_without_networks_are_none(networks: None, tiny: Any, tmp_path: Path) -> None:
    name, path = tiny[0].config.name_or_path, tmp_path / "stats.safetensors"
    measured = statistics.load("", name)
    assert defaults.has_networks(name) and not defaults.has_networks("another")
    save(replace(measured, predictors={}), path)
    statistics.offer(name, lambda: path)
    assert str(default_recipe(name, name, ASKED_LATER).recipe) == ASKED_LATER


@pytest.mark.full
def test_the_embedded_model_has_networks(embedded: Any) -> None:
    assert defaults.has_networks(str(embedded_folder()))


@pytest.mark.parametrize("text", [NETWORKS, ANSWERED_AT_ONCE, ASKED_LATER])
def test_each_is_a_quarter_of_the_bytes_and_leaves_short_prompts_whole(text: str) -> None:
    recipe = Recipe.parse(text)
    assert (recipe.budget.bytes, recipe.budget.short, str(recipe)) == (0.25, defaults.SHORT, text)
