"""Calls of keepset's Python functions, which tests count."""

from __future__ import annotations

import gc
import sys
from collections import Counter
from collections.abc import Callable
from pathlib import Path
from types import FrameType
from typing import Any

import keepset


def called(run: Callable[[], Any]) -> Counter[str]:
    """Calls of Python functions by keepset's file that they stand in.

    No garbage is collected meanwhile, of which keepset takes note in a call.
    """
    root, calls = str(Path(keepset.__file__).parent), Counter[str]()

    def note(frame: FrameType, event: str, _: Any) -> None:
        file = frame.f_code.co_filename
        if event == "call" and file.startswith(root):
            calls[file] += 1

    before, collects = sys.getprofile(), gc.isenabled()
    gc.disable()
    sys.setprofile(note)
    try:
        run()
    finally:
        sys.setprofile(before)
        if collects:
            gc.enable()
    return calls
