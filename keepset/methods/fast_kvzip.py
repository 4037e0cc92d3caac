"""Fast KVzip: keep what a gate, fitted to KVzip's scores, finds in the hidden states."""

from __future__ import annotations

from dataclasses import dataclass
from functools import cached_property

from keepset.core.feature import Needs
from keepset.core.hidden_predictor import HiddenGate
from keepset.core.method import parameter
from keepset.core.traits import Traits
from keepset.methods.fitted import HiddenStateScorer


@dataclass(frozen=True)
class FastKVzip(HiddenStateScorer):
    """Scores an entry by a gate on the hidden state that enters its layer (Kim et al. 2026, arXiv:2601.17668).

    A gate compares one low-dimensional key of the token's with a few keys that it has learnt, by a few queries of the
    same token's, and gives a number from 0 to 1 for each KV head. `HiddenGate` has the formula, which is that of the
    authors' program for inference, because the paper's text was not at hand. The authors publish gates, and `keepset
    calibrate --import` reads them. An entry is scored once, as it is written.

    The authors compare scores over all heads of all layers: `pool(fast_kvzip)`. The first 4 tokens stay, and of the
    newest as many as when they decode, 128; after a prompt they keep 2% of its tokens, or 4,096 of a long one.

    Attributes:
        stats: a file of `keepset calibrate --import`.
    """

    name = "fast_kvzip"
    advice = "is meant to share one budget over all heads of all layers: pool(fast_kvzip)"
    paper = "arXiv:2601.17668"
    network = HiddenGate

    stats: str = parameter("")

    @cached_property
    def traits(self) -> Traits:
        needs = Needs(self._scores.statistics, self._scores)
        return Traits(needs=needs, sinks=4, recent=128, state_names=(self._scores.column,))
