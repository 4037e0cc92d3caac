"""`PageFormat`: how keys and values are read from an engine's quantised cache, and written to it."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass

import torch
from jaxtyping import Float, Int, Int8, Shaped
from torch import Tensor

from keepset.kernels.dispatch import CACHE_BLOCK, block_size
from keepset.kernels.entry_format import Mixing

SCALE_BYTES = 4
"""Bytes of a scale, which is a float32."""
LEAST_SCALE = 1e-6
"""The least scale that is written, so that a row of zeros is not divided by zero."""


@dataclass(frozen=True, eq=False)
class PageFormat:
    """The format of a quantised cache, which stores keys and values in the same way.

    A row is the numbers of one key or value, then its scale, unless the layer has one scale for all keys and one for
    all values. A row stands for `numbers * scale`. A mixed row stands for the product of this with `mixing.matrix`.

    Attributes:
        numbers: the dtype of the stored numbers: int8, or an 8-bit float.
        head_dim: numbers of a key.
        dtype: the dtype in which keys and values are read.
        key_scale, value_scale: the layer's scales; None if each row has its own. They are read whenever rows are read
            or written.
        mixing: the mixing of rows; None if rows are not mixed.
    """

    numbers: torch.dtype
    head_dim: int
    dtype: torch.dtype
    key_scale: Float[Tensor, ""] | None = None
    value_scale: Float[Tensor, ""] | None = None
    mixing: Mixing | None = None

    @property
    def has_row_scales(self) -> bool:
        """Whether each row has a scale of its own."""
        return self.key_scale is None

    @property
    def row_bytes(self) -> int:
        """Bytes of a row."""
        return self.head_dim + (SCALE_BYTES if self.has_row_scales else 0)

    def parts(
        self, rows: Shaped[Tensor, "*places row"]
    ) -> tuple[Float[Tensor, "*places head_dim"], Float[Tensor, "*places"] | None]:
        """Return the numbers of keys or values in float32, and each row's own scale if rows have one.

        Mixed rows stay mixed, and the layer's scale is left out.

        Args:
            rows: the stored rows; the bytes of each are contiguous.
        """
        stored = rows.view(torch.uint8)
        numbers, behind = stored[..., : self.head_dim], stored[..., self.head_dim :]
        return numbers.view(self.numbers).float(), behind.view(torch.float32)[..., 0] if self.has_row_scales else None

    def encode(
        self, numbers: Float[Tensor, "n head_dim"], scale: Float[Tensor, "*#n"] | None = None
    ) -> Shaped[Tensor, "n row"]:
        """Return keys or values in their stored form, as bytes.

            scale = max(max(|row|) / largest, 1e-6)     stored = round(row / scale)

        If the format mixes rows, they are mixed first. Integers are rounded half away from zero, 8-bit floats to even.
        If rows have their own scales, a row with NaN or infinity gets the scale NaN and is all NaN when it is read.

        Args:
            numbers: the keys or values.
            scale: the scale of the layer, or of the layer of each; None if rows have their own.
        """
        whole = numbers.float() if self.mixing is None else self.mixing.mixed(numbers).float()
        rows = torch.empty(len(whole), self.row_bytes, dtype=torch.uint8, device=whole.device)
        largest = largest_number(self.numbers)
        if scale is None:
            magnitude = torch.linalg.vector_norm(whole, torch.inf, -1)
            scale = (magnitude / largest).clamp(min=LEAST_SCALE).where(magnitude.isfinite(), float("nan"))
            rows[:, self.head_dim :].view(torch.float32)[:, 0] = scale
            steps = whole * (1 / scale)[:, None]
        else:
            steps = whole / scale[..., None]
        if self.numbers == torch.int8:
            steps = (steps + torch.full_like(steps, 0.5).copysign(steps)).nan_to_num_(0.0)
        rows[:, : self.head_dim] = steps.clamp_(-largest, largest).to(self.numbers).view(torch.uint8)
        return rows

    def join(self, numbers: Int8[Tensor, "n head_dim"], scale: Float[Tensor, " n"]) -> Shaped[Tensor, "n row"]:
        """Return rows of the given integers and scales, unchanged, as bytes.

        Args:
            numbers: as they are stored.
            scale: of each row.
        """
        return torch.cat([numbers.view(torch.uint8), scale.float()[:, None].view(torch.uint8)], -1)

    def encode_entries(
        self, keys: Float[Tensor, "*n head_dim"], values: Float[Tensor, "*n head_dim"]
    ) -> tuple[Shaped[Tensor, "*n row"], Shaped[Tensor, "*n row"]]:
        """Return the rows of keys and values of a layer, as bytes.

        Args:
            keys, values: not quantised.
        """
        shape, keys, values = keys.shape[:-1], keys.reshape(-1, self.head_dim), values.reshape(-1, self.head_dim)
        rows = self.encode(keys, self.key_scale), self.encode(values, self.value_scale)
        return rows[0].view(*shape, -1), rows[1].view(*shape, -1)

    def decode_entries(
        self, keys: Shaped[Tensor, "*places row"], values: Shaped[Tensor, "*places row"]
    ) -> tuple[Float[Tensor, "*places head_dim"], Float[Tensor, "*places head_dim"]]:
        """Return the keys and values that rows of a layer stand for.

        Args:
            keys, values: stored rows.
        """
        return self.decode(keys, self.key_scale), self.decode(values, self.value_scale)

    def decode(
        self, rows: Shaped[Tensor, "*places row"], scale: Float[Tensor, "*#places"] | None = None
    ) -> Float[Tensor, "*places head_dim"]:
        """Return keys or values in `dtype`. They are read in blocks, so that few are held in float32.

        Args:
            rows: the stored rows; the bytes of each are contiguous.
            scale: the scale of the layer, or of the layer of each; None if rows have their own.
        """
        shape = rows.shape[:-1]
        flat = rows.reshape(-1, rows.shape[-1])
        layer_scale = None if scale is None else scale.expand(shape).reshape(-1)
        decoded = torch.empty(len(flat), self.head_dim, dtype=self.dtype, device=rows.device)
        # In blocks whose numbers fit a core's cache in float32.
        at_once = max(1, block_size(rows.device, CACHE_BLOCK) // self.head_dim)
        for first in range(0, len(flat), at_once):
            block = slice(first, first + at_once)
            numbers, row_scale = self.parts(flat[block])
            for factor in (row_scale, None if layer_scale is None else layer_scale[block]):
                if factor is not None:
                    torch.mul(numbers, factor[:, None], out=numbers)
            decoded[block] = numbers if self.mixing is None else self.mixing.unmixed(numbers)
        return decoded.view(*shape, self.head_dim)


def largest_number(kind: torch.dtype) -> float:
    """Return the stored number of a row's largest magnitude."""
    return 127.0 if kind == torch.int8 else torch.finfo(kind).max


