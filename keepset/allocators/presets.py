"""Presets: names for compositions of other methods."""

from __future__ import annotations

from abc import abstractmethod
from collections.abc import Sequence
from dataclasses import dataclass, replace
from functools import cached_property
from typing import ClassVar

from keepset.allocators.pool import Composite, Pool
from keepset.core.budget import Budget
from keepset.core.keep_set import KeepSet
from keepset.core.method import Method, parameter
from keepset.core.observation import Observation
from keepset.core.shapes import Scores
from keepset.core.traits import Traits, combine
from keepset.methods.second_pass import PromptQueries, SecondPassAttention


class Preset(Method):
    """A composition of other methods under one name; it decides as its `composition` does.

    No allocator may divide a preset's budget again, so it counts as a method that looks across layers.

    Attributes:
        own_traits: what it adds to the traits of its composition.
    """

    own_traits: ClassVar[Traits] = Traits(across_layers=True, counts_from_data=True)

    @property
    @abstractmethod
    def composition(self) -> Method:
        """Return the method that this name stands for."""

    @cached_property
    def traits(self) -> Traits:
        return combine(self.own_traits, self.composition.traits)

    def score(self, observation: Observation) -> Scores:
        return self.composition.score(observation)

    def select_all(self, observations: Sequence[Observation], budget: Budget) -> KeepSet:
        return self.composition.select_all(observations, budget)


@dataclass(frozen=True)
class Glance(Preset):
    """Keeps what a quarter of the prompt's queries would look at right after it: `pool(prompt_queries(stride=4))`.

    A preset for a prompt that is answered directly. It takes one pass and little time beside it. It does not keep
    facts that only a later question asks for; use `reread` for those. `prompt_queries` says why it works, and
    docs/results.md what was measured.
    """

    name = "glance"
    composition = Pool(PromptQueries(stride=4))


@dataclass(frozen=True)
class Reread(Preset):
    """Keeps what the prompt looks at when it comes once more: `pool(prompt_queries(second_pass=True))`.

    A preset for a context that is asked about later. In the second pass every token occurs again, so entries stay that
    the text has not come back to yet. Heads that look far get many entries; heads that look at the first and newest
    tokens get few. It takes two passes, as `kvzip` and `kvcompose` do. `pool(prompt_queries)` takes one. On a text that
    continues it is as near to the full cache, but it finds fewer facts if little may stay. `prompt_queries` says why it
    works, and docs/results.md what was measured.
    """

    name = "reread"
    composition = Pool(PromptQueries(second_pass=True))


@dataclass(frozen=True)
class KVZip(Preset):
    """Keeps what is looked at when the model is asked to repeat its prompt (Kim et al. 2025, arXiv:2505.23416).

    A preset: one pool of all heads of all layers, by the most attention that each entry receives in a second pass in
    which the model repeats the prompt. After the prompt, each chunk of it runs again, behind words that ask to repeat
    it and the chat template's turn change. The softmax is over the first entries, the chunk's entries and these
    tokens. An entry's score is the maximum over these tokens and the query group. The best entries of all heads of all
    layers stay, without a floor.

    As in the authors' program, the words' tokens count as queries, their wording is the same, and a chat template's
    opening (system message, user's header) is not part of the context: it is in every chunk's softmax and always
    stays. The opening is recognised by the prompt's tokens; a system message other than the template's own is context.
    Without an opening the first four tokens replace it, as in kvpress; the first chunk contains them anyway. A
    tokenizer without a template has the authors' "Answer:" as its turn change. Exactly the budget is kept; the authors'
    threshold drops everything that ties with it. Each head keeps at least one entry.

    It costs more than a second prefill. The prompt runs again on top of its own cache, so its tokens attend to two to
    three times as many entries as the first time, and the whole cache is held until then.

    Attributes:
        chunk: tokens of the prompt that are repeated at a time; the paper's 2K. 0 repeats all of them at once.
        uniform: whether every head keeps the same number, the authors' variant with uniform head budgets.
    """

    name = "kvzip"
    paper = "arXiv:2505.23416"
    own_traits = replace(Preset.own_traits, sinks=4)  # as in kvpress; a chat template's opening stays beside them

    chunk: int = parameter(2048, minimum=0)
    uniform: bool = parameter(False)

    @property
    def composition(self) -> Method:
        scorer = SecondPassAttention("repeat", "max", "max", chunk=self.chunk)
        return scorer if self.uniform else Pool(scorer, floor=0.0)


@dataclass(frozen=True)
class KVCompose(Preset):
    """Keeps the best composite tokens of all layers (KVCompose 2025, arXiv:2509.05165, sections 3.2 and 3.3).

    A preset: what a second pass over the prompt attends to, divided among layers by composite tokens. It is
    `composite(second_pass(mean_term=True, chunk=0))` under the paper's name or, where it is unstructured (A.2),
    `pool(second_pass(mean_term=True, chunk=0), floor=0.0)`. It keeps exactly the budget of all layers together.
    Aggregates are the paper's: the maximum over the task's tokens, and means elsewhere; `second_pass` and `composite`
    explain each parameter. The task is the context itself or, task-aware, the questions that the cache was given.

    At small budgets the paper's pure pool starves most layers. Some heads look for a token's earlier occurrence. When
    the context runs again, such a head finds every entry by its own copy, and nearly all of its maxima are close to 1.
    A `floor` helps little, because those maxima rank entries inside a layer as well. A statistic that also depends on
    how often an entry is found helps most: `pool(second_pass(statistic='rms'), sinks=4, recent=32)`. docs/results.md
    has the figures.

    The context is one task, which follows the prompt in one piece and reaches positions of twice its length, as in the
    paper (T = {C}) and its authors' program (kvpress' KVComposePress). With `chunk=128`, each 128 tokens follow the
    prompt by themselves, which is quicker and nearer to the full cache. The program also lets the first layer keep as
    much as any other, and a layer nothing at all; here every layer keeps at least one entry.
    """

    name = "kvcompose"
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
