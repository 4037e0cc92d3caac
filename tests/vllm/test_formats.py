"""Quantised caches are laid out as vLLM's own kernels do it, which run in Triton's interpreter here."""

from __future__ import annotations

import importlib.util
from collections.abc import Iterator
from dataclasses import replace
from types import ModuleType
from typing import Any

import pytest
import torch

from keepset import KeepsetError
from keepset.paged.pages import StridedPages
from tests.kernels.interpreter import patched_once
from tests.vllm.late import Late

compat, formats = Late("keepset.vllm.compat"), Late("keepset.vllm.formats")
CPU = torch.device("cpu")


@pytest.fixture
def vllms_kernels(monkeypatch: pytest.MonkeyPatch) -> Iterator[None]:
    """vLLM knows no compiler for CPUs and has left its kernels out; their file is read again, with the interpreter."""
    interpreter = pytest.importorskip("triton.runtime.interpreter")
    import triton
    from triton import language
    from vllm import triton_utils
    from vllm.v1.attention.backends import triton_attn
    from vllm.v1.attention.ops import triton_reshape_and_cache_flash

    monkeypatch.setattr(triton_utils, "triton", triton)
    monkeypatch.setattr(triton_utils, "tl", language)
    name = "triton_reshape_and_cache_flash_per_token_head_quant"
    monkeypatch.setattr(triton_attn, name, getattr(read_again(triton_reshape_and_cache_flash), name))
    convert = interpreter.InterpreterBuilder.create_fp_to_fp

    # The interpreter forgets the carry when it rounds to 8 bits.
    def create_fp_to_fp(builder: Any, src: Any, dst_type: Any, rounding: Any) -> Any:
        if str(dst_type.scalar) != "fp8e4nv":
            return convert(builder, src, dst_type, rounding)
        rounded = torch.from_numpy(src.data).to(torch.float8_e4m3fn)
        return interpreter.TensorHandle(rounded.view(torch.uint8).numpy(), dst_type.scalar)

    monkeypatch.setattr(interpreter.InterpreterBuilder, "create_fp_to_fp", create_fp_to_fp)
    with patched_once(interpreter):
        yield


def read_again(module: ModuleType) -> ModuleType:
    """A module whose kernels are interpreted."""
    assert module.__file__ is not None
    spec = importlib.util.spec_from_file_location(f"interpreted_{module.__name__.split('.')[-1]}", module.__file__)
    assert spec is not None and spec.loader is not None
    again = importlib.util.module_from_spec(spec)
    spec.loader.exec_module(again)
    return again


@pytest.mark.cross
@pytest.mark.parametrize("kind", ["int8_per_token_head", "fp8_per_token_head"])
@pytest.mark.parametrize("dtype", [torch.float32, torch.bfloat16])
@pytest.mark.parametrize("head_dim", [64, 80])
def test_rows_are_those_that_vllm_writes(vllms_kernels: None, kind: str, dtype: torch.dtype, head_dim: int) -> None:
    """By tokens, as the cache may lie in memory; what is not written stays, but for scales, which vLLM sets to one."""
    draw, size = torch.Generator().manual_seed(1), 16
    how = formats.row_format(kind, head_dim, dtype)
    cache = torch.zeros(3, size, 2, 2 * how.row_bytes, dtype=torch.int8).transpose(1, 2)
    cache = cache if kind.startswith("int8") else cache.view(torch.uint8)
    keys, values = (torch.randn(5, 2, head_dim, generator=draw).to(dtype) for _ in range(2))
    keys *= torch.logspace(-7, 3, 5).to(dtype)[:, None, None]
    keys[2] = 0.0
    slots = torch.tensor([17, 3, 40, -1, 0])
    spread = formats.own_mixing(kind, head_dim)
    compat.write_rows(kind, *((keys, values) if spread is None else map(spread.mixed, (keys, values))), cache, slots)
    own, real = torch.zeros_like(cache), slots >= 0
    rows = how.encode_entries(keys[real].flatten(0, 1), values[real].flatten(0, 1))
    of_heads = ((slots[real] // size)[:, None] * 2 + torch.arange(2)) * size + (slots[real] % size)[:, None]
    StridedPages([own], 0, how).write(*rows, of_heads.flatten())
    written = torch.zeros(3, 2, size, dtype=torch.bool)
    written[slots[real] // size, :, slots[real] % size] = True
    assert torch.equal(cache[written], own[written]) and not cache[..., :head_dim][~written].any()
    formats.check_rows(kind, 2, head_dim, dtype, CPU)


@pytest.mark.parametrize("fault", ["scales first", "values first", "another scale", "rotated", "mixed twice"])
def test_another_layout_is_refused(monkeypatch: pytest.MonkeyPatch, fault: str) -> None:
    def write(kind: str, keys: torch.Tensor, values: torch.Tensor, cache: torch.Tensor, slots: torch.Tensor) -> None:
        how: Any = formats.row_format(kind, 64, torch.float32)
        how = how if fault == "mixed twice" else replace(how, mixing=None)
        if fault == "values first":
            keys, values = values, keys
        rows = [part.clone() for part in how.encode_entries(keys, values)]
        if fault == "scales first":
            rows = [part.roll(4, -1) for part in rows]
        elif fault == "another scale":
            rows[1][..., 64:].view(torch.float32).mul_(2)
        elif fault == "rotated":
            rows[0][..., :64] = rows[0][..., :64].roll(1, -1)
        cache[slots // 16, :, slots % 16] = torch.cat(rows, -1).view(cache.dtype)

    monkeypatch.setattr("keepset.vllm.formats.write_rows", write)
    with pytest.raises(
        KeepsetError, match="does not know the layout of this vLLM's KV cache of kind int8_per_token_head"
    ):
        formats.check_rows("int8_per_token_head", 3, 64, torch.float32, CPU)


def test_scales_are_filled_before_pages_are_written_to() -> None:
    """vLLM fills them when a layer first runs, and never again."""
    from vllm.v1.attention.backends.triton_attn import TritonAttentionImpl

    impl: Any = TritonAttentionImpl(2, 64, 1.0, 2, None, None, "int8_per_token_head")
    cache = torch.zeros(3, 2, 16, 136, dtype=torch.int8)
    layer = type("Layer", (), {"impl": impl})()
    compat.fill_scales(layer, cache)
    assert torch.equal(cache[..., 64:68].view(torch.float32), torch.ones(3, 2, 16, 1))
    cache.fill_(7)
    impl._pth_key_value_caches(cache)
    assert cache.eq(7).all()
    compat.fill_scales(type("Layer", (), {"impl": object()})(), cache)  # of a backend without scales
