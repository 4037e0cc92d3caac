"""Contexts whose requests are compressed further, each in pages of its own, as the transformers runtime would."""

from __future__ import annotations

from pathlib import Path
from typing import Any

import pytest
import torch
from transformers import PreTrainedModel

import keepset
from tests.vllm.compared import check_oracle, result
from tests.vllm.engine import Ask, Result, Scenario, raw
from tests.vllm.late import Late
from tests.vllm.oracle import Oracle
from tests.vllm.test_contexts import ENGINE, ask, question, write

pytestmark = pytest.mark.full
settings = Late("keepset.vllm.settings")

RECIPES = {
    "equal": "snapkv(window=8, keep=40, every=16)",
    "ragged": "adakv(snapkv(window=8), keep=48, every=12)",
    "segments": "ams(tova, window=16, keep=48, every=16)",
    "no queries": "keydiff(keep=50, every=7)",  # and no ties, as knorm has where words repeat
    "turmoil": "adakv(snapkv(window=8), keep=48, every=12)",
    "apart": "snapkv(window=8, keep=40, every=16)",
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


def scenario(tiny: Path, folder: Path, name: str) -> Scenario:
    recipe = RECIPES[name]
    additional = {settings.CONTEXTS: str(folder), settings.SAVE_LIMIT: 10**7, "keepset": recipe}
    connector = {"kv_transfer_config": settings.CONTEXT_CONNECTOR}
    engine = {"model": str(tiny), **ENGINE, "additional_config": additional, **connector}
    some = TURMOIL if name == "turmoil" else [PLAIN, *ASKS]
    return Scenario(None, some, (13, 40) if name == "turmoil" else (), engine, own_process=name == "apart")


@pytest.fixture(scope="module")
def folders(tiny_model: PreTrainedModel, tmp_path_factory: pytest.TempPathFactory) -> dict[str, Path]:
    folders = {}
    for name, recipe in RECIPES.items():
        folders[name] = tmp_path_factory.mktemp("goes on")
        keep = recipe[recipe.index("keep=") : recipe.index(", every")]
        for file, (tokens, other) in FILES.items():
            text = "snapkv(window=8, keep=33)" if other == "still" else recipe.replace(keep, other or keep)
            write(folders[name], tiny_model, file, text, tokens)
    return folders


@pytest.fixture(scope="module")
def engines(tiny: Path, folders: dict[str, Path]) -> dict[str, Any]:
    return dict(zip(RECIPES, raw(*(scenario(tiny, folders[name], name) for name in RECIPES)), strict=True))


@torch.no_grad()
def going_on(
    model: PreTrainedModel, path: Path, asked: list[int], tokens: list[int], steps: list[tuple[int, int]]
) -> list[int]:
    """The best token after each of the answer's, fed in the engine's steps; a preempted request begins again."""
    ids, best, cache = asked + tokens, dict[int, int](), keepset.Cache.load(path, model)
    begin = cache.get_seq_length()
    for first, number in steps:
        if first == begin:
            cache = keepset.Cache.load(path, model)
        new = ids[first - begin : first - begin + number]
        logits = model(torch.tensor([new]), past_key_values=cache, use_cache=True).logits[0]
        place = first + number - begin - len(asked)
        if 0 <= place < len(tokens) and place not in best:
            best[place] = int(logits[-1].argmax())
    return [best[place] for place in range(len(tokens))]


def check(name: str, engine: Result, folder: Path, model: PreTrainedModel, oracle: Oracle) -> None:
    some = TURMOIL if name == "turmoil" else [PLAIN, *ASKS]
    for index, one in enumerate(some):
        tokens = engine.tokens[index] or []
        assert one.abort is not None or len(tokens) == one.max_tokens
        if one.extra is not None and engine.log:
            path = folder / f"{one.extra['keepset']['context']}.safetensors"
            assert going_on(model, path, one.ids, tokens, engine.steps_of(index)) == tokens
            # Events came, and gave pages back.
            assert bool(engine.events[index]) is (one.extra["keepset"]["context"] != "still" and bool(tokens))
    if not engine.log:
        return
    if name == "turmoil":
        assert min(engine.preemptions[:4]) == 2
        engine.check_nothing_left()
    else:
        check_oracle(oracle, RECIPES[name], [PLAIN], engine)


@pytest.mark.parametrize("name", list(RECIPES))
def test_questions_are_compressed_as_their_files_say(
    name: str, engines: dict[str, Any], folders: dict[str, Path], tiny_model: PreTrainedModel, tiny_oracle: Oracle
) -> None:
    engine = result(engines, name)
    if name == "apart":  # where nobody watched
        assert engine.tokens == result(engines, "equal").tokens
    check(name, engine, folders[name], tiny_model, tiny_oracle)
