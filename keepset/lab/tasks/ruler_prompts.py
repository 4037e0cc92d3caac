"""Prompts of RULER at any size: needles, words that lm-evaluation-harness makes, and questions about documents."""

import inspect
import json
import random
import re
from abc import ABC, abstractmethod
from collections.abc import Callable, Sequence
from dataclasses import dataclass
from functools import cache, lru_cache
from itertools import cycle, islice
from pathlib import Path
from types import SimpleNamespace
from typing import Any, Literal
from uuid import UUID

from keepset.errors import KeepsetError
from keepset.lab import texts
from keepset.lab.tasks.data import import_extra
from keepset.lab.tasks.task import Question

QUESTION = "\nQuestion:"

PromptParts = tuple[str, Question]
"""The text up to the question, and the question, whose target is what an answer contains."""


class PromptMaker(ABC):
    """Makes the prompts of one task, up to a largest size and number; None means no limit."""

    largest: int | None = None
    questions: int | None = None

    @property
    def smallest(self) -> int:
        """Return the smallest size, in the units that make a context longer: words, sentences or documents."""
        return 1

    @abstractmethod
    def make(self, size: int, index: int, seed: int) -> PromptParts:
        """Return the prompt of this size for an index and a seed, from which `random` and `numpy` are seeded."""


