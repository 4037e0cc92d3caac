"""Whether tables have been compiled from a text: then they must not be judged by it.

Whoever evaluates recipes on contexts calls `refuse_contaminated(recipe, context)` for every pair, before anything runs.
"""

import hashlib
from collections.abc import Iterator

from keepset.core.method import Allocator, Method
from keepset.core.tables import Tables, load
from keepset.errors import KeepsetError
from keepset.methods.compilerkv import CompilerKV
from keepset.recipe import Recipe

_WORDS, _ONE_IN = 12, 32
"""A mark is the hash of so many words that follow one another; of all such hashes one in so many is kept, chosen by
its value, so that two texts that share 150 words share a mark in all but 1 of 100 cases, wherever they were cut."""


def passage_hashes(text: str) -> tuple[str, ...]:
    """What a text is known by; at least one, unless it has no words."""
    words = text.split()
    runs = (" ".join(words[first : first + _WORDS]) for first in range(max(len(words) - _WORDS, 0) + 1) if words)
    hashes = {hashlib.blake2b(run.encode("utf-8", "surrogatepass"), digest_size=8).digest() for run in runs}
    chosen = {each for each in hashes if each[-1] % _ONE_IN == 0} or set(sorted(hashes)[:1])
    return tuple(sorted(each.hex() for each in chosen))


def is_contaminated(tables: Tables, text: str) -> bool:
    """Whether the text shares a passage with a context that the tables were compiled from."""
    compiled = {mark for context in tables.provenance.get("marks", ()) for mark in context}
    return not compiled.isdisjoint(passage_hashes(text))


def refuse_contaminated(recipe: Recipe, text: str) -> None:
    """Refuses, with a `KeepsetError`, to judge a recipe by a text that its tables were compiled from."""
    for method in _methods(recipe.method):
        if isinstance(method, CompilerKV) and method.tables and is_contaminated(load(method.tables), text):
            raise KeepsetError(
                f"The tables {method.tables!r} were compiled from this context, or from one that shares a passage with "
                "it: evaluate on other texts, or compile them from others."
            )


def _methods(method: Method) -> Iterator[Method]:
    yield method
    if isinstance(method, Allocator):
        yield from method.inner()
