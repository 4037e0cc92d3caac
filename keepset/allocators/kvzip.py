"""KVzip: what the model looks at when it is asked to repeat its prompt."""

from __future__ import annotations

from dataclasses import dataclass

from keepset.allocators.pool import Pool
from keepset.allocators.preset import Preset
from keepset.core.method import Method, parameter
from keepset.methods.second_pass import SecondPassAttention


@dataclass(frozen=True)
class KVZip(Preset):
    """Keeps what is looked at when the model is asked to repeat its prompt (Kim et al. 2025, arXiv:2505.23416).

    A preset: one pool of all heads of all layers, by the most that a second pass which repeats the prompt attends to.
    After the prompt, chunk by chunk, run words that ask to repeat it, the chat template's turn change, and the chunk.
    An entry's score is the most that it receives, over these tokens and the query group, of a softmax over the first
    entries, its chunk's and these tokens. The best of all heads of all layers stay, without a floor.

    As in the authors' program, the words' tokens count as queries too, their wording is the same, and a chat
    template's opening (system message, user's header) is no part of the context: it is in every chunk's softmax and
    always stays. It is known by the prompt's tokens; another system message than the template's own is context.
    Without it the first four tokens take its place, as in kvpress; the first chunk holds them itself. A tokenizer
    without a template has the authors' "Answer:" as its turn change. Exactly the budget is kept, where their
    threshold drops all that ties with it, and each head keeps one entry in any case.

    It costs a second prefill and more: the prompt runs again on top of its own cache, so that its tokens attend to
    two to three times as many entries as they did at first, and the whole cache is there until that is done.

    Attributes:
        chunk: tokens of the prompt that are repeated at a time; the paper's 2K. 0: all of them.
        uniform: whether every head keeps the same number, the authors' variant with uniform head budgets.
    """

    name = "kvzip"
    paper = "arXiv:2505.23416"
    sinks = 4  # as in kvpress: what a chat template's opening is where there is one

    chunk: int = parameter(2048, minimum=0)
    uniform: bool = parameter(False)

    @property
    def composition(self) -> Method:
        scorer = SecondPassAttention("repeat", "max", "max", chunk=self.chunk)
        return scorer if self.uniform else Pool(scorer, floor=0.0)
