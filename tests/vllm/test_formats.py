"""Quantised caches are laid out as vLLM's own kernels do it, which run in Triton's interpreter here.

NVFP4's are written in CUDA. A writer stands in for them that follows the published layout.
"""

from __future__ import annotations

import importlib.util
import sys
from collections.abc import Iterator
from dataclasses import replace
from types import ModuleType, SimpleNamespace
from typing import Any

import pytest
import torch
from torch import Tensor

from keepset import KeepsetError
from keepset.paged.pages import ScatteredPages, StridedPages, decoded_entries
from tests.kernels.interpreter import patched_once
from tests.vllm.late import Late

compat, formats = Late("keepset.vllm.compat"), Late("keepset.vllm.formats")
CPU, SIZE, HEADS = torch.device("cpu"), 16, 2
TURBOQUANT = ["turboquant_k8v4", "turboquant_4bit_nc", "turboquant_k3v4_nc", "turboquant_3bit_nc"]


@pytest.fixture
def vllms_kernels(monkeypatch: pytest.MonkeyPatch) -> Iterator[None]:
    """vLLM knows no compiler for CPUs and has left its kernels out; their file is read again, with the interpreter."""
    interpreter = pytest.importorskip("triton.runtime.interpreter")
    import triton
    from triton import language
    from vllm import triton_utils
    from vllm.v1.attention.backends import triton_attn
    from vllm.v1.attention.ops import int4_per_token_head, triton_reshape_and_cache_flash

    monkeypatch.setattr(triton_utils, "triton", triton)
    monkeypatch.setattr(triton_utils, "tl", language)
    name = "triton_reshape_and_cache_flash_per_token_head_quant"
    monkeypatch.setattr(triton_attn, name, getattr(read_again(triton_reshape_and_cache_flash), name))
    monkeypatch.setitem(sys.modules, int4_per_token_head.__name__, read_again(int4_per_token_head))
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
@pytest.mark.parametrize("kind", ["int8_per_token_head", "fp8_per_token_head", "int4_per_token_head"])
@pytest.mark.parametrize("dtype", [torch.float32, torch.bfloat16])
@pytest.mark.parametrize("head_dim", [64, 80])
def test_rows_are_those_that_vllm_writes(vllms_kernels: None, kind: str, dtype: torch.dtype, head_dim: int) -> None:
    """By tokens, as the cache may lie in memory; what is not written stays, but for scales, which vLLM sets to one."""
    draw, size = torch.Generator().manual_seed(1), 16
    how = formats.row_format(kind, head_dim, dtype)
    cache = torch.zeros(3, size, 2, 2 * how.row_bytes, dtype=torch.int8).transpose(1, 2)
    cache = cache if kind.startswith("int8") else cache.view(torch.uint8)
    keys, values = (torch.randn(5, 2, head_dim, generator=draw).to(dtype) for _ in range(2))
    if not kind.startswith("int4"):
        keys *= torch.logspace(-7, 3, 5).to(dtype)[:, None, None]
    else:  # numbers whose sums have no last bits to round
        keys, values = ((part * 20).round() for part in (keys, values))
        keys *= torch.tensor([2.0**-30, 1.0, 1.0, 2.0**9, 8.0]).to(dtype)[:, None, None]
        values[0] = compat.mixing_of(head_dim, "cpu").mix.T.sum(0) * 4  # all of it is far from zero when it is mixed
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
    assert torch.equal(cache[written], own[written]) and not cache[..., : how.number_bytes][~written].any()
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


