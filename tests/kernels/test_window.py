"""What entries receive of a few queries, in packed heads and in pages, against a softmax that is written out."""

from __future__ import annotations

import math
from dataclasses import replace
from itertools import product

import pytest
import torch
from torch import Tensor

from keepset.kernels.packed import PackedHeads
from keepset.kernels.page_format import PageFormat
from keepset.kernels.page_layout import ColumnTarget, EntriesInPages, PageLayout, RecordedQueries
from keepset.kernels.softmax import GroupReduction, Softmax
from keepset.kernels.window import add_received, add_received_in_pages, received_attention
from tests.kernels.quantised import ALL_FORMATS
from tests.kernels.test_attention import COUNTS, STORED, attention_of, heads_of, other_softmax, packed_heads, seeded
from tests.kernels.test_paged import Case, _slots, at, stored_as

TOLERANCE = {torch.float32: dict(rtol=1e-5, atol=1e-6), torch.bfloat16: dict(rtol=0.02, atol=1e-4)}
ROUNDED = {torch.float32: dict(rtol=0.02, atol=1e-5), torch.bfloat16: dict(rtol=0.02, atol=1e-4)}
"""Of 8 and 4 bits: a GPU's product takes keys in the queries' type."""


def received_of(
    products: Tensor, softmax: Softmax, heads: range, sums_of: GroupReduction, bias: Tensor | float = 0.0
) -> Tensor:
    """What entries receive of one query, `[numbers, entries]`: of its products with them in a KV head's query heads."""
    if sums_of == "largest":
        sinks = None if softmax.sinks is None else softmax.sinks[heads.start : heads.stop].amax(0, keepdim=True)
        return attention_of(products.amax(0), replace(softmax, sinks=sinks), 0, bias)[None]
    by_head = torch.stack([attention_of(row, softmax, head, bias) for head, row in zip(heads, products, strict=True)])
    return by_head if sums_of == "each" else by_head.mean(0, keepdim=True)


def expected(
    queries: Tensor, packed: PackedHeads, kv_heads: int, last: Tensor, softmax: Softmax, sums_of: GroupReduction
) -> Tensor:
    """The column; places that hold no entry stay as they are."""
    group = queries.shape[1] // kv_heads
    column = torch.ones(len(packed.keys), *sums_of.shape(group), dtype=torch.float64)
    for run, i in heads_of(packed):
        request, kv_head = divmod(run.first + i, kv_heads)
        rows = torch.arange(run.count) + run.start + i * run.capacity
        for row in range(queries.shape[2]):
            visible = rows[packed.positions[rows] <= last[request, row]]
            heads = range(kv_head * group, (kv_head + 1) * group)
            products = queries[request, heads, row].double() @ packed.keys[visible].double().T * softmax.scaling
            bias = 0.0 if packed.bias is None else packed.bias[visible]
            column[visible] += received_of(products, softmax, heads, sums_of, bias).T.reshape(-1, *column.shape[1:])
    return column


@pytest.mark.few
@pytest.mark.cross
@pytest.mark.parametrize("sums_of", GroupReduction)
@pytest.mark.parametrize("group", [1, 3, 8])
@pytest.mark.parametrize("n", [1, 3, 9])
@pytest.mark.parametrize("dtype", TOLERANCE)
@pytest.mark.parametrize("counts", COUNTS)
@pytest.mark.parametrize("bits", [16, 8, 4])
@pytest.mark.parametrize("kind", range(4))
def test_sums(
    implementation: str, counts: list[list[int]], dtype: torch.dtype, n: int, group: int, sums_of: GroupReduction,
    bits: int, kind: int,
) -> None:  # fmt: skip
    """Some of the queries see nothing, or do not exist."""
    packed, batch, kv_heads = packed_heads(counts, (10, 6), dtype, spare=2), len(counts), len(counts[0])
    draw = seeded(n)
    if group == 3:
        packed = replace(packed, bias=torch.randn(len(packed.keys), generator=draw))
    stored, written = STORED[bits](packed)
    queries = torch.randn(batch, n, kv_heads * group, 10, generator=draw).to(dtype).transpose(1, 2)
    last = torch.randint(-1, 12, (batch, n), generator=draw).sort().values
    column = torch.ones(len(packed.keys), *sums_of.shape(group))
    softmax = other_softmax(kv_heads * group)[kind]
    add_received(column, queries, stored, kv_heads, last, softmax, sums_of)
    right = expected(queries, written, kv_heads, last, softmax, sums_of)
    torch.testing.assert_close(column.double(), right, **(TOLERANCE if bits == 16 else ROUNDED)[dtype])


