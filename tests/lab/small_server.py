"""A small server that answers `/health`; `--crash`, `--silent`, `--late`, `--stubborn` and `--child` spoil it.

It imports the standard library alone: many tests start it.
"""

import signal
import subprocess
import sys
import time
from http.server import BaseHTTPRequestHandler, HTTPServer


class Handler(BaseHTTPRequestHandler):
    def log_message(self, *_: object) -> None:
        pass

    def do_GET(self) -> None:
        self.send_response(200 if self.path == "/health" else 404)
        self.end_headers()


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
    HTTPServer(("127.0.0.1", int(words[words.index("--port") + 1])), Handler).serve_forever()


if __name__ == "__main__":
    main(sys.argv[1:])
