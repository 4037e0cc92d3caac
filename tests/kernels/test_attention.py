"""Packed heads: attention, entries that come and stay, and 8 bits, against loops over heads, queries and entries."""

from __future__ import annotations

import math
from collections.abc import Iterator
from contextlib import contextmanager
from dataclasses import replace
from itertools import chain, product

import pytest
import torch
from torch import Tensor

from keepset.kernels import attention, columns, dispatch
from keepset.kernels.attention import append_entries, pack_entries, ragged_attention
from keepset.kernels.entry_format import FORMATS
from keepset.kernels.packed import HeadRun, PackedHeads
from keepset.kernels.softmax import Softmax
from tests.kernels.few_bits import matrix, meant, rounded
from tests.on_gpu import pretends

# Entries of every head of every request, [batch][kv_heads].
COUNTS = [[[5]], [[4, 4, 4], [4, 4, 4]], [[9, 9], [1, 1], [4, 4]], [[3, 8, 8], [8, 1, 6]]]
TOLERANCE = {
    torch.float32: dict(rtol=1e-5, atol=1e-5),
    # Weights and outputs are rounded to bfloat16's 8 bits: of outputs below 4 that takes a few 2**-7.
    torch.bfloat16: dict(rtol=0.02, atol=0.03),
}
ROUNDING = {torch.float32: 2**-24, torch.float16: 2**-11, torch.bfloat16: 2**-8}
"""Of a number, in parts of it: the largest of a row is 127 steps, so that it is that much further from them."""


def seeded(seed: int) -> torch.Generator:
    return torch.Generator().manual_seed(seed)


def packed_heads(counts: list[list[int]], sizes: tuple[int, int], dtype: torch.dtype, spare: int) -> PackedHeads:
    """Random entries, of ascending positions from 0; behind each head `spare` places that hold NaN."""
    draw = seeded(3)
    runs, start = [], 0
    for head, count in enumerate(chain(*counts)):
        if runs and runs[-1].count == count:
            runs[-1].heads += 1
        else:
            runs.append(HeadRun(head, 1, start, count, count + spare))
        start += count + spare
    keys, values = (torch.randn(start, size, generator=draw).to(dtype) for size in sizes)
    positions = torch.zeros(start, dtype=torch.int32)
    for run in runs:
        for part in (keys, values):
            run.view(part, run.count, spare).fill_(math.nan)
        # The first token always stays, so that every query sees something.
        for row in run.view(positions):
            later = 1 + torch.randperm(max(11, len(row)), generator=draw)
            row[1:] = later[: max(len(row) - 1, 0)].sort().values
    return PackedHeads(keys, values, positions, runs)


def mixed(rows: Tensor) -> Tensor:
    return (rows.double() @ matrix(rows.shape[-1]).T).to(rows.dtype)


def in_8_bits(packed: PackedHeads) -> tuple[PackedHeads, PackedHeads]:
    """The same heads in 8 bits, and as floating-point numbers, product by product."""
    (keys, key_scale), (values, value_scale) = (
        FORMATS[8].quantize(mixed(rows), rows.dtype) for rows in (packed.keys, packed.values)
    )
    stored = replace(packed, keys=keys, values=values, key_scale=key_scale, value_scale=value_scale)
    parts = (keys.double(), key_scale.double()), (values.double(), value_scale.double())
    written = [torch.stack([row * step for row, step in zip(*part, strict=True)]) for part in parts]
    whole = [part @ matrix(part.shape[1]) for part in written]
    return stored, replace(packed, keys=whole[0], values=whole[1])


def rms(row: Tensor) -> float:
    return float(row.square().mean().sqrt())


