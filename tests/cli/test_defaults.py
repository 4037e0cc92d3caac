"""Recipes where none is named: by whether the model has networks, and how it gets them if it has none."""

from __future__ import annotations

import json
import re
from collections.abc import Iterator
from dataclasses import replace
from pathlib import Path
from typing import Any

import pytest

from keepset import defaults, models
from keepset.core import statistics
from keepset.core.statistics import save
from keepset.defaults import ANSWERED_AT_ONCE, ASKED_LATER, NETWORKS, default_recipe
from keepset.recipe import Recipe
from tests.cli.conftest import Run
from tests.methods.naive import Shape, random_statistics

ADVICE = (
    r"There are no networks for SmolLM2-135M-Instruct, .*: `keepset calibrate --model SmolLM2-135M-Instruct --teacher "
    r"reread --out stats\.safetensors` makes them, and distilled\(stats='stats\.safetensors'\) names them\."
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
    match = re.match(r"saved: \d+ tokens under (.*) in ", done.out)
    assert match
    return match[1], done.err


@pytest.mark.parametrize("command", COMMANDS)
def test_a_model_with_networks_uses_them(run: Run, text: Path, networks: None, command: str) -> None:
    assert used(run, command) == (NETWORKS, "")


@pytest.mark.parametrize(("command", "recipe"), [("generate", ANSWERED_AT_ONCE), ("build", ASKED_LATER)])
def test_a_model_without_is_told_how_to_get_them(run: Run, text: Path, tiny: Any, command: str, recipe: str) -> None:
    named, said = used(run, command)
    assert named == recipe and re.fullmatch(ADVICE + "\n", said)


@pytest.mark.parametrize(("fixture", "recipes"), [("networks", [NETWORKS]), ("tiny", [ASKED_LATER, ANSWERED_AT_ONCE])])
def test_comparisons_have_the_defaults_among_the_others(
    run: Run,
    text: Path,
    fixture: str,
    recipes: list[str],
    request: pytest.FixtureRequest,
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    request.getfixturevalue(fixture)
    monkeypatch.setattr(defaults, "COMPARED", ("random",))
    words = ("--prompt-tokens", "60", "--continuation", "4", "--budgets", "0.25,20", "--json", "-")
    done = run("compare", "--text", "text", *words)
    rows = [row["recipe"] for row in json.loads(done.out)["rows"]]
    pairs = [(recipe, str(Recipe.parse(recipe).without_budget().with_keep(20))) for recipe in recipes]
    assert rows == [*(each for pair in pairs for each in pair), "random(bytes=0.25)", "random(keep=20)"]
    assert bool(done.err) == (fixture == "tiny")


def test_statistics_without_networks_are_none(networks: None, tiny: Any, tmp_path: Path) -> None:
    name, path = tiny[0].config.name_or_path, tmp_path / "stats.safetensors"
    measured = statistics.load("", name)
    assert default_recipe(name, ASKED_LATER) == NETWORKS and default_recipe("another", ASKED_LATER) == ASKED_LATER
    save(replace(measured, predictors={}), path)
    statistics.offer(name, lambda: path)
    assert default_recipe(name, ASKED_LATER) == ASKED_LATER


@pytest.mark.full
def test_the_embedded_model_has_networks(embedded: Any) -> None:
    assert default_recipe(str(models.embedded_folder()), ANSWERED_AT_ONCE) == NETWORKS


def test_each_is_a_quarter_of_the_bytes() -> None:
    recipes = [Recipe.parse(text) for text in (NETWORKS, ANSWERED_AT_ONCE, ASKED_LATER)]
    assert [recipe.budget.bytes for recipe in recipes] == [0.25] * 3
