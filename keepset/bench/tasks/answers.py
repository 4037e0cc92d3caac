"""Whether a solution's final answer is the right one, by math-verify.

math-verify stops what takes too long by a signal, which only a process's main thread can have. So it runs in a process
of its own, whoever asks: threads, Ray's workers, notebooks.
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
"""Then its process is killed. Its own limit is 5 for every expression, but some operations let no signal through."""

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
    """Whether a solution's final answer equals that of the gold text.

    The final answer is what the last box holds. Without a box it is what math-verify finds, after the last `####` if
    there is one: what is called the answer, else the last expression or number. What takes too long is no answer.
    """
    with _lock:
        process = start()
        with suppress(BrokenPipeError):
            cast(IO[str], process.stdin).write(json.dumps([_final(gold), _final(solution)]) + "\n")
            cast(IO[str], process.stdin).flush()
        return _line(process) == "true\n"


def start() -> subprocess.Popen[str]:
    """Starts the process, unless it runs, so that what is missing is known before hours of answers."""
    global _process  # noqa: PLW0603
    with _lock:
        if _process is None or _process.poll() is not None:
            # -P: what lies in the working directory must not pass for a package.
            command = [sys.executable, "-P", "-c", _PROGRAM]
            pipe, null = subprocess.PIPE, subprocess.DEVNULL
            _process = subprocess.Popen(command, stdin=pipe, stdout=pipe, stderr=null, encoding="ascii")
            if _line(_process) != "ready\n":
                raise KeepsetError(
                    'Answers are judged by math-verify, which does not start: pip install "keepset[eval]".'
                )
        return _process


def _line(process: subprocess.Popen[str]) -> str:
    """What it says next; nothing where it ended or takes too long, which ends it."""
    stdout = cast(IO[str], process.stdout)
    ready, _, _ = select.select([stdout], [], [], _SECONDS)
    line = stdout.readline() if ready else ""
    if not line:
        process.kill()
        process.wait()
    return line


def _final(text: str) -> str:
    """From the last box on, since math-verify joins the boxes of a text to one set; else from GSM8K's mark on."""
    box = text.rfind("\\boxed")
    return text[box:] if box >= 0 else text.rpartition("####")[2]
