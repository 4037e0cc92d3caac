"""Codes of entries by small networks, against the formula entry by entry in float64; in stores and in pages."""

from __future__ import annotations

import math
from typing import Any

import pytest
import torch
from torch import Tensor

from keepset.kernels import predictor
from keepset.kernels.entry_format import decode, encode
from keepset.kernels.page_entries import _table
from keepset.kernels.predictor import Networks, entry_codes, entry_codes_in_pages, turns_of
from tests.kernels.codes import check_same_codes
from tests.kernels.quantised import ALL_FORMATS, quantised

LAYERS, ROWS, HEADS, LONGEST = 2, 2, 3, 2**17
STEPS, LIMITS = torch.tensor([1 / 512, 1 / 256]).double(), torch.tensor([16 - 1 / 512, 2 - 1 / 256]).double()
"""What log scores and slopes are rounded to, and the largest of them."""
ROUNDING = 2e-4
"""Of a sum of some hundred float32 products of numbers about 1."""


def random_networks(head_dim: int, value_dim: int, width: int, draw: torch.Generator) -> tuple[Networks, Tensor]:
    """Networks whose outputs are a few units apart, and the frequencies of a layer that rotates its halves and one that
    rotates neighbours, but not the last of them."""
    half, inputs = head_dim // 2, head_dim + value_dim + 2
    itself = torch.arange(head_dim)
    halves = torch.cat([itself[half : 2 * half], itself[:half], itself[2 * half :]])
    neighbours = torch.where(itself < 2 * max(1, half - 1), itself ^ 1, itself)
    partner = torch.stack([halves, neighbours])
    plane = torch.logspace(0, -5, head_dim)[torch.minimum(itself, partner)] * torch.tensor([[1.0], [0.7]])
    frequency = torch.where(itself < partner, -plane, plane).where(itself != partner, 0.0)
    gain = torch.where(frequency == 0, 1.0, torch.tensor([[1.3], [0.8]]))
    shapes = [(2, inputs), (width, inputs), (width,), (2, width), (2,)]
    weights = [torch.randn(LAYERS, HEADS, *shape, generator=draw) * inputs**-0.5 for shape in shapes]
    return Networks(*weights, partner, turns_of(frequency), gain), frequency


def expected(
    keys: Tensor,
    values: Tensor,
    positions: Tensor,
    new: Tensor,
    networks: Networks,
    frequency: Tensor,
    earlier_codes: Tensor,
) -> Tensor:
    """The formula's log scores and slopes, one entry after another; what known codes hold elsewhere."""
    outputs = torch.stack(decode(earlier_codes.double()), -1)
    for row, head, entry in new.nonzero().tolist():
        layer = row // ROWS
        linear, hidden, hidden_bias, output, output_bias = (part[layer, head].double() for part in networks[:5])
        angles = int(positions[row, head, entry]) * frequency[layer].double()
        plain = keys[row, head, entry].double() / networks.gain[layer].double()
        plain = plain * angles.cos() - plain[networks.partner[layer]] * angles.sin()
        value = values[row, head, entry].double()
        inputs = torch.tensor(
            [*plain, *value, *(math.log(math.dist(each, [0] * len(each))) for each in (plain, value))]
        )
        units = hidden @ inputs + hidden_bias
        active = units * (1 + torch.erf(units / math.sqrt(2))) / 2
        outputs[row, head, entry] = (linear @ inputs + output @ active + output_bias).clamp(-LIMITS, LIMITS)
    return outputs


def check_codes(codes: Tensor, outputs: Tensor, parts: dict[str, Any]) -> None:
    """Codes are whole numbers that hold the formula's to half a step; others are what they were."""
    new = parts["new"]
    assert torch.equal(
        codes[~new], torch.zeros_like(codes)[~new] if parts["earlier_codes"] is None else parts["earlier_codes"][~new]
    )
    assert torch.equal(codes, codes.round()) and codes[new].min() >= 1 and codes.max() < 2**24
    far = (torch.stack(decode(codes), -1).double() - outputs)[new].abs()
    assert (far < STEPS / 2 + ROUNDING).all()


