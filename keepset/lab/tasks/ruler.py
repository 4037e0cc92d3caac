"""RULER (Hsieh et al. 2024, arXiv:2404.06654): thirteen synthetic tasks at any length."""

import re
from collections.abc import Callable, Sequence
from functools import partial
from pathlib import Path

from keepset.errors import CorruptFileError, KeepsetError
from keepset.lab.tasks.data import DataRecord, find_records, seeded
from keepset.lab.tasks.fit import fit, measure, room
from keepset.lab.tasks.ruler_prompts import (
    CommonWords,
    FrequentWords,
    Needles,
    PromptMaker,
    PromptParts,
    Variables,
    load_documents,
)
from keepset.lab.tasks.task import Example, Generation, Question, Reply, Task, TaskSettings, Tokenizer

EXAMPLES = 500
"""The number of examples without a limit, as in the paper."""

_TASKS: dict[str, tuple[int, Callable[[int, TaskSettings], PromptMaker]]] = {
    "niah_single_1": (128, lambda length, settings: Needles("noise")),
    "niah_single_2": (128, lambda length, settings: Needles("essays")),
    "niah_single_3": (128, lambda length, settings: Needles("essays", value="uuids")),
    "niah_multikey_1": (128, lambda length, settings: Needles("essays", keys=4)),
    "niah_multikey_2": (128, lambda length, settings: Needles("needles")),
    "niah_multikey_3": (128, lambda length, settings: Needles("needles", key="uuids", value="uuids")),
    "niah_multivalue": (128, lambda length, settings: Needles("essays", values=4)),
    "niah_multiquery": (128, lambda length, settings: Needles("essays", keys=4, queries=4)),
    "ruler_vt": (30, lambda length, settings: Variables()),
    "ruler_cwe": (120, lambda length, settings: CommonWords(length)),
    "ruler_fwe": (50, lambda length, settings: FrequentWords(length)),
    "ruler_qa_squad": (32, lambda length, settings: load_documents("squad", settings.data)),
    "ruler_qa_hotpot": (32, lambda length, settings: load_documents("hotpot", settings.data)),
}
"""Tokens of an answer, and the maker of prompts of a length."""
NAMES = (*_TASKS, "ruler")
PARTS = {
    "needles": tuple(name for name in _TASKS if name.startswith("niah")),
    "aggregation": ("ruler_cwe", "ruler_fwe"),
    "QA": ("ruler_qa_squad", "ruler_qa_hotpot"),
}
"""Tasks by kind, as KVCompose (section 4.1) shows them; the variables alone are one more kind."""


def make(name: str, settings: TaskSettings) -> list[Task]:
    """Return the tasks of a name, one for every length.

    Args:
        name: a task, or `ruler` for all thirteen.
        settings: the settings, with the lengths of texts.
    """
    names = list(_TASKS) if name == "ruler" else [name]
    return [RulerTask(task_name, length, settings) for task_name in names for length in settings.lengths]