@pytest.mark.cross
@pytest.mark.parametrize("sums_of", [GroupReduction.EACH, GroupReduction.LARGEST])
@pytest.mark.parametrize("group", [1, 3, 8])
@pytest.mark.parametrize("n", [1, 9])
@pytest.mark.parametrize("dtype", TOLERANCE)
@pytest.mark.parametrize("by_token", [False, True])
@pytest.mark.parametrize("holes", [False, True])
@pytest.mark.parametrize("kind", range(4))
def test_sums_of_heads_that_lie_apart(
    implementation: str, sums_of: GroupReduction, group: int, n: int, dtype: torch.dtype, by_token: bool, holes: bool,
    kind: int,
) -> None:  # fmt: skip
    """As a model makes keys: head by head, or token by token; some entries do not exist, and have biases."""
    heads, entries, size, draw = 3, 90, 12, seeded(5)
    shape = (entries, heads, size) if by_token else (heads, entries, size)
    keys = torch.randn(*shape, generator=draw).to(dtype)
    keys = keys.transpose(0, 1) if by_token else keys
    queries = torch.randn(heads, group, n, size, generator=draw).to(dtype)
    positions = torch.arange(entries).expand(heads, -1)
    last = torch.randint(-1, entries, (heads, n), generator=draw).sort().values
    valid = bias = None
    if holes:
        valid = torch.rand(heads, entries, generator=draw) < 0.7
        bias = torch.randn(heads, entries, generator=draw)
    whole = other_softmax(heads * group)[kind]
    softmax = whole.by_query_group(1, heads)
    sums = received_attention(queries, keys, positions, last, softmax, valid, sums_of, bias)
    right = torch.zeros(heads, 1 if sums_of == "largest" else group, entries, dtype=torch.float64)
    for head, row in product(range(heads), range(n)):
        visible = positions[head] <= last[head, row]
        visible = (visible if valid is None else visible & valid[head]).nonzero()[:, 0]
        products = queries[head, :, row].double() @ keys[head, visible].double().T * whole.scaling
        head_bias = 0.0 if bias is None else bias[head, visible]
        right[head][:, visible] += received_of(
            products, whole, range(head * group, (head + 1) * group), sums_of, head_bias
        )
    torch.testing.assert_close(sums.double(), right, **TOLERANCE[dtype])


@pytest.mark.parametrize("longest", [300, pytest.param(700, marks=pytest.mark.full)])
def test_a_long_head_beside_none_and_many_queries(triton_interpreted: None, longest: int) -> None:
    packed = packed_heads([[0, longest, 1]], (16, 16), torch.float32, spare=1)
    queries, last = torch.randn(1, 6, 70, 16, generator=seeded(1)), torch.arange(longest - 70, longest)[None]
    for softmax in other_softmax(6)[::3]:
        column = torch.ones(len(packed.keys))
        add_received(column, queries, packed, 3, last, softmax)
        right = expected(queries, packed, 3, last, softmax, GroupReduction.MEAN)
        torch.testing.assert_close(column.double(), right, rtol=1e-4, atol=1e-5)


@pytest.mark.parametrize("sums_of", GroupReduction)
@pytest.mark.parametrize("strange", [math.nan, math.inf])
def test_what_is_no_number_spoils_its_own_head_only(
    implementation: str, strange: float, sums_of: GroupReduction
) -> None:
    packed = packed_heads([[4, 5]], (8, 8), torch.float32, spare=3)
    packed.runs[1].view(packed.keys)[0, 2] = strange
    column = torch.zeros(len(packed.keys), *sums_of.shape(2))
    add_received(column, torch.ones(1, 4, 2, 8), packed, 2, torch.full((1, 2), 20), Softmax(0.3), sums_of)
    of_head = [run.view(column) for run in packed.runs]
    assert of_head[0].isfinite().all() and of_head[1].isnan().all()


# --- in pages

LENGTHS, NEW = [9, 21, 12, 1], [9, 1, 9, 1]
"""The second one shares pages, some of them in the other layer's cache; the fourth kept nothing."""
BEFORE = 7.0
"""What stands in columns."""