def entries_of(
    head_dim: int, value_dim: int, entries: int, dtype: torch.dtype, draw: torch.Generator
) -> dict[str, Tensor]:
    """Heads whose first entries have a code and whose last are holes, as many as the head's number says."""
    shape = LAYERS * ROWS, HEADS, entries
    index, heads = torch.arange(entries), torch.arange(LAYERS * ROWS * HEADS).view(-1, HEADS, 1)
    valid, scored = index < entries - heads % 3, index < 7 * heads
    known = torch.randint(1, 2**24, shape, generator=draw).float()
    return {
        "keys": torch.randn(*shape, head_dim, generator=draw).to(dtype),
        "values": torch.randn(*shape, value_dim, generator=draw).to(dtype),
        "positions": torch.randint(LONGEST, shape, generator=draw).sort().values, "new": valid & ~scored,
        "earlier_codes": known.where(valid & scored, 0),
    }  # fmt: skip


CASES = [
    (5, 5, 6, 70, torch.float32), (6, 11, 70, 9, torch.float32), (80, 80, 20, 66, torch.bfloat16),
    pytest.param(64, 64, 64, 70, torch.float16, marks=pytest.mark.full),
    pytest.param(128, 128, 70, 20, torch.bfloat16, marks=pytest.mark.full),
    pytest.param(256, 256, 32, 20, torch.float32, marks=pytest.mark.full),
]  # fmt: skip


@pytest.mark.few
@pytest.mark.parametrize(("head_dim", "value_dim", "width", "entries", "dtype"), CASES)
def test_codes_are_the_formulas(
    implementation: str, head_dim: int, value_dim: int, width: int, entries: int, dtype: torch.dtype
) -> None:
    """At positions up to 131,072; what has a code keeps it, and holes get none."""
    draw = torch.Generator().manual_seed(head_dim)
    networks, frequency = random_networks(head_dim, value_dim, width, draw)
    entry_parts = entries_of(head_dim, value_dim, entries, dtype, draw)
    outputs = expected(networks=networks, frequency=frequency, **entry_parts)
    check_codes(entry_codes(networks=networks, **entry_parts), outputs, entry_parts)
    at_prompt = entry_parts | {
        "positions": entry_parts["positions"][:, :1].expand(-1, HEADS, -1),
        "earlier_codes": None,
    }
    at_prompt["keys"] = at_prompt["keys"].transpose(1, 2).contiguous().transpose(1, 2)  # as layers make them
    outputs = expected(
        networks=networks,
        frequency=frequency,
        **at_prompt | {"earlier_codes": torch.zeros_like(entry_parts["earlier_codes"])},
    )
    check_codes(entry_codes(networks=networks, **at_prompt), outputs, at_prompt)


@pytest.mark.parametrize("block", [1, 540, 8000], ids=["an entry", "ten entries", "two layers"])
def test_blocks_of_any_size_have_the_same_codes(block: int, monkeypatch: pytest.MonkeyPatch) -> None:
    """All layers and heads hold the same positions, so that they share angles."""
    monkeypatch.setattr(predictor, "CACHE_BLOCK", block)
    draw = torch.Generator().manual_seed(3)
    networks, frequency = random_networks(8, 8, 6, draw)
    parts = entries_of(8, 8, 70, torch.float32, draw)
    parts["positions"] = parts["positions"][:ROWS, :1].repeat(LAYERS, 1, 1).expand(-1, HEADS, -1)
    outputs = expected(networks=networks, frequency=frequency, **parts)
    check_codes(entry_codes(networks=networks, **parts), outputs, parts)


def test_what_a_code_holds() -> None:
    """Both numbers to half a step, within the limits; never what says that there is none; NaN where either is."""
    numbers = torch.tensor([[0.3, -0.7], [-15.9, 1.99], [1e9, -1e9], [-1e9, 1e9], [math.inf, -math.inf]])
    codes = encode(numbers)
    assert torch.equal(codes, codes.round()) and codes.min() >= 1
    far = torch.stack(decode(codes), -1) - numbers.clamp(-LIMITS, LIMITS)
    assert (far.abs() <= STEPS / 2).all()
    assert encode(torch.tensor([[math.nan, 0.0], [0.0, math.nan]])).isnan().all()


