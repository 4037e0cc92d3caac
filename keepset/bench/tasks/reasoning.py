"""Problems that are solved by long reasoning: GSM8K, MATH-500, AIME 2024 and 2025."""

from collections.abc import Sequence

from keepset.bench.tasks import answers
from keepset.bench.tasks.catalogue import Settings
from keepset.bench.tasks.data import DataRecord, own_records
from keepset.bench.tasks.task import Example, Generation, Question, Reply, Task, Tokenizer

_SOURCES: dict[str, tuple[str, str | None, str, int]] = {
    "gsm8k": ("openai/gsm8k", "main", "test", 1024),
    "math500": ("HuggingFaceH4/MATH-500", None, "test", 16384),
    "aime24": ("Maxwell-Jia/AIME_2024", None, "train", 32768),
    "aime25": ("math-ai/aime25", None, "test", 32768),
}
"""Where a data set lies on the hub (where lm-evaluation-harness finds it): path, subset, split; tokens of an answer."""
_ASK = "\nPlease reason step by step, and put your final answer within \\boxed{}."

NAMES = tuple(_SOURCES)


def make(name: str, settings: Settings) -> list[Task]:
    """The task, if math-verify is there to judge its answers."""
    answers.start()
    return [Reasoning(name, settings)]


class Reasoning(Task):
    """A problem whose final answer is an expression: Cobbe and others 2021 (arXiv:2110.14168), Lightman and others 2023
    (arXiv:2305.20050), and the American Invitational Mathematics Examination.

    All of a problem is the question, asked as reasoning models are (DeepSeek-R1, arXiv:2501.12948); `accuracy` is
    pass@1. Longest answers are those of lm-evaluation-harness; of MATH-500, which has none there, those of R-KV's
    scripts (arXiv:2505.24133).
    """

    def __init__(self, name: str, settings: Settings) -> None:
        self.name = name
        self.metric = "accuracy"
        self.generation = Generation(_SOURCES[name][-1])
        self.decodes = True
        self._folder = settings.data

    def examples(self, tokenizer: Tokenizer, *, limit: int | None = None, seed: int = 0) -> Sequence[Example]:
        """From the folder's file, or where there is none from the hub; in the order of the data, whatever the seed."""
        from keepset.bench.tasks.hub import download  # loads what only a download takes

        items = own_records(self._folder, self.name) or download(self.name, *_SOURCES[self.name][:3])
        return [
            Example(str(index), "", (Question(_prompt(row), target=_gold(row)),), _facts(row))
            for index, row in enumerate(items[:limit])
        ]

    def judge(self, question: Question, reply: Reply) -> dict[str, float]:
        return {"accuracy": float(answers.agree(question.target, str(reply)))}


def _prompt(row: DataRecord) -> str:
    if row.fields.get("prompt") is not None:
        return str(row.fields["prompt"])
    return str(row.first("question", "problem", "Problem")) + _ASK


def _facts(row: DataRecord) -> dict[str, float | str]:
    """MATH's subject and level."""
    facts = {name: row.fields.get(name) for name in ("subject", "level")}
    return {name: fact for name, fact in facts.items() if isinstance(fact, str | int)}


def _gold(row: DataRecord) -> str:
    answer = str(row.first("answer", "Answer", "solution"))
    # GSM8K's ends a solution.
    answer = answer.rpartition("####")[2].strip()
    return answer if "\\boxed" in answer else f"\\boxed{{{answer}}}"
