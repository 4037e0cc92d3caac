"""The small server as a process; `--crash`, `--silent`, `--stubborn`, `--slow`, `--fail` and `--child` spoil it."""

import signal
import subprocess
import sys
import time
from pathlib import Path

sys.path.insert(0, str(Path(__file__).parents[2]))

from tests.serving.conftest import Fake, Quiet, handler


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
