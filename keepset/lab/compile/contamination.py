"""Contamination: tables must not be evaluated on a text from which they were compiled.

An evaluation calls `refuse_contaminated(recipe, context)` for every recipe and context before it runs them.
"""

import hashlib

from keepset.core.tables import Tables, load
from keepset.errors import KeepsetError
from keepset.methods.compilerkv import CompilerKV
from keepset.recipe import Recipe

_WORDS, _ONE_IN = 12, 32
"""A mark is the hash of `_WORDS` consecutive words. One of `_ONE_IN` hashes is kept, chosen by its value. So two texts
that share 150 words share a mark in 99 of 100 cases, wherever the texts were cut."""


def passage_hashes(text: str) -> tuple[str, ...]:
    """Return the marks that identify a text; at least one unless it has no words."""
    words = text.split()
    runs = (" ".join(words[first : first + _WORDS]) for first in range(max(len(words) - _WORDS, 0) + 1) if words)
    hashes = {hashlib.blake2b(run.encode("utf-8", "surrogatepass"), digest_size=8).digest() for run in runs}
    chosen = {digest for digest in hashes if digest[-1] % _ONE_IN == 0} or set(sorted(hashes)[:1])
    return tuple(sorted(digest.hex() for digest in chosen))


def is_contaminated(tables: Tables, text: str) -> bool:
    """Return whether a text shares a passage with a context from which tables were compiled.

    Args:
        tables: the tables, whose provenance has the marks of the contexts.
        text: the text.
    """
    compiled = {mark for context in tables.provenance.get("marks", ()) for mark in context}
    return not compiled.isdisjoint(passage_hashes(text))


def refuse_contaminated(recipe: Recipe, text: str) -> None:
    """Refuse to evaluate a recipe on a text from which its tables were compiled.

    Args:
        recipe: the recipe; only steps with tables count.
        text: the text.

    Raises:
        KeepsetError: the tables were compiled from the text, or from one that shares a passage with it.
    """
    for method in recipe.method.steps():
        if isinstance(method, CompilerKV) and method.tables and is_contaminated(load(method.tables), text):
            raise KeepsetError(
                f"The tables {method.tables!r} were compiled from this context, or from one that shares a passage with "
                "it: evaluate on other texts, or compile them from others."
            )
