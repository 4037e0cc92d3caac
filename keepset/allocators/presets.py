"""Presets of `prompt_queries`: Glance for prompts that are answered directly, Reread for ones asked about later."""

from __future__ import annotations

from dataclasses import dataclass

from keepset.allocators.pool import Pool
from keepset.allocators.preset import Preset
from keepset.core.method import Method
from keepset.methods.prompt_queries import PromptQueries


@dataclass(frozen=True)
class Glance(Preset):
    """Keeps what a quarter of the prompt's queries would look at right after it: `pool(prompt_queries(stride=4))`.

    A preset, for a prompt that is answered directly. It takes one pass and little
    time beside it; `prompt_queries` says why it works, and docs/results.md what was measured. A fact that is asked for
    out of nowhere takes a second pass: `reread`.
    """

    name = "glance"

    @property
    def composition(self) -> Method:
        return Pool(PromptQueries(stride=4))


@dataclass(frozen=True)
class Reread(Preset):
    """Keeps what the prompt looks at when it comes once more: `pool(prompt_queries(second_pass=True))`.

    A preset, for a context that is asked about later: every token is looked
    for, so facts are found that nobody has come back to yet. Heads that look far get many entries, heads that look at
    the first and newest tokens few. It takes two passes, as `kvzip` and `kvcompose` do; `pool(prompt_queries)` takes
    one and is as near to texts that go on, but finds fewer facts in little room. `prompt_queries` says why it works,
    and docs/results.md what was measured.
    """

    name = "reread"

    @property
    def composition(self) -> Method:
        return Pool(PromptQueries(second_pass=True))