@pytest.mark.few(6)
@pytest.mark.parametrize(
    ("head_dim", "size", "dtype", "stored"),
    [(5, 4, torch.float32, None), (80, 16, torch.bfloat16, None)]
    + [(12, 4, torch.float32, each) for each in ALL_FORMATS]
    + [pytest.param(40, 16, torch.float32, ("int8", None), marks=pytest.mark.full)],
)
def test_codes_of_pages_are_those_of_stores(
    triton_interpreted: None, head_dim: int, size: int, dtype: torch.dtype, stored: Any
) -> None:
    """Layer after layer from the second of three on, whose blocks lie anywhere; quantised ones as what they mean."""
    _table.cache_clear()
    draw, entries = torch.Generator().manual_seed(1), 30
    networks, _ = random_networks(head_dim, head_dim, 20, draw)
    entry_parts, pages = entries_of(head_dim, head_dim, entries, dtype, draw), -(-entries // size)
    blocks, layer = ROWS * pages + 3, torch.arange(LAYERS)[:, None, None, None]
    caches = torch.full((3, blocks, HEADS, size, 2 * head_dim), math.nan).to(dtype)
    anywhere = [torch.randperm(blocks * HEADS, generator=draw)[: ROWS * HEADS * pages] for _ in range(LAYERS)]
    pages_of_heads = torch.stack(anywhere).view(LAYERS, ROWS, HEADS, pages)
    whole = torch.nn.functional.pad(
        torch.cat([entry_parts["keys"], entry_parts["values"]], -1), (0, 0, 0, pages * size - entries), value=math.nan
    )
    address, formats = (1 + layer, pages_of_heads // HEADS, pages_of_heads % HEADS), []
    caches[address] = whole.view(LAYERS, ROWS, HEADS, pages, size, -1)
    kept = list(caches)
    if stored:
        kept, floats, how = quantised(kept, *stored, dtype, draw)
        formats, read = [how] * LAYERS, torch.stack(floats)[address].flatten(3, 4).flatten(0, 1).nan_to_num()
        entry_parts["keys"], entry_parts["values"] = read[:, :, :entries].chunk(2, -1)
    subpages, parts = (
        (pages_of_heads + layer * blocks * HEADS).flatten(0, 1),
        {name: entry_parts[name] for name in ("positions", "new")},
    )
    for earlier in (entry_parts["earlier_codes"], None):
        codes = entry_codes_in_pages(
            kept, 1, subpages, networks=networks, formats=formats, earlier_codes=earlier, **parts
        )
        check_same_codes(codes, entry_codes(networks=networks, **entry_parts | {"earlier_codes": earlier}), 0.98)


def test_what_has_a_code_is_not_read(implementation: str) -> None:
    """Nor is a number that is none in one entry anything to its neighbours."""
    draw = torch.Generator().manual_seed(2)
    networks, _ = random_networks(8, 8, 6, draw)
    parts = entries_of(8, 8, 70, torch.float32, draw)
    for part in (parts["keys"], parts["values"]):
        part.masked_fill_(~parts["new"][..., None], math.nan)
    assert entry_codes(networks=networks, **parts).isfinite().all()
    parts["keys"][0, 0, 40] = math.nan
    spoilt = entry_codes(networks=networks, **parts).isnan()
    assert spoilt[0, 0, 40] and spoilt.sum() == 1


def test_angles_are_exact_where_float32_would_not_be() -> None:
    frequency = torch.tensor([1.0, -1.0, 0.7353, 1e-5, 0.0, math.pi, 100.0])
    at = torch.tensor([1, 999, 2**17 - 1])
    angles = (at[:, None] * turns_of(frequency)).float() * (2 * math.pi / predictor.TURN)
    exact: Any = at[:, None] * frequency.double()
    assert torch.allclose(angles.double().cos(), exact.cos(), atol=4e-7, rtol=0)
    assert torch.allclose(angles.double().sin(), exact.sin(), atol=4e-7, rtol=0)
