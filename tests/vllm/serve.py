"""A program of vLLM's whose processes are forks of one that has imported vLLM: `python -m tests.vllm.serve WORDS`.

On its own a server starts three, each of which would import for as long as all that is asked of it here takes.
"""

from __future__ import annotations

import os
import runpy
import sys

from tests.vllm import processes


def work(words: list[str]) -> None:
    """Do what Python does with these words, in its process."""
    kind, what, *rest = words
    sys.argv = [what, *rest]
    if kind == "-m":
        runpy.run_module(what, run_name="__main__")
    else:
        exec(compile(what, "-c", "exec"), {"__name__": "__main__"})


def forked(command: list[str]) -> list[str]:
    """The words of a program, `python -P -m MODULE OPTIONS` or `python -P -c CODE OPTIONS`, to be run so."""
    python, _, *words = command
    return ["env", f"PYTHONPATH={processes.ROOT}", python, "-m", "tests.vllm.serve", *words]


def main() -> None:
    sys.exit(processes.run(work, sys.argv[1:], log="/dev/stderr", env=os.environ))


if __name__ == "__main__":
    main()
