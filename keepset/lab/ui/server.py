"""The server of the playground's page: for this machine and its own page only, one run at a time.

Pages of other sites that are open in the browser must not control it. So the Host header has to name this machine,
which excludes foreign names that resolve to it. A posted request has to be JSON from the same origin, which a browser
does not let a foreign page send without asking first.
"""

from __future__ import annotations

import base64
import hashlib
import json
import threading
from http.server import BaseHTTPRequestHandler, ThreadingHTTPServer
from importlib import resources
from string import Template
from typing import Any

from keepset.core.select import nan_scores_refused
from keepset.errors import KeepsetError
from keepset.lab.report.page import asset, script_json
from keepset.lab.ui.playground import IMAGE_BYTES, ChatRequest, Playground, RunRequest

HOST = "127.0.0.1"
_NAMES = (HOST, "localhost")
_BYTES = 1_000_000 + 4 * IMAGE_BYTES // 3
"""The most bytes of a request, with its image in base64."""
_REQUESTS: dict[str, Any] = {"/run": RunRequest, "/chat": ChatRequest}
"""What is posted, by its path, which is also the name of the playground's method."""
_PIECE = 65536
_SECONDS = 30.0
"""Time limit in seconds for a request to arrive, and for a part of an answer to be read."""


class PlaygroundServer(ThreadingHTTPServer):
    """Serves one playground.

    Raises:
        KeepsetError: the port is taken.
    """

    daemon_threads = True

    def __init__(self, port: int, playground: Playground, facts: dict[str, Any]) -> None:
        self.busy, self.closing = threading.Lock(), False
        self.runner: threading.Thread | None = None
        try:
            super().__init__((HOST, port), _Handler)
        except OSError as error:
            raise KeepsetError(
                f"Port {port} of {HOST} is not available ({error.strerror}): give another with --port."
            ) from None
        self.port = self.server_address[1]
        self.playground, self.page = playground, _page({**facts, "limit": playground.limit})

    def server_close(self) -> None:
        """End a run at its next message, and wait for it; a process that exits while a model computes would crash."""
        self.closing = True
        if self.runner is not None:
            self.runner.join()
        super().server_close()

    def handle_error(self, *_: Any) -> None:
        """Ignore browsers that close the connection."""


def _page(facts: dict[str, Any]) -> tuple[str, str]:
    """Return the page and its security policy, which only allows the page's own script."""
    script = asset("elements.js") + resources.files(__package__).joinpath("page.js").read_text(encoding="utf-8")
    markup = resources.files(__package__).joinpath("page.html").read_text(encoding="utf-8")
    digest = base64.b64encode(hashlib.sha256(script.encode()).digest()).decode("ascii")
    policy = (
        f"default-src 'none'; script-src 'sha256-{digest}'; style-src 'unsafe-inline'; connect-src 'self'; "
        "img-src data:; base-uri 'none'; form-action 'none'; frame-ancestors 'none'"
    )
    return Template(markup).substitute(style=asset("page.css"), data=script_json(facts), script=script), policy


class _Handler(BaseHTTPRequestHandler):
    server: PlaygroundServer
    timeout = _SECONDS

    def log_message(self, *_: object) -> None:
        """Log nothing: the reader of the page sees what happens."""

    def do_GET(self) -> None:
        """Answer with the page."""
        if not self._is_ours():
            return
        if self.path != "/":
            return self._answer(404, "This address has no page: open /.")
        page, policy = self.server.page
        self._answer(200, page, "text/html; charset=utf-8", policy)

    def do_POST(self) -> None:
        """Answer a run, or a turn of a chat, with server-sent events; each is one JSON object."""
        body = self._body()
        if not self._is_ours():
            return
        request = self._request(body)
        if request is None:
            return
        if not self.server.busy.acquire(blocking=False):
            return self._answer(409, "Another run is in progress: wait for it, or stop it.")
        self.server.runner = threading.current_thread()
        try:
            self._head(200, "text/event-stream; charset=utf-8")
            try:
                with nan_scores_refused():
                    getattr(self.server.playground, self.path[1:])(request, self._send)
            except KeepsetError as error:
                self._send({"error": str(error)})
        finally:
            self.server.busy.release()

    def _is_ours(self) -> bool:
        """Return whether the request is for this server and from its own page; answer it otherwise."""
        hosts = {f"{name}:{self.server.port}" for name in _NAMES}
        origin = self.headers.get("Origin")
        foreign = origin is not None and origin.removeprefix("http://") not in hosts
        if self.headers.get("Host") in hosts and not foreign:
            return True
        self._answer(403, f"Open http://{HOST}:{self.server.port} in a browser of this machine.")
        return False

    def _body(self) -> bytes | None:
        """Return the posted body; None if it is too long, or its length is not given.

        It is always read, because closing a connection with unread bytes resets it, and the answer would be lost.
        """
        length = self.headers.get("Content-Length", "")
        if not length.isdecimal():
            return None
        left = int(length)
        if left <= _BYTES:
            return self.rfile.read(left)
        while left > 0 and (piece := self.rfile.read(min(left, _PIECE))):
            left -= len(piece)
        return None

    def _request(self, body: bytes | None) -> RunRequest | ChatRequest | None:
        """Return the request; None if it is invalid, after answering it with an error."""
        if self.path not in _REQUESTS:
            self._answer(404, "This address takes no posts: post runs to /run, and turns of a chat to /chat.")
        elif self.headers.get("Content-Type") != "application/json":
            self._answer(415, "Only application/json is accepted.")
        elif body is None:
            self._answer(413, f"The request is too long: send at most {_BYTES} bytes.")
        else:
            try:
                return _REQUESTS[self.path].of(json.loads(body))  # type: ignore[no-any-return]
            except (ValueError, RecursionError, KeepsetError) as error:
                self._answer(400, str(error) if isinstance(error, KeepsetError) else "The request is not JSON.")
        return None

    def _head(self, status: int, kind: str, policy: str = "default-src 'none'") -> None:
        self.send_response(status)
        for name, value in (
            ("Content-Type", kind),
            ("Content-Security-Policy", policy),
            ("X-Content-Type-Options", "nosniff"),
            ("Referrer-Policy", "no-referrer"),
            ("Cache-Control", "no-store"),
        ):
            self.send_header(name, value)
        self.end_headers()

    def _answer(self, status: int, text: str, kind: str = "text/plain; charset=utf-8", policy: str = "") -> None:
        self._head(status, kind, policy or "default-src 'none'")
        self.wfile.write(text.encode())

    def _send(self, event: dict[str, Any]) -> None:
        if self.server.closing:
            raise ConnectionAbortedError
        self.wfile.write(f"data: {json.dumps(event)}\n\n".encode())
        self.wfile.flush()
