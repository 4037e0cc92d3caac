"""Checks of pages of every kind."""

from __future__ import annotations

import torch
from torch import Tensor

from keepset.paged.pages import Pages

DTYPES = [torch.float32, torch.bfloat16, torch.float16]


def seeded(seed: int) -> torch.Generator:
    return torch.Generator().manual_seed(seed)


def random(*shape: int, dtype: torch.dtype, generator: torch.Generator) -> Tensor:
    return torch.randn(*shape, generator=generator).to(dtype)


def check_only_the_given_slots_are_written(pages: Pages, cache: Tensor) -> None:
    """The cache has three blocks of two heads, 32 entries of 32 numbers each, all ones."""
    before = cache.clone()
    pages.write(torch.zeros(0, 32), torch.zeros(0, 32), torch.zeros(0, dtype=torch.long))
    assert torch.equal(cache, before)
    pages.write(torch.full((2, 32), 2.0), torch.full((2, 32), 3.0), torch.tensor([33, 191]))
    keys, values = pages.read(torch.arange(6))
    untouched = torch.ones(192, dtype=torch.bool)
    untouched[[33, 191]] = False
    assert keys[untouched].eq(1).all() and values[untouched].eq(1).all()
    assert keys[[33, 191]].eq(2).all() and values[[33, 191]].eq(3).all()


def check_entries_may_be_views_of_larger_tensors(pages: Pages) -> None:
    """The cache has one block of one head, 32 entries of 32 numbers."""
    wide = random(64, 20, 2, dtype=torch.float32, generator=seeded(2))
    keys, values = wide[:, 1:9, 0].T.repeat(1, 1), wide[:, ::2, 1].T[:8]
    expected = (keys[:, ::2].clone(), values[:, ::2].clone())
    some = torch.arange(0, 32, 2)[::2]
    pages.write(keys[:, ::2], values[:, ::2], some)
    found = pages.read(torch.zeros(1, dtype=torch.long))
    assert torch.equal(found[0][some], expected[0]) and torch.equal(found[1][some], expected[1])
