"""Quantised caches on a CPU: every token and entry is that of a reference that rounds keys and values when it has them.

Of fitted values and biases the reference knows nothing: there the transformers runtime is it, on a model that rounds.
"""

from __future__ import annotations

from pathlib import Path
from typing import Any

import pytest
import torch
from torch import Tensor
from transformers import LlamaForCausalLM

from tests.kernels.few_bits import matrix
from tests.tiers import FULL
from tests.vllm.compared import CHUNKED, IDS, answers_of, asks, check_oracle, check_transformers, result, rounding_model
from tests.vllm.engine import BLOCK, Ask, Result, Scenario, run
from tests.vllm.oracle import Oracle

EQUAL = "snapkv(window=8, keep=40, every=16)"
RAGGED = "adakv(snapkv(window=8), keep=40, every=12)"
MOMENTS = "expected_attention(keep=40, buffer=40, every=20)"
INT8, FP8 = "int8_per_token_head", "fp8_per_token_head"
CASES = {(FP8, RAGGED): (0, 1548, 2681)}
MORE = {
    (INT8, "int8(adakv(snapkv(window=8)), keep=40, every=12)"): (332, 137, 523),
    (INT8, EQUAL): (249, 137, 440),
    (INT8, MOMENTS): (0, 137, 523),
    ("fp8", RAGGED): (332, 303, 689),
}
"""Kinds of caches and recipes, and where prompts begin. Not fp8_e5m2: on a boundary the last bit of a number decides a
quarter of it.

Some keys and values lie in the middle of two steps, so sums in another order round them to the other one. That moves
scores by up to a hundredth, and decides between two entries that are as good. So prompts are ones whose tokens and
entries stay if all numbers move by half a millionth of their row's largest, as other sums do, in eight random ways.
"""
FITTED = [
    "int8(match(adakv(snapkv(window=8)), window=8), keep=40, every=12)",
    "int8(match(snapkv(window=8), biases=False), bytes=0.2)",
]
TOKENS = 30 if FULL else 20
LENGTHS = (130, 90, 200)
FITTED_TO = [*(Ask(IDS[5 + 53 * i :][:130], TOKENS) for i in (0, 1, 3, 4)), Ask(IDS[700:701], TOKENS)]
TURMOIL = [Ask(IDS[at : at + n], 24, add=add) for at, n, add in ((332, 130, 0), (137, 70, 0), (606, 230, 9))]
"""These, too, are such prompts."""


def of_case(case: tuple[str, str]) -> list[Ask]:
    """The requests of a case, and one of a single token."""
    some = [Ask(IDS[at : at + n], TOKENS) for at, n in zip((CASES | MORE)[case], LENGTHS, strict=True)]
    return [*some, Ask(IDS[700:701], TOKENS)]


def rounded(numbers: Tensor, kind: str) -> Tensor:
    """What a cache of a kind holds of keys or values, `[..., head_dim]`."""
    if kind == INT8:
        spread = matrix(numbers.shape[-1]).float()
        mixed = (numbers.double() @ spread.T.double()).float()
        step = (mixed.abs().amax(-1, keepdim=True) / 127).clamp(min=1e-6)
        steps = mixed * (1 / step)
        return ((steps.abs() + 0.5).floor() * steps.sign() * step) @ spread
    if kind == FP8:
        step = (numbers.abs().amax(-1, keepdim=True) / 448).clamp(min=1e-6)
        return (numbers * (1 / step)).to(torch.float8_e4m3fn).float() * step
    return numbers.to(torch.float8_e4m3fn).float()


def rounding(tiny: Path, kind: str, block_size: int = BLOCK) -> Oracle:
    """A reference that holds what a cache of a kind can hold."""

    def stored(_: int, keys: Tensor, values: Tensor) -> tuple[Tensor, Tensor]:
        return rounded(keys, kind), rounded(values, kind)

    return Oracle(LlamaForCausalLM.from_pretrained(tiny).eval(), block_size, stored)


