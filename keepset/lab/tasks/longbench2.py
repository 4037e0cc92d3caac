"""LongBench v2 (Bai et al. 2024, arXiv:2412.15204): questions with four choices, answered in words.

lm-evaluation-harness compares likelihoods of the letters instead. Their first token is predicted by the whole prompt,
so no recipe would change an answer.
"""

import re
from collections.abc import Sequence

from keepset.errors import KeepsetError
from keepset.lab.tasks.data import DataRecord, HubData, load_records
from keepset.lab.tasks.task import Example, Generation, Question, Reply, Task, TaskSettings, Tokenizer

_GROUP = "longbench2"
_DOMAINS = {
    "longbench2_single": "Single-Document QA",
    "longbench2_multi": "Multi-Document QA",
    "longbench2_incontext": "Long In-context Learning",
    "longbench2_history": "Long-dialogue History Understanding",
    "longbench2_code": "Code Repository Understanding",
    "longbench2_structured": "Long Structured Data Understanding",
}
NAMES = (*_DOMAINS, _GROUP)

_HUB = HubData("THUDM/LongBench-v2", None, "train")
_TOKENS = 128
"""The longest answer, as in the authors' program."""
_BEFORE = "Please read the following text and answer the question below.\n\n<text>\n"
_AFTER = "\n</text>"
_ANSWERED = re.compile(r"The correct answer is (?:\(([A-D])\)|([A-D]))")


def make(name: str, settings: TaskSettings) -> list[Task]:
    """Return the tasks of a name.

    Args:
        name: a domain, or `longbench2` for all six.
        settings: the settings, which may name a user's folder.
    """
    return [LongBench2Task(task_name, settings) for task_name in (_DOMAINS if name == _GROUP else [name])]


class LongBench2Task(Task):
    """One of LongBench v2's domains, with the authors' prompt without reasoning, and their way to find the answer."""

    def __init__(self, name: str, settings: TaskSettings) -> None:
        self.name, self.metric, self.generation = name, "accuracy", Generation(_TOKENS)
        self._domain, self._folder = _DOMAINS[name], settings.data

    def examples(self, tokenizer: Tokenizer, *, limit: int | None = None, seed: int = 0) -> Sequence[Example]:
        """Return the domain's items of the folder's `longbench2.jsonl`, which has all domains, or else of the hub."""
        items = [item for item in load_records(_GROUP, self._folder, _HUB) if item.first("domain") == self._domain]
        if not items:
            raise KeepsetError(f"{_GROUP}.jsonl has no item of the domain {self._domain!r}: take the official file.")
        return [_example(item, str(index)) for index, item in enumerate(items[:limit])]

    def judge(self, question: Question, reply: Reply) -> dict[str, float]:
        """Return whether the first letter that the reply calls correct is right; letters in brackets come first."""
        said = _ANSWERED.findall(str(reply).replace("*", ""))
        letters = [bracketed for bracketed, _ in said if bracketed] + [plain for _, plain in said if plain]
        return {"accuracy": float(letters[:1] == [question.target])}


def _example(item: DataRecord, index: str) -> Example:
    choices = "\n".join(f"({letter}) {str(item.first(f'choice_{letter}')).strip()}" for letter in "ABCD")
    question_text = str(item.first("question")).strip()
    question = (
        f"\n\nWhat is the correct answer to this question: {question_text}\nChoices:\n{choices}\n\n"
        'Format your response as follows: "The correct answer is (insert answer here)".'
    )
    if (answer := item.first("answer")) not in ("A", "B", "C", "D"):
        raise KeepsetError(f"{item.where} has the answer {answer!r}, which is none of A, B, C and D.")
    facts = {name: item.fields.get(name) for name in ("sub_domain", "difficulty", "length")}
    return Example(
        id=str(item.fields.get("_id", index)),
        context=f"{_BEFORE}{str(item.first('context')).strip()}{_AFTER}",
        questions=(Question(question, target=answer),),
        facts={name: fact for name, fact in facts.items() if isinstance(fact, str)},
    )
