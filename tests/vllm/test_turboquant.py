"""An engine whose cache is TurboQuant's, on a CPU, with stand-ins for vLLM's kernels: they alone know what it stores.

The first and the last layers have 16 bits in such an engine (here 32), and the same block tables as the others.
"""

from __future__ import annotations

from pathlib import Path

import pytest
from torch import Tensor
from transformers import LlamaForCausalLM

from tests.vllm import turboquant
from tests.vllm.compared import CHUNKED, IDS, asks, check_oracle
from tests.vllm.conftest import DEEP
from tests.vllm.engine import Ask, Scenario, run
from tests.vllm.oracle import Oracle

pytestmark = pytest.mark.full

RECIPES = ["snapkv(window=8, keep=70, every=40)", "keydiff(keep=80)", "streaming_llm(keep=64, every=64)"]
"""Methods that look at queries and keys, at keys, and at neither."""
BLOCK = 64
"""vLLM doubles the size of blocks, so that one of these layers can hold as many bytes as one of the others."""


def rounding(deep: Path, block_size: int) -> Oracle:
    """A reference that holds what the cache can hold, in the layers between the first and the last two."""

    def stored(layer: int, keys: Tensor, values: Tensor) -> tuple[Tensor, Tensor]:
        if layer not in range(2, DEEP - 2):
            return keys, values
        return turboquant.meant(turboquant.stored(keys, values), keys.shape[-1])

    return Oracle(LlamaForCausalLM.from_pretrained(deep).eval(), block_size, stored)


def test_tokens_and_kept_entries_are_those_of_a_model_that_rounds(deep: Path) -> None:
    some = [*asks((230, 150), 40), Ask(IDS[40:210], 60, add=7)]
    # A small pool, since the stand-ins read all of it at each step.
    pool = {"num_gpu_blocks_override": 120, "max_num_seqs": 8, "kv_cache_dtype": turboquant.KIND}
    engine = {"model": str(deep), **pool, **CHUNKED}
    scenarios = [Scenario(recipe, some, engine=engine, backend="TURBOQUANT") for recipe in RECIPES]
    oracle = rounding(deep, BLOCK)
    for recipe, each in zip(RECIPES, run(*scenarios), strict=True):
        assert each.classes == ["FlashKeepImpl", "TurboQuantKeepImpl"] and all(each.events)
        check_oracle(oracle, recipe, some, each)


def test_ragged_heads_by_keepsets_own_kernels(deep: Path) -> None:
    """In Triton's interpreter; new entries are what vLLM's backend writes, copied to each head's own place."""
    some, recipe = [*asks((50, 37), 8), Ask(IDS[700:740], 4, add=4)], "adakv(tova, keep=24, every=6)"
    small = {"model": str(deep), "max_num_seqs": 8, "max_model_len": 512}
    small |= {"max_num_batched_tokens": 96, "block_size": 16}
    pool = {"num_gpu_blocks_override": 60, "kv_cache_dtype": turboquant.KIND}
    (engine,) = run(Scenario(recipe, some, engine=small | pool, triton=True, backend="TURBOQUANT"))
    assert engine.classes == ["FlashKeepImpl", "TurboQuantKeepImpl"] and all(engine.events)
    check_oracle(rounding(deep, 16), recipe, some, engine)
