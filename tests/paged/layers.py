"""A group of layers without an engine, batches of steps for it, and what is allocated while it runs."""

from __future__ import annotations

from collections.abc import Callable, Sequence
from functools import partial
from typing import Any

import torch
from torch import Tensor
from torch.multiprocessing.reductions import StorageWeakRef
from torch.utils._python_dispatch import TorchDispatchMode
from torch.utils._pytree import tree_leaves

from keepset import Recipe
from keepset.core.rope import RotaryTable
from keepset.kernels import page_entries
from keepset.kernels.page_format import PageFormat
from keepset.kernels.softmax import Softmax
from keepset.paged.engine import EngineSize, QueryProjection
from keepset.paged.eviction import EvictionSchedule
from keepset.paged.layer_group import LayerGroup
from keepset.paged.layout_table import EmptiedBlocks
from keepset.paged.pages import StridedPages
from keepset.paged.planner import Planner
from keepset.paged.query_records import slots_for
from keepset.paged.step import ScheduledRequest, StepBatch
from keepset.recording import QueryRing, Recording

REQUESTS = 8
"""That run at once, at most."""


def planner_of(
    recipe: str | Recipe, layers: int = 2, kv_heads: int = 2, block_size: int = 4, group: int = 2, head_dim: int = 8,
    itemsize: int = 4, *, blocks: int = 10**4, requests: int = 64,
) -> Planner:  # fmt: skip
    """A planner of so many layers, with so many query heads to a KV head, in a pool of so many blocks."""
    parsed = Recipe.parse(recipe) if isinstance(recipe, str) else recipe
    schedule = EvictionSchedule(parsed, 0, tuple(range(layers)), kv_heads, head_dim, block_size)
    recording = Recording.of_recipe(parsed, group, head_dim, itemsize)
    return Planner(schedule, recording, range(layers), EngineSize(requests, blocks), EmptiedBlocks())


def layer_group(
    recipe: str, caches: Sequence[Tensor], group: int, formats: Sequence[PageFormat] = (),
    rotary: RotaryTable | None = None, projections: Sequence[QueryProjection] = (),
) -> LayerGroup:  # fmt: skip
    """Layers with these caches `[blocks, kv_heads, size, width]`, with so many query heads to a KV head."""
    page_entries._table.cache_clear()  # of caches that lay there before
    first = caches[0]
    blocks, kv_heads, size, width = first.shape
    dtype, head_dim = (formats[0].dtype, formats[0].head_dim) if formats else (first.dtype, width // 2)
    planner = planner_of(
        recipe, len(caches), kv_heads, size, group, head_dim, dtype.itemsize, blocks=blocks, requests=REQUESTS
    )
    shape = len(caches), slots_for(REQUESTS), kv_heads * group, head_dim
    ring = QueryRing(planner.recording, *shape, dtype, first.device)
    how = formats or [None] * len(caches)
    pages = [partial(StridedPages, caches, place, one) for place, one in enumerate(how)]
    return LayerGroup(planner, pages, ring, Softmax(head_dim**-0.5), rotary, projections)


def batch_of(
    requests: list[tuple[int, int, int]], width: int, size: int, put: Callable[[Tensor], Tensor] = lambda tensor: tensor
) -> StepBatch:
    """A step of requests, given by prompt and tokens before and after; each has `width` blocks of `size` tokens."""
    rows, first = [], 0
    for row, (prompt, before, after) in enumerate(requests):
        rows.append(ScheduledRequest(row, first, first + after - before, prompt, before, after))
        first += after - before
    table = torch.arange(len(rows) * width, dtype=torch.int32).view(len(rows), width)
    slots = [int(table[one.row, p // size]) * size + p % size for one in rows for p in range(one.before, one.after)]
    lengths = torch.tensor([one.after for one in rows], dtype=torch.int32)
    starts = torch.tensor([0, *(one.end_query for one in rows)], dtype=torch.int32)
    most = max(one.after - one.before for one in rows)
    return StepBatch(rows, put(table), put(lengths), put(torch.tensor(slots)), put(starts), most)


class Allocated(TorchDispatchMode):
    """Counts what operators answer with while it is active, and not what they take and give back inside.

    Attributes:
        peak: the most bytes that were there at a time.
        total: the bytes of all that was made, one after another.
    """

    def __init__(self) -> None:
        super().__init__()
        self._made: dict[int, tuple[StorageWeakRef, int]] = {}
        self.peak = self.total = 0

    def __torch_dispatch__(self, function: Any, types: Any, args: Any = (), kwargs: Any = None) -> Any:
        output = function(*args, **(kwargs or {}))
        given = {_storage(leaf).cdata for leaf in tree_leaves((args, kwargs)) if isinstance(leaf, Tensor)}
        self._made = {place: one for place, one in self._made.items() if not one[0].expired()}
        for leaf in tree_leaves(output):
            if isinstance(leaf, Tensor) and (storage := _storage(leaf)).cdata not in given:
                self._made[storage.cdata] = storage, leaf.untyped_storage().nbytes()
                self.total += leaf.untyped_storage().nbytes()
        self.peak = max(self.peak, sum(size for _, size in self._made.values()))
        return output


def _storage(tensor: Tensor) -> StorageWeakRef:
    return StorageWeakRef(tensor.untyped_storage())
