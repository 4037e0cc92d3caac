"""Scores of entries by small networks: one program for each block of a head's entries, in one launch for all layers."""

from __future__ import annotations

import torch
import triton
import triton.language as tl

from keepset.kernels.page_format import layer_scales
from keepset.kernels.triton.page_format import as_bytes, kind_of, load_numbers, load_scales, load_zeros
from keepset.kernels.triton.softmax import rows_of

_WIDTH = 64
"""Numbers of the hidden layer that a program computes at a time: those of `WIDTH` in a fit of the default size."""
_INPUTS = 32
"""Numbers of an input that a program multiplies at a time."""


def entry_scores(keys, values, positions, new, networks, known):
    """Compute `keepset.kernels.predictor.entry_scores` in one launch, without a host sync."""
    keys, values = (part if part.stride(3) == 1 else part.contiguous() for part in (keys, values))
    strides = (*keys.stride()[:3], *values.stride()[:3])
    return _launch(keys, values, None, None, strides, (1, 1, 0, 1), positions, new, networks, known, False, ())


def entry_scores_in_pages(cache, addresses, place, subpages, positions, new, networks, known, formats):
    """Compute `keepset.kernels.predictor.entry_scores_in_pages` in one launch, without a host sync."""
    blocks, kv_heads, size, width = cache.shape
    kind = as_bytes(cache, formats[0] if formats else None)
    strides, pool = (*kind.stride()[:3], 0, 0, 0), (kv_heads, blocks, place, len(addresses.on_device))
    return _launch(
        kind, kind, addresses.on_device, subpages.contiguous(), strides, pool, positions, new, networks, known,
        addresses.aligned, formats, size, width // 2,
    )  # fmt: skip


def _launch(  # type: ignore[no-untyped-def]
    keys, values, addresses, subpages, strides, pool, positions, new, networks, known, aligned, formats, size=1, half=0
):
    rows, heads, entries = new.shape
    layers, _, width, inputs = networks.hidden.shape
    head_dim = networks.partner.shape[1]
    known = None if known is None else known.contiguous()
    mixing = formats[0].key_mixing if formats else None
    scores = torch.empty(rows, heads, entries, dtype=torch.float32, device=new.device)
    if not scores.numel():
        return scores
    inputs_block = max(16, min(_INPUTS, triton.next_power_of_2(max(head_dim, inputs - head_dim))))
    block = rows_of(inputs_block, torch.float32)
    _entry_scores[(rows * heads, triton.cdiv(entries, block))](
        keys, values, addresses, subpages, layer_scales(formats, values=False), layer_scales(formats, values=True),
        None if mixing is None else mixing.unmix.contiguous(),
        positions, new, known, scores, *(part.contiguous() for part in networks),
        *strides, *pool, *positions.stride(), *new.stride(), entries, rows // layers,
        0 if subpages is None else subpages.shape[2],
        HEADS=heads, HEAD_DIM=head_dim, VALUE_DIM=inputs - head_dim, WIDTH=width, SIZE=size, BLOCK=block,
        WIDTH_BLOCK=max(16, min(_WIDTH, triton.next_power_of_2(width))), INPUTS_BLOCK=inputs_block,
        PAGED=subpages is not None, KNOWN=known is not None, ALIGNED=aligned, SMALLEST=1e-30, HALF=half,
        **kind_of(formats[0] if formats else None),
    )  # fmt: skip
    return scores


@triton.jit
def _cos_and_sin(angles):
    """Return cosine and sine of angles in parts of a full turn, which 64-bit integers count.

    The quarter of the turn is known exactly, so two short polynomials are enough (those of Cephes).
    """
    part = (angles >> 32).to(tl.int32)  # to 1.5e-9 radians
    quarter = (part + 536870912) >> 30
    x = (part - (quarter << 30)).to(tl.float32) * 1.4629180792671596e-9  # 2 pi / 2**32; at most pi / 4
    y = x * x
    sin = ((-1.9515295891e-4 * y + 8.3321608736e-3) * y - 1.6666654611e-1) * y * x + x
    cos = ((2.443315711809948e-5 * y - 1.388731625493765e-3) * y + 4.166664568298827e-2) * y * y - 0.5 * y + 1.0
    odd = (quarter & 1) != 0
    sin, cos = tl.where(odd, cos, sin), tl.where(odd, -sin, cos)
    half = (quarter & 2) != 0
    return tl.where(half, -cos, cos), tl.where(half, -sin, sin)


