"""Files of tensors, which are written whole or not at all, and checked in full when they are read.

`TensorFile` is a kind of file: tensors, and one JSON object as its metadata. `TensorReader` reads what it holds.
"""

from __future__ import annotations

import json
import math
import os
import stat
import time
from collections.abc import Iterator, Mapping
from contextlib import ExitStack, contextmanager, suppress
from dataclasses import dataclass
from hashlib import sha256
from pathlib import Path
from reprlib import repr as shortened
from typing import Any, NamedTuple, TypeVar
from uuid import uuid4

import torch
from torch import Tensor

from keepset.errors import CorruptFileError, KeepsetError, quoted

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
_UNFINISHED = ".unfinished"
"""The end of a file's name while it is written."""
_NAMED = 16
"""Digits by which an unfinished file tells what it will be called."""
_ABANDONED = 24 * 3600.0
"""Seconds without a write after which an unfinished file was left by a process that is gone."""
_DAMAGED = (ArithmeticError, AttributeError, LookupError, RuntimeError, TypeError, ValueError)
"""The errors that reading damaged contents raises. RecursionError is a RuntimeError, and so are PyTorch's errors."""

Part = TypeVar("Part")


def check_replaceable(path: Path) -> None:
    """Refuse to write to a path that is no regular file, such as a folder, a named pipe or a device.

    Raises:
        KeepsetError: if it is none, or no file can have this name.
    """
    try:
        regular, cause = stat.S_ISREG(path.stat().st_mode), "it is no regular file"
    except FileNotFoundError:
        return
    except (OSError, ValueError) as error:
        regular, cause = False, getattr(error, "strerror", None) or str(error)
    if not regular:
        raise KeepsetError(f"{quoted(path)} cannot be written ({cause}): name another file.")


@dataclass(frozen=True)
class TensorFile:
    """A kind of file, and the error sentences for files that are not as they should be.

    In the sentences `{path}` stands for the file and `{version}` for the format that is read.

    Attributes:
        metadata: the name of the JSON object.
        version: the version of the format that is written.
        foreign: the sentence for a file of another kind.
        other: the sentence for a file of another format, `{found}`.
        damaged: the sentence for a damaged file.
        unreadable: the sentence for a file that is no file of tensors; `foreign` by default.
    """

    metadata: str
    version: int
    foreign: str
    other: str
    damaged: str
    unreadable: str = ""

    def write(self, path: Path, tensors: Mapping[str, Tensor], metadata: Mapping[str, Any]) -> None:
        """Write a file whole or not at all; replace an existing one once everything is written.

        What a process that was killed has left of a file of this name is removed after a day.

        Args:
            path: the file.
            tensors: what it holds, by name.
            metadata: what can be written as JSON, by name.

        Raises:
            KeepsetError: if the file cannot be written, or the path is no regular file.
        """
        from safetensors import SafetensorError
        from safetensors.torch import save_file

        check_replaceable(path)
        name = sha256(os.fsencode(path.name)).hexdigest()[:_NAMED]  # the name itself may be as long as names can be
        clear_abandoned(path.parent, f".{name}.*")
        unfinished = path.parent / f".{name}.{uuid4().hex}{_UNFINISHED}"
        try:
            mode = _mode_of_a_new_file(unfinished)
            # One entry, because safetensors would order several differently from file to file.
            save_file(dict(tensors), unfinished, {self.metadata: json.dumps(metadata)})
            unfinished.chmod(mode)  # safetensors writes files that their owner alone may read
            os.replace(unfinished, path)
        except (OSError, SafetensorError) as error:
            cause = getattr(error, "strerror", None) or error
            raise KeepsetError(f"{str(path)!r} cannot be written ({cause}): name another file.") from error
        finally:
            with suppress(OSError):  # the folder may not exist
                unfinished.unlink(missing_ok=True)

    def corrupt(self, path: Path) -> CorruptFileError:
        """Return the error for a damaged file."""
        return CorruptFileError(self.damaged.format(path=repr(str(path))))

    @contextmanager
    def opened(self, path: Path) -> Iterator[tuple[TensorReader, Any]]:
        """Open a file for reading.

        Yields:
            The file's tensors, each read when it is accessed, and its metadata.

        Raises:
            CorruptFileError: if the file is damaged or of another kind; also if the code inside the context raises an
                error that damaged contents cause.
        """

        def refused(sentence: str, found: Any = None) -> CorruptFileError:
            return CorruptFileError(sentence.format(path=repr(str(path)), version=self.version, found=found))

        with ExitStack() as stack:
            try:
                tensors = stack.enter_context(opened(path))
            except (OSError, *_DAMAGED):
                raise refused(self.unreadable or self.foreign) from None
            if self.metadata not in tensors.metadata:
                raise refused(self.foreign)
            try:
                metadata = parse_json(tensors.metadata[self.metadata])
                if metadata["format"] != self.version:
                    raise refused(self.other, shortened(metadata["format"]))
                yield tensors, metadata
            except KeepsetError:
                raise
            except (OSError, *_DAMAGED):
                raise refused(self.damaged) from None


def clear_abandoned(folder: Path, pattern: str) -> None:
    """Remove the files that processes left when they were killed while they wrote.

    Args:
        folder: where they wrote.
        pattern: of the files' names, without the ending that unfinished files have.
    """
    for left in folder.glob(f"{pattern}{_UNFINISHED}"):
        with suppress(OSError):  # another process may have removed it
            if time.time() - left.lstat().st_mtime > _ABANDONED:
                left.unlink()


def _mode_of_a_new_file(path: Path) -> int:
    """Make an empty file, and return the permissions that the umask gives it; this is how to read an umask safely."""
    descriptor = os.open(path, os.O_WRONLY | os.O_CREAT | os.O_EXCL | os.O_CLOEXEC, 0o666)
    try:
        return stat.S_IMODE(os.fstat(descriptor).st_mode)
    finally:
        os.close(descriptor)


class TensorLocation(NamedTuple):
    """The place of a tensor in a file; `start` and `end` are bytes."""

    dtype: torch.dtype
    shape: tuple[int, ...]
    start: int
    end: int


class TensorReader:
    """An open safetensors file, read by its descriptor.

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
        for _, _, start, stop in sorted(self.layout.values(), key=lambda entry: entry[2:]):
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
    """Open a safetensors file; raise the errors of `TensorReader`."""
    # Non-blocking, because a named pipe that nobody writes to would hold this process.
    descriptor = os.open(path, os.O_RDONLY | os.O_NONBLOCK | os.O_CLOEXEC)
    try:
        yield TensorReader(descriptor)
    finally:
        os.close(descriptor)


def below(prefix: str, named: Mapping[str, Part]) -> dict[str, Part]:
    """Return what has a name that begins with a prefix, by its name without it.

    Args:
        prefix: the beginning of names.
        named: anything by name.
    """
    return {name.removeprefix(prefix): part for name, part in named.items() if name.startswith(prefix)}


def parse_json(text: str | bytes) -> Any:
    """Return the value of a JSON text; raise ValueError if it is no JSON, repeats a name, or has NaN or infinity."""
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
    if not all(
        isinstance(numbers, list) and all(is_count(number) for number in numbers) for numbers in (shape, offsets)
    ):
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
