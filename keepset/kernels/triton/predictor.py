"""Codes of entries by small networks: one program for each block of a head's entries, in one launch for all layers."""

from __future__ import annotations

import torch
import triton
import triton.language as tl

from keepset.kernels.entry_format import SCORE_LIMIT, SCORE_STEPS, SHORTEST, SLOPE_LIMIT, SLOPE_STEPS
from keepset.kernels.page_format import layer_scales
from keepset.kernels.triton.page_entries import as_bytes, kind_of, load_numbers, load_scales
from keepset.kernels.triton.softmax import rows_of

_WIDTH = 64
"""Hidden units that a program computes at a time: all of them in a fit of the default `WIDTH`."""
_INPUTS = 32
"""Numbers of an input that a program multiplies at a time."""


def entry_codes(keys, values, positions, new, networks, earlier_codes):
    """Compute `keepset.kernels.predictor.entry_codes` in one launch, without a host sync.

    Args:
        keys, values, positions, new, networks, earlier_codes: as there.
    """
    keys, values = (part if part.stride(3) == 1 else part.contiguous() for part in (keys, values))
    strides = (*keys.stride()[:3], *values.stride()[:3])
    return _launch(keys, values, None, None, strides, (1, 1, 0, 1), positions, new, networks, earlier_codes, False, ())


def entry_codes_in_pages(cache, addresses, first_layer, subpages, positions, new, networks, earlier_codes, formats):
    """Compute `keepset.kernels.predictor.entry_codes_in_pages` in one launch, without a host sync.

    Args:
        cache: of one of the layers.
        addresses: of the group's caches.
        first_layer, subpages, positions, new, networks, earlier_codes, formats: as there.
    """
    blocks, kv_heads, size, width = cache.shape
    kind = as_bytes(cache, formats[0] if formats else None)
    strides, pool = (*kind.stride()[:3], 0, 0, 0), (kv_heads, blocks, first_layer, len(addresses.on_device))
    return _launch(
        kind, kind, addresses.on_device, subpages.contiguous(), strides, pool, positions, new, networks, earlier_codes,
        addresses.aligned, formats, size, width // 2,
    )  # fmt: skip


def _launch(  # type: ignore[no-untyped-def]
    keys,
    values,
    addresses,
    subpages,
    strides,
    pool,
    positions,
    new,
    networks,
    earlier_codes,
    aligned,
    formats,
    size=1,
    half=0,
):
    rows, heads, entries = new.shape
    layers, _, width, inputs = networks.hidden.shape
    head_dim = networks.partner.shape[1]
    value_dim = inputs - 2 - head_dim
    earlier_codes = None if earlier_codes is None else earlier_codes.contiguous()
    mixing = formats[0].mixing if formats else None
    codes = torch.empty(rows, heads, entries, dtype=torch.float32, device=new.device)
    if not codes.numel():
        return codes
    inputs_block = max(16, min(_INPUTS, triton.next_power_of_2(max(head_dim, value_dim))))
    block = rows_of(inputs_block, torch.float32)
    _entry_codes[(rows * heads, triton.cdiv(entries, block))](
        keys, values, addresses, subpages, layer_scales(formats, values=False), layer_scales(formats, values=True),
        None if mixing is None else mixing.matrix.contiguous(),
        positions, new, earlier_codes, codes, *(part.contiguous() for part in networks),
        *strides, *pool, *positions.stride(), *new.stride(), entries, rows // layers,
        0 if subpages is None else subpages.shape[2],
        HEADS=heads, HEAD_DIM=head_dim, VALUE_DIM=value_dim, INPUTS=inputs, WIDTH=width, SIZE=size, BLOCK=block,
        WIDTH_BLOCK=max(16, min(_WIDTH, triton.next_power_of_2(width))), INPUTS_BLOCK=inputs_block,
        PAGED=subpages is not None, KNOWN=earlier_codes is not None, ALIGNED=aligned, HALF=half,
        SCORE_STEPS=SCORE_STEPS, SCORE_LIMIT=SCORE_LIMIT, SLOPE_STEPS=SLOPE_STEPS, SLOPE_LIMIT=SLOPE_LIMIT,
        SHORTEST=SHORTEST,
        **kind_of(formats[0] if formats else None),
    )  # fmt: skip
    return codes