@triton.jit
def _numbers(row, exists, dims, unmix, DIM: tl.constexpr, FORMAT: tl.constexpr):
    """Return some numbers of a block of rows, without their scales; of mixed rows what they stand for.

    Args:
        row: where each row begins.
        dims: which numbers.
        unmix: as `keepset.kernels.mixing.Mixing` has it; None if rows are not mixed.
    """
    if unmix is None:
        numbers = load_numbers(row[:, None], dims[None, :], exists[:, None] & (dims < DIM)[None, :], FORMAT)
        numbers = numbers.to(tl.float32)
    else:
        numbers = tl.zeros([row.shape[0], dims.shape[0]], tl.float32)
        for begin in range(0, DIM, dims.shape[0]):
            place = begin + tl.arange(0, dims.shape[0])
            mixed = load_numbers(row[:, None], place[None, :], exists[:, None] & (place < DIM)[None, :], FORMAT)
            if FORMAT == 4:
                mixed -= load_zeros(row, exists, DIM)[:, None]
            part = tl.load(
                unmix + place[:, None] * DIM + dims[None, :],
                mask=(place < DIM)[:, None] & (dims < DIM)[None, :], other=0.0,
            )  # fmt: skip
            numbers += tl.dot(mixed, part, input_precision="ieee")
    return numbers


@triton.jit
def _unrotated(
    key, exists, scale, positions, partner, turns, gain, dims, unmix, HEAD_DIM: tl.constexpr, FORMAT: tl.constexpr
):
    """Return some numbers of a block of keys as they were before rotation.

    Args:
        key: where each entry's key begins.
        scale: factor of each entry's numbers.
        dims: which numbers.
        unmix: as in `_numbers`.
    """
    real = dims < HEAD_DIM
    other = tl.load(partner + dims, mask=real, other=HEAD_DIM)
    x = _numbers(key, exists, dims, unmix, HEAD_DIM, FORMAT)
    y = _numbers(key, exists, other, unmix, HEAD_DIM, FORMAT)
    x *= (1 / tl.load(gain + dims, mask=real, other=1.0))[None, :]
    y *= (1 / tl.load(gain + other, mask=real, other=1.0))[None, :]
    cos, sin = _cos_and_sin(positions[:, None] * tl.load(turns + dims, mask=real, other=0)[None, :])  # which wraps
    unrotated = x * cos - y * sin
    return unrotated if FORMAT == 0 else unrotated * scale[:, None]


