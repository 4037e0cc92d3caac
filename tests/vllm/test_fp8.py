"""Caches of 8 bits: the reference is a model whose keys and values are rounded when they are made."""

from __future__ import annotations

from pathlib import Path
from typing import Any

import pytest
import torch
from torch import Tensor
from transformers import LlamaForCausalLM

from tests.vllm.compared import CHUNKED, asks, check_oracle
from tests.vllm.engine import Scenario, run
from tests.vllm.oracle import Oracle
from tests.vllm.test_life import IDS

pytestmark = [
    pytest.mark.full,
    pytest.mark.skipif(
        not (torch.cpu._is_avx512_supported() or torch.cpu._is_amx_tile_supported()),
        reason="vLLM's kernels for CPUs read FP8 with AVX-512 or AMX alone",
    ),
]

RECIPES = [
    "streaming_llm(keep=64, every=8)",
    "knorm(keep=96)",
    "snapkv(window=16, keep=96, every=24)",
    "expected_attention(keep=64, buffer=40, every=24)",
]


def rounded(numbers: Tensor, kind: torch.dtype) -> Tensor:
    """Round numbers to 8 bits, towards zero, as vLLM's kernel for CPUs does."""
    numbers = numbers.clamp(-torch.finfo(kind).max, torch.finfo(kind).max)
    nearest = numbers.to(kind)
    beyond = nearest.float().abs() > numbers.abs()
    # The next smaller one is the one before it, whatever its sign.
    return (nearest.view(torch.uint8) - beyond.to(torch.uint8)).view(kind).float()


class Rounding(Oracle):
    """Holds what 8 bits can hold."""

    kind = torch.float8_e4m3fn

    def _attend(self, module: Any, query: Tensor, key: Tensor, value: Tensor, *args: Any, **kwargs: Any) -> Any:
        return super()._attend(module, query, rounded(key, self.kind), rounded(value, self.kind), *args, **kwargs)


@pytest.mark.parametrize("kind", [torch.float8_e4m3fn, torch.float8_e5m2])
def test_every_token_and_entry(kind: torch.dtype, tiny: Path) -> None:
    some = asks(IDS, (257, 150, 300), 40)
    name = {torch.float8_e4m3fn: "fp8_e4m3", torch.float8_e5m2: "fp8_e5m2"}[kind]
    engine = {"model": str(tiny), "kv_cache_dtype": name, **CHUNKED}
    oracle = Rounding(LlamaForCausalLM.from_pretrained(tiny).eval(), 32)
    oracle.kind = kind
    for recipe, result in zip(
        RECIPES, run(*(Scenario(recipe, some, engine=engine) for recipe in RECIPES)), strict=True
    ):
        assert all(result.events)
        check_oracle(oracle, recipe, some, result)