def in_4_bits(packed: PackedHeads) -> tuple[PackedHeads, PackedHeads]:
    """The same heads in 4 bits, the first of them with a residual of its newest entries; and as numbers."""
    rows = packed.keys, packed.values
    spread = [mixed(part) for part in rows]
    stored = [FORMATS[4].quantize(part, part.dtype) for part in spread]
    written = [meant(*part) for part in stored]
    lost = [part - FORMATS[4].dequantize(*coded_part) for part, coded_part in zip(spread, stored, strict=True)]
    first, start = packed.runs[0], packed.runs[0].start
    n = min(first.count, 2)
    newest = slice(start + first.count - n, start + first.count)
    second = [FORMATS[4].quantize(part[newest], part.dtype) for part in lost]
    for part, coded_part in zip(written, second, strict=True):
        part[newest] += meant(*coded_part)
    other_heads = sum(run.heads for run in packed.runs) - 1
    runs = [HeadRun(0, 1, 0, n, n), *([HeadRun(1, other_heads, n, 0, 0)] if other_heads else [])]
    (keys, key_scale), (values, value_scale) = second
    layer = PackedHeads(keys, values, packed.positions[newest], runs, None, key_scale, value_scale)
    (keys, key_scale), (values, value_scale) = stored
    whole = [part @ matrix(part.shape[1]) for part in written]
    coded = replace(packed, keys=keys, values=values, key_scale=key_scale, value_scale=value_scale, residual=layer)
    return coded, replace(packed, keys=whole[0], values=whole[1])


STORED = {16: lambda packed: (packed, packed), 8: in_8_bits, 4: in_4_bits}
"""Heads as they are stored, and as numbers, by bits."""


def heads_of(packed: PackedHeads) -> list[tuple[HeadRun, int]]:
    """Each head: its run, and which of the run's heads it is."""
    return [(run, i) for run in packed.runs for i in range(run.heads)]


def other_softmax(query_heads: int) -> list[Softmax]:
    """What models do with products: nothing more, caps, sinks, or both; logits of some size."""
    sinks = torch.linspace(-2.0, 3.0, query_heads)
    return [Softmax(0.37), Softmax(0.37, 0.5), Softmax(0.37, None, sinks), Softmax(0.37, 0.5, sinks)]


def attention_of(logits: Tensor, softmax: Softmax, head: int, bias: Tensor | float = 0.0) -> Tensor:
    """The attention of a query head to entries of scaled products, number by number."""
    powers = []
    for scaled, added in zip(logits.tolist(), (torch.zeros(len(logits)) + bias).double().tolist(), strict=True):
        cap = softmax.softcap
        powers.append(math.exp((scaled if cap is None else cap * math.tanh(scaled / cap)) + added))
    sunk = 0.0 if softmax.sinks is None else math.exp(float(softmax.sinks[head]))
    return torch.tensor([power / (sum(powers) + sunk) for power in powers], dtype=torch.float64)