@triton.jit
def _cos_and_sin(angles):
    """Return cosine and sine of angles in parts of a full turn, which 64-bit integers count.

    The quadrant is exact, so two short polynomials suffice (those of Cephes).
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
    """Return some numbers of a block of rows, unmixed if rows are mixed, without their scales.

    Args:
        row: pointer to each row.
        dims: which numbers.
        unmix: the matrix of `keepset.kernels.entry_format.Mixing`; None if rows are not mixed.
    """
    if unmix is None:
        numbers = load_numbers(row[:, None], dims[None, :], exists[:, None] & (dims < DIM)[None, :], FORMAT)
        numbers = numbers.to(tl.float32)
    else:
        numbers = tl.zeros([row.shape[0], dims.shape[0]], tl.float32)
        for begin in range(0, DIM, dims.shape[0]):
            source_dims = begin + tl.arange(0, dims.shape[0])
            mixed = load_numbers(
                row[:, None], source_dims[None, :], exists[:, None] & (source_dims < DIM)[None, :], FORMAT
            )
            part = tl.load(
                unmix + source_dims[:, None] * DIM + dims[None, :],
                mask=(source_dims < DIM)[:, None] & (dims < DIM)[None, :], other=0.0,
            )  # fmt: skip
            numbers += tl.dot(mixed, part, input_precision="ieee")
    return numbers


@triton.jit
def _unrotated(
    key, exists, scale, positions, partner, turns, gain, dims, unmix, HEAD_DIM: tl.constexpr, FORMAT: tl.constexpr
):
    """Return some numbers of a block of keys as they were before rotation.

    Args:
        key: pointer to each entry's key.
        scale: factor of each entry's numbers.
        dims: which numbers.
        unmix: as in `_numbers`.
    """
    real = dims < HEAD_DIM
    partner_dims = tl.load(partner + dims, mask=real, other=HEAD_DIM)
    x = _numbers(key, exists, dims, unmix, HEAD_DIM, FORMAT)
    y = _numbers(key, exists, partner_dims, unmix, HEAD_DIM, FORMAT)
    x *= (1 / tl.load(gain + dims, mask=real, other=1.0))[None, :]
    y *= (1 / tl.load(gain + partner_dims, mask=real, other=1.0))[None, :]
    cos, sin = _cos_and_sin(positions[:, None] * tl.load(turns + dims, mask=real, other=0)[None, :])  # wraps around
    unrotated = x * cos - y * sin
    return unrotated if FORMAT == 0 else unrotated * scale[:, None]


@triton.jit
def _weights(hidden, unit, dims, real, exist, INPUTS: tl.constexpr):
    """Return the weights from some inputs to some units.

    Args:
        hidden: pointer to the weights of a network's hidden layer.
        unit, dims: which units, and which inputs.
        real, exist: which of them exist.
        INPUTS: inputs of a unit.
    """
    pointers = hidden + unit[None, :] * INPUTS + dims[:, None]
    return tl.load(pointers, mask=real[None, :] & exist[:, None], other=0.0)


@triton.jit
def _log_length(square, SHORTEST: tl.constexpr):
    return 0.5 * tl.log(tl.where(square < SHORTEST * SHORTEST, SHORTEST * SHORTEST, square))  # NaN stays NaN


@triton.jit
def _linear(score, slope, x, weights, numbers, exist, ROW: tl.constexpr):
    """Add the products of some numbers of the rows `x` with their weights to both outputs; weights are `ROW` apart.

    Args:
        score, slope: sums so far.
        x: rows of numbers.
        weights: pointer to those of the first output.
        numbers: which inputs they are.
        exist: which of them exist.
        ROW: the distance of both outputs' weights.
    """
    score += tl.sum(x * tl.load(weights + numbers, mask=exist, other=0.0)[None, :], 1)
    slope += tl.sum(x * tl.load(weights + ROW + numbers, mask=exist, other=0.0)[None, :], 1)
    return score, slope


@triton.jit
def _steps(numbers, STEPS: tl.constexpr, LIMIT: tl.constexpr):
    steps = tl.floor(numbers * STEPS + (LIMIT * STEPS + 0.5))
    steps = tl.where(steps < 1, 1.0, steps)  # NaN stays NaN
    return tl.where(steps > 2 * LIMIT * STEPS - 1, 2 * LIMIT * STEPS - 1, steps)


@triton.jit(do_not_specialize=["first", "at_row", "at_head", "new_row", "new_head", "entries", "requests", "pages"])
def _entry_codes(
    keys, values, addresses, subpages, key_scales, value_scales, unmix, positions, new, earlier_codes, codes,
    linear, hidden, hidden_bias, output, output_bias, partner, turns, gain,
    key_row, key_head, key_entry, value_row, value_head, value_entry, kv_heads, blocks, first, layers,
    at_row, at_head, at_entry, new_row, new_head, new_entry, entries, requests, pages,
    HEADS: tl.constexpr, HEAD_DIM: tl.constexpr, VALUE_DIM: tl.constexpr, INPUTS: tl.constexpr, WIDTH: tl.constexpr,
    SIZE: tl.constexpr, BLOCK: tl.constexpr, WIDTH_BLOCK: tl.constexpr, INPUTS_BLOCK: tl.constexpr, PAGED: tl.constexpr,
    KNOWN: tl.constexpr, ALIGNED: tl.constexpr, HALF: tl.constexpr, SCORE_STEPS: tl.constexpr,
    SCORE_LIMIT: tl.constexpr, SLOPE_STEPS: tl.constexpr, SLOPE_LIMIT: tl.constexpr, SHORTEST: tl.constexpr,
    FORMAT: tl.constexpr, OWN_SCALES: tl.constexpr, EIGHT: tl.constexpr,
):  # fmt: skip
    """Encode the new entries among a block of a head's entries; program axes: (head, block)."""
    whole = tl.program_id(0).to(tl.int64)
    row, head = whole // HEADS, whole % HEADS
    entry = (tl.program_id(1) * BLOCK + tl.arange(0, BLOCK)).to(tl.int64)
    stored = entry < entries
    unknown = tl.load(new + row * new_row + head * new_head + entry * new_entry, mask=stored, other=0) != 0
    result = tl.zeros([BLOCK], tl.float32)
    if KNOWN:
        result = tl.load(earlier_codes + whole * entries + entry, mask=stored, other=0.0)
    if tl.sum(unknown.to(tl.int32), 0) > 0:
        if PAGED:
            subpage = tl.load(subpages + whole * pages + entry // SIZE, mask=unknown, other=0).to(tl.int64)
            through = subpage // kv_heads
            cache = tl.load(addresses + (first + through // blocks) % layers).to(keys.dtype)
            if ALIGNED:
                cache = tl.multiple_of(cache, 16)
            offset = through % blocks * key_row + subpage % kv_heads * key_head + entry % SIZE * key_entry
            if EIGHT:
                offset = tl.multiple_of(offset, 8)
            key = cache + offset
            value = key + HALF
        else:
            key = keys + row * key_row + head * key_head + entry * key_entry
            value = values + row * value_row + head * value_head + entry * value_entry
        at = tl.load(positions + row * at_row + head * at_head + entry * at_entry, mask=unknown, other=0).to(tl.int64)
        layer, key_scale, value_scale = row // requests, result, result
        if OWN_SCALES:
            key_scale = load_scales(key, unknown, HEAD_DIM)
            value_scale = load_scales(value, unknown, VALUE_DIM)
        elif FORMAT > 0:
            key_scale = tl.zeros([BLOCK], tl.float32) + tl.load(key_scales + layer)
            value_scale = tl.zeros([BLOCK], tl.float32) + tl.load(value_scales + layer)
        network = layer * HEADS + head
        partner += layer * HEAD_DIM
        turns += layer * HEAD_DIM
        gain += layer * HEAD_DIM
        linear += network * 2 * INPUTS
        output += network * 2 * WIDTH
        hidden += network * WIDTH * INPUTS
        score = tl.zeros([BLOCK], tl.float32) + tl.load(output_bias + 2 * network)
        slope = tl.zeros([BLOCK], tl.float32) + tl.load(output_bias + 2 * network + 1)
        key_square, value_square = tl.zeros([BLOCK], tl.float32), tl.zeros([BLOCK], tl.float32)
        for start in range(0, WIDTH, WIDTH_BLOCK):
            unit = start + tl.arange(0, WIDTH_BLOCK)
            real = unit < WIDTH
            sums = tl.zeros([BLOCK, WIDTH_BLOCK], tl.float32)
            for begin in range(0, HEAD_DIM, INPUTS_BLOCK):
                dims = begin + tl.arange(0, INPUTS_BLOCK)
                exist = dims < HEAD_DIM
                x = _unrotated(key, unknown, key_scale, at, partner, turns, gain, dims, unmix, HEAD_DIM, FORMAT)
                sums += tl.dot(x, _weights(hidden, unit, dims, real, exist, INPUTS), input_precision="ieee")
                if start == 0:
                    key_square += tl.sum(x * x, 1)
                    score, slope = _linear(score, slope, x, linear, dims, exist, INPUTS)
            for begin in range(0, VALUE_DIM, INPUTS_BLOCK):
                dims = begin + tl.arange(0, INPUTS_BLOCK)
                exist = dims < VALUE_DIM
                x = _numbers(value, unknown, dims, unmix, VALUE_DIM, FORMAT)
                if FORMAT > 0:
                    x *= value_scale[:, None]
                weights = _weights(hidden + HEAD_DIM, unit, dims, real, exist, INPUTS)
                sums += tl.dot(x, weights, input_precision="ieee")
                if start == 0:
                    value_square += tl.sum(x * x, 1)
                    score, slope = _linear(score, slope, x, linear + HEAD_DIM, dims, exist, INPUTS)
            for i in tl.static_range(2):
                length = _log_length(value_square if i else key_square, SHORTEST)
                at_length = HEAD_DIM + VALUE_DIM + i
                of_length = tl.load(hidden + unit * INPUTS + at_length, mask=real, other=0.0)
                sums += length[:, None] * of_length[None, :]
                if start == 0:
                    score += length * tl.load(linear + at_length)
                    slope += length * tl.load(linear + INPUTS + at_length)
            sums += tl.load(hidden_bias + network * WIDTH + unit, mask=real, other=0.0)[None, :]
            active = 0.5 * sums * (1 + tl.erf(sums * 0.7071067811865476))
            score, slope = _linear(score, slope, active, output, unit, real, WIDTH)
        score, slope = _steps(score, SCORE_STEPS, SCORE_LIMIT), _steps(slope, SLOPE_STEPS, SLOPE_LIMIT)
        result = tl.where(unknown, score * (2 * SLOPE_LIMIT * SLOPE_STEPS) + slope, result)
    tl.store(codes + whole * entries + entry, result, mask=stored)
