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
"""What reading damaged contents raises. RecursionError is a RuntimeError, and so are PyTorch's errors."""


@dataclass(frozen=True)
class TensorFile:
    """A kind of file, and what is said of one that is not as it should be.

    In these sentences `{path}` stands for the file, `{version}` for the format that is read.

    Attributes:
        metadata: the name of the JSON object.
        version: of the format.
        foreign: of what is no such file.
        other: of one of another format, `{found}`.
        damaged: of one that does not hold what it should.
        unreadable: of what is no file of tensors; `foreign`, if none is given.
    """

    metadata: str
    version: int
    foreign: str
    other: str
    damaged: str
    unreadable: str = ""

    def write(self, path: Path, tensors: Mapping[str, Tensor], metadata: Mapping[str, Any]) -> None:
        """Writes a file whole or not at all; what is there is replaced once all is written. Metadata has the format.

        Raises:
            KeepsetError: the place cannot be written to, or what is there is no regular file.
        """
        from safetensors import SafetensorError
        from safetensors.torch import save_file

        check_replaceable(path)
        unfinished = path.parent / f".{uuid4().hex}.unfinished"
        try:
            # One entry: of several, safetensors would change the order from file to file.
            save_file(dict(tensors), unfinished, {self.metadata: json.dumps(metadata)})
            os.replace(unfinished, path)
        except (OSError, SafetensorError) as error:
            cause = getattr(error, "strerror", None) or error
            raise KeepsetError(f"{str(path)!r} cannot be written ({cause}): name another file.") from error
        finally:
            with suppress(OSError):  # there may be no such folder
                unfinished.unlink(missing_ok=True)

    def corrupt(self, path: Path) -> CorruptFileError:
        """Return the error for a file that does not hold what it should."""
        return CorruptFileError(self.damaged.format(path=repr(str(path))))

    @contextmanager
    def opened(self, path: Path) -> Iterator[tuple[TensorReader, Any]]:
        """Open a file for reading.

        Yields:
            its tensors, which are read when they are asked for, and its metadata.

        Raises:
            CorruptFileError: it is not as it should be; also where what is done with it raises as damaged contents do.
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
