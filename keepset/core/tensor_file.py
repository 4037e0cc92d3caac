"""`TensorFile`: a kind of file that holds tensors, with one JSON object as its metadata."""

from __future__ import annotations

import json
import os
from collections.abc import Iterator, Mapping
from contextlib import contextmanager, suppress
from dataclasses import dataclass
from pathlib import Path
from typing import Any
from uuid import uuid4

from torch import Tensor

from keepset.errors import CorruptFileError, KeepsetError


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
            KeepsetError: the place cannot be written to.
        """
        from safetensors import SafetensorError
        from safetensors.torch import save_file

        unfinished = path.parent / f"{path.name}.{uuid4().hex}.unfinished"
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

    @contextmanager
    def opened(self, path: Path) -> Iterator[tuple[Any, Any]]:
        """A file for reading, and its metadata.

        Raises:
            CorruptFileError: it is not as it should be; also where what is done with it raises as damaged contents do.
        """
        from safetensors import SafetensorError, safe_open

        def refused(sentence: str, found: Any = None) -> CorruptFileError:
            return CorruptFileError(sentence.format(path=repr(str(path)), version=self.version, found=found))

        try:
            with safe_open(path, framework="pt") as file:
                written = (file.metadata() or {}).get(self.metadata)
                if written is None:
                    raise refused(self.foreign)
                metadata = json.loads(written)
                if metadata["format"] != self.version:
                    raise refused(self.other, metadata["format"])
                yield file, metadata
        except KeepsetError:
            raise
        except (OSError, SafetensorError):
            raise refused(self.unreadable or self.foreign) from None
        except (AttributeError, KeyError, TypeError, ValueError, RecursionError):
            raise refused(self.damaged) from None
