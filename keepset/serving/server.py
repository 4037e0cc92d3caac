"""A vLLM server of one's own: started, waited for, and always stopped with all of its processes."""

import os
import re
import socket
import subprocess
import tempfile
import time
from collections.abc import Sequence
from contextlib import suppress
from typing import IO, Self

from keepset.serving.optional_imports import import_http
from keepset.serving.supervisor import end, start
from keepset.vllm.signing import SIGNING_KEY, new_key

_HOST = "127.0.0.1"
_STOP_SECONDS = 15.0
_LINES = 20
# The first error of a log is why the others came; warnings name errors that may come.
_ERROR = re.compile(r"^(?!.*\bWARNING\b).*?\b([A-Z]\w*Error: [^\n]+)", re.M)


class ServerError(Exception):
    """A server that did not start or did not last: a sentence, and the end of its log."""

    def __init__(self, sentence: str, log: Sequence[str]) -> None:
        super().__init__(sentence)
        self.log = list(log)


def free_port() -> int:
    """A port that nobody listens on."""
    with socket.socket() as probe:
        probe.bind((_HOST, 0))
        return int(probe.getsockname()[1])


class ServerProcess:
    """A server process between `with` and the block's end; the command lets it listen on this port."""

    _process: subprocess.Popen[bytes]
    _log: IO[bytes]

    def __init__(self, command: Sequence[str], port: int) -> None:
        self.url, self._command = f"http://{_HOST}:{port}", command

    def __enter__(self) -> Self:
        self._log = tempfile.TemporaryFile()
        # Ctrl-C reaches only us.
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
        """Wait until it answers; a `ServerError` where it stopped, or did not answer in time."""
        library = import_http()
        until = time.monotonic() + seconds
        with library.Client(base_url=self.url, timeout=5.0, trust_env=False) as client:
            while True:
                self.check()
                with suppress(library.HTTPError):
                    if client.get("/health").status_code == 200:
                        return
                if time.monotonic() > until:
                    raise ServerError(f"The server did not answer within {seconds:g} s.", self.last_lines())
                time.sleep(0.25)

    def check(self) -> None:
        """Raises a `ServerError` where it does not run any more."""
        code = self._process.poll()
        if code is not None:
            cause = _ERROR.search(self._text())
            why = f": {cause[1].strip().rstrip('.')}" if cause else ""
            raise ServerError(f"The server stopped with exit code {code}{why}.", self.last_lines())

    def last_lines(self) -> list[str]:
        """The end of what it wrote."""
        return [line for line in self._text().splitlines() if line.strip()][-_LINES:]

    def _text(self) -> str:
        # Read by place, so that the process, which shares the file's, goes on writing at the end.
        size, length = os.fstat(self._log.fileno()).st_size, 64 * 1024
        return os.pread(self._log.fileno(), length, max(0, size - length)).decode(errors="replace")
