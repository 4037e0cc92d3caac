"""`TensorReader`: the tensors of a safetensors file, read and not mapped.

safetensors maps a file into memory. Changing the file afterwards changes the tensors, and truncating it kills the
process. Tensors that are read stay as they were when they were checked.
"""

from __future__ import annotations

import json
import math
import os
import stat
from collections.abc import Iterator
from contextlib import contextmanager
from pathlib import Path
from typing import Any, NamedTuple

import torch
from torch import Tensor

_DTYPES = {
    "BOOL": torch.bool,
    "U8": torch.uint8,
    "I8": torch.int8,
    "I32": torch.int32,
    "I64": torch.int64,
    "F16": torch.float16,
    "BF16": torch.bfloat16,
    "F32": torch.float32,
    "F64": torch.float64,
    "F8_E4M3": torch.float8_e4m3fn,
    "F8_E5M2": torch.float8_e5m2,
}
_MAX_HEADER = 100 * 2**20
"""The largest header that safetensors itself allows, in bytes."""
_MAX_DIMENSIONS = 8
_METADATA = "__metadata__"


class TensorLocation(NamedTuple):
    """The place of a tensor in a file; `start` and `end` are bytes."""

    dtype: torch.dtype
    shape: tuple[int, ...]
    start: int
    end: int


class TensorReader:
    """An open safetensors file.

    Args:
        descriptor: the descriptor of the open file.

    Attributes:
        layout: the place of every tensor.
        metadata: texts by their names.

    Raises:
        ValueError: if the file is no safetensors file, or its header contradicts itself or the file's size.
        OSError: if the file cannot be read.
    """

    def __init__(self, descriptor: int) -> None:
        self._descriptor = descriptor
        state = os.fstat(descriptor)
        if not stat.S_ISREG(state.st_mode):
            raise ValueError("no regular file")
        size = int.from_bytes(self._bytes(0, 8), "little")
        if size > min(_MAX_HEADER, state.st_size - 8):
            raise ValueError("the header is longer than the file")
        header = parse_json(self._bytes(8, size))
        if not isinstance(header, dict):
            raise ValueError("the header is no object")
        metadata = header.pop(_METADATA, {})
        if not isinstance(metadata, dict) or not all(isinstance(text, str) for text in metadata.values()):
            raise ValueError("the metadata are no texts")
        self.metadata: dict[str, str] = metadata
        self.layout = {name: _layout(said, 8 + size) for name, said in header.items()}
        end = 8 + size
        for _, _, start, stop in sorted(self.layout.values(), key=lambda each: each[2:]):
            if start != end:
                raise ValueError("tensors overlap, or there is a gap between them")
            end = stop
        if end != state.st_size:
            raise ValueError("the tensors do not fill the file")

    def __contains__(self, name: str) -> bool:
        return name in self.layout

    def __getitem__(self, name: str) -> Tensor:
        """Read one tensor.

        Raises:
            KeyError: if there is none of this name.
            ValueError: if the file has been truncated since it was opened.
        """
        dtype, shape, start, end = self.layout[name]
        flat = torch.empty(end - start, dtype=torch.uint8)
        buffer, done = memoryview(flat.numpy().data), 0
        while done < len(buffer):
            count = os.preadv(self._descriptor, [buffer[done : done + 2**30]], start + done)
            if not count:
                raise ValueError("the file ends early")
            done += count
        return flat.view(dtype).view(shape)

    def _bytes(self, start: int, count: int) -> bytes:
        read = os.pread(self._descriptor, count, start)
        if len(read) != count:
            raise ValueError("the file ends early")
        return read


@contextmanager
def opened(path: Path) -> Iterator[TensorReader]:
    """Open a safetensors file; raise what `TensorReader` raises."""
    # Non-blocking, because a named pipe that nobody writes to would hold this process.
    descriptor = os.open(path, os.O_RDONLY | os.O_NONBLOCK | os.O_CLOEXEC)
    try:
        yield TensorReader(descriptor)
    finally:
        os.close(descriptor)


def parse_json(text: str | bytes) -> Any:
    """Return the value of a JSON text; raise ValueError if it is none, repeats a name, or has NaN or infinity."""
    return json.loads(text, parse_constant=_no_number, object_pairs_hook=_once)


def _no_number(said: str) -> float:
    raise ValueError(f"{said} is no number")


def _once(pairs: list[tuple[str, Any]]) -> dict[str, Any]:
    once = dict(pairs)
    if len(once) != len(pairs):
        raise ValueError("a name is there twice")
    return once


def _layout(said: Any, first: int) -> TensorLocation:
    if not isinstance(said, dict) or said.keys() != {"dtype", "shape", "data_offsets"}:
        raise ValueError("a tensor is not described")
    shape, offsets = said["shape"], said["data_offsets"]
    if not all(isinstance(numbers, list) and all(is_count(each) for each in numbers) for numbers in (shape, offsets)):
        raise ValueError("shapes and offsets are lists of numbers")
    if len(shape) > _MAX_DIMENSIONS:
        raise ValueError("a tensor has too many dimensions")
    if said["dtype"] not in _DTYPES:
        raise ValueError("the type of a tensor's numbers is unknown")
    dtype, (start, end) = _DTYPES[said["dtype"]], offsets
    if end - start != math.prod(shape) * dtype.itemsize:
        raise ValueError("a tensor's shape and bytes differ")
    return TensorLocation(dtype, tuple(shape), first + start, first + end)


def is_count(said: Any) -> bool:
    """Return whether a value is a whole number from 0, of at most 63 bits."""
    return type(said) is int and 0 <= said < 2**63
