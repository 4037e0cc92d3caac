"""Fast KVzip: keep what a gate, fitted to KVzip's scores, scores highest by hidden states."""

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

    From the token's hidden state a gate makes one low-dimensional key and a few queries. It compares that key with a
    few learned keys by these queries, and gives a number from 0 to 1 for each KV head. `HiddenGate` has the formula of
    the authors' program for inference, because the paper's text was not available. The authors publish gates, and
    `keepset calibrate --import` reads them. An entry is scored once, when it is written.

    The authors compare scores over all heads of all layers: `pool(fast_kvzip)`. The first 4 tokens always stay, and
    the newest 128, which is the authors' number while decoding; after a prompt they keep the newest 2% of its tokens,
    or 4,096 of a long one.

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
