"""RULER's prompts from a user's files: as the authors' program writes them, or as kvpress' data set has them."""

import re
from pathlib import Path

from keepset.bench.tasks.data import DataRecord, find_records
from keepset.bench.tasks.ruler_prompts import PromptParts
from keepset.bench.tasks.task import Question
from keepset.errors import CorruptFileError

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
    """Return a task's prompts of one length; None if the folder has none.

    Args:
        folder: may have `<length>/<task>/validation.jsonl`, which the authors' program writes for a model without a
            chat template, under the authors' names (`vt`, `qa_1`, ...); or `ruler@<length>.jsonl` with all tasks, as
            the data set simonjegou/ruler has them.
        name: the task.
        length: tokens of a prompt.

    Raises:
        KeepsetError: if a line is something else.
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
    """Return a whole prompt, cut where its last question begins, and where the answer begins."""
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
