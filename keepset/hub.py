"""The Hugging Face hub, and work without it if it does not answer."""

import functools
from collections.abc import Iterator
from contextlib import contextmanager

_SECONDS = 5


@contextmanager
def offline_if_unreachable() -> Iterator[bool]:
    """Let the hub's libraries use downloaded files alone within the block, if the hub does not answer.

    Otherwise each of them would wait for the hub again and again.

    Yields:
        Whether they ask the hub.
    """
    from huggingface_hub import constants

    before = constants.HF_HUB_OFFLINE
    constants.HF_HUB_OFFLINE = before or not answers()
    try:
        yield not constants.HF_HUB_OFFLINE
    finally:
        constants.HF_HUB_OFFLINE = before


@functools.cache
def answers() -> bool:
    """Return whether the hub answers. It is asked once in a process."""
    from huggingface_hub import constants, get_session

    try:
        get_session().head(constants.ENDPOINT, timeout=_SECONDS)
    except Exception:  # of whichever HTTP library it uses
        return False
    return True
