"""What an example of RULER says, at any size; and the three of its tasks whose words lm-evaluation-harness makes."""

import random
from abc import ABC, abstractmethod
from collections.abc import Sequence
from types import SimpleNamespace

from keepset.bench.tasks.data import extra
from keepset.bench.tasks.task import Question

QUESTION = "\nQuestion:"

Draw = tuple[str, Question]
"""An example: the text up to the question, and the question, whose target is what an answer contains."""


class Draws(ABC):
    """One task's examples; `largest` and `questions` say how large and how many, if there is an end."""

    largest: int | None = None
    questions: int | None = None

    @property
    def smallest(self) -> int:
        """In words, sentences or documents, whatever makes a context longer."""
        return 1

    @abstractmethod
    def draw(self, size: int, index: int, seed: int) -> Draw:
        """The example of that index and seed, so large; what it draws from the shared generators is seeded."""


class Variables(Draws):
    """Five variables of one value, assigned one to the other in a chain; a short one with its answer comes first."""

    def __init__(self) -> None:
        self._vt = extra("lm_eval.tasks.ruler.vt_utils")

    def draw(self, size: int, index: int, seed: int) -> Draw:
        shot, shown = self._vt.generate_input_output(_SHOT, 1, 4, is_icl=True)
        text, answers = self._vt.generate_input_output(size, 1, 4)
        return cut(f"{shot} {' '.join(shown)}\n\n\n\n{text}", QUESTION, answers)


_SHOT = 10
"""Sentences of noise in the example that is shown: the harness's fits 500 tokens."""


class CommonWords(Draws):
    """The ten words that are in a list most often; a short list with its answer comes first.

    The harness leaves out that example, which it counts, and the authors' program has.
    """

    smallest = 20

    def __init__(self, length: int) -> None:
        self._length, self._cwe = length, extra("lm_eval.tasks.ruler.cwe_utils")
        self.largest = len(self._cwe.WORDS)

    def draw(self, size: int, index: int, seed: int) -> Draw:
        self._cwe.RNG.seed(random.getrandbits(32))
        shot, text, answers = self._cwe.generate_input_output(size, self._length)
        answer = self._cwe.CONFIG["answer_prefix"]
        return cut(f"{shot.replace(answer, answer + ' ')}\n{text}", QUESTION, answers)


class FrequentWords(Draws):
    """The three made-up words that are in a text most often, after the dots."""

    smallest = 53
    """From here on the third is more frequent than the fourth."""

    def __init__(self, length: int) -> None:
        self._length, self._fwe = length, extra("lm_eval.tasks.ruler.fwe_utils")

    def draw(self, size: int, index: int, seed: int) -> Draw:
        words = max(self._length // 50, 5)
        # What is too long it would shorten by itself, for ever: so nothing is.
        text, answers, _ = self._fwe.generate_input_output(0, _no_tokens, size, vocab_size=words)
        return cut(text, QUESTION, answers)


def _no_tokens(text: str) -> SimpleNamespace:
    return SimpleNamespace(input_ids=())


def cut(text: str, question: str, answers: Sequence[str]) -> Draw:
    """The parts of a text in which the question begins so."""
    context, begin, rest = text.rpartition(question)
    words, answer, prefix = rest.rpartition(" Answer:")
    return context, Question(begin + words, target=tuple(answers), prefix=(answer + prefix).rstrip())