class RulerTask(Task):
    """One of RULER's tasks at one length.

    The length counts the tokens of the whole prompt, those of a chat template and of the answer included. Prompts and
    answers are those of lm-evaluation-harness, made longer until they fill the length. Its own tasks make all examples
    of all lengths as soon as they are named, and fetch essays and questions from the network. The same index and seed
    have the same needles at every length.
    """

    def __init__(self, name: str, length: int, settings: TaskSettings) -> None:
        self.name = f"{name}@{length}"
        self.metric, self._base = "match", name
        tokens, self._maker = _TASKS[name]
        self.generation = Generation(tokens)
        self._any = name.startswith("ruler_qa")
        self.length, self._settings = length, settings

    def examples(self, tokenizer: Tokenizer, *, limit: int | None = None, seed: int = 0) -> Sequence[Example]:
        """Return the examples of a user's file, or else made ones.

        Questions whose own documents do not fit are left out.

        Raises:
            KeepsetError: if the length is too short for a made example.
        """
        user_prompts = read_prompts(self._settings.data, self._base, self.length)
        if user_prompts is not None:
            return [self._example(index, *prompt) for index, prompt in enumerate(user_prompts[:limit])]
        maker = self._maker(self.length, self._settings)
        space = room(tokenizer, self.length, self.generation.tokens)
        examples: list[Example] = []
        count = partial(measure, tokenizer)
        index, guess, example_count = 0, None, EXAMPLES if limit is None else limit
        while len(examples) < example_count and index != maker.questions:
            make = partial(self._make_example, maker, index, seed)
            fitted = fit(make, count, space, smallest=maker.smallest, largest=maker.largest, guess=guess)
            if fitted is not None:
                guess, example = fitted
                examples.append(example)
            elif maker.questions is None or (index == maker.questions - 1 and not examples):
                least = count(make(maker.smallest)) + self.length - space
                raise KeepsetError(
                    f"{self.name} is too short: such an example takes {least} tokens with this tokenizer, its answer "
                    "and a chat template included; ask for a longer one."
                )
            index += 1
        return examples

    def judge(self, question: Question, reply: Reply) -> dict[str, float]:
        """Return the share of the answers that are in the reply, whatever their case.

        One of several answers to a question about documents is enough. That is the paper's metric;
        lm-evaluation-harness asks for all of them.
        """
        text = str(reply).lower()
        hits = [float(answer.lower() in text) for answer in question.target]
        return {"match": max(hits) if self._any else sum(hits) / len(hits)}

    def _make_example(self, maker: PromptMaker, index: int, seed: int, size: int) -> Example:
        with seeded(f"{index} {seed}"):
            return self._example(index, *maker.make(size, index, seed))

    def _example(self, index: int, context: str, question: Question) -> Example:
        return Example(str(index), context, (question,), {"length": self.length})


_AUTHORS_NAMES = {
    "ruler_vt": "vt",
    "ruler_cwe": "cwe",
    "ruler_fwe": "fwe",
    "ruler_qa_squad": "qa_1",
    "ruler_qa_hotpot": "qa_2",
}
_NEEDLE = re.compile(r"\s*What (?:is|are all) the special magic")
_DOCUMENTS = re.compile(r"\s*Answer the question based on the given documents")
_WORDS = re.compile(r"\s*Question:")
_NEEDLES_ANSWER = re.compile(r"\s*The special magic")
_ANSWER = re.compile(r"\s*Answer:")


def read_prompts(folder: Path | None, name: str, length: int) -> list[PromptParts] | None:
    """Return a task's prompts of one length from a user's folder; None if it has none.

    The folder may have `<length>/<task>/validation.jsonl`, which the authors' program writes for a model without a chat
    template, under the authors' names (`vt`, `qa_1`, ...); or `ruler@<length>.jsonl` with all tasks, as the data set
    simonjegou/ruler has them. A line that is something else raises `KeepsetError`.

    Args:
        folder: the user's folder; None for none.
        name: the task's name.
        length: tokens of a prompt.
    """
    if folder is None:
        return None
    authors = _AUTHORS_NAMES.get(name, name)
    if (items := find_records(folder / str(length) / authors, "validation")) is not None:
        return [_split(item, name) for item in items]
    items = [item for item in find_records(folder, f"ruler@{length}") or () if item.first("task") == authors]
    return [_parts(item) for item in items] or None


def _parts(item: DataRecord) -> PromptParts:
    question, prefix = str(item.first("question")), str(item.fields.get("answer_prefix") or "")
    return str(item.first("context")), Question(question, target=_answers(item, "answer"), prefix=prefix)


def _split(item: DataRecord, name: str) -> PromptParts:
    """Return a whole prompt, cut at the beginnings of its last question and of the answer."""
    text = str(item.first("input")) + str(item.fields.get("answer_prefix") or "")
    is_needle = name.startswith("niah")
    asks = _NEEDLE if is_needle else _DOCUMENTS if name.startswith("ruler_qa") else _WORDS
    begin = max((match.start() for match in asks.finditer(text)), default=len(text))
    answers = [match.start() for match in (_NEEDLES_ANSWER if is_needle else _ANSWER).finditer(text, begin)]
    if not answers:
        raise CorruptFileError(f"{item.where} has no question as RULER asks it: take a file of the authors' program.")
    end = answers[0] if is_needle else answers[-1]
    return text[:begin], Question(text[begin:end], target=_answers(item, "outputs"), prefix=text[end:])


def _answers(item: DataRecord, field: str) -> tuple[str, ...]:
    answers = item.first(field)
    if not isinstance(answers, list) or not answers:
        raise CorruptFileError(f"{item.where} has {field} that are no list of answers: take the official file.")
    return tuple(map(str, answers))
