"""What holds for random numbers holds for those of real models."""

from __future__ import annotations

import pytest
import torch

import keepset
from keepset.kernels.entry_format import FORMATS
from keepset.kernels.packed import BIAS
from tests.allocators.fits import squared_errors, with_reference
from tests.hf.models import generate, oracle_gap, prompt, tiny
from tests.kernels import few_bits
from tests.methods.naive import Shape, observe
from tests.real_shapes import MASSIVE, SHAPES, SINKS, shaped

SHAPE = Shape((29, 22), 2, 3, 8, 16)
every = pytest.mark.parametrize("name", SHAPES)


@every
@pytest.mark.parametrize("dtype", [torch.float32, torch.float16, torch.bfloat16], ids=str)
def test_entries_in_8_and_4_bits_are_near_in_every_precision(name: str, dtype: torch.dtype) -> None:
    """No number overflows in float16, and none is further off than the rounding of its row allows."""
    observation = shaped(observe(SHAPE), name)
    for part in (observation.keys, observation.values):
        rows = part[0].flatten(0, 1).to(dtype)
        assert bool(rows.isfinite().all())
        exact, mixing = rows.double(), few_bits.matrix(rows.shape[-1])
        mixed = exact @ mixing.T
        length = exact.norm(dim=-1)
        for bits, expected in (
            (8, torch.stack([few_bits.in_steps(row) for row in mixed])),
            (4, torch.stack([few_bits.rounded(row) for row in mixed])),
        ):
            error = (FORMATS[bits].rounded(rows).double() - expected @ mixing).norm(dim=-1)
            # Another level where a number lies between two, and the precision of what is stored.
            step = {8: mixed.abs().amax(-1) / 127, 4: 0.5 * length / rows.shape[-1] ** 0.5}[bits]
            assert bool((error <= 1.1 * step + 12 * torch.finfo(dtype).eps * length + 1e-6).all())


@every
@pytest.mark.parametrize("allocator", ["", "adakv"])
def test_a_fit_is_never_worse_than_none(name: str, allocator: str) -> None:
    inner = f"{allocator}(snapkv(window=3))" if allocator else "snapkv(window=3)"
    observation = with_reference(shaped(observe(SHAPE), name))
    kept = keepset.Recipe.parse(f"match({inner}, keep=0.5)").select(observation).layer(0)
    assert kept.values is not None and bool(kept.values.isfinite().all())
    assert bool(kept.state[BIAS].isfinite().all())
    errors = squared_errors(observation, kept)
    assert errors[0] <= 1.01 * errors[1] + 1e-9


@every
@pytest.mark.parametrize("dtype", [torch.float32, torch.float16, torch.bfloat16], ids=str)
def test_knorm_keeps_the_shortest_keys(name: str, dtype: torch.dtype) -> None:
    """Also where lengths are more than float16 can hold."""
    observation = shaped(observe(SHAPE, dtype=dtype), name)
    kept = keepset.Recipe.parse("knorm(keep=7)").select(observation).layer(0)
    for row in range(SHAPE.batch * SHAPE.kv_heads):
        request, head = divmod(row, SHAPE.kv_heads)
        lengths = observation.keys[request, head, : SHAPE.lengths[request]].double().norm(dim=-1)
        found = kept.indices[slice(*kept.cu_seqlens[row : row + 2].tolist())]
        assert len(found) == 7
        assert float(lengths[found].max()) <= float(lengths.sort().values[6]) * (1 + 1e-6)
        if name in ("shortest first", "longest first"):
            assert (0 in found.tolist()) is (name == "shortest first")


def test_a_shaped_model_has_these_shapes() -> None:
    model = tiny("llama_real")
    ids = prompt(1, 40, 5).clamp(min=SINKS.stop)
    ids[0, [0, 27]] = SINKS.start
    sinks, others = [0, 27], [at for at in range(1, 40) if at != 27]
    kept = keepset.Cache(model, "knorm(keep=1.0)")
    with torch.no_grad():
        output = model(ids, past_key_values=kept, output_hidden_states=True)
    assert float(output.hidden_states[1][0, 0].abs().max()) > 0.9 * MASSIVE
    for layer, is_longest in ((0, False), (1, True)):
        columns = kept.managed_layers[layer].store.padded()[0]
        lengths = columns["keys"][0].norm(dim=-1)
        assert bool(((lengths[:, sinks].amin(-1) > lengths[:, others].amax(-1)) == is_longest).all())
    first = columns["keys"][0, 0]
    assert not first[:, [1, 9]].any()


@pytest.mark.parametrize(
    "recipe",
    [
        "knorm(keep=12)",
        "adakv(snapkv(window=5), keep=12)",
        "quantized(snapkv(window=5), keep=12)",
        "quantized(match(adakv(snapkv(window=5))), bits=4, keep=12)",
        pytest.param("match(pool(prompt_queries), keep=12)", marks=pytest.mark.full),
        pytest.param("streaming_llm(keep=12, every=8)", marks=pytest.mark.full),
    ],
)
def test_a_shaped_model_says_what_a_dense_one_says(recipe: str) -> None:
    model, ids = tiny("llama_real"), prompt(1, 44, 3)
    ids[0, [0, 29]] = SINKS.start
    cache = keepset.Cache(model, recipe)
    output = generate(model, ids, cache, max_new_tokens=6)
    assert cache.events and oracle_gap(model, cache, output, torch.ones_like(ids)) < 2e-3