@dataclass(frozen=True)
class Needles(PromptMaker):
    """Needles in a haystack: sentences that give each of `keys` keys `values` values; `queries` keys are asked for.

    The sentences are those of the paper and of lm-evaluation-harness. The harness's own module is not used, because
    importing it downloads data for a tokenizer of sentences. The haystack is a repeated sentence, essays, or needles
    that nobody asks for.
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
        values_by_key: dict[str, list[str]] = {}
        while len(values_by_key) < self.keys:
            values_by_key[_value(self.key, chance)] = [_value(self.value, chance) for _ in range(self.values)]
        needles = [self._needle(name, value) for name, values in values_by_key.items() for value in values]
        chance.shuffle(needles)
        hay = self._hay(size, chance)
        insertions = [len(hay) * step // 39 for step in range(40)] if self.haystack == "essays" else range(size)
        for insertion, needle in zip(
            sorted(chance.sample(insertions, len(needles)), reverse=True), needles, strict=True
        ):
            hay.insert(insertion, needle)
        chosen = chance.sample(list(values_by_key), self.queries)
        return self._prompt(chosen, (" " if self.haystack == "essays" else "\n").join(hay), values_by_key)

    def _hay(self, size: int, chance: random.Random) -> list[str]:
        if self.haystack == "essays":
            return list(_sentences(size))
        if self.haystack == "noise":
            return [_NOISE] * size
        return [self._needle(_value(self.key, chance), _value(self.value, chance)) for _ in range(size)]

    def _needle(self, key: str, value: str) -> str:
        return f"One of the special magic {self.value} for {key} is: {value}."

    def _prompt(self, chosen: Sequence[str], hay: str, values_by_key: dict[str, list[str]]) -> PromptParts:
        single = self.queries * self.values == 1
        noun = self.value[:-1] if single else self.value
        determiner, all_of, are = ("A", "is", "is") if single else ("Some", "are all", "are")
        query = chosen[0] if len(chosen) == 1 else f"{', '.join(chosen[:-1])}, and {chosen[-1]}"
        context = (
            f"{determiner} special magic {noun} {are} hidden within the following text. Make sure to memorize it. "
            f"I will quiz you about the {noun} afterwards.\n{hay}"
        )
        return context, Question(
            f"\nWhat {all_of} the special magic {noun} for {query} mentioned in the provided text?",
            target=tuple(value for name in chosen for value in values_by_key[name]),
            prefix=f" The special magic {noun} for {query} mentioned in the provided text {are}",
        )


_NOISE = "The grass is green. The sky is blue. The sun is yellow. Here we go. There and back again."


def _value(kind: str, chance: random.Random) -> str:
    if kind == "numbers":
        return str(chance.randint(10**6, 10**7 - 1))
    if kind == "uuids":
        return str(UUID(int=chance.getrandbits(128), version=4))
    return "-".join(chance.choice(words) for words in _words())


_WORDS = "lm-eval[ruler]"
"""The extra with the package of words."""


@cache
def _words() -> tuple[Sequence[str], Sequence[str]]:
    wonderwords = import_extra("wonderwords", _WORDS).RandomWord()
    adjectives, nouns = (wonderwords.filter(include_categories=[kind]) for kind in ("adjective", "noun"))
    return sorted(adjectives), sorted(nouns)


@lru_cache(maxsize=4)
def _sentences(words: int) -> Sequence[str]:
    return re.split(r"(?<=[.!?])\s+", " ".join(islice(cycle(_essay_words()), words)))


@cache
def _essay_words() -> Sequence[str]:
    return " ".join(map(texts.essay, texts.essays())).split()


class Variables(PromptMaker):
    """Five variables of one value, assigned to each other in a chain, after a short example with its answer."""

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
        self._length, self._cwe = length, import_extra("lm_eval.tasks.ruler.cwe_utils", _WORDS)
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
        # The harness endlessly shortens texts that its tokenizer finds too long; with this one no text is too long.
        no_tokens = SimpleNamespace(input_ids=())
        text, answers, _ = self._fwe.generate_input_output(0, lambda _: no_tokens, size, vocab_size=words)
        return cut(text, QUESTION, answers)


def cut(text: str, question: str, answers: Sequence[str]) -> PromptParts:
    """Return the parts of a text: context, question, ` Answer:` and the answer's beginning.

    Args:
        text: the text.
        question: the question's first words; the last place that has them counts.
        answers: the right answers.
    """
    context, begin, remainder = text.rpartition(question)
    words, answer, prefix = remainder.rpartition(" Answer:")
    return context, Question(begin + words, target=tuple(answers), prefix=(answer + prefix).rstrip())


_ASKED = "\n\nAnswer the question based on the given documents."
DocumentQuestion = tuple[str, list[str], list[str], list[str]]
"""A question, its answers, the documents that it needs, and others that are preferred to the rest."""


class Documents(PromptMaker):
    """A question, and the documents that answer it among others.

    The seed draws the order of the questions. The authors' program takes them in the file's order, all of one article
    first.
    """

    def __init__(self, entries: Sequence[DocumentQuestion]) -> None:
        if not entries:
            raise ValueError("no questions")
        self._documents = sorted({document for entry in entries for group in entry[2:] for document in group})
        number = {document: index for index, document in enumerate(self._documents)}
        self._questions = [
            {
                "query": query,
                "outputs": answers,
                "context": [number[document] for document in needed],
                "more_context": [number[document] for document in related],
            }
            for query, answers, needed, related in entries
        ]
        self.largest, self.questions = len(self._documents), len(self._questions)
        self._qa = import_extra("lm_eval.tasks.ruler.qa_utils")

    def make(self, size: int, index: int, seed: int) -> PromptParts:
        """Return the question with `size` documents, or with all that it needs if those are more."""
        chosen = random.Random(seed).sample(range(len(self._questions)), len(self._questions))[index]
        # The harness shuffles the list that it is given if all documents fit, so it gets a copy.
        text, answers = self._qa.generate_input_output(chosen, size, self._questions, list(self._documents))
        return cut(f"{text} Answer:", _ASKED, answers)


def load_documents(name: str, folder: Path | None) -> Documents:
    """Return documents and questions about them.

    Args:
        name: `squad` or `hotpot`.
        folder: a folder with `<name>.json`; without it they are downloaded.

    Raises:
        KeepsetError: if the file has another format, or cannot be downloaded.
    """
    parse = _PARSERS[name]
    path = None if folder is None else folder / f"{name}.json"
    if path is None or not path.is_file():
        return Documents(parse(_download(name)))
    try:
        return Documents(parse(json.loads(texts.read(path))))
    except (ValueError, KeyError, TypeError, AttributeError) as error:
        raise KeepsetError(
            f"{str(path)!r} is not in the format of {_OFFICIAL[name]} ({type(error).__name__}: {error}): "
            "put that file there."
        ) from error


def _squad(data: Any) -> list[DocumentQuestion]:
    entries = []
    for article in data["data"]:
        documents = [paragraph["context"] for paragraph in article["paragraphs"]]
        for paragraph in article["paragraphs"]:
            needed = paragraph["context"]
            related = [document for document in documents if document != needed]
            for item in paragraph["qas"]:
                if not item.get("is_impossible"):
                    entries.append((item["question"], [a["text"] for a in item["answers"]], [needed], related))
    return entries


def _hotpot(data: Any) -> list[DocumentQuestion]:
    return [
        (item["question"], [item["answer"]], [f"{title}\n{''.join(text)}" for title, text in item["context"]], [])
        for item in data
    ]


def _download(name: str) -> Any:
    qa, requests = import_extra("lm_eval.tasks.ruler.qa_utils"), import_extra("requests")
    reader = qa.read_squad if name == "squad" else qa.read_hotpotqa
    url = inspect.signature(reader).parameters["url"].default
    try:
        return qa.download_json(url)
    except (requests.RequestException, ValueError) as error:
        raise KeepsetError(
            f"The questions of {name} cannot be downloaded ({type(error).__name__}): put {_OFFICIAL[name]} into a "
            f"folder as {name}.json, and give that folder as data."
        ) from error


_PARSERS: dict[str, Callable[[Any], list[DocumentQuestion]]] = {"squad": _squad, "hotpot": _hotpot}
_OFFICIAL = {"squad": "SQuAD's dev-v2.0.json", "hotpot": "HotpotQA's hotpot_dev_distractor_v1.json"}
