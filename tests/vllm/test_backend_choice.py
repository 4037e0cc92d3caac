"""The attention backend that vLLM chooses for CUDA, on GPUs that are not there."""

from __future__ import annotations

import sys
from collections.abc import Iterator
from importlib import import_module
from pathlib import Path
from types import ModuleType
from typing import Any

import pytest
import torch

from keepset import KeepsetError
from keepset.errors import UnsupportedEngineError
from keepset.vllm import plugin
from tests.vllm.compared import IDS
from tests.vllm.engine import Ask, Scenario, raw
from tests.vllm.kernels import Anything
from tests.vllm.late import Late
from tests.vllm.test_refusals import config

registry = Late("vllm.v1.attention.backends.registry")
import_utils = Late("vllm.utils.import_utils")

UNIFORM, RAGGED = "snapkv(keep=0.25)", "adakv(snapkv, keep=256, every=64)"
CAPABILITIES = {"A100": (8, 0), "H100": (9, 0), "B200": (10, 0)}
SERVED = {"FLASH_ATTN": "FlashKeepImpl", "FLASHINFER": "FlashInferKeepImpl", "TRITON_ATTN": "TritonKeepImpl"}
"""For any recipe."""


@pytest.fixture(autouse=True)
def gpu_libraries(monkeypatch: pytest.MonkeyPatch) -> Iterator[None]:
    import_module("keepset.vllm.engine_context")  # some of vLLM looks for FlashInfer while it is imported
    for name in ("flashinfer", "flashinfer.decode", "flashinfer.prefill", "flashinfer.utils"):
        monkeypatch.setitem(sys.modules, name, Anything(name))
    monkeypatch.setitem(sys.modules, "vllm._C_stable_libtorch", ModuleType("vllm._C_stable_libtorch"))
    monkeypatch.setattr("keepset.vllm.engine_context._active", None)
    plugin.register()
    yield
    sys.modules.pop("vllm.v1.attention.backends.flashinfer", None)


def choose(
    monkeypatch: pytest.MonkeyPatch, gpu: str, recipe: str | None, backend: str | None = None, cache: str = "auto"
) -> Any:
    """vLLM's choice for a model of heads of 128 numbers in bfloat16.

    `backend` and `cache` are as `--attention-backend` and `--kv-cache-dtype` say them.
    """
    from vllm.platforms.cuda import CudaPlatformBase
    from vllm.platforms.interface import DeviceCapability
    from vllm.v1.attention.selector import AttentionSelectorConfig

    class Gpu(CudaPlatformBase):
        @classmethod
        def get_device_capability(cls, device_id: int = 0) -> Any:
            return DeviceCapability(*CAPABILITIES[gpu])

    asked = None if backend is None else registry.AttentionBackendEnum[backend]
    current = config()
    current.additional_config = {} if recipe is None else {"keepset": recipe}
    current.attention_config.backend = asked
    current.cache_config.cache_dtype = cache
    current.model_config = None
    monkeypatch.setattr("vllm.config.vllm._current_vllm_config", current)
    wanted = AttentionSelectorConfig(head_size=128, dtype=torch.bfloat16, kv_cache_dtype=cache, block_size=None)
    found = import_utils.resolve_obj_by_qualname(Gpu.get_attn_backend_cls(asked, wanted, 32))
    current.model_config = config().model_config
    return found


@pytest.mark.parametrize(("gpu", "own"), [("A100", "FLASH_ATTN"), ("H100", "FLASH_ATTN"), ("B200", "FLASHINFER")])
def test_a_recipe_is_served_whatever_gpu_it_is(monkeypatch: pytest.MonkeyPatch, gpu: str, own: str) -> None:
    plain = choose(monkeypatch, gpu, None)
    assert plain.get_name() == own and plain.get_impl_cls().__module__.startswith("vllm.")
    for recipe in (UNIFORM, RAGGED):
        found = choose(monkeypatch, gpu, recipe)
        assert found.get_name() == own and found.get_impl_cls().__name__ == SERVED[own]


@pytest.mark.parametrize("gpu", CAPABILITIES)
def test_a_backend_that_was_asked_for_or_that_vllm_takes_for_eight_bits(
    monkeypatch: pytest.MonkeyPatch, gpu: str
) -> None:
    plain, found = (choose(monkeypatch, gpu, recipe, cache="fp8") for recipe in (None, UNIFORM))
    assert found.get_name() == plain.get_name() and found.get_impl_cls().__name__ == SERVED[plain.get_name()]
    for backend, name in SERVED.items():
        for recipe in (UNIFORM, RAGGED):
            assert choose(monkeypatch, gpu, recipe, backend).get_impl_cls().__name__ == name


@pytest.mark.parametrize("recipe", [UNIFORM, RAGGED])
def test_a_backend_that_cannot_be_served_says_so(monkeypatch: pytest.MonkeyPatch, recipe: str) -> None:
    assert choose(monkeypatch, "H100", None, "FLEX_ATTENTION").get_impl_cls().__module__.startswith("vllm.")
    with pytest.raises(KeepsetError) as refused:
        choose(monkeypatch, "H100", recipe, "FLEX_ATTENTION").get_impl_cls()
    assert str(refused.value) == (
        f"keepset cannot serve {recipe}: this engine chose the attention backend FLEX_ATTENTION; choose one of "
        "FLASH_ATTN, FLASHINFER, TRITON_ATTN (--attention-backend) or, on CPUs, CPU_ATTN."
    )


NOISE = ("int8_per_token_head", "int4_per_token_head", "fp8_per_token_head", "nvfp4", "turboquant_4bit_nc")


@pytest.mark.parametrize("kind", ["auto", "bfloat16", "fp8", "fp8_e5m2", *NOISE])
def test_without_a_recipe_kinds_of_caches_that_a_cpu_misreads_are_refused(
    monkeypatch: pytest.MonkeyPatch, kind: str
) -> None:
    current = config(cache_dtype=kind)
    current.additional_config = {}
    monkeypatch.setattr("vllm.config.vllm._current_vllm_config", current)
    backend = registry.AttentionBackendEnum.CPU_ATTN.get_class()
    if kind not in NOISE:
        assert backend.get_impl_cls().__module__.startswith("vllm.")
        return
    with pytest.raises(UnsupportedEngineError) as refused:
        backend.get_impl_cls()
    assert str(refused.value).startswith(f"vLLM's attention for CPUs answers noise from a KV cache of kind {kind}, ")
    assert ("name a recipe" in str(refused.value)) is (kind in ("int8_per_token_head", "fp8_per_token_head"))
    # GPUs have kernels for these kinds.
    assert registry.AttentionBackendEnum.TRITON_ATTN.get_class().get_impl_cls().__module__.startswith("vllm.")


@pytest.mark.full
def test_an_engine_that_would_answer_noise_does_not_start(tiny: Path) -> None:
    engine = {"model": str(tiny), "max_model_len": 256, "kv_cache_dtype": NOISE[0]}
    (answer,) = raw(Scenario(None, [Ask(IDS[:20], 4)], engine=engine))
    assert "answers noise from a KV cache of kind int8_per_token_head" in answer


@pytest.mark.parametrize("backend", [*SERVED, "FLEX_ATTENTION", "CPU_ATTN", "TRITON_FLASH_ATTN", "TRITON_MLA"])
def test_a_backend_is_found_again_by_its_name(backend: str) -> None:
    """vLLM keeps names of classes and looks them up."""
    found = registry.AttentionBackendEnum[backend].get_class()
    assert import_utils.resolve_obj_by_qualname(".".join(found.full_cls_name())) is found
