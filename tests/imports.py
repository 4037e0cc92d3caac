"""What is imported before the first test, in a fifth less time.

Torch, transformers and vLLM make a million objects, none of which is garbage, and Python would look through them again
and again. transformers imports scikit-learn where it is installed, for drafts whose number adapts.
"""

from __future__ import annotations

import gc
import sys


def begin() -> None:
    """Look for no garbage, and hide scikit-learn."""
    gc.disable()
    sys.modules.setdefault("sklearn", None)  # type: ignore[arg-type]


def end() -> None:
    """Look for garbage among what comes from now on, and show scikit-learn again."""
    if sys.modules["sklearn"] is None:
        del sys.modules["sklearn"]
    gc.freeze()
    gc.enable()
