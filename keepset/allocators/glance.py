"""Glance: a preset of `prompt_queries` for prompts that are answered directly."""

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
