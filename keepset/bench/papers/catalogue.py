"""All entries, paper by paper."""

import difflib

from keepset.bench.papers import ams, compilerkv, gvote, kvcompose
from keepset.bench.papers.entry import Entry
from keepset.errors import KeepsetError

ENTRIES: dict[str, Entry] = {
    entry.name: entry for paper in (ams, kvcompose, gvote, compilerkv) for entry in paper.ENTRIES
}


def entry_of(name: str) -> Entry:
    """The entry of this name."""
    if name not in ENTRIES:
        close = difflib.get_close_matches(name, ENTRIES, n=3, cutoff=0.5)
        near = f"did you mean {', '.join(map(repr, close))}?" if close else "`keepset reproduce list` shows all."
        raise KeepsetError(f"There is no table or figure {name!r}; {near}")
    return ENTRIES[name]