@pytest.mark.parametrize("fault", ["halves", "no zero", "not mixed", "other signs"])
def test_another_layout_of_four_bits_is_refused(monkeypatch: pytest.MonkeyPatch, fault: str) -> None:
    kind = "int4_per_token_head"

    def write(kind: str, keys: torch.Tensor, values: torch.Tensor, cache: torch.Tensor, slots: torch.Tensor) -> None:
        how: Any = formats.row_format(kind, 64, torch.float32)
        if fault == "not mixed":
            keys = keys @ how.mixing.unmix
        elif fault == "other signs":
            values = values * (torch.arange(64) % 2 * 2 - 1)
        rows = [part.clone() for part in how.encode_entries(keys, values)]
        if fault == "halves":
            rows[0][..., :32] = rows[0][..., :32] >> 4 | rows[0][..., :32] << 4
        elif fault == "no zero":
            rows[1][..., 32:].view(torch.int32).bitwise_and_(-16)
        cache[slots // 16, :, slots % 16] = torch.cat(rows, -1)

    monkeypatch.setattr("keepset.vllm.formats.write_rows", write)
    with pytest.raises(KeepsetError, match=f"does not know the layout of this vLLM's KV cache of kind {kind}"):
        formats.check_rows(kind, 3, 64, torch.float32, CPU)


def test_a_mixing_that_cannot_be_undone_is_refused(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr("keepset.vllm.compat.resolve_name", lambda _: lambda whole: whole + whole.roll(1, 0))
    compat.mixing_of.cache_clear()
    with pytest.raises(
        KeepsetError, match="This vLLM mixes keys and values of 4 bits in a way that keepset cannot undo"
    ):
        formats.row_format("int4_per_token_head", 64, torch.float32)
    compat.mixing_of.cache_clear()


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


@pytest.fixture
def turboquants_kernels(vllms_kernels: None, monkeypatch: pytest.MonkeyPatch) -> Any:
    """vLLM's module that reads these caches; its layers write to them with the interpreter, too."""
    from vllm.v1.attention.backends import turboquant_attn
    from vllm.v1.attention.ops import triton_turboquant_decode, triton_turboquant_store

    store = read_again(triton_turboquant_store)
    monkeypatch.setattr(turboquant_attn, "triton_turboquant_store", store.triton_turboquant_store)
    return read_again(triton_turboquant_decode)


def packed_layer(kind: str, head_dim: int, **impl: Any) -> Any:
    """What keepset looks at of a layer whose cache is packed."""
    scales = {"_k_scale": torch.tensor(0.5), "_v_scale": torch.tensor(2.0)}
    shape = {"kv_cache_dtype": kind, "head_size": head_dim, "num_kv_heads": HEADS}
    return SimpleNamespace(**shape, **scales, impl=SimpleNamespace(**impl))


def turboquant_layer(kind: str, head_dim: int) -> Any:
    """A layer that writes to its cache as vLLM's do."""
    from vllm.model_executor.layers.quantization.turboquant.config import TurboQuantConfig
    from vllm.v1.attention.backends.turboquant_attn import TurboQuantAttentionImpl

    impl: Any = object.__new__(TurboQuantAttentionImpl)
    impl.tq_config = TurboQuantConfig.from_cache_dtype(kind, head_dim)
    impl.num_kv_heads, impl.head_size, impl._soa_store = HEADS, head_dim, False
    layer = packed_layer(kind, head_dim)
    layer.impl, impl.write_plain = impl, impl.do_kv_cache_update
    return layer


@pytest.mark.few(1)
@pytest.mark.cross
@pytest.mark.parametrize(("kind", "head_dim"), [*((kind, 64) for kind in TURBOQUANT), ("turboquant_k8v4", 80)])
@pytest.mark.parametrize("dtype", [torch.float32, torch.bfloat16])
def test_turboquant_is_written_as_vllm_writes_it(
    turboquants_kernels: Any, kind: str, dtype: torch.dtype, head_dim: int
) -> None:
    """Bit for bit, in slots by tokens and by heads; what is zero, large or beyond the largest 8-bit float, too."""
    draw, number = torch.Generator().manual_seed(1), 18  # of two blocks
    layer, how = turboquant_layer(kind, head_dim), compat.turboquant_format(kind, head_dim, dtype)
    keys, values = torch.randn(2, number, HEADS, head_dim, generator=draw).to(dtype)
    keys *= torch.logspace(-5, 4, number).to(dtype)[:, None, None]
    keys[3], values[4], values[5] = 0.0, 0.0, 2.5
    rows = torch.cat(how.encode_entries(keys, values), -1)
    content = formats.packed_slots(kind, HEADS, head_dim)[1]
    for shape in ((2, SIZE, HEADS, content), (2, HEADS, SIZE, content)):
        cache = torch.zeros(shape, dtype=torch.uint8)
        cache = cache.transpose(1, 2) if shape[1] == SIZE else cache
        room = formats.room_like(cache, number)
        assert room.shape == cache.shape and room.stride() == cache.stride()
        layer.impl.write_plain(layer, keys, values, room, torch.arange(number))
        written = room.transpose(1, 2).flatten(0, 1)[:number]
        assert torch.equal(written, rows)


@pytest.mark.few(1)
@pytest.mark.parametrize("kind", TURBOQUANT)
def test_turboquant_is_read_as_vllm_reads_it(turboquants_kernels: Any, kind: str) -> None:
    """By tokens, as vLLM lays it out; what is read is what its kernel for long prompts makes of the same bytes."""
    head_dim, slots, draw = 64, torch.tensor([17, 3, 40, 0]), torch.Generator().manual_seed(1)
    layer, (_, content) = turboquant_layer(kind, head_dim), formats.packed_slots(kind, HEADS, head_dim)
    cache, config = torch.zeros(3, SIZE, HEADS, content, dtype=torch.uint8), layer.impl.tq_config
    new = torch.randn(2, 4, HEADS, head_dim, generator=draw)
    layer.impl.write_plain(layer, new[0], new[1], cache.transpose(1, 2), slots)
    how = formats.packed_format(layer, torch.float32)
    pages = ScatteredPages([formats.parts_of(layer, cache.transpose(1, 2))], 0, how)
    own = [part.flatten(1, 2) for part in decoded_entries(pages, torch.arange(3 * HEADS).view(3, HEADS).T[..., None])]
    read = torch.zeros(2, 1, HEADS, 3 * SIZE, head_dim, dtype=torch.float16)
    turboquants_kernels._tq_full_dequant_kv[(3 * SIZE, HEADS)](
        cache, torch.arange(3)[None], how.centroids, *read, *read[0].stride()[:3], *read[1].stride()[:3],
        *cache.stride()[:3], 3, HEAD_DIM=head_dim, BLOCK_SIZE=SIZE, NUM_KV_HEADS=HEADS,
        MSE_BYTES=head_dim * config.key_mse_bits // 8, KPS=config.key_packed_size, VQB=config.value_quant_bits,
        VAL_DATA_BYTES=head_dim * config.value_quant_bits // 8, MSE_BITS=config.key_mse_bits,
        KEY_FP8=int(config.key_fp8), BLOCK_D=head_dim, NORM_CORRECTION=int(config.norm_correction),
    )  # fmt: skip
    keys, values = read[:, 0].float()
    keys = keys if config.key_fp8 else keys @ how.rotation
    for mine, right in ((own[0], keys), (own[1], values)):
        torch.testing.assert_close(mine[:, slots], right[:, slots], rtol=2e-3, atol=2e-3)  # rounded to 16 bits
    formats.check_packed(layer, torch.float32, CPU)


def write_nvfp4(layer: Any, keys: Tensor, values: Tensor, cache: Tensor, slots: Tensor, swizzled: bool) -> None:
    """As the published layout has it, a number at a time, in blocks that are laid out by heads."""
    size, dim = cache.shape[2], keys.shape[-1]
    levels = torch.tensor([0.0, 0.5, 1, 1.5, 2, 3, 4, 6, 0, -0.5, -1, -1.5, -2, -3, -4, -6])
    numbers, scales, memory = dim // 2, dim // 16, cache.view(len(cache), -1)
    for side, (rows, factor) in enumerate(((keys, layer._k_scale), (values, layer._v_scale))):
        for slot, of_heads in zip(slots.tolist(), rows, strict=True):
            block, offset = divmod(slot, size)
            for head, row in enumerate(of_heads):
                first = side * HEADS * size * (numbers + scales)
                behind = first + HEADS * size * numbers
                for i, some in enumerate(row.view(-1, 16)):
                    scale = (some.abs().max() / 6 / factor).to(torch.float8_e4m3fn)
                    codes = (some[:, None] / (scale.float() * factor) - levels).abs().argmin(1).tolist()
                    place = first + (head * size + offset) * numbers + i * 8
                    pairs = zip(codes[::2], codes[1::2], strict=True)
                    memory[block, place : place + 8] = torch.tensor([low + 16 * high for low, high in pairs])
                    line, column = offset, i
                    if side and swizzled:
                        line, column = offset // 4 * 4 + i // (scales // 4), i % (scales // 4) * 4 + offset % 4
                    memory[block, behind + (head * size + line) * scales + column] = scale.view(torch.uint8)


@pytest.mark.parametrize("swizzled", [True, False])
def test_nvfp4_is_read_as_it_is_published(swizzled: bool) -> None:
    """Another order of scales is noticed when the engine starts."""

    def write(*args: Any) -> None:
        write_nvfp4(*args, swizzled=swizzled)

    formats.check_packed(packed_layer("nvfp4", 128, write_plain=write, nvfp4_fa2=not swizzled), torch.float32, CPU)
    with pytest.raises(KeepsetError, match="does not know the layout of this vLLM's KV cache of kind nvfp4"):
        formats.check_packed(packed_layer("nvfp4", 128, write_plain=write, nvfp4_fa2=swizzled), torch.float32, CPU)


def test_slots_of_the_backends_are_those_that_are_read() -> None:
    """As vLLM's backends say how large they are."""
    from vllm.v1.attention.backends.turboquant_attn import TurboQuantAttentionBackend
    from vllm.v1.kv_cache_interface import FullAttentionSpec, get_kv_quant_mode

    for kind in TURBOQUANT:
        plain = FullAttentionSpec(
            block_size=SIZE, num_kv_heads=HEADS, head_size=96, dtype=torch.uint8, kv_quant_mode=get_kv_quant_mode(kind)
        )
        customized = TurboQuantAttentionBackend.customize_spec(plain)
        assert not formats.packed_otherwise(customized) and formats.as_on_gpus(plain) == customized
        assert formats.packed_otherwise(plain)
