"""Signatures that show an engine that a server's front end has checked a request's options.

A client's options could reach the engine by many routes of vLLM, and later versions have more. So the front end signs
the options that it has checked, with a key that `keepset serve` makes at its start and passes to its processes in the
environment. No client knows the key, and an engine that has one accepts no options without a signature.
"""

from __future__ import annotations

import hashlib
import hmac
import os
import secrets
from typing import Any

from keepset.errors import KeepsetError
from keepset.vllm.settings import KEY

SIGNING_KEY = "KEEPSET_SIGNING_KEY"
"""The environment variable that holds the key."""


def new_key() -> str:
    """Return a key for one start of a server."""
    return secrets.token_hex(32)


def has_key() -> bool:
    """Return whether this process has a key."""
    return bool(os.environ.get(SIGNING_KEY))


def signed(text: str) -> str:
    """Return a text with its signature in front."""
    return f"{_signature(text)} {text}"


def verified(value: Any) -> str:
    """Return the text that `signed` has signed.

    Args:
        value: the value that reached the engine; anything but a signed text is refused.

    Raises:
        KeepsetError: it is something else, or the signature was made with another key.
    """
    signature, _, text = value.partition(" ") if isinstance(value, str) else ("", "", "")
    if not hmac.compare_digest(signature.encode(errors="replace"), _signature(text).encode()):
        raise KeepsetError(
            f"{KEY} came by a route on which this server does not check it: give it at the top of the body of a "
            "request to a route that takes it."
        )
    return text


def _signature(text: str) -> str:
    key = os.environ[SIGNING_KEY].encode()
    return hmac.new(key, text.encode(errors="surrogatepass"), hashlib.sha256).hexdigest()
