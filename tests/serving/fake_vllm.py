"""A small server that speaks as much of OpenAI's language as a load needs, with known delays.

As a process of its own `--crash`, `--silent`, `--late`, `--stubborn`, `--slow`, `--fail` and `--child` spoil it. It
imports the standard library alone: many tests start it.
"""

from __future__ import annotations

import json
import signal
import subprocess
import sys
import threading
import time
from contextlib import suppress
from dataclasses import dataclass, field
from http.server import BaseHTTPRequestHandler, ThreadingHTTPServer
from typing import Any

METRICS = """\
# HELP vllm:num_requests_running Number of requests in model execution batches.
# TYPE vllm:num_requests_running gauge
vllm:num_requests_running{{engine="0",model_name="a\\"b"}} {running}
vllm:num_requests_waiting{{engine="0",model_name="a\\"b"}} 3.0
vllm:num_requests_waiting_by_reason{{engine="0",reason="capacity"}} 77.0
vllm:num_preemptions_total{{engine="0"}} {looks}
vllm:request_success_total{{engine="0",finished_reason="length"}} {finished}
vllm:request_success_total{{engine="0",finished_reason="stop"}} 2
vllm:num_preemptions_created{{engine="0"}} 1.7e9
vllm:kv_cache_usage_perc{{engine="0"}} 0.25
vllm:kv_cache_usage_perc{{engine="1"}} 0.75
vllm:cache_config_info{{block_size="4",engine="0",num_gpu_blocks="41"}} 1.0
vllm:e2e_request_latency_seconds_bucket{{le="+Inf"}} 5.0
keepset:events_total {looks}
keepset:entries_kept_total{{engine="0"}} 100.0
keepset:entries_kept_total{{engine="1"}} {looks}
"""


@dataclass
class Fake:
    """What the server does, and what it was asked.

    Attributes:
        tokens: in each piece of an answer; one number each.
        first: seconds before the first piece.
        gap: seconds between pieces.
        trouble: for the numbers of requests, counted from 0, what goes wrong.
        metrics: the page's text; None for a server without one.
        text: what a piece says.
    """

    tokens: list[int] = field(default_factory=lambda: [1] * 4)
    first: float = 0.0
    gap: float = 0.0
    trouble: dict[int, str] = field(default_factory=dict)
    metrics: str | None = METRICS
    text: str = "word\u2028\x85 "
    models: Any = field(default_factory=lambda: {"data": [{"id": "fake", "root": "here", "max_model_len": 4096}]})
    url: str = ""
    asked: list[dict[str, Any]] = field(default_factory=list)
    running: int = 0
    most: int = 0
    looks: int = 0
    finished: int = 0
    lock: threading.Lock = field(default_factory=threading.Lock)


def handler(fake: Fake) -> type[BaseHTTPRequestHandler]:
    class Handler(BaseHTTPRequestHandler):
        protocol_version = "HTTP/1.1"

        def log_message(self, *_: object) -> None:
            pass

        def send(self, text: str, code: int = 200, kind: str = "application/json") -> None:
            body = text.encode()
            self.send_response(code)
            self.send_header("Content-Type", kind)
            self.send_header("Content-Length", str(len(body)))
            self.end_headers()
            self.wfile.write(body)

        def do_GET(self) -> None:
            if self.path == "/health":
                self.send("")
            elif self.path == "/v1/models":
                self.send(json.dumps(fake.models))
            elif self.path == "/metrics" and fake.metrics is not None:
                fake.looks += 1
                now = {name: getattr(fake, name) for name in ("running", "looks", "finished")}
                self.send(fake.metrics.format(**now), kind="text/plain")
            else:
                self.send("no such page", 404)

        def piece(self, event: Any) -> None:
            text = f"data: {event if isinstance(event, str) else json.dumps(event, ensure_ascii=False)}\n\n".encode()
            self.wfile.write(f"{len(text):x}\r\n".encode() + text + b"\r\n")
            self.wfile.flush()

        def do_POST(self) -> None:
            body = json.loads(self.rfile.read(int(self.headers["Content-Length"])))
            with fake.lock:
                number = len(fake.asked)
                fake.asked.append(body)
                fake.running += 1
                fake.most = max(fake.most, fake.running)
            trouble = fake.trouble.get(number, "")
            with suppress(BrokenPipeError, ConnectionResetError):
                try:
                    whole = self.answer(body, trouble)
                finally:
                    # Before the end is sent, after which a client asks again.
                    with fake.lock:
                        fake.running -= 1
                        fake.finished += 1
                if whole:
                    if trouble != "no end":
                        self.piece("[DONE]")
                    self.wfile.write(b"0\r\n\r\n")

        def answer(self, body: dict[str, Any], trouble: str) -> bool:
            """Whether all but the end of it was sent."""
            if trouble == "refused":
                self.send('{"error": "too   much"}', 503)
                return False
            self.send_response(200)
            self.send_header("Content-Type", "text/event-stream")
            self.send_header("Transfer-Encoding", "chunked")
            self.end_headers()
            time.sleep(fake.first)
            for i, _ in enumerate(fake.tokens):
                if i:
                    time.sleep(fake.gap)
                self.piece({"choices": [{"text": fake.text}], "usage": None})
                if trouble == "cut off":
                    self.close_connection = True
                    return False
                if trouble == "stuck":
                    time.sleep(2.0)
                if trouble == "error":
                    self.piece({"error": {"message": "out of\nmemory"}})
                if trouble == "nonsense":
                    self.piece("{nonsense")
            short = trouble == "short"
            usage = {
                "prompt_tokens": len(body["prompt"]),  # a letter is a token
                "completion_tokens": sum(fake.tokens) - short,
            }
            if trouble != "no usage":
                self.piece({"choices": [], "usage": usage})
            return True

    return Handler


class Quiet(ThreadingHTTPServer):
    """Says nothing of clients that hang up."""

    daemon_threads = True
    request_queue_size = 64

    def handle_error(self, *_: object) -> None:
        pass


def main(words: list[str]) -> None:
    if "--stubborn" in words:
        signal.signal(signal.SIGTERM, signal.SIG_IGN)
    if "--child" in words:
        child = subprocess.Popen([sys.executable, "-c", "import time; time.sleep(600)"])
        print(f"child {child.pid}", flush=True)
    if "--crash" in words:
        print("\n".join(f"line {i}" for i in range(100)))
        print("\x1b[31m[red]out of memory[/red]\udcff".encode(errors="replace").decode(), file=sys.stderr)
        sys.exit(7)
    if "--silent" in words:
        time.sleep(600)
    if "--late" in words:  # who waits for it must ask more than once
        time.sleep(1.0)
    fake = Fake(first=0.05)
    if "--slow" in words:
        fake.first = 60.0
    if "--fail" in words:
        fake.trouble = {2: "refused"}
    port = int(words[words.index("--port") + 1])
    with Quiet(("127.0.0.1", port), handler(fake)) as server:
        server.serve_forever()


if __name__ == "__main__":
    main(sys.argv[1:])
