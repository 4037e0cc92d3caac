"""KVCompose: composite tokens by the attention that a task pays to the whole prompt."""

from __future__ import annotations

from dataclasses import dataclass

from keepset.allocators.composite import Composite
from keepset.allocators.pool import Pool
from keepset.allocators.preset import Preset
from keepset.core.keep_set import Layout
from keepset.core.method import Method, parameter
from keepset.methods.second_pass import SecondPassAttention


@dataclass(frozen=True)
class KVCompose(Preset):
    """Keeps the best composite tokens of all layers (KVCompose 2025, arXiv:2509.05165, sections 3.2 and 3.3).

    A preset: what a second pass over the prompt attends to, divided among layers by composite tokens.
    It is `composite(second_pass(mean_term=True, chunk=0))` under the paper's name, or, where it is unstructured (A.2),
    `pool(second_pass(mean_term=True, chunk=0), floor=0.0)`, and keeps exactly the budget of all layers together.
    Aggregates are the paper's: the maximum over the task's tokens, means elsewhere; `second_pass` and `composite` say
    what each parameter does. The task is the context itself, or, task-aware, the questions that the cache was given.

    At small budgets the paper's pure pool starves most layers. Some heads look for a token's earlier occurrence: when
    the context runs again, every entry is found by its own copy, and nearly all of their maxima are close to one. A
    `floor` mends a little of it, because inside a layer, too, those maxima rank entries; a statistic that knows how
    often mends most: `pool(second_pass(statistic='rms'), sinks=4, recent=32)`. docs/results.md has the figures.

    The context is one task, which follows the prompt in one piece and reaches positions of twice its length: so the
    paper has it, T = {C}, and its authors' program (kvpress' KVComposePress). With `chunk=128` so many tokens at a time
    follow the prompt anew: quicker, and nearer to the full cache. The program also lets the first layer keep as much as
    any, and a layer nothing at all; here every layer keeps one entry.
    """

    name = "kvcompose"
    layout = Layout.LAYER_RAGGED
    paper = "arXiv:2509.05165"

    task: str = parameter("context", choices=("context", "self"))
    aggregate_task: str = parameter("max", choices=("max", "mean"))
    aggregate_group: str = parameter("mean", choices=("max", "mean"))
    aggregate_head: str = parameter("mean", choices=("max", "mean"))
    mean_term: bool = parameter(True)
    values: str = parameter("none", choices=("none", "norm", "projected"))
    structured: bool = parameter(True)
    floor: float = parameter(0.0, minimum=0.0, maximum=1.0)
    chunk: int = parameter(0, minimum=0)

    @property
    def composition(self) -> Method:
        scorer = SecondPassAttention(
            self.task, self.aggregate_task, self.aggregate_group, self.mean_term, self.values, self.chunk
        )
        if self.structured:
            return Composite(scorer, aggregate_head=self.aggregate_head, floor=self.floor)
        return Pool(scorer, floor=self.floor)
