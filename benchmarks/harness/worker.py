"""A measuring process: started once, asked many times."""

import json
import os
import subprocess
import sys
import tempfile
from collections.abc import Mapping, Sequence
from contextlib import ExitStack
from pathlib import Path
from types import TracebackType
from typing import Any, Self

from harness.prompt import Prompt

BENCHMARKS = Path(__file__).resolve().parent.parent
PEER_PYTHON = BENCHMARKS.parent / ".venv-kvpress" / "bin" / "python"
QUIET = {
    "HF_HUB_OFFLINE": "1",
    "HF_HUB_DISABLE_PROGRESS_BARS": "1",
    "TRANSFORMERS_VERBOSITY": "error",
    "TOKENIZERS_PARALLELISM": "false",
}
Answer = dict[str, Any]


class WorkerError(Exception):
    """A measurement that failed, or a worker that died."""


class Worker:
    """One side of the comparison, in its own process and environment."""

    def __init__(
        self,
        name: str,
        python: Path,
        arguments: Sequence[str | Path],
        threads: int,
        environment: Mapping[str, str] | None = None,
    ):
        self.name = name
        script = BENCHMARKS / "workers" / f"{name}_worker.py"
        self._log = tempfile.TemporaryFile("w+")  # noqa: SIM115 (close() closes it)
        self._process = subprocess.Popen(
            [python, script, *arguments, "--threads", str(threads)],
            stdin=subprocess.PIPE,
            stdout=subprocess.PIPE,
            stderr=self._log,
            text=True,
            env=os.environ | QUIET | dict(environment or {}),
            start_new_session=True,  # Ctrl-C stops the driver, which then ends the worker
        )
        self.versions: dict[str, str] = self._read()["versions"]

    def ask(self, what: str, method: str = "full", **request: Any) -> Answer:
        """Ask the worker for one measurement."""
        assert self._process.stdin
        try:
            print(json.dumps({"what": what, "method": method, **request}), file=self._process.stdin, flush=True)
        except BrokenPipeError as error:
            raise WorkerError(self._last_words()) from error
        answer = self._read()
        if "error" in answer:
            raise WorkerError(answer["error"])
        return answer

    def close(self) -> None:
        """End the process, whatever it is doing."""
        self._process.kill()
        self._process.wait()
        for stream in (self._process.stdin, self._process.stdout, self._log):
            if stream:
                stream.close()

    def __enter__(self) -> Self:
        return self

    def __exit__(
        self, kind: type[BaseException] | None, error: BaseException | None, trace: TracebackType | None
    ) -> None:
        self.close()

    def _read(self) -> Answer:
        assert self._process.stdout
        line = self._process.stdout.readline()
        if not line:
            raise WorkerError(self._last_words())
        answer: Answer = json.loads(line)
        return answer

    def _last_words(self) -> str:
        self._process.wait()
        self._log.seek(0)
        return f"the {self.name} worker ended: {self._log.read()[-2000:].strip()}"


def start_workers(stack: ExitStack, prompt: Prompt, threads: int, peer: bool) -> list[Worker]:
    """Start keepset's worker and, unless told otherwise, the peer's. `stack` ends them."""
    if peer:
        check_peer()
    arguments = [prompt.model, prompt.ids_file]
    workers = [stack.enter_context(Worker("keepset", Path(sys.executable), arguments, threads))]
    if peer:
        workers.append(stack.enter_context(Worker("kvpress", PEER_PYTHON, arguments, threads)))
    return workers


def check_peer() -> None:
    """Raise an error if the peer's environment is missing."""
    if not PEER_PYTHON.exists():
        raise WorkerError("the peer has no environment yet: run benchmarks/peer_setup.sh, or give --no-peer")