def encode_layers(
    formats: Sequence[PageFormat], numbers: Float[Tensor, "n head_dim"], layers: Int[Tensor, " n"], values: bool
) -> Shaped[Tensor, "n row"]:
    """Return keys or values of several layers in their stored form, as bytes.

    Args:
        formats: the layers' formats, which differ only in their scales.
        numbers: keys or values.
        layers: the layer of each, as an index of `formats`.
        values: whether these are values.
    """
    scales = layer_scales(formats, values)
    return formats[0].encode(numbers, None if scales is None else scales[layers])


def decode_layers(
    formats: Sequence[PageFormat], rows: Shaped[Tensor, "layers_rows heads entries row"], values: bool
) -> Float[Tensor, "layers_rows heads entries head_dim"]:
    """Return the keys or values that rows of several layers stand for; each layer has equally many rows.

    Args:
        formats: the layers' formats, which differ only in their scales.
        rows: stored keys or values, layer after layer.
        values: whether these are values.
    """
    if (scales := layer_scales(formats, values)) is not None:
        scales = scales.repeat_interleave(len(rows) // len(scales))[:, None, None]
    return formats[0].decode(rows, scales)


def layer_scales(formats: Sequence[PageFormat], values: bool) -> Float[Tensor, " layers"] | None:
    """Return the scale of each layer's keys or values; None if layers have none.

    Args:
        formats: of each layer.
        values: whether the scales are those of values, not of keys.
    """
    scales = [format.value_scale if values else format.key_scale for format in formats]
    present = [scale for scale in scales if scale is not None]
    return torch.stack(present) if present else None
