"""Recipes that look at statistics of the model: the same entries as under transformers."""

from __future__ import annotations

from pathlib import Path
from typing import Any

import pytest
import torch
from transformers import PreTrainedModel

from keepset import KeepsetError, Recipe
from keepset.core.statistics import save
from keepset.offline.calibrate.corpus import Corpus
from keepset.offline.calibrate.measure import measure
from tests.vllm.compared import check_transformers
from tests.vllm.engine import Ask, Result, Scenario, run
from tests.vllm.test_refusals import config, validation

pytestmark = pytest.mark.full

RECIPES = [
    "triattention(stats={file!r}, keep=96, every=12)",
    "adakv(triattention(stats={file!r}), keep=0.3)",
    "qfilter(stats={file!r}, keep=96, recent=8, every=12)",
    "expected_attention(stats={file!r}, keep=96, every=12)",
]


@pytest.fixture(scope="module")
def file(shallow_model: PreTrainedModel, essay: list[int], tmp_path_factory: pytest.TempPathFactory) -> Path:
    path = tmp_path_factory.mktemp("statistics") / "stats.safetensors"
    passages = torch.tensor(essay[1024:2048]).view(4, 256)
    save(measure(shallow_model, Corpus(list(passages), "0", 0)), path)
    return path


@pytest.fixture(scope="module")
def engines(shallow: Path, file: Path, essay: list[int]) -> dict[str, tuple[list[Ask], Result]]:
    some = [Ask(essay[:300], 30), Ask(essay[500:650], 30)]
    scenarios = [
        Scenario(recipe.format(file=str(file)), some, engine={"model": str(shallow), "max_num_batched_tokens": 256})
        for recipe in RECIPES
    ]
    return {recipe: (some, result) for recipe, result in zip(RECIPES, run(*scenarios), strict=True)}


@pytest.mark.parametrize("recipe", RECIPES)
def test_the_same_entries_as_under_transformers(
    recipe: str, engines: dict[str, Any], shallow_model: PreTrainedModel, file: Path
) -> None:
    some, result = engines[recipe]
    assert all(result.events)
    check_transformers(shallow_model, recipe.format(file=str(file)), some, result)
    result.check_nothing_left()


def test_a_file_must_be_named_and_be_there() -> None:
    with pytest.raises(KeepsetError, match="run `keepset calibrate --model MODEL"):
        validation.check(config(), Recipe.parse("adakv(qfilter, keep=96)"))
    with pytest.raises(KeepsetError, match="There is no file 'absent'"):
        validation.check(config(), Recipe.parse("triattention(stats='absent', keep=96)"))


def test_heads_that_other_processes_hold_are_refused(file: Path) -> None:
    parts = config()
    parts.parallel_config.tensor_parallel_size = 2
    with pytest.raises(KeepsetError, match="its statistics are of all heads"):
        validation.check(parts, Recipe.parse(f"qfilter(stats={str(file)!r}, keep=96)"))
