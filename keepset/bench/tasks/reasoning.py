"""Problems that are solved by long reasoning: GSM8K, MATH-500, AIME 2024 and 2025."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass
from typing import TYPE_CHECKING

from keepset.bench.tasks import answers
from keepset.bench.tasks.catalogue import Settings
from keepset.bench.tasks.data import Row, rows
from keepset.bench.tasks.task import Example, Generation, Question, Reply, Task

if TYPE_CHECKING:
    import transformers


@dataclass(frozen=True)
class _Source:
    """Where a data set lies on the hub (where lm-evaluation-harness finds it), and how long its answers may be."""

    path: str
    subset: str | None
    split: str
    tokens: int


_SOURCES = {
    "gsm8k": _Source("openai/gsm8k", "main", "test", 1024),
    "math500": _Source("HuggingFaceH4/MATH-500", None, "test", 16384),
    "aime24": _Source("Maxwell-Jia/AIME_2024", None, "train", 32768),
    "aime25": _Source("math-ai/aime25", None, "test", 32768),
}
_ASK = "\nPlease reason step by step, and put your final answer within \\boxed{}."

NAMES = tuple(_SOURCES)


def make(name: str, settings: Settings) -> list[Task]:
    """The task.

    Raises:
        KeepsetError: math-verify, which judges answers, is not installed.
    """
    answers.start()
    return [Reasoning(name, settings)]


class Reasoning(Task):
    """A problem whose final answer is an expression: Cobbe and others 2021 (arXiv:2110.14168), Lightman and others 2023
    (arXiv:2305.20050), and the American Invitational Mathematics Examination.

    The prompt is the problem and a request for steps and a boxed answer, without examples: what reasoning models are
    asked (DeepSeek-R1, arXiv:2501.12948); `prompt` of a data file is taken as it is. All of it is the question, since
    nothing of a problem can be compressed before it is known. An answer is right if math-verify finds its last box, or
    the last expression of one without a box, equal to the gold one; so `accuracy` is pass@1. Longest answers: 32768 for
    AIME and 1024 for GSM8K, as lm-evaluation-harness has them (the latter for Llama's instruct models); MATH-500 has
    none there: 16384, as in R-KV's scripts (arXiv:2505.24133).
    """

    def __init__(self, name: str, settings: Settings) -> None:
        self.name = name
        self.metric = "accuracy"
        self.generation = Generation(_SOURCES[name].tokens)
        self.decodes = True
        self._folder = settings.data

    def examples(
        self, tokenizer: transformers.PreTrainedTokenizerBase, *, limit: int | None = None, seed: int = 0
    ) -> Sequence[Example]:
        """From the folder's file, or where there is none from the hub; in the order of the data, whatever the seed."""
        folder = self._folder
        there = folder is not None and (folder / f"{self.name}.jsonl").is_file()
        found = rows(folder, self.name) if folder is not None and there else _download(self.name)
        return [
            Example(id=str(index), context="", questions=(Question(_prompt(row), target=_gold(row)),))
            for index, row in enumerate(found[:limit])
        ]

    def judge(self, question: Question, reply: Reply) -> dict[str, float]:
        """Whether the final answer is right."""
        return {"accuracy": float(answers.agree(question.target, str(reply)))}


def _download(name: str) -> list[Row]:
    from keepset.bench.tasks.hub import download

    source = _SOURCES[name]
    return download(name, source.path, source.subset, source.split)


def _prompt(row: Row) -> str:
    if row.fields.get("prompt") is not None:
        return str(row["prompt"])
    return str(row.first("question", "problem", "Problem")) + _ASK


def _gold(row: Row) -> str:
    answer = str(row.first("answer", "Answer", "solution"))
    # GSM8K's ends a solution.
    answer = answer.rpartition("####")[2].strip()
    return answer if "\\boxed" in answer else f"\\boxed{{{answer}}}"
