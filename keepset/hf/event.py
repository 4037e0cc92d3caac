"""`Event`: one compression of a cache, as it is told afterwards."""

from __future__ import annotations

from dataclasses import dataclass

from keepset.core.keep_set import KeepSet


@dataclass(frozen=True, eq=False)
class Event:
    """One compression.

    Attributes:
        length: logical length of the cache at the event, padding included.
        keep_set: what stayed; of events before the newest only where the cache keeps its history.
        entries: number of entries before it, over all layers, requests and KV heads.
        kept: number of entries that stayed.
        nbytes_before: bytes of the keys and values before it.
        seconds: time spent on choosing and freeing.
    """

    length: int
    keep_set: KeepSet | None
    entries: int
    kept: int
    nbytes_before: int
    seconds: float
