"""Other KV connectors beside keepset: they store and load plain pages alone, and answers are the same as without."""

from __future__ import annotations

from dataclasses import replace
from functools import partial
from pathlib import Path
from types import SimpleNamespace
from typing import Any

import pytest

from keepset import Recipe
from keepset.paged.eviction_schedule import EvictionSchedule
from tests.vllm.compared import IDS, answers_of, check_request, result
from tests.vllm.engine import Ask, Result, Scenario
from tests.vllm.late import Late
from tests.vllm.oracle import Oracle

settings, managers = Late("keepset.vllm.settings"), Late("keepset.vllm.manager")
beside_module = Late("keepset.vllm.beside")

RECIPES = {
    "once": "snapkv(window=16, keep=96)",
    "ragged": "adakv(snapkv(window=16), keep=96)",
    "every": "snapkv(window=16, keep=80, every=24)",
}
COMMON = IDS[:280]
AGAIN = (6, 12, 18)
"""The requests that begin as an earlier one did."""


def with_offloading() -> dict[str, Any]:
    store = {"cpu_bytes_to_use": 1 << 24, "spec_name": "HostSpec", "spec_module_path": "tests.vllm.offload"}
    return beside("OffloadingConnector", **store)


def beside(name: str, **more: Any) -> dict[str, Any]:
    """The `kv_transfer_config` of keepset's connector and this one."""
    other = {"kv_connector": name, "kv_connector_module_path": settings.BESIDE_MODULE, "kv_role": "kv_both"}
    parts = [settings.CONNECTOR, other | {"kv_connector_extra_config": more}]
    return {"kv_connector": "MultiConnector", "kv_role": "kv_both", "kv_connector_extra_config": {"connectors": parts}}


def with_lmcache(**more: Any) -> dict[str, Any]:
    """Settings of an engine beside LMCache, whose chunks are two blocks."""
    settings = {"chunk_size": 64, "local_cpu": True, "max_local_cpu_size": 0.1, "save_decode_cache": True, **more}
    transfer = beside("LMCacheConnectorV1", **{f"lmcache.{name}": value for name, value in settings.items()})
    return {"kv_transfer_config": transfer, "worker_extension_cls": "tests.vllm.lmcache_memory.Extension"}


def load() -> list[Ask]:
    """Prompts with a common beginning, and others that push it out of the pool and wait for the pages that it frees."""
    some = [Ask(COMMON + IDS[300:330], 40)]
    for turn in range(len(AGAIN)):
        some += [Ask(IDS[400 + 500 * turn + 90 * place :][:300], 30, add=60 * turn) for place in range(5)]
        some.append(Ask(COMMON + IDS[2000 + 50 * turn :][:40], 30, add=100 + 60 * turn))
    some.append(Ask(COMMON + IDS[2300:2330], 30, add=92, extra={"keepset": {"keep": 60}}))
    some.append(Ask(IDS[:25], 8, add=92))
    return some


def engine(tiny: Path, **more: Any) -> dict[str, Any]:
    sizes = {"max_num_batched_tokens": 128, "max_num_seqs": 8, "max_model_len": 512, "num_gpu_blocks_override": 26}
    return {"model": str(tiny), **sizes, "enable_prefix_caching": True, **more}


@pytest.fixture(scope="module")
def engines(tiny: Path, tmp_path_factory: pytest.TempPathFactory) -> dict[Any, Any]:
    """A recipe in a pool that is short, alone and beside offloading; and beside a connector that uses files."""
    files = beside("ExampleConnector", shared_storage_path=str(tmp_path_factory.mktemp("pages")))
    whole = {"kv_transfer_config": files, "max_num_batched_tokens": 1024}
    scenarios = {("once", "files"): Scenario(RECIPES["once"], load(), (50, 160), engine(tiny, **whole))}
    for kind, transfer in {"alone": settings.CONNECTOR, "beside": with_offloading()}.items():
        own = engine(tiny, kv_transfer_config=transfer)
        scenarios["once", kind] = Scenario(RECIPES["once"], load(), (50, 160), own)
    return answers_of(scenarios)


@pytest.fixture(scope="module")
def others(tiny: Path) -> dict[Any, Any]:
    own = engine(tiny, kv_transfer_config=with_offloading())
    return answers_of(
        {(name, "beside"): Scenario(RECIPES[name], load(), (50, 160), own) for name in ("ragged", "every")}
    )


