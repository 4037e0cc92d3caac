"""Problems that are solved by long reasoning: GSM8K, MATH-500, AIME 2024 and 2025.

lm-evaluation-harness has tasks on these data. They ask after worked examples or without a request for a box, and
compare answers as texts.
"""

from collections.abc import Sequence

from keepset.bench.tasks import answers
from keepset.bench.tasks.data import DataRecord, HubData, load_records
from keepset.bench.tasks.task import Example, Generation, Question, Reply, Task, TaskSettings, Tokenizer

_SOURCES: dict[str, tuple[HubData, int]] = {
    "gsm8k": (HubData("openai/gsm8k", "main", "test"), 1024),
    "math500": (HubData("HuggingFaceH4/MATH-500", None, "test"), 16384),
    "aime24": (HubData("Maxwell-Jia/AIME_2024", None, "train"), 32768),
    "aime25": (HubData("math-ai/aime25", None, "test"), 32768),
}
"""Data as lm-evaluation-harness finds them, and tokens of an answer."""
_ASK = "\nPlease reason step by step, and put your final answer within \\boxed{}."

NAMES = tuple(_SOURCES)


def make(name: str, settings: TaskSettings) -> list[Task]:
    """Return the task, if math-verify is there to judge its answers."""
    answers.start()
    return [Reasoning(name, settings)]


class Reasoning(Task):
    """A problem whose final answer is an expression: Cobbe and others 2021 (arXiv:2110.14168), Lightman and others 2023
    (arXiv:2305.20050), and the American Invitational Mathematics Examination.

    The whole problem is the question, asked as reasoning models are (DeepSeek-R1, arXiv:2501.12948); `accuracy` is
    pass@1. The longest answers are those of lm-evaluation-harness. It has none for MATH-500: there they are those of
    R-KV's scripts (arXiv:2505.24133).
    """

    metric = "accuracy"
    decodes = True

    def __init__(self, name: str, settings: TaskSettings) -> None:
        self.name, self._folder = name, settings.data
        self._hub, tokens = _SOURCES[name]
        self.generation = Generation(tokens)

    def examples(self, tokenizer: Tokenizer, *, limit: int | None = None, seed: int = 0) -> Sequence[Example]:
        """Return the items of the folder's file, or else of the hub, in the order of the data."""
        return [
            Example(str(index), "", (Question(_prompt(item), target=_gold(item)),), _facts(item))
            for index, item in enumerate(load_records(self.name, self._folder, self._hub)[:limit])
        ]

    def judge(self, question: Question, reply: Reply) -> dict[str, float]:
        return {"accuracy": float(answers.agree(question.target, str(reply)))}


def _prompt(item: DataRecord) -> str:
    if item.fields.get("prompt") is not None:
        return str(item.fields["prompt"])
    return str(item.first("question", "problem", "Problem")) + _ASK


def _facts(item: DataRecord) -> dict[str, float | str]:
    """Return MATH's subject and level."""
    facts = {name: item.fields.get(name) for name in ("subject", "level")}
    return {name: fact for name, fact in facts.items() if isinstance(fact, str | int)}


def _gold(item: DataRecord) -> str:
    answer = str(item.first("answer", "Answer", "solution"))
    # GSM8K's answer is the end of a solution.
    answer = answer.rpartition("####")[2].strip()
    return answer if "\\boxed" in answer else f"\\boxed{{{answer}}}"
