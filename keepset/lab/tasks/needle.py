"""A needle in a haystack: one fact somewhere in essays, at every depth."""

import random
from collections.abc import Sequence
from functools import partial

from keepset.errors import KeepsetError
from keepset.lab import texts
from keepset.lab.tasks.fit import fit, measure, room
from keepset.lab.tasks.task import Example, Generation, Question, Reply, Task, TaskSettings, Tokenizer

NAMES = ("needle",)
EXAMPLES = 50
"""The number of examples without a limit: five at every depth."""

_DEPTHS = (0.05, 0.35, 0.65, 0.95, 0.25, 0.55, 0.85, 0.15, 0.45, 0.75)
"""The middles of ten equal parts, in an order that also spreads the first few."""
_CHARACTERS = 100
"""Characters of the shortest haystack."""
_TOKENS = 10


def make(name: str, settings: TaskSettings) -> list[Task]:
    """Return one task for every length.

    Args:
        name: `needle`.
        settings: the settings, with the lengths of texts.
    """
    return [NeedleTask(length) for length in settings.lengths]


class NeedleTask(Task):
    """The number of a city, said once in essays of `length` tokens, which include the answer (Kamradt, 2023).

    Essays and depths alternate. The seed determines an example's city and number.
    """

    metric, generation = "found", Generation(_TOKENS)

    def __init__(self, length: int) -> None:
        self.length, self.name = length, f"needle@{length}"

    def examples(self, tokenizer: Tokenizer, *, limit: int | None = None, seed: int = 0) -> Sequence[Example]:
        space, count = room(tokenizer, self.length, _TOKENS), partial(measure, tokenizer)
        examples, guess = [], None
        for index in range(EXAMPLES if limit is None else limit):
            fitted = fit(partial(self._example, index, seed), count, space, smallest=_CHARACTERS, guess=guess)
            if fitted is None:
                raise KeepsetError(f"{self.length} tokens leave no room for a needle and a text: ask for more.")
            guess, example = fitted
            examples.append(example)
        return examples

    def judge(self, question: Question, reply: Reply) -> dict[str, float]:
        return {"found": float(question.target in str(reply))}

    def _example(self, index: int, seed: int, size: int) -> Example:
        draw = random.Random(f"needle {seed} {index}")
        city, number, depth = draw.choice(texts.CITIES), str(draw.randint(1000, 9999)), _DEPTHS[index % len(_DEPTHS)]
        needle = texts.secret_number(city, number)
        question = Question(f"\n\n{needle.question}", target=number, prefix=f" {needle.opening}")
        context = texts.insert(texts.haystack(index, size), needle, depth)
        return Example(str(index), context, (question,), {"length": self.length, "depth": depth})