def in_pages(case: Case, layers: int) -> EntriesInPages:
    """The layout of the last of so many layers, before which nothing was compressed."""
    layout = PageLayout(*(torch.cat([*[part * 0] * (layers - 1), part], 1).contiguous() for part in case.layout))
    table = torch.tensor([row.block_table() for row in case.rows], dtype=torch.int32)
    lengths = torch.tensor([row.length for row in case.rows])
    return EntriesInPages(layout, table, lengths, layout.counts, max(row.length for row in case.rows))


def positions_of(case: Case, size: int) -> Tensor:
    """Of each slot with an entry that was kept, bit for bit; what else there is means nothing."""
    column = torch.full(case.bias.shape, 12345, dtype=torch.int32)
    for row in case.rows:
        for head in range(case.caches[0].shape[1]):
            for slot, position in _slots(row, head, size):
                column[place(case, slot)] = position
    return column.view(torch.float32)


def unwritten(case: Case) -> Tensor:
    """How many of each request's newest entries have no number yet."""
    return torch.tensor([min(2, row.length) for row in case.rows])


def place(case: Case, slot: int) -> tuple[int, int]:
    """Of a slot as the second layer numbers it: its layer, and its place there."""
    slots = case.bias.shape[1]
    return (1 + slot // slots) % 2, slot % slots


def check_in_pages(
    case: Case, caches: list[Tensor], formats: list[PageFormat], queries: RecordedQueries, received: ColumnTarget,
    layers: int = 2,
) -> None:  # fmt: skip
    """Numbers of the second layer are those of its entries, one by one; all others are what they were."""
    _, kv_heads, size, _ = case.caches[0].shape
    add_received_in_pages(caches, range(1, 2), queries, in_pages(case, layers), received, formats)
    row_queries = [queries.rings[0, slot, of] for slot, of in zip(queries.slots, queries.places, strict=True)]
    group, sinks = row_queries[0].shape[1] // kv_heads, received.softmax.sinks
    softmax = replace(received.softmax, sinks=None if sinks is None else sinks[1])
    columns = [received.column, *received.own]
    right = [None if of is None else torch.full_like(of, BEFORE, dtype=torch.float64) for of in columns]
    for (r, row), head in product(enumerate(case.rows), range(kv_heads)):
        slots, (positions, numbers, biases) = _slots(row, head, size), case.held(r, head)
        if received.positions is None:  # what was kept lies just before what came since
            positions = torch.arange(len(slots)) + row.length - len(slots)
        sums = torch.full((len(slots), group if received.sums_of == "each" else 1), BEFORE, dtype=torch.float64)
        sums[len(slots) - int(received.unwritten[r]) :] = 0.0
        heads = range(head * group, head * group + group)
        for query, last in zip(row_queries[r].double(), received.last_visible[r], strict=True):
            visible, added = positions <= last, biases * (received.bias is not None)
            products = query[heads] @ numbers[visible, : query.shape[1]].T * softmax.scaling
            sums[visible] += received_of(products, softmax, heads, received.sums_of, added[visible]).T
        for i, ((slot, _), numbers_of_entry) in enumerate(zip(slots, sums, strict=True)):
            private = right[1 + r] if received.own else None
            target, address = (right[0], place(case, slot)) if private is None else (private, (1, head, i))
            target[address] = numbers_of_entry.view(target.shape[len(address) :])
    for of, whole in zip(right, columns, strict=True):
        if of is not None and whole is not None:
            torch.testing.assert_close(whole.double(), of, **TOLERANCE[queries.rings.dtype])


@pytest.mark.cross
@pytest.mark.parametrize("softmax", ["plain", "capped", "sinks"])
@pytest.mark.parametrize("positioned", [False, True])
@pytest.mark.parametrize("group", [1, 3, 8])
@pytest.mark.parametrize("sums_of", GroupReduction)
@pytest.mark.parametrize("n", [1, 4])
@pytest.mark.parametrize("dtype", TOLERANCE)
def test_sums_in_pages(
    implementation: str, dtype: torch.dtype, n: int, sums_of: GroupReduction, group: int, positioned: bool, softmax: str
) -> None:
    """Some of the queries see nothing, or do not exist. With positions, two requests' numbers are their own."""
    kv_heads, size, dim = 2, 4, 10
    case = Case.draw(LENGTHS, NEW, kv_heads, size, dim, dtype)
    draw, rows = seeded(n), len(LENGTHS)
    rings = torch.randn(1, rows + 2, 6, kv_heads * group, dim, generator=draw).to(dtype)
    slots = torch.randperm(2 * rows, generator=draw).clamp(max=rows + 1)[::2]  # not one after another
    at_places = torch.randint(6, (rows, n), generator=draw)
    last = torch.stack([torch.randint(-1, row.length, (n,), generator=draw) for row in case.rows]).sort().values
    columns = torch.full((*case.bias.shape, *sums_of.shape(group)), BEFORE)
    room = 2, kv_heads, 24, *sums_of.shape(group)
    private = [torch.full(room, BEFORE) if row in (1, 2) else None for row in range(rows)] if positioned else []
    bias, positions = case.bias if group == 3 else None, positions_of(case, size) if positioned else None
    sinks = torch.randn(2, kv_heads * group, generator=draw) if softmax == "sinks" else None
    makes = Softmax(0.3, None if softmax == "plain" else 0.7, sinks)
    received = ColumnTarget(columns, last, unwritten(case), makes, sums_of, bias, positions, private)
    check_in_pages(case, case.caches, [], RecordedQueries(rings, slots, at_places), received)


@pytest.mark.few
@pytest.mark.cross
@pytest.mark.parametrize(("kind", "scales"), ALL_FORMATS)
@pytest.mark.parametrize("dtype", TOLERANCE)
def test_sums_over_quantised_pages(
    implementation: str, dtype: torch.dtype, kind: str, scales: tuple[float, float] | None
) -> None:
    kv_heads, size, dim, group = 2, 4, 12, 3
    case, draw, rows = Case.draw(LENGTHS, NEW, kv_heads, size, dim, torch.float32), seeded(4), len(LENGTHS)
    stored, how = stored_as(case, kind, scales, dtype, draw)
    rings = torch.randn(1, rows, 3, kv_heads * group, dim, generator=draw).to(dtype)
    slots, at_places = torch.randperm(rows, generator=draw), torch.randint(3, (rows, 2), generator=draw)
    last = torch.tensor([[row.length - 2, row.length - 1] for row in case.rows])
    columns = torch.full(case.bias.shape, BEFORE)
    received = ColumnTarget(columns, last, unwritten(case), Softmax(0.3), bias=case.bias)
    check_in_pages(case, stored, [how], RecordedQueries(rings, slots, at_places), received)


def test_one_layout_of_all_layers_and_long_heads(triton_interpreted: None, monkeypatch: pytest.MonkeyPatch) -> None:
    """As where heads are equal; long enough for several parts, with shorter ones beside them."""
    monkeypatch.setattr("keepset.kernels.triton.paged_window.LEAST_PART", 16)
    case, last = Case.draw([108, 100, 3], [1, 1, 3], 2, 16, 8, torch.float32), [[95, 107], [90, 99], [1, 2]]
    target = torch.full(case.bias.shape, BEFORE), torch.tensor(last), unwritten(case), Softmax(0.5)
    slots_and_indices = torch.tensor([1, 0, 2]), torch.tensor([[3, 4], [0, 1], [2, 0]])
    queries = RecordedQueries(torch.randn(1, 3, 5, 4, 8, generator=seeded(1)), *slots_and_indices)
    check_in_pages(case, case.caches, [], queries, ColumnTarget(*target), layers=1)


@pytest.mark.parametrize("sums_of", GroupReduction)
@pytest.mark.parametrize("strange", [math.nan, math.inf])
def test_what_is_no_number_in_pages_spoils_its_own_head_only(
    implementation: str, strange: float, sums_of: GroupReduction
) -> None:
    case = Case.draw([9], [9], 2, 4, 8, torch.float32)
    spoilt = _slots(case.rows[0], 1, 4)
    slot = spoilt[2][0]
    layer, *address = at(slot, 4, 2, len(case.caches[0]))
    case.caches[layer][tuple(address)][0] = strange
    column = torch.zeros(*case.bias.shape, *sums_of.shape(2))
    received = ColumnTarget(column, torch.tensor([[8, 8]]), torch.tensor([9]), Softmax(0.3), sums_of)
    queries = RecordedQueries(torch.ones(1, 1, 2, 4, 8), torch.tensor([0]), torch.arange(2)[None])
    add_received_in_pages(case.caches, range(1, 2), queries, in_pages(case, 2), received)
    whole = [slot for slot, _ in _slots(case.rows[0], 0, 4)]
    assert column[1, whole].isfinite().all() and column[1, [slot for slot, _ in spoilt]].isnan().all()
