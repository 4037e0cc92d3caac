"""Files of tensors with one JSON object as their metadata, written whole or not at all."""

from __future__ import annotations

import json
import os
from collections.abc import Mapping
from contextlib import suppress
from pathlib import Path
from typing import Any
from uuid import uuid4

from torch import Tensor

from keepset.errors import KeepsetError


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
