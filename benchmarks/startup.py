"""Start-up time that a user waits: wall time of fresh processes."""

import argparse
import subprocess
import sys
from pathlib import Path
from time import perf_counter

from harness.report import Section, machine, publish
from harness.summary import Summary, shown, verdict
from rich.progress import track

KEEPSET = Path(sys.executable).with_name("keepset")
COMMANDS: dict[str, list[str]] = {
    "import keepset": [sys.executable, "-c", "import keepset"],
    "keepset methods": [str(KEEPSET), "methods"],
    "import torch": [sys.executable, "-c", "import torch"],
}
TARGETS = {"import keepset": 1.0, "keepset methods": 2.0, "import torch": None}


def main() -> int:
    """Measure, show, write; fail if a command failed."""
    parser = argparse.ArgumentParser(description=__doc__)
    parser.add_argument("--repeats", type=int, default=7, help="rounds (default 7)")
    args = parser.parse_args()
    seconds: dict[str, list[float]] = {name: [] for name in COMMANDS}
    failed: dict[str, str] = {}
    for number in track(range(args.repeats + 1), "fresh processes"):
        for name, command in COMMANDS.items():
            if name in failed:
                continue
            try:
                took = _run(command)
            except (OSError, subprocess.CalledProcessError) as error:
                failed[name] = _reason(error)
                continue
            if number > 0:  # the first round fills the file cache
                seconds[name].append(took)

    section = Section("Wall time of a fresh process, in seconds", ["command", "target", "seconds", ""])
    for name, target in TARGETS.items():
        summary = Summary.of(seconds[name])
        result = "failed" if name in failed else verdict(summary, target)
        section.rows.append([name, f"≤ {target}" if target else "-", shown(summary, 2), result])
    section.notes += [f"{name}: {reason}" for name, reason in failed.items()]
    publish("startup", [section], {"machine": machine(), "seconds": seconds, "failed": failed})
    return 1 if failed else 0


def _run(command: list[str]) -> float:
    began = perf_counter()
    subprocess.run(command, check=True, capture_output=True, text=True)
    return perf_counter() - began


def _reason(error: OSError | subprocess.CalledProcessError) -> str:
    if isinstance(error, subprocess.CalledProcessError):
        return str(error.stderr).strip().rpartition("\n")[2]
    return error.strerror or str(error)


if __name__ == "__main__":
    sys.exit(main())
