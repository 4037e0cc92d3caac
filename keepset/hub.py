"""The Hugging Face hub, for which nobody waits where it does not answer."""

import functools
from collections.abc import Iterator
from contextlib import contextmanager

_SECONDS = 5


@contextmanager
def offline_if_unreachable() -> Iterator[bool]:
    """While a hub does not answer, its libraries use what was downloaded before, and do not ask again and again.

    Gives whether they ask it.
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
    """Whether it does, asked once in a process."""
    from huggingface_hub import constants, get_session

    try:
        get_session().head(constants.ENDPOINT, timeout=_SECONDS)
    except Exception:  # of whichever HTTP library it uses
        return False
    return True