def check(oracle: Oracle, name: str, offloaded: Result) -> None:
    """Check tokens and kept entries, and that prefixes were loaded, except by the request with another budget."""
    recipe, asks = Recipe.parse(RECIPES[name]), load()
    for index, ask in enumerate(asks):
        keep = (ask.extra or {}).get("keepset", {}).get("keep")
        own = recipe if keep is None else replace(recipe, budget=replace(recipe.budget, keep=keep))
        check_request(oracle, own, ask, offloaded, index)
    offloaded.check_nothing_left()
    assert sum(offloaded.preemptions) > 0
    assert any(offloaded.cached[index] for index in AGAIN)
    assert all(
        (offloaded.cached[index] or 0) <= len(asks[index].ids) - 80 for index in AGAIN
    )  # nothing of what is dropped
    assert not any(cached for index, cached in enumerate(offloaded.cached) if index not in AGAIN)


@pytest.mark.full
def test_prefixes_come_back_and_answers_stay(engines: dict[Any, Any], tiny_oracle: Oracle) -> None:
    check(tiny_oracle, "once", result(engines, ("once", "beside")))


@pytest.mark.full
def test_the_pool_is_too_short_to_hold_prefixes(engines: dict[Any, Any]) -> None:
    alone, offloaded = (sum(one or 0 for one in result(engines, ("once", kind)).cached) for kind in ("alone", "beside"))
    assert alone < offloaded


@pytest.mark.full
def test_prefixes_come_back_from_files(engines: dict[Any, Any], tiny_oracle: Oracle) -> None:
    check(tiny_oracle, "once", result(engines, ("once", "files")))


@pytest.mark.full
@pytest.mark.parametrize("name", RECIPES)
def test_prefixes_come_back_from_lmcache(name: str, tiny: Path, tiny_oracle: Oracle) -> None:
    pytest.importorskip("lmcache")
    answers = answers_of({name: Scenario(RECIPES[name], load(), (50, 160), engine(tiny, **with_lmcache()))})
    check(tiny_oracle, name, result(answers, name))


@pytest.mark.full
def test_lmcache_stores_whole_chunks_alone(tiny: Path) -> None:
    pytest.importorskip("lmcache")
    own = engine(tiny, **with_lmcache(save_unfull_chunk=True))
    (answer,) = answers_of({"": Scenario(RECIPES["once"], [Ask(IDS[:40], 2)], engine=own)}).values()
    assert "leave LMCache's save_unfull_chunk out" in answer


@pytest.mark.full
@pytest.mark.parametrize("name", ["ragged", "every"])
def test_under_other_recipes(name: str, others: dict[Any, Any], tiny_oracle: Oracle) -> None:
    check(tiny_oracle, name, result(others, (name, "beside")))


def test_a_request_whose_pages_are_freed_has_none_that_are_plain() -> None:
    spec = {"kv_heads": 2, "head_dim": 32, "block_size": 32}
    schedule = EvictionSchedule(Recipe.parse(RECIPES["once"]), 0, (0, 1), **spec)
    request = SimpleNamespace(request_id="a", num_prompt_tokens=320, num_tokens=350, num_computed_tokens=340)
    request.block_hashes, request.prompt_token_ids = list(range(10)), IDS[:320]
    state = SimpleNamespace(_own={}, is_released=lambda name: False, schedule=schedule, block_size=32)
    state.shareable_tokens = partial(managers.KeepManager.shareable_tokens, state)
    view = beside_module.PlainRequest(request, partial(managers.KeepManager.plain_tokens, state), 32)
    assert view.block_hashes == list(range(7)) and view.num_tokens // 32 == view.num_computed_tokens // 32 == 7
    state.is_released = lambda name: True
    assert view.block_hashes == [] and view.num_tokens // 32 == view.num_computed_tokens // 32 == 0
    state.is_released, state._own = lambda name: False, {"a": None}
    assert view.block_hashes == [] and view.prompt_token_ids == IDS[:2]
    state._own, request.num_prompt_tokens = {}, 90  # stays whole, and so does its answer
    assert view.limit is None and view.num_tokens == 350 and view.block_hashes == list(range(10))