def expected(queries: Tensor, packed: PackedHeads, kv_heads: int, softmax: Softmax, at: Tensor | None) -> Tensor:
    """Softmax head by head and query by query; `at` are positions of queries that see no later entries."""
    batch, query_heads, n, _ = queries.shape
    heads = heads_of(packed)
    output = torch.zeros(batch, n, query_heads, packed.values.shape[1], dtype=torch.float64)
    for request, head, row in product(range(batch), range(query_heads), range(n)):
        run, i = heads[request * kv_heads + head * kv_heads // query_heads]
        keys, values, positions = (run.view(part)[i] for part in (packed.keys, packed.values, packed.positions))
        logits = keys.double() @ queries[request, head, row].double() * softmax.scaling
        bias = torch.zeros(len(logits)) if packed.bias is None else run.view(packed.bias)[i]
        visible = positions < math.inf if at is None else positions <= at[request, row]
        if visible.any():
            output[request, row, head] = (
                attention_of(logits[visible], softmax, head, bias[visible]) @ values[visible].double()
            )
    return output


@pytest.mark.cross
@pytest.mark.parametrize("dtype", TOLERANCE)
@pytest.mark.parametrize("causal", [False, True])
@pytest.mark.parametrize("n", [1, 4])
@pytest.mark.parametrize(("group", "head_dim", "value_dim"), [(1, 5, 5), (3, 8, 8), (8, 3, 7)])
@pytest.mark.parametrize("counts", COUNTS)
@pytest.mark.parametrize("biased", [False, True])
@pytest.mark.parametrize("bits", [16, 8, 4])
@pytest.mark.parametrize("kind", range(4))
def test_is_a_masked_softmax_over_each_heads_entries(
    implementation: str, counts: list[list[int]], group: int, head_dim: int, value_dim: int, n: int, causal: bool,
    biased: bool, bits: int, kind: int, dtype: torch.dtype,
) -> None:  # fmt: skip
    batch, kv_heads, draw = len(counts), len(counts[0]), seeded(4)
    if bits == 4:  # two numbers share a byte
        head_dim, value_dim = 2 * head_dim, 2 * value_dim
    packed = packed_heads(counts, (head_dim, value_dim), dtype, spare=2)
    if biased:
        packed = replace(packed, bias=torch.randn(len(packed.keys), generator=draw).to(dtype))
    stored, written = STORED[bits](packed)
    # As models make them: token by token.
    queries = torch.randn(batch, n, kv_heads * group, head_dim, generator=draw).to(dtype).transpose(1, 2)
    # A part of a longer call's.
    positions = torch.stack([torch.arange(n + 1) + 12 - n - request for request in range(batch)])
    at = positions[:, :n] if causal else None
    softmax = other_softmax(kv_heads * group)[kind]
    output = ragged_attention(queries, [stored], softmax, at)
    assert output.dtype == dtype and output.is_contiguous()
    torch.testing.assert_close(output.double(), expected(queries, written, kv_heads, softmax, at), **TOLERANCE[dtype])


@pytest.mark.parametrize("longest", [257, pytest.param(5000, marks=pytest.mark.full)])
def test_a_long_head_in_parts(triton_interpreted: None, longest: int) -> None:
    """Heads without entries and with one beside it; what is not there counts nothing."""
    packed = packed_heads([[0, longest, 1], [64, 0, 65]], (16, 16), torch.float32, spare=1)
    queries = torch.randn(2, 6, 1, 16, generator=seeded(1))
    for softmax in other_softmax(6):  # a sink counts once, however many parts there are
        right = expected(queries, packed, 3, softmax, None)
        torch.testing.assert_close(ragged_attention(queries, [packed], softmax).double(), right, rtol=1e-5, atol=1e-5)


@pytest.mark.parametrize("head_dim", [64, *(pytest.param(size, marks=pytest.mark.full) for size in (80, 160))])
def test_many_new_queries_over_other_head_sizes(triton_interpreted: None, head_dim: int) -> None:
    packed = packed_heads([[12, 7]], (head_dim, head_dim), torch.bfloat16, spare=0)
    queries, at = torch.randn(1, 16, 9, head_dim, generator=seeded(1)).bfloat16(), torch.arange(3, 12)[None]
    output = ragged_attention(queries, [packed], Softmax(head_dim**-0.5), at)
    right = expected(queries, packed, 2, Softmax(head_dim**-0.5), at)
    torch.testing.assert_close(output.double(), right, **TOLERANCE[torch.bfloat16])


@pytest.mark.parametrize("bits", [8, 4])
def test_heads_of_few_bits_are_attended_piece_by_piece(bits: int, monkeypatch: pytest.MonkeyPatch) -> None:
    """A dense run of several heads, whose copies as floating-point numbers are more than a core's cache holds."""
    stored, written = STORED[bits](packed_heads([[30] * 5], (64, 64), torch.float32, spare=1))
    monkeypatch.setattr("keepset.kernels.packed.CACHE_BLOCK", 2 * 30 * 64)
    assert len(stored.runs) == 1 and [piece.heads for piece in stored.pieces] == [2, 2, 1]
    queries = torch.randn(1, 10, 1, 64, generator=seeded(1))
    right, output = expected(queries, written, 5, Softmax(0.1), None), ragged_attention(queries, [stored], Softmax(0.1))
    torch.testing.assert_close(output.double(), right, **TOLERANCE[torch.float32])


@pytest.mark.parametrize("strange", [math.nan, math.inf])
def test_what_is_no_number_spoils_its_own_head_only(implementation: str, strange: float) -> None:
    packed = packed_heads([[4, 5]], (8, 8), torch.float32, spare=3)
    packed.runs[1].view(packed.keys)[0, 2] = strange
    output = ragged_attention(torch.ones(1, 4, 1, 8), [packed], Softmax(0.3))
    assert output[0, 0, :2].isfinite().all() and output[0, 0, 2:].isnan().all()


@pytest.mark.cross
@pytest.mark.parametrize("n", [1, 3])
@pytest.mark.parametrize("dtype", TOLERANCE)
@pytest.mark.parametrize("head_dim", [64, 10])
def test_heads_of_many_stores(implementation: str, head_dim: int, dtype: torch.dtype, n: int) -> None:
    """Some have grown since their table was written, some have a bias, one has places to spare."""
    counts, draw = [[300, 7], [1, 1], [12, 40], [5, 5]], seeded(4)
    stores = [packed_heads([of_row], (head_dim, head_dim), dtype, spare=row) for row, of_row in enumerate(counts)]
    stores[2] = replace(stores[2], bias=torch.randn(len(stores[2].keys), generator=draw).to(dtype))
    for row in (1, 3):
        ragged_attention(torch.zeros(1, 4, 1, head_dim, dtype=dtype), [stores[row]], Softmax(0.3))
        for run in stores[row].runs:
            for column in (stores[row].keys, stores[row].values):
                column.copy_(torch.randn(column.shape, generator=draw))
            run.count += 1
        stores[row].grown += 1
    queries = torch.randn(4, n, 4, head_dim, generator=draw).to(dtype).transpose(1, 2)
    at = None if n == 1 else torch.tensor([[3, 4, 5]]).expand(4, -1).contiguous()
    together = ragged_attention(queries, stores, Softmax(0.3), at)
    for row, store in enumerate(stores):
        right = expected(queries[row : row + 1], store, 2, Softmax(0.3), None if at is None else at[row : row + 1])
        torch.testing.assert_close(together[row : row + 1].double(), right, **TOLERANCE[dtype])


def test_stores_of_two_kinds_are_not_read_as_one(triton_interpreted: None) -> None:
    stores = [packed_heads([[3, 8]], (8, 8), dtype, spare=0) for dtype in TOLERANCE]
    with pytest.raises(ValueError, match="stores' entries must have one dtype"):
        ragged_attention(torch.zeros(2, 2, 1, 8), stores, Softmax(0.3))


# --- entries that come and stay


@pytest.mark.parametrize("by_token", [False, True])
@pytest.mark.parametrize("counts", [[0, 1, 20, 7, 5, 3], [4] * 6, [0] * 6])
def test_every_head_keeps_its_own(implementation: str, by_token: bool, counts: list[int]) -> None:
    draw = seeded(2)
    keys = torch.randn((2, 20, 3, 5) if by_token else (2, 3, 20, 5), generator=draw).bfloat16()
    moved = {
        "keys": keys.transpose(1, 2) if by_token else keys,
        "values": torch.randn(2, 3, 26, 64, generator=draw)[:, :, :20],
        "positions": torch.arange(20, dtype=torch.int32).expand(2, 3, 20),
        "credit": torch.randn(2, 3, 20, generator=draw),
    }
    chosen = [torch.randperm(20, generator=draw)[:count].sort().values for count in counts]
    packed = pack_entries(moved, torch.cat(chosen), torch.tensor(counts).view(2, 3))
    for name, column in moved.items():
        rows = [column[head // 3, head % 3][entries] for head, entries in enumerate(chosen)]
        assert packed[name].dtype == column.dtype and torch.equal(packed[name], torch.cat(rows))


@pytest.mark.parametrize("n", [1, 40])
def test_new_entries_follow_those_of_their_head(implementation: str, n: int) -> None:
    draw = seeded(2)
    runs = [[HeadRun(0, 2, 0, 3, 50)], [HeadRun(0, 1, 0, 0, 41), HeadRun(1, 1, 41, 9, 50)]]
    stores = []
    for of_store, room in zip(runs, (100, 91), strict=True):
        keys, values = torch.randn(room, 8, generator=draw), torch.randn(room, 5, generator=draw).bfloat16()
        stores.append(PackedHeads(keys, values, torch.full((room,), -1, dtype=torch.int32), of_store))
    keys, values = (torch.randn(2, n, 2, size, generator=draw).transpose(1, 2) for size in (8, 5))
    positions = torch.arange(n) + torch.tensor([[12], [30]])
    # The second store's table, when it is written, is of a time before two entries came to every head.
    stores[1].grown = 2
    right = [[column.clone() for column in (store.keys, store.values, store.positions)] for store in stores]
    for (head, (start, count)), i in product(enumerate([(0, 3), (50, 3), (0, 0), (41, 9)]), range(n)):
        of_head = keys[head // 2, head % 2, i], values[head // 2, head % 2, i], positions[head // 2, i]
        for column, new in zip(right[head // 2], of_head, strict=True):
            column[start + count + i] = new
    append_entries(stores, keys, values.bfloat16(), positions)
    for store, (right_keys, right_values, right_positions) in zip(stores, right, strict=True):
        assert torch.equal(store.keys, right_keys) and torch.equal(store.values, right_values)
        assert torch.equal(store.positions, right_positions)


def appended(
    stored: PackedHeads, sizes: tuple[int, int], n: int, dtype: torch.dtype
) -> Iterator[tuple[Tensor, int, str, Tensor, Tensor]]:
    """Append entries to two requests of two heads: of each head its places, its number, `key` or `value`, the rows and
    the same mixed. Their positions are right, and nothing else has changed."""
    draw, stored.grown = seeded(2), 2  # the table is of a time before
    parts = [stored.keys, stored.values, stored.positions, stored.key_scale, stored.value_scale]
    before = [part.clone() for part in parts if part is not None]
    keys, values = (torch.randn(2, n, 2, size, generator=draw).to(dtype).transpose(1, 2) for size in sizes)
    keys[1, 1, 0, 3], keys[0, 0, 0] = math.nan, 0.0
    positions = torch.arange(n) + torch.tensor([[12], [30]])
    append_entries([stored], keys, values, positions)
    untouched = torch.ones(len(stored.keys), dtype=torch.bool)
    for run, i in heads_of(stored):
        head = run.first + i
        slots = run.start + i * run.capacity + run.count + torch.arange(n)
        untouched[slots] = False
        assert stored.positions[slots].tolist() == positions[head // 2].tolist()
        for rows, name in ((keys, "key"), (values, "value")):
            head_rows = rows[head // 2, head % 2]
            yield slots, head, name, head_rows, mixed(head_rows.float()).to(dtype).double()
    for part, old in zip([column for column in parts if column is not None], before, strict=True):
        assert torch.equal(part[untouched].nan_to_num(), old[untouched].nan_to_num())


@pytest.mark.cross
@pytest.mark.parametrize("dtype", ROUNDING)
@pytest.mark.parametrize("n", [1, 5])
def test_new_entries_of_8_bits(implementation: str, n: int, dtype: torch.dtype) -> None:
    """Where a head ends come its new entries, mixed and in steps."""
    stored, _ = in_8_bits(packed_heads([[3, 3], [0, 9]], (8, 5), dtype, spare=6))
    # Mixing rounds once more, and Triton's interpreter cuts bfloat16 where a GPU rounds.
    cut = 4 * 127 * ROUNDING[dtype]
    for slots, _, name, rows, new in appended(stored, (8, 5), n, dtype):
        step = getattr(stored, f"{name}_scale")[slots].double()
        exists = ~rows.isnan().any(-1)
        assert torch.equal(step.isnan(), ~exists)
        torch.testing.assert_close(step[exists], new.abs().amax(-1)[exists] / 127, rtol=cut / 127, atol=0.0)
        error = (getattr(stored, f"{name}s")[slots].double() * step[:, None] - new).abs()[exists]
        assert (error <= (0.5 + cut) * step[exists, None]).all()


@pytest.mark.few
@pytest.mark.cross
@pytest.mark.parametrize("dtype", [torch.float32, torch.bfloat16])
@pytest.mark.parametrize("n", [1, 5, 40])
@pytest.mark.parametrize("sizes", [(8, 6), (10, 64)])
def test_new_entries_of_4_bits(implementation: str, n: int, sizes: tuple[int, int], dtype: torch.dtype) -> None:
    """Where a head ends come its new entries, mixed and on the nearest levels, and what that loses in the residual."""
    heads, room = 4, 50
    empty = [torch.zeros(heads * room, size // 2, dtype=torch.uint8) for size in sizes]
    scales = [torch.zeros(heads * room, dtype=dtype) for _ in sizes]
    positions = torch.zeros(heads * room, dtype=torch.int32)
    residual = PackedHeads(*empty, positions, [HeadRun(0, heads, 0, 2, room)], None, *scales)
    residual.grown = 1  # its table is of a time before, too
    stored = replace(in_4_bits(packed_heads([[3, 3], [0, 9]], sizes, dtype, spare=44))[0], residual=residual)
    for slots, head, name, rows, new in appended(stored, sizes, n, dtype):
        behind = head * room + 2 + torch.arange(n)
        assert residual.positions[behind].tolist() == stored.positions[slots].tolist()
        coarse, fine = (
            meant(getattr(part, f"{name}s")[at], getattr(part, f"{name}_scale")[at])
            for part, at in ((stored, slots), (residual, behind))
        )
        exists = ~rows.isnan().any(-1)
        assert torch.equal(getattr(stored, f"{name}_scale")[slots].isnan(), ~exists)
        for row, first, second in zip(new[exists], coarse[exists], fine[exists], strict=True):
            size = rms(row)
            assert rms(first - rounded(row, dtype)) <= 16 * ROUNDING[dtype] * size
            # What is lost may be rounded itself, so that a number on a border takes the other level.
            assert rms(second - rounded(row - first, dtype)) <= max(16 * ROUNDING[dtype], 1e-6) * size


@pretends
def test_each_kernel_is_launched_on_the_gpu_of_its_tensors(
    triton_interpreted: None, monkeypatch: pytest.MonkeyPatch
) -> None:
    from tests.posing import Gpu, Posing

    assert torch.cuda.device("cuda:1").idx == dispatch.launched_on(torch.device("cuda:1")).idx == 1  # type: ignore[attr-defined]
    current: list[torch.device] = []

    @contextmanager
    def launched_on(device: torch.device) -> Iterator[None]:
        current.append(device)
        before = kernels()
        yield
        assert kernels() > before

    def kernels() -> int:
        names = ("_append", "_attend_part", "_columns", "_log_sum_exp", "_pack")
        return sum(n for name, n in gpu.launches.items() if name.startswith(names))

    for module in (attention, columns):
        monkeypatch.setattr(module, "launched_on", launched_on)
    with Gpu(monkeypatch) as gpu:
        keys, new = Posing(torch.randn(6, 8)), Posing(torch.randn(1, 2, 1, 8))
        store = PackedHeads(keys, keys, Posing(torch.arange(6, dtype=torch.int32)), [HeadRun(0, 2, 0, 2, 3)])
        append_entries([store], new, new, Posing(torch.tensor([[7]])))
        ragged_attention(new, [store], Softmax(0.3))
        columns.attention_columns(new[0], new[0], softmax=Softmax(1.0))
        pack_entries({"keys": new}, Posing(torch.tensor([0, 0])), Posing(torch.tensor([[1, 1]])))
    assert len(current) == 5 and {device.type for device in current} == {"meta"}
