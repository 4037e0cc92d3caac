"""LongBench v2 (Bai et al. 2024, arXiv:2412.15204): questions with four choices, answered in words."""

import re
from collections.abc import Sequence

from keepset.bench.tasks.catalogue import Settings
from keepset.bench.tasks.data import DataRecord, own_records
from keepset.bench.tasks.task import Example, Generation, Question, Reply, Task, Tokenizer
from keepset.errors import KeepsetError

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

_TOKENS = 128
"""Of an answer, as in the authors' program."""
_BEFORE = "Please read the following text and answer the question below.\n\n<text>\n"
_AFTER = "\n</text>"
_ANSWERED = re.compile(r"The correct answer is (?:\(([A-D])\)|([A-D]))")


def make(name: str, settings: Settings) -> list[Task]:
    """The domain's task; `longbench2` is all six."""
    return [LongBench2Task(one, settings) for one in (_DOMAINS if name == _GROUP else [name])]


class LongBench2Task(Task):
    """One of LongBench v2's domains, with the authors' prompt without reasoning, and their way to find the answer.

    lm-evaluation-harness compares likelihoods of the letters instead, whose first token the whole prompt predicts: an
    answer that no recipe changes.
    """

    def __init__(self, name: str, settings: Settings) -> None:
        self.name, self.metric, self.generation = name, "accuracy", Generation(_TOKENS)
        self._domain, self._folder = _DOMAINS[name], settings.data

    def examples(self, tokenizer: Tokenizer, *, limit: int | None = None, seed: int = 0) -> Sequence[Example]:
        """From the folder's `longbench2.jsonl`, which has all domains; where there is none, from the hub."""
        from keepset.bench.tasks.hub import download  # loads what only a download takes

        items = own_records(self._folder, _GROUP) or download(_GROUP, "THUDM/LongBench-v2", None, "train")
        own = [item for item in items if item.first("domain") == self._domain]
        if not own:
            raise KeepsetError(f"{_GROUP}.jsonl has no item of the domain {self._domain!r}: take the official file.")
        return [_example(item, str(index)) for index, item in enumerate(own[:limit])]

    def judge(self, question: Question, reply: Reply) -> dict[str, float]:
        """Whether the first letter that the reply calls the correct answer is it; a letter in brackets comes first."""
        said = _ANSWERED.findall(str(reply).replace("*", ""))
        letters = [bracketed for bracketed, _ in said if bracketed] + [plain for _, plain in said if plain]
        return {"accuracy": float(letters[:1] == [question.target])}


def _example(row: DataRecord, index: str) -> Example:
    choices = "\n".join(f"({letter}) {str(row.first(f'choice_{letter}')).strip()}" for letter in "ABCD")
    asked = str(row.first("question")).strip()
    question = (
        f"\n\nWhat is the correct answer to this question: {asked}\nChoices:\n{choices}\n\n"
        'Format your response as follows: "The correct answer is (insert answer here)".'
    )
    if (answer := row.first("answer")) not in ("A", "B", "C", "D"):
        raise KeepsetError(f"{row.where} has the answer {answer!r}, which is none of A, B, C and D.")
    facts = {name: row.fields.get(name) for name in ("sub_domain", "difficulty", "length")}
    return Example(
        id=str(row.fields.get("_id", index)),
        context=f"{_BEFORE}{str(row.first('context')).strip()}{_AFTER}",
        questions=(Question(question, target=answer),),
        facts={name: fact for name, fact in facts.items() if isinstance(fact, str)},
    )