@triton.jit(do_not_specialize=["first", "at_row", "at_head", "new_row", "new_head", "entries", "requests", "pages"])
def _entry_scores(
    keys, values, addresses, subpages, key_scales, value_scales, unmix, positions, new, known, scores,
    linear, hidden, hidden_bias, output, output_bias, partner, turns, gain,
    key_row, key_head, key_entry, value_row, value_head, value_entry, kv_heads, blocks, first, layers,
    at_row, at_head, at_entry, new_row, new_head, new_entry, entries, requests, pages,
    HEADS: tl.constexpr, HEAD_DIM: tl.constexpr, VALUE_DIM: tl.constexpr, WIDTH: tl.constexpr, SIZE: tl.constexpr,
    BLOCK: tl.constexpr, WIDTH_BLOCK: tl.constexpr, INPUTS_BLOCK: tl.constexpr, PAGED: tl.constexpr,
    KNOWN: tl.constexpr, ALIGNED: tl.constexpr, SMALLEST: tl.constexpr, HALF: tl.constexpr, FORMAT: tl.constexpr,
    OWN_SCALES: tl.constexpr, EIGHT: tl.constexpr,
):  # fmt: skip
    """Score the new entries among a block of a head's entries; program axes: (head, block)."""
    whole = tl.program_id(0).to(tl.int64)
    row, head = whole // HEADS, whole % HEADS
    entry = (tl.program_id(1) * BLOCK + tl.arange(0, BLOCK)).to(tl.int64)
    stored = entry < entries
    unknown = tl.load(new + row * new_row + head * new_head + entry * new_entry, mask=stored, other=0) != 0
    result = tl.zeros([BLOCK], tl.float32)
    if KNOWN:
        result = tl.load(known + whole * entries + entry, mask=stored, other=0.0)
    if tl.sum(unknown.to(tl.int32), 0) > 0:
        if PAGED:
            subpage = tl.load(subpages + whole * pages + entry // SIZE, mask=unknown, other=0).to(tl.int64)
            through = subpage // kv_heads
            cache = tl.load(addresses + (first + through // blocks) % layers).to(keys.dtype)
            if ALIGNED:
                cache = tl.multiple_of(cache, 16)
            place = through % blocks * key_row + subpage % kv_heads * key_head + entry % SIZE * key_entry
            if EIGHT:
                place = tl.multiple_of(place, 8)
            key = cache + place
            value = key + HALF
        else:
            key = keys + row * key_row + head * key_head + entry * key_entry
            value = values + row * value_row + head * value_head + entry * value_entry
        at = tl.load(positions + row * at_row + head * at_head + entry * at_entry, mask=unknown, other=0).to(tl.int64)
        layer, key_scale, value_scale = row // requests, result, result
        if OWN_SCALES:
            key_scale = load_scales(key, unknown, HEAD_DIM, FORMAT)
            value_scale = load_scales(value, unknown, VALUE_DIM, FORMAT)
        elif FORMAT > 0:
            key_scale = tl.zeros([BLOCK], tl.float32) + tl.load(key_scales + layer)
            value_scale = tl.zeros([BLOCK], tl.float32) + tl.load(value_scales + layer)
        network = layer * HEADS + head
        partner += layer * HEAD_DIM
        turns += layer * HEAD_DIM
        gain += layer * HEAD_DIM
        linear += network * (HEAD_DIM + VALUE_DIM)
        hidden += network * WIDTH * (HEAD_DIM + VALUE_DIM)
        total = tl.zeros([BLOCK], tl.float32) + tl.load(output_bias + network)
        for start in range(0, WIDTH, WIDTH_BLOCK):
            unit = start + tl.arange(0, WIDTH_BLOCK)
            real = unit < WIDTH
            sums = tl.zeros([BLOCK, WIDTH_BLOCK], tl.float32)
            for begin in range(0, HEAD_DIM, INPUTS_BLOCK):
                dims = begin + tl.arange(0, INPUTS_BLOCK)
                x = _unrotated(key, unknown, key_scale, at, partner, turns, gain, dims, unmix, HEAD_DIM, FORMAT)
                weights = tl.load(
                    hidden + unit[None, :] * (HEAD_DIM + VALUE_DIM) + dims[:, None],
                    mask=real[None, :] & (dims < HEAD_DIM)[:, None], other=0.0,
                )  # fmt: skip
                sums += tl.dot(x, weights, input_precision="ieee")
                if start == 0:
                    total += tl.sum(x * tl.load(linear + dims, mask=dims < HEAD_DIM, other=0.0)[None, :], 1)
            for begin in range(0, VALUE_DIM, INPUTS_BLOCK):
                dims = begin + tl.arange(0, INPUTS_BLOCK)
                x = _numbers(value, unknown, dims, unmix, VALUE_DIM, FORMAT)
                if FORMAT > 0:
                    x *= value_scale[:, None]
                weights = tl.load(
                    hidden + unit[None, :] * (HEAD_DIM + VALUE_DIM) + HEAD_DIM + dims[:, None],
                    mask=real[None, :] & (dims < VALUE_DIM)[:, None], other=0.0,
                )  # fmt: skip
                sums += tl.dot(x, weights, input_precision="ieee")
                if start == 0:
                    of_value = tl.load(linear + HEAD_DIM + dims, mask=dims < VALUE_DIM, other=0.0)
                    total += tl.sum(x * of_value[None, :], 1)
            sums += tl.load(hidden_bias + network * WIDTH + unit, mask=real, other=0.0)[None, :]
            active = 0.5 * sums * (1 + tl.erf(sums * 0.7071067811865476))
            total += tl.sum(active * tl.load(output + network * WIDTH + unit, mask=real, other=0.0)[None, :], 1)
        score = tl.exp(total)
        score = tl.where(score < SMALLEST, SMALLEST, score)  # NaN stays NaN
        result = tl.where(unknown, score, result)
    tl.store(scores + whole * entries + entry, result, mask=stored)
