"""RULER's needles: values of keys, hidden in a haystack."""

import random
import re
from collections.abc import Sequence
from dataclasses import dataclass
from functools import cache, lru_cache
from itertools import cycle, islice
from typing import Literal
from uuid import UUID

from keepset import texts
from keepset.bench.tasks.harness_imports import import_extra
from keepset.bench.tasks.ruler_prompts import PromptMaker, PromptParts
from keepset.bench.tasks.task import Question


@dataclass(frozen=True)
class Needles(PromptMaker):
    """Needles in a haystack: sentences that give keys their values, of which some are asked for.

    The sentences are those of the paper and of lm-evaluation-harness. The harness's own module is not used, because
    importing it downloads data for a tokenizer of sentences.

    Attributes:
        haystack: repeated sentences, essays, or needles that nobody asks for.
        key: the kind of keys.
        value: the kind of values.
        keys: how many keys there are.
        values: how many values each key has.
        queries: how many keys are asked for.
    """

    haystack: Literal["noise", "essays", "needles"]
    key: Literal["words", "uuids"] = "words"
    value: Literal["numbers", "uuids"] = "numbers"
    keys: int = 1
    values: int = 1
    queries: int = 1

    @property
    def smallest(self) -> int:
        return self.keys * self.values

    def make(self, size: int, index: int, seed: int) -> PromptParts:
        chance = random.Random(f"{self} {index} {seed}")
        known: dict[str, list[str]] = {}
        while len(known) < self.keys:
            known[_value(self.key, chance)] = [_value(self.value, chance) for _ in range(self.values)]
        needles = [self._needle(name, value) for name, values in known.items() for value in values]
        chance.shuffle(needles)
        hay = self._hay(size, chance)
        places = [len(hay) * step // 39 for step in range(40)] if self.haystack == "essays" else range(size)
        for place, needle in zip(sorted(chance.sample(places, len(needles)), reverse=True), needles, strict=True):
            hay.insert(place, needle)
        chosen = chance.sample(list(known), self.queries)
        return self._prompt(chosen, (" " if self.haystack == "essays" else "\n").join(hay), known)

    def _hay(self, size: int, chance: random.Random) -> list[str]:
        if self.haystack == "essays":
            return list(_sentences(size))
        if self.haystack == "noise":
            return [_NOISE] * size
        return [self._needle(_value(self.key, chance), _value(self.value, chance)) for _ in range(size)]

    def _needle(self, key: str, value: str) -> str:
        return f"One of the special magic {self.value} for {key} is: {value}."

    def _prompt(self, chosen: Sequence[str], hay: str, known: dict[str, list[str]]) -> PromptParts:
        single = self.queries * self.values == 1
        what = self.value[:-1] if single else self.value
        some, all_of, are = ("A", "is", "is") if single else ("Some", "are all", "are")
        query = chosen[0] if len(chosen) == 1 else f"{', '.join(chosen[:-1])}, and {chosen[-1]}"
        context = (
            f"{some} special magic {what} {are} hidden within the following text. Make sure to memorize it. "
            f"I will quiz you about the {what} afterwards.\n{hay}"
        )
        return context, Question(
            f"\nWhat {all_of} the special magic {what} for {query} mentioned in the provided text?",
            target=tuple(value for name in chosen for value in known[name]),
            prefix=f" The special magic {what} for {query} mentioned in the provided text {are}",
        )


_NOISE = "The grass is green. The sky is blue. The sun is yellow. Here we go. There and back again."


def _value(kind: str, chance: random.Random) -> str:
    if kind == "numbers":
        return str(chance.randint(10**6, 10**7 - 1))
    if kind == "uuids":
        return str(UUID(int=chance.getrandbits(128), version=4))
    return "-".join(chance.choice(words) for words in _words())


@cache
def _words() -> tuple[Sequence[str], Sequence[str]]:
    wonderwords = import_extra("wonderwords").RandomWord()
    adjectives, nouns = (wonderwords.filter(include_categories=[kind]) for kind in ("adjective", "noun"))
    return sorted(adjectives), sorted(nouns)


@lru_cache(maxsize=4)
def _sentences(words: int) -> Sequence[str]:
    return re.split(r"(?<=[.!?])\s+", " ".join(islice(cycle(_essay_words()), words)))


@cache
def _essay_words() -> Sequence[str]:
    return " ".join(map(texts.essay, texts.essays())).split()
