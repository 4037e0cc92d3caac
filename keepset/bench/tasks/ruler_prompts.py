"""Prompts of RULER at any size, and the three tasks whose words lm-evaluation-harness makes."""

import random
from abc import ABC, abstractmethod
from collections.abc import Sequence
from types import SimpleNamespace

from keepset.bench.tasks.harness_imports import import_extra
from keepset.bench.tasks.task import Question

QUESTION = "\nQuestion:"

PromptParts = tuple[str, Question]
"""The text up to the question, and the question, whose target is what an answer contains."""


class PromptMaker(ABC):
    """Makes the prompts of one task.

    Attributes:
        largest: the largest size; None without an end.
        questions: how many prompts there are; None without an end.
    """

    largest: int | None = None
    questions: int | None = None

    @property
    def smallest(self) -> int:
        """Return the smallest size, in words, sentences or documents, whatever makes a context longer."""
        return 1

    @abstractmethod
    def make(self, size: int, index: int, seed: int) -> PromptParts:
        """Return the prompt of an index and a seed.

        Args:
            size: how large it is, in the maker's unit.
            index: the example's.
            seed: the data's. The generators of `random` and `numpy` are seeded from both.
        """


class Variables(PromptMaker):
    """Five variables of one value, assigned one to the other in a chain, after a short example with its answer."""

    def __init__(self) -> None:
        self._vt = import_extra("lm_eval.tasks.ruler.vt_utils")

    def make(self, size: int, index: int, seed: int) -> PromptParts:
        shot, shown = self._vt.generate_input_output(_SHOT, 1, 4, is_icl=True)
        text, answers = self._vt.generate_input_output(size, 1, 4)
        return cut(f"{shot} {' '.join(shown)}\n\n\n\n{text}", QUESTION, answers)


_SHOT = 10
"""Sentences of noise in the example that is shown; the harness's own example fits 500 tokens."""


class CommonWords(PromptMaker):
    """The ten most frequent words of a list, after a short list with its answer.

    The authors' program shows that short list. The harness counts its tokens, but leaves it out.
    """

    smallest = 20

    def __init__(self, length: int) -> None:
        self._length, self._cwe = length, import_extra("lm_eval.tasks.ruler.cwe_utils")
        self.largest = len(self._cwe.WORDS)

    def make(self, size: int, index: int, seed: int) -> PromptParts:
        self._cwe.RNG.seed(random.getrandbits(32))
        shot, text, answers = self._cwe.generate_input_output(size, self._length)
        answer = self._cwe.CONFIG["answer_prefix"]
        return cut(f"{shot.replace(answer, answer + ' ')}\n{text}", QUESTION, answers)


class FrequentWords(PromptMaker):
    """The three most frequent made-up words of a text, after the dots."""

    smallest = 53
    """From this size on the third word is more frequent than the fourth."""

    def __init__(self, length: int) -> None:
        self._length, self._fwe = length, import_extra("lm_eval.tasks.ruler.fwe_utils")

    def make(self, size: int, index: int, seed: int) -> PromptParts:
        words = max(self._length // 50, 5)
        # The harness shortens by itself, for ever, what its tokenizer finds too long: this one finds nothing too long.
        text, answers, _ = self._fwe.generate_input_output(0, _no_tokens, size, vocab_size=words)
        return cut(text, QUESTION, answers)


def _no_tokens(text: str) -> SimpleNamespace:
    return SimpleNamespace(input_ids=())


def cut(text: str, question: str, answers: Sequence[str]) -> PromptParts:
    """Return the parts of a text.

    Args:
        text: context, question, ` Answer:` and the answer's beginning.
        question: the question's first words; the last place that has them counts.
        answers: the question's target.
    """
    context, begin, rest = text.rpartition(question)
    words, answer, prefix = rest.rpartition(" Answer:")
    return context, Question(begin + words, target=tuple(answers), prefix=(answer + prefix).rstrip())
