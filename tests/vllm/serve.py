"""A vLLM server whose processes are forks of one that has imported vLLM: `python -m tests.vllm.serve MODULE OPTIONS`.

As the module it starts three, each of which would import for as long as all that is asked of it here takes.
"""

from __future__ import annotations

import runpy
import sys
from pathlib import Path

from tests.vllm import processes

ROOT = Path(__file__).parents[2]


def work(words: list[str]) -> None:
    """The module, in its process."""
    sys.argv = words
    runpy.run_module(words[0], run_name="__main__")


def forked(command: list[str]) -> list[str]:
    """The command of a server, `python -P -m MODULE OPTIONS`, to be run so."""
    python, _, _, *words = command
    return ["env", f"PYTHONPATH={ROOT}", python, "-m", "tests.vllm.serve", *words]


def main() -> None:
    processes.make_ready()
    sys.exit(processes.run(work, sys.argv[1:], log="/dev/stderr"))


if __name__ == "__main__":
    main()
