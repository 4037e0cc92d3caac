"""KVzap: keep what a small module, fitted to KVzip's scores, scores highest by hidden states."""

from __future__ import annotations

from dataclasses import dataclass
from functools import cached_property

from keepset.core.feature import Needs
from keepset.core.hidden_predictor import HiddenNetwork
from keepset.core.method import parameter
from keepset.core.traits import Traits
from keepset.methods.fitted import HiddenStateScorer, ThresholdScorer


@dataclass(frozen=True)
class KVzap(HiddenStateScorer, ThresholdScorer):
    """Scores an entry by a module on the hidden state that enters its layer (Jegou and Jeblick 2026, arXiv:2601.07891).

    Each layer has one linear map, or two with GELU between them, from a token's hidden state to one number per KV head:
    the logarithm of the score that KVzip+ would give the entry. The authors publish such modules, and `keepset
    calibrate --import` reads them. An entry is scored once, as it is written.

    With a `threshold`, all entries with a lower score are dropped, except the `recent` newest; `keep` is then a cap.
    The authors use only a threshold, with a window of the newest 128 tokens; -4 is the example in their program. There
    an entry is judged when it leaves the window; here at every event (`every=`). Their program computes in the model's
    precision, keepset in float32. Formulas are those of the program (kvpress 0.5.5, `KVzapModel` and `DMSPress`),
    because the paper's text was not available.

    Attributes:
        threshold: the lowest score that stays, below 0; 0 for a budget alone.
        stats: a file of `keepset calibrate --import`.
    """

    name = "kvzap"
    paper = "arXiv:2601.07891"
    network = HiddenNetwork

    threshold: float = parameter(0.0, maximum=0.0)
    stats: str = parameter("")

    @cached_property
    def traits(self) -> Traits:
        budget = self.threshold == 0
        return Traits(
            needs=Needs(self._scores.statistics, self._scores),
            recent=128,
            state_names=(self._scores.column,),
            equal_heads=budget,
            needs_budget=budget,
            counts_from_data=not budget,
        )
