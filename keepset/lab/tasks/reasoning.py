"""Problems that are solved by long reasoning: GSM8K, MATH-500, AIME 2024 and 2025.

lm-evaluation-harness has tasks on these data. They ask after worked examples or without a request for a box, and
compare answers as texts.
"""

import json
import select
import subprocess
import sys
import threading
from collections.abc import Sequence
from contextlib import suppress
from typing import IO, cast

from keepset.errors import KeepsetError, installation
from keepset.lab.tasks.data import DataRecord, HubData, load_records
from keepset.lab.tasks.task import Example, Generation, Question, Reply, Task, TaskSettings, Tokenizer

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
    """Return the task; start math-verify, so that a missing package is noticed before hours of answers.

    Args:
        name: the name.
        settings: the settings, which may name a user's folder.
    """
    start()
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
        return {"accuracy": float(agree(question.target, str(reply)))}


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


_SECONDS = 60.0
"""Seconds after which its process is killed. Its own limit is 5 per expression, but some operations block signals."""

_PROGRAM = """
import json, sys
from math_verify import parse, verify
out, sys.stdout = sys.stdout, sys.stderr
print("ready", file=out, flush=True)
for line in sys.stdin:
    gold, answer = json.loads(line)
    print(json.dumps(verify(parse(gold), parse(answer))), file=out, flush=True)
"""

_lock = threading.RLock()
_process: subprocess.Popen[str] | None = None


def agree(gold: str, solution: str) -> bool:
    """Return whether the final answers of two texts are equal by math-verify; if that takes too long they are not.

    The final answer is the content of the last box. Without a box it is math-verify's result, after the last `####` if
    there is one: the expression that is called the answer, or else the last expression or number.

    Args:
        gold: the right solution.
        solution: the model's.

    Raises:
        KeepsetError: if math-verify does not start.
    """
    with _lock:
        process = start()
        with suppress(BrokenPipeError):
            cast(IO[str], process.stdin).write(json.dumps([_final(gold), _final(solution)]) + "\n")
            cast(IO[str], process.stdin).flush()
        return _line(process) == "true\n"


def start() -> subprocess.Popen[str]:
    """Return math-verify's process, started unless it runs; raise `KeepsetError` if it does not start.

    math-verify limits its time by a signal, which only the main thread of a process can receive. In a separate process,
    threads, Ray's workers and notebooks can use it.
    """
    global _process  # noqa: PLW0603
    with _lock:
        if _process is None or _process.poll() is not None:
            # -P: a file in the working directory must not pass for a package.
            command = [sys.executable, "-P", "-c", _PROGRAM]
            pipe, null = subprocess.PIPE, subprocess.DEVNULL
            _process = subprocess.Popen(command, stdin=pipe, stdout=pipe, stderr=null, encoding="ascii")
            if _line(_process) != "ready\n":
                raise KeepsetError(
                    f"Answers are judged by math-verify, which does not start: run {installation('eval')}."
                )
        return _process


def _line(process: subprocess.Popen[str]) -> str:
    """Return the process's next line; an empty one if it ended, or took too long and was killed."""
    stdout = cast(IO[str], process.stdout)
    ready, _, _ = select.select([stdout], [], [], _SECONDS)
    line = stdout.readline() if ready else ""
    if not line:
        process.kill()
        process.wait()
    return line


def _final(text: str) -> str:
    """Return the text from the last box on, or else after GSM8K's mark; math-verify would join several boxes."""
    box = text.rfind("\\boxed")
    return text[box:] if box >= 0 else text.rpartition("####")[2]
