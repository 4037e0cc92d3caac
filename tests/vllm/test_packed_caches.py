"""TurboQuant's and NVFP4's caches on a CPU, by keepset's own attention: tokens and entries of a reference that rounds.

With TurboQuant the first and the last layers are whole, and have the same block tables as the others.
"""

from __future__ import annotations

from pathlib import Path
from typing import Any

import pytest
import torch
from torch import Tensor
from transformers import LlamaForCausalLM

from tests.vllm import turboquant
from tests.vllm.compared import CHUNKED, IDS, answers_of, asks, check_oracle, result, rounding_model
from tests.vllm.contexts import ask, going_on, serving, write
from tests.vllm.engine import BLOCK, Ask, Scenario
from tests.vllm.oracle import Oracle
from tests.vllm.test_turboquant import BLOCK as DOUBLED
from tests.vllm.test_turboquant import rounding

pytestmark = pytest.mark.full

RAGGED, EQUAL = "adakv(snapkv(window=8), keep=70, every=40)", "snapkv(window=8, keep=70, every=40)"
ACROSS = "pool(snapkv(window=8), keep=40, every=12)"
NVFP4 = "nvfp4"
CASES = [
    *((turboquant.KIND, recipe) for recipe in (RAGGED, EQUAL)),
    *((NVFP4, recipe) for recipe in (ACROSS, RAGGED, EQUAL)),
]
"""Kinds of caches, and recipes."""
SOME = [*asks((230, 150), 40), Ask(IDS[40:210], 60, add=7)]


def four_bit_floats(numbers: Tensor) -> Tensor:
    """Each number as the nearest of sixteen, times what the largest of its sixteen neighbours is a sixth of."""
    some = numbers.unflatten(-1, (-1, 16))
    scale = (some.abs().amax(-1, keepdim=True) / 6).to(torch.float8_e4m3fn).float()
    levels = torch.tensor([0.0, 0.5, 1.0, 1.5, 2.0, 3.0, 4.0, 6.0])
    levels = torch.cat([levels, -levels])
    return (levels[((some / scale)[..., None] - levels).abs().argmin(-1)] * scale).flatten(-2)


@pytest.fixture(scope="module")
def answers(tiny: Path, deep: Path) -> dict[tuple[str, str], Any]:
    """What engines did, one after another in one process."""
    small = {"max_num_seqs": 8, "max_model_len": 512, **CHUNKED}
    models = {turboquant.KIND: str(deep), NVFP4: str(tiny)}
    engines = {kind: {"model": model, "kv_cache_dtype": kind, **small} for kind, model in models.items()}
    return answers_of({(kind, recipe): Scenario(recipe, SOME, engine=engines[kind]) for kind, recipe in CASES})


@pytest.fixture(scope="module")
def oracles(tiny: Path, deep: Path) -> dict[str, Oracle]:
    return {
        turboquant.KIND: rounding(deep, DOUBLED),
        NVFP4: Oracle(
            LlamaForCausalLM.from_pretrained(tiny).eval(), BLOCK, lambda _, *parts: tuple(map(four_bit_floats, parts))
        ),
    }


@pytest.mark.parametrize(("kind", "recipe"), CASES)
def test_it_is_the_reference(
    kind: str, recipe: str, answers: dict[tuple[str, str], Any], oracles: dict[str, Oracle]
) -> None:
    engine = result(answers, (kind, recipe))
    assert engine.classes == ["CPURowsKeepImpl"] and all(engine.events)
    check_oracle(oracles[kind], recipe, SOME, engine)


def test_a_context_is_packed_when_it_is_loaded(tiny: Path, tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    """Two requests share its pages, in which entries of one layer may lie in another one's cache."""
    model = rounding_model(tiny, four_bit_floats, monkeypatch)
    path = write(tmp_path, model, "some", "adakv(snapkv(window=8), keep=0.4)", 190)
    some = [ask("some", 1, 33), ask("some", 2, 5, add=12)]
    engine = result(answers_of({0: serving(tiny, tmp_path, some, engine={"kv_cache_dtype": NVFP4})}), 0)
    assert engine.classes == ["CPURowsKeepImpl"]
    for index, (one, tokens) in enumerate(zip(some, engine.tokens, strict=True)):
        assert tokens is not None and len(tokens) == one.max_tokens
        assert going_on(model, path, one.ids, tokens, engine.steps_of(index)) == tokens
    engine.check_nothing_left()
