"""Runs engines in processes of their own: `python -m tests.vllm.server`, which `tests.vllm.engine.raw` talks to.

Importing vLLM takes longer than most of what is tested here, so one process does it, see `tests.vllm.processes`: each
job, a line of the standard input, runs in a fork of that one, and its exit code is a line of the output.
"""

from __future__ import annotations

import json
import os
from typing import Any

from tests.vllm import processes


def work(job: dict[str, Any]) -> None:
    """A job, in its process."""
    from tests.vllm.job import answer

    answer(job)


def main() -> None:
    jobs, codes = os.fdopen(os.dup(0)), os.fdopen(os.dup(1), "w")
    nothing = os.open(os.devnull, os.O_RDONLY)
    os.dup2(nothing, 0)
    os.dup2(2, 1)  # whatever vLLM has to say
    processes.make_ready()
    for line in jobs:
        job = json.loads(line)
        print(processes.run(work, job, log=job["log"]), file=codes, flush=True)


if __name__ == "__main__":
    main()
