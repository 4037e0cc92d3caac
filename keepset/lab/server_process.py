"""A vLLM server as a process with a log, which always ends together with its child processes."""

import os
import re
import socket
import subprocess
import tempfile
import time
from collections.abc import Sequence
from contextlib import suppress
from typing import IO, Self
from urllib.request import ProxyHandler, build_opener

from keepset.serving.supervisor import end, start
from keepset.vllm.request_options import SIGNING_KEY, new_key

_HOST = "127.0.0.1"
_STOP_SECONDS = 15.0
_LINES = 20
# The first error of a log is the cause of the others. Warnings may name errors that have not occurred.
_ERROR = re.compile(r"^(?!.*\bWARNING\b).*?\b([A-Z]\w*Error: [^\n]+)", re.M)


class ServerError(Exception):
    """A server that has failed: a sentence, and the end of its log."""

    def __init__(self, sentence: str, log: Sequence[str]) -> None:
        super().__init__(sentence)
        self.log = list(log)


def free_port() -> int:
    """Return a free port."""
    with socket.socket() as probe:
        probe.bind((_HOST, 0))
        return int(probe.getsockname()[1])


class ServerProcess:
    """A vLLM server that runs within a `with` block: the words that start it, and its port on 127.0.0.1."""

    _process: subprocess.Popen[bytes]
    _log: IO[bytes]

    def __init__(self, command: Sequence[str], port: int) -> None:
        self._command, self.url = command, f"http://{_HOST}:{port}"

    def __enter__(self) -> Self:
        self._log = tempfile.TemporaryFile()
        # In its own session Ctrl-C does not reach it.
        self._process = start(
            self._command,
            env={**os.environ, SIGNING_KEY: new_key()},
            stdin=subprocess.DEVNULL,
            stdout=self._log,
            stderr=subprocess.STDOUT,
        )
        return self

    def __exit__(self, *_: object) -> None:
        try:
            if self._process.poll() is None:
                self._process.terminate()
                with suppress(subprocess.TimeoutExpired):
                    self._process.wait(_STOP_SECONDS)
        finally:
            end(self._process)
            self._log.close()

    def wait(self, seconds: float) -> None:
        """Wait until the server answers; raise `ServerError` if it stops, or does not answer within `seconds`."""
        until = time.monotonic() + seconds
        direct = build_opener(ProxyHandler({}))
        while True:
            self.check()
            with suppress(OSError), direct.open(f"{self.url}/health", timeout=5.0):
                return
            if time.monotonic() > until:
                raise ServerError(f"The server did not answer within {seconds:g} s.", self.last_lines())
            time.sleep(0.25)

    def check(self) -> None:
        """Raise `ServerError` if the server has stopped; it says why if the log does."""
        if (code := self._process.poll()) is not None:
            cause = _ERROR.search(self._text())
            why = f": {cause[1].strip().rstrip('.')}" if cause else ""
            raise ServerError(f"The server stopped with exit code {code}{why}.", self.last_lines())

    def last_lines(self) -> list[str]:
        """Return the end of what the server has written."""
        return [line for line in self._text().splitlines() if line.strip()][-_LINES:]

    def _text(self) -> str:
        # pread does not move the file's position, which the server shares and writes at.
        size, length = os.fstat(self._log.fileno()).st_size, 64 * 1024
        return os.pread(self._log.fileno(), length, max(0, size - length)).decode(errors="replace")
