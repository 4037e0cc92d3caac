"""KeepSets against Python's own sets of positions."""

from __future__ import annotations

import random
from collections.abc import Callable
from dataclasses import dataclass
from typing import Any

import pytest
import torch
from hypothesis import given
from hypothesis import strategies as st

from keepset import KeepSet, KeepsetError, Observation
from keepset.core.keep_set import LayerKeepSet
from tests.tiers import examples

Sets = list[list[list[list[int]]]]  # [layer][request][head] -> sorted positions


@dataclass(frozen=True)
class Cached:
    """Positions that a cache of several layers holds, and two choices out of them."""

    entries: Sets
    first: Sets
    second: Sets
    layers: list[int]

    def keep_set(self, chosen: Sets) -> KeepSet:
        parts = []
        for layer, entries, sets in zip(self.layers, self.entries, chosen, strict=True):
            heads = [zip(*request, strict=True) for request in zip(entries, sets, strict=True)]
            mask = [[[entry in chosen for entry in cached] for cached, chosen in request] for request in heads]
            positions = torch.tensor(entries)
            mask = torch.tensor(mask, dtype=torch.bool).view(positions.shape)
            parts.append(LayerKeepSet.from_mask(layer, mask, positions, entry_bytes=24))
        return KeepSet(parts)


@st.composite
def caches(draw: st.DrawFn) -> Cached:
    layers, requests, heads, count = (draw(st.integers(1, most)) for most in (3, 3, 3, 7))
    chance = random.Random(draw(st.integers(0, 10**6)))
    share = draw(st.sampled_from([0.0, 0.3, 0.7, 1.0]))

    def for_heads(make: Callable[[int, int, int], list[int]]) -> Sets:
        return [[[make(i, b, h) for h in range(heads)] for b in range(requests)] for i in range(layers)]

    entries = for_heads(lambda *at: sorted(chance.sample(range(12), count)))
    first = for_heads(lambda i, b, h: [entry for entry in entries[i][b][h] if chance.random() < share])
    second = for_heads(lambda i, b, h: [entry for entry in entries[i][b][h] if chance.random() < 0.5])
    return Cached(entries, first, second, sorted(chance.sample(range(30), layers)))


def sets_of(keep_set: KeepSet) -> Sets:
    _, batch, heads = keep_set.counts.shape
    return [
        [[keep_set.positions(layer, b, h).tolist() for h in range(heads)] for b in range(batch)]
        for layer in keep_set.layers
    ]


def compared(a: Sets, b: Sets, measure: Callable[[set[int], set[int]], Any]) -> list[Any]:
    """A number for every layer, request and head."""
    return [
        [[measure(set(p), set(q)) for p, q in zip(*heads, strict=True)] for heads in zip(*requests, strict=True)]
        for requests in zip(a, b, strict=True)
    ]


def check_packed(cache: Cached, keep_set: KeepSet, sets: Sets) -> None:
    """Heads are packed one after another, and gather their own entries."""
    assert keep_set.layers == tuple(cache.layers) and sets_of(keep_set) == sets
    assert keep_set.counts.tolist() == [[[len(p) for p in heads] for heads in layer] for layer in sets]
    assert keep_set.entries == sum(len(p) for layer in sets for heads in layer for p in heads)
    for layer, entries, of_layer in zip(cache.layers, cache.entries, sets, strict=True):
        part, flat = keep_set.layer(layer), [positions for heads in of_layer for positions in heads]
        assert part.cu_seqlens.tolist() == [sum(map(len, flat[:row])) for row in range(len(flat) + 1)]
        assert part.rows.tolist() == [row for row, positions in enumerate(flat) for _ in positions]
        assert part.packed_positions.tolist() == [entry for positions in flat for entry in positions]
        cached = [head for heads in entries for head in heads]
        gathered = [cached[row][i] for row, i in zip(part.rows.tolist(), part.indices.tolist(), strict=True)]
        assert gathered == part.packed_positions.tolist()


