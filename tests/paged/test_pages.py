"""Pages that keep an entry's numbers in order, at any strides."""

from __future__ import annotations

import pytest
import torch
from torch import Tensor

from keepset.paged.pages import StridedPages
from tests.paged import pages as checks
from tests.paged.pages import random, seeded


def test_what_is_written() -> None:
    """Only the given slots; entries may be views of larger tensors."""
    cache = torch.ones(3, 2, 32, 64)
    checks.check_only_the_given_slots_are_written(StridedPages([cache]), cache)
    checks.check_entries_may_be_views_of_larger_tensors(StridedPages([torch.zeros(1, 1, 32, 64)]))


@pytest.mark.parametrize("dtype", checks.DTYPES)
@pytest.mark.parametrize("order", [(0, 1, 2, 3), (0, 2, 1, 3), (1, 0, 2, 3), (2, 0, 3, 1), (3, 2, 1, 0)])
def test_strided_pages_are_their_logical_view(dtype: torch.dtype, order: tuple[int, ...]) -> None:
    """The axes may be in any order in memory, with gaps between blocks."""
    shape = [6, 3, 4, 10]
    memory = random(*(shape[axis] for axis in order), dtype=dtype, generator=seeded(7))
    memory = torch.stack((memory, memory * 0), dim=1)[:, 0]
    cache = memory.permute([order.index(axis) for axis in range(4)])
    assert list(cache.shape) == shape
    pages = StridedPages([cache])
    assert (pages.kv_heads, pages.block_size, pages.head_dim) == (3, 4, 5)
    subpages = torch.tensor([[4 * 3 + 2, 0], [1, 5 * 3]])

    def logical() -> Tensor:
        places = [[(4, 2), (0, 0)], [(0, 1), (5, 0)]]
        return torch.stack([torch.cat([cache[block, head] for block, head in row]) for row in places])

    old = logical()
    for part, right in zip(pages.read(subpages), old.chunk(2, -1), strict=True):
        assert torch.equal(part, right)
    before = cache.clone()
    new_keys, new_values = (random(3, 5, dtype=dtype, generator=seeded(8)) for _ in range(2))
    pages.write(new_keys, new_values, torch.tensor([(4 * 3 + 2) * 4 + 1, 3, 5 * 3 * 4]))
    for entry, place in enumerate([(4, 2, 1), (0, 0, 3), (5, 0, 0)]):
        assert torch.equal(cache[place], torch.cat((new_keys[entry], new_values[entry])))
        before[place] = cache[place]
    assert torch.equal(cache, before) and not torch.equal(logical(), old)
