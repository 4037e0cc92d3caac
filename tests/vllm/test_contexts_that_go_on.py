"""Contexts whose requests are compressed further, each in pages of its own, as the transformers runtime would."""

from __future__ import annotations

from pathlib import Path
from typing import Any

import pytest
from transformers import PreTrainedModel

from tests.vllm.compared import answers_of, check_oracle, networks_file, result
from tests.vllm.contexts import ask, going_on, question, serving, write
from tests.vllm.engine import Ask, Scenario
from tests.vllm.oracle import Oracle

pytestmark = pytest.mark.full

RECIPES = {
    "equal": "snapkv(window=8, keep=40, every=16)",
    "segments": "ams(tova, window=16, keep=48, every=16)",
    "no queries": "distilled(stats='FILE', keep=50, every=7)",  # and no ties, as knorm has where words repeat
    "turmoil": "adakv(snapkv(window=8), keep=48, every=12)",
}
FILES = {"long": (230, ""), "short": (70, ""), "wide": (200, "keep=64"), "still": (150, "still")}
"""Tokens, and what is other in the recipe; the last goes on without any compression."""
ASKS = [
    ask("long", 0, 5, 60),
    ask("long", 1, 40, 60),
    ask("short", 2, 70, 60),
    ask("wide", 3, 1, 60),
    ask("still", 4, 20, 40),
    ask("long", 5, 9, 40, add=30),
]
PLAIN = Ask(question(6, 150), 50)
TURMOIL = [*ASKS, ask("long", 7, 30, 60, add=4, abort=25), ask("wide", 8, 30, 60, add=9, abort=11)]


def recipe_of(name: str, folder: Path) -> str:
    return RECIPES[name].replace("FILE", str(folder.parent / "networks.safetensors"))


def scenario(tiny: Path, folder: Path, name: str) -> Scenario:
    some, preempt = (TURMOIL, (13, 40)) if name == "turmoil" else ([PLAIN, *ASKS], ())
    return serving(tiny, folder, some, recipe_of(name, folder), save=10**7, preempt=preempt, read_at_once=True)


@pytest.fixture(scope="module")
def folders(tiny_model: PreTrainedModel, tmp_path_factory: pytest.TempPathFactory) -> dict[str, Path]:
    folders, whole = {}, tmp_path_factory.mktemp("goes on")
    networks_file(whole, tiny_model.config.num_hidden_layers)
    for name in RECIPES:
        folders[name] = whole / name
        folders[name].mkdir()
        recipe = recipe_of(name, folders[name])
        keep = recipe[recipe.index("keep=") : recipe.index(", every")]
        for file, (tokens, other) in FILES.items():
            text = "snapkv(window=8, keep=33)" if other == "still" else recipe.replace(keep, other or keep)
            write(folders[name], tiny_model, file, text, tokens)
    return folders


@pytest.fixture(scope="module")
def engines(tiny: Path, folders: dict[str, Path]) -> dict[str, Any]:
    return answers_of({name: scenario(tiny, folders[name], name) for name in RECIPES})


@pytest.mark.parametrize("name", RECIPES)
def test_questions_are_compressed_as_their_files_say(
    name: str, engines: dict[str, Any], folders: dict[str, Path], tiny_model: PreTrainedModel, tiny_oracle: Oracle
) -> None:
    engine = result(engines, name)
    for index, one in enumerate(TURMOIL if name == "turmoil" else [PLAIN, *ASKS]):
        tokens = engine.tokens[index] or []
        assert one.abort is not None or len(tokens) == one.max_tokens
        if one.extra is not None:
            context = one.extra["keepset"]["context"]
            path = folders[name] / f"{context}.safetensors"
            assert going_on(tiny_model, path, one.ids, tokens, engine.steps_of(index)) == tokens
            # Events came, and gave pages back.
            assert bool(engine.events[index]) is (context != "still" and bool(tokens))
    if name == "turmoil":
        assert min(engine.preemptions[:4]) == 2
        engine.check_nothing_left()
    else:
        check_oracle(tiny_oracle, recipe_of(name, folders[name]), [PLAIN], engine)