@examples(60, derandomize=False)
@given(cache=caches(), length=st.integers(0, 14))
def test_holds_the_chosen_positions_and_their_mask(cache: Cached, length: int) -> None:
    keep_set = cache.keep_set(cache.first)
    check_packed(cache, keep_set, cache.first)
    expected = [[[[t in p for t in range(length)] for p in heads] for heads in layer] for layer in cache.first]
    assert keep_set.mask(length).tolist() == expected
    assert [keep_set.layer(layer).mask(length).tolist() for layer in cache.layers] == expected


@examples(60, derandomize=False)
@given(cache=caches())
def test_set_operations_are_those_of_sets(cache: Cached) -> None:
    first, second = cache.keep_set(cache.first), cache.keep_set(cache.second)
    check_packed(cache, first.union(second), compared(cache.first, cache.second, lambda a, b: sorted(a | b)))
    assert sets_of(second.union(first)) == sets_of(first.union(second))
    overlap = compared(cache.first, cache.second, lambda a, b: len(a & b) / len(a) if a else 1.0)
    iou = compared(cache.first, cache.second, lambda a, b: len(a & b) / len(a | b) if a | b else 1.0)
    torch.testing.assert_close(first.overlap(second), torch.tensor(overlap))
    torch.testing.assert_close(first.iou(second), torch.tensor(iou))


@pytest.mark.parametrize("dtype", [torch.float32, torch.bfloat16])
def test_bytes_are_those_of_the_gathered_tensors(dtype: torch.dtype) -> None:
    keys, values = torch.zeros(2, 3, 10, 6, dtype=dtype), torch.zeros(2, 3, 10, 4, dtype=dtype)
    mask = torch.rand(2, 3, 10, generator=torch.Generator().manual_seed(0)) < 0.5
    keep_set = Observation(keys=keys, values=values).keep(mask)
    assert keep_set.nbytes == keys[mask].nbytes + values[mask].nbytes


@pytest.mark.parametrize(
    ("layers", "layout"),
    [
        ([[[3, 3], [3, 3]], [[3, 3], [3, 3]]], "dense"),
        ([[[3, 3], [2, 2]], [[3, 3], [2, 2]]], "dense"),
        ([[[3, 3], [2, 2]], [[1, 1], [2, 2]]], "layer-ragged"),
        ([[[3, 3], [3, 3]], [[3, 3], [3, 2]]], "head-ragged"),
        ([[[0, 0], [0, 0]], [[0, 0], [0, 0]]], "dense"),
    ],
)
def test_layout_is_what_the_counts_allow(layers: list[list[list[int]]], layout: str) -> None:
    sets = [[[list(range(n)) for n in heads] for heads in layer] for layer in layers]
    entries = [[[list(range(5)) for _ in heads] for heads in layer] for layer in layers]
    keep_set = Cached(entries, sets, sets, [0, 1]).keep_set(sets)
    assert keep_set.layout == layout and f"layout={layout!r}" in repr(keep_set)


def small(heads: int = 2, layer: int = 4) -> KeepSet:
    nothing = torch.zeros(1, heads, 3, 1)
    return Observation(keys=nothing, values=nothing, layer=layer).keep(torch.ones(1, heads, 3, dtype=torch.bool))


@pytest.mark.parametrize(
    ("refused", "says"),
    [
        (lambda: KeepSet([]), "at least one layer"),
        (lambda: small().layer(0), "no layer 0; it has [4]"),
        (lambda: small().positions(4, 1, 0), "no request 1, head 0"),
        (lambda: small().positions(4, 0, -1), "no request 0, head -1"),
        (lambda: small().iou(small(heads=1)), "same layers, requests and KV heads"),
        (lambda: small().overlap(small(layer=5)), "same layers, requests and KV heads"),
        (lambda: small().union(small(layer=5)), "same layers, requests and KV heads"),
    ],
)
def test_refuses_in_one_sentence(refused: Callable[[], object], says: str) -> None:
    with pytest.raises(KeepsetError) as refusal:
        refused()
    assert says in str(refusal.value) and str(refusal.value).endswith(".")


def test_layers_are_in_the_models_order() -> None:
    assert KeepSet([small(layer=7).layer(7), small(layer=2).layer(2)]).layers == (2, 7)
