"""Comparison of a solution's final answer with the right one, by math-verify.

math-verify stops what takes too long by a signal, which only the main thread of a process can have. It therefore runs
in a process of its own, so that threads, Ray's workers and notebooks can ask it.
"""

import json
import select
import subprocess
import sys
import threading
from contextlib import suppress
from typing import IO, cast

from keepset.errors import KeepsetError

_SECONDS = 60.0
"""After so long its process is killed. Its own limit is 5 seconds an expression, but some operations block signals."""

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
    """Return whether the final answers of two texts are equal.

    The final answer is what the last box holds. Without a box it is what math-verify finds, after the last `####` if
    there is one: what is called the answer, or else the last expression or number. A comparison that takes too long is
    false.

    Args:
        gold: the text with the right answer.
        solution: the text that is judged.

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
    """Start math-verify's process unless it runs, so that a missing package is known before hours of answers.

    Raises:
        KeepsetError: if it does not start.
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
                    'Answers are judged by math-verify, which does not start: pip install "keepset[eval]".'
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
