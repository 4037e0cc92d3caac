"""`TensorFile`: a kind of file that holds tensors, with one JSON object as its metadata."""

from __future__ import annotations

import json
import os
from collections.abc import Iterator, Mapping
from contextlib import ExitStack, contextmanager, suppress
from dataclasses import dataclass
from pathlib import Path
from reprlib import repr as shortened
from typing import Any
from uuid import uuid4

from torch import Tensor

from keepset.core.files import check_replaceable
from keepset.core.tensor_reader import TensorReader, opened, parse_json
from keepset.errors import CorruptFileError, KeepsetError

_DAMAGED = (ArithmeticError, AttributeError, LookupError, RuntimeError, TypeError, ValueError)
"""The errors that reading damaged contents raises. RecursionError is a RuntimeError, and so are PyTorch's errors."""


@dataclass(frozen=True)
class TensorFile:
    """A kind of file, and the error sentences for files that are not as they should be.

    In the sentences `{path}` stands for the file and `{version}` for the format that is read.

    Attributes:
        metadata: the name of the JSON object.
        version: the version of the format.
        foreign: the sentence for a file of another kind.
        other: the sentence for a file of another format, `{found}`.
        damaged: the sentence for a file that does not hold what it should.
        unreadable: the sentence for what is no file of tensors; `foreign` by default.
    """

    metadata: str
    version: int
    foreign: str
    other: str
    damaged: str
    unreadable: str = ""

    def write(self, path: Path, tensors: Mapping[str, Tensor], metadata: Mapping[str, Any]) -> None:
        """Write a file whole or not at all; an existing one is replaced once everything is written.

        Args:
            path: where to write.
            tensors: tensors by their names.
            metadata: the JSON object; its `format` is the version.

        Raises:
            KeepsetError: if the file cannot be written, or something that is no regular file is there.
        """
        from safetensors import SafetensorError
        from safetensors.torch import save_file

        check_replaceable(path)
        unfinished = path.parent / f".{uuid4().hex}.unfinished"
        try:
            # One entry, because safetensors would order several differently from file to file.
            save_file(dict(tensors), unfinished, {self.metadata: json.dumps(metadata)})
            os.replace(unfinished, path)
        except (OSError, SafetensorError) as error:
            cause = getattr(error, "strerror", None) or error
            raise KeepsetError(f"{str(path)!r} cannot be written ({cause}): name another file.") from error
        finally:
            with suppress(OSError):  # the folder may not exist
                unfinished.unlink(missing_ok=True)

    def corrupt(self, path: Path) -> CorruptFileError:
        """Return the error for a file that does not hold what it should."""
        return CorruptFileError(self.damaged.format(path=repr(str(path))))

    @contextmanager
    def opened(self, path: Path) -> Iterator[tuple[TensorReader, Any]]:
        """Open a file for reading.

        Yields:
            The file's tensors, each read when it is accessed, and its metadata.

        Raises:
            CorruptFileError: if the file is not as it should be; also if the code inside the context raises an error
                that damaged contents cause.
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