@pytest.fixture(scope="module")
def answers(tiny: Path, request: pytest.FixtureRequest) -> dict[tuple[str, str], Any]:
    """What engines did, one after another in one process; those of the full tier only there."""
    engine: dict[str, Any] = {"model": str(tiny), "max_num_seqs": 8, "max_model_len": 512, **CHUNKED}
    whole = request.config.getoption("--full")
    cases = {case: of_case(case) for case in [*CASES, *(MORE if whole else [])]}
    cases |= {(INT8, recipe): FITTED_TO for recipe in (FITTED if whole else ())}
    scenarios = {
        case: Scenario(case[1], some, engine=engine | {"kv_cache_dtype": case[0]}) for case, some in cases.items()
    }
    if whole:
        small = engine | {"kv_cache_dtype": INT8, "max_num_batched_tokens": 96}
        scenarios[INT8, "preempted"] = Scenario(RAGGED, TURMOIL, preempt=(14,), engine=small)
    return answers_of(scenarios)


def answer(answers: dict[tuple[str, str], Any], kind: str, name: str) -> Result:
    engine = result(answers, (kind, name))
    assert engine.classes == ["CPURowsKeepImpl"]
    return engine


@pytest.mark.parametrize(("kind", "recipe"), [*CASES, *(pytest.param(*case, marks=pytest.mark.full) for case in MORE)])
def test_it_is_the_reference(kind: str, recipe: str, answers: dict[tuple[str, str], Any], tiny: Path) -> None:
    engine = answer(answers, kind, recipe)
    assert all(engine.events[:3]) and engine.stats["entries_dropped"] > 0
    check_oracle(rounding(tiny, kind), recipe, of_case((kind, recipe)), engine)


@pytest.mark.full
def test_heads_that_are_preempted(answers: dict[tuple[str, str], Any], tiny: Path) -> None:
    engine = answer(answers, INT8, "preempted")
    assert sum(engine.preemptions) > 1
    check_oracle(rounding(tiny, INT8), RAGGED, TURMOIL, engine)


@pytest.mark.full
@pytest.mark.parametrize("recipe", FITTED)
def test_fitted_values_are_rounded_once(
    recipe: str, answers: dict[tuple[str, str], Any], tiny: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    """As transformers' `int8` rounds them, whose scales are the same but for the last bit."""
    engine = answer(answers, INT8, recipe)
    model = rounding_model(tiny, lambda numbers: rounded(numbers, INT8), monkeypatch)
    check_transformers(model, recipe, FITTED_TO, engine)
    engine.check_nothing_left()


@pytest.mark.full
def test_a_backend_for_gpus_is_given_what_is_mixed_already(tiny: Path) -> None:
    """vLLM's backend writes and attends, called and in pretended graphs. Unmixed, it would hold others."""
    small = {"model": str(tiny), "max_num_seqs": 8, "block_size": 16, "kv_cache_dtype": INT8, **CHUNKED}
    some = of_case((INT8, EQUAL))
    results = run(
        *(Scenario(EQUAL, some, engine=small, backend="TRITON_ATTN", graphs=graphs) for graphs in (False, True))
    )
    oracle = rounding(tiny, INT8, 16)
    for engine in results:
        assert engine.classes == ["TritonKeepImpl"] and all(engine.events[:3])
        check_oracle(oracle, EQUAL, some, engine)
    assert results[1].replays > 10


@pytest.mark.full
def test_a_backend_for_gpus_and_keepsets_own_kernels(tiny: Path) -> None:
    """vLLM's kernels are plain torch, keepset's run in Triton's interpreter; pages lie as vLLM's backend has them."""
    some, recipe = [*asks((50, 37), 8), Ask(IDS[700:740], 4, add=4)], "adakv(tova, keep=24, every=6)"
    small = {"model": str(tiny), "max_num_seqs": 8, "max_num_batched_tokens": 96, "block_size": 16}
    small |= {"kv_cache_dtype": INT8}
    (engine,) = run(Scenario(recipe, some, engine=small, triton=True, backend="TRITON_ATTN"))
    assert engine.classes == ["TritonKeepImpl"] and all(engine.events)
    check_oracle(rounding(tiny, INT8, 16), recipe, some, engine)
