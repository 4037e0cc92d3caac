"""Files of tensors with one JSON object as their metadata, written whole or not at all."""

from __future__ import annotations

import json
import os
from collections.abc import Callable, Iterator, Mapping
from contextlib import contextmanager, suppress
from pathlib import Path
from typing import Any
from uuid import uuid4

from torch import Tensor

from keepset.errors import CorruptFileError, KeepsetError


def write(path: Path, tensors: Mapping[str, Tensor], name: str, metadata: Mapping[str, Any]) -> None:
    """Writes them, the metadata under this name; what is there is replaced once all is written.

    Raises:
        KeepsetError: the place cannot be written to.
    """
    from safetensors import SafetensorError
    from safetensors.torch import save_file

    unfinished = path.parent / f"{path.name}.{uuid4().hex}.unfinished"
    try:
        # One entry: of several, safetensors would change the order from file to file.
        save_file(dict(tensors), unfinished, {name: json.dumps(metadata)})
        os.replace(unfinished, path)
    except (OSError, SafetensorError) as error:
        cause = getattr(error, "strerror", None) or error
        raise KeepsetError(f"{str(path)!r} cannot be written ({cause}): name another file.") from error
    finally:
        with suppress(OSError):  # there may be no such folder
            unfinished.unlink(missing_ok=True)


@contextmanager
def opened(
    path: Path,
    name: str,
    version: int,
    *,
    foreign: str,
    other: Callable[[Any], str],
    damaged: str,
    unreadable: str | None = None,
) -> Iterator[tuple[Any, Any]]:
    """A file for reading, and the metadata under this name.

    Args:
        version: the format that is read.
        foreign, damaged: the sentences for what is no such file, and for one that does not hold what it should.
        unreadable: that for one that is no file of tensors; `foreign`, if none is given.
        other: that for a file of this other format.

    Raises:
        CorruptFileError: one of these; also where what is done with the file raises as damaged contents do.
    """
    from safetensors import SafetensorError, safe_open

    try:
        with safe_open(path, framework="pt") as file:
            written = (file.metadata() or {}).get(name)
            if written is None:
                raise CorruptFileError(foreign)
            metadata = json.loads(written)
            if metadata["format"] != version:
                raise CorruptFileError(other(metadata["format"]))
            yield file, metadata
    except CorruptFileError:
        raise
    except (OSError, SafetensorError):
        raise CorruptFileError(unreadable or foreign) from None
    except (AttributeError, KeyError, TypeError, ValueError, RecursionError):
        raise CorruptFileError(damaged) from None
