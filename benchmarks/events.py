"""The cost of one compression event, compared with bare operations, kvpress and the AMS authors' program."""

import argparse
import subprocess
import sys
import tempfile
from contextlib import ExitStack
from dataclasses import dataclass, field
from pathlib import Path

from harness.options import names
from harness.report import Section, machine, publish
from harness.summary import Summary, ratios, shown, verdict
from harness.worker import PEER_PYTHON, Worker, WorkerError, check_peer
from rich.progress import track

AUTHORS = "https://github.com/EIT-NLP/AdaptiveMassSegment"
CALLS = 5  # of each side in a round; their median counts
MANY_ROUNDS = 15


@dataclass
class Figure:
    """A case of keepset at one size, the case by which its time is divided, and the largest allowed ratio."""

    case: str
    side: str
    other: str
    tokens: int
    target: float | None
    seconds: list[float] = field(default_factory=list)
    other_seconds: list[float] = field(default_factory=list)
    error: str | None = None

    @property
    def name(self) -> str:
        beside = self.other if self.side == "keepset" else self.side
        return f"{self.case} / {beside}, {self.tokens} to {self.keep}"

    @property
    def keep(self) -> int:
        return self.tokens // 2

    @property
    def ratio(self) -> Summary | None:
        return ratios(self.seconds, self.other_seconds)


def figures() -> list[Figure]:
    """Return all ratios, in the order of the table."""
    selection = "ams selection"
    return [
        *(
            Figure(selection, "keepset", "topk and sort", tokens, target)
            for tokens, target in ((1024, None), (8192, 2.0), (32768, None))
        ),
        *(
            Figure(selection, "authors", selection, tokens, target)
            for tokens, target in ((1024, 0.5), (8192, 0.9), (32768, 1.0))
        ),
        Figure("gather", "keepset", "copy", 8192, 1.5),
        Figure("tova scores", "kvpress", "tova scores", 8192, 0.3),
        Figure("snapkv scores", "kvpress", "snapkv scores", 8192, 0.3),
        Figure("window mass", "authors", "window mass", 8192, 0.3),
        Figure("ams(knorm) event", "authors", "ams(knorm) event", 8192, 0.2),
        Figure("expected_attention event", "kvpress", "expected_attention event", 8192, 0.4),
    ]


def main() -> int:
    """Measure, show, write; fail if a measurement failed."""
    parser = argparse.ArgumentParser(description=__doc__)
    parser.add_argument("--repeats", type=int, default=MANY_ROUNDS, help=f"rounds (default {MANY_ROUNDS})")
    parser.add_argument("--threads", type=int, default=1, help="torch threads of a worker (default 1)")
    parser.add_argument("--only", type=names, help="figures whose names contain one of these, with commas")
    parser.add_argument("--no-peer", dest="peer", action="store_false", help="leave kvpress and the authors out")
    parser.add_argument("--ams-peer", type=Path, help="folder of the AMS authors' program (default: a fresh clone)")
    args = parser.parse_args()

    table = [figure for figure in figures() if not args.only or any(part in figure.name for part in args.only)]
    with ExitStack() as stack:
        workers, notes = _workers(stack, args.threads, args.peer, args.ams_peer)
        table = [figure for figure in table if figure.side in workers]
        try:
            for number in track(range(args.repeats), "rounds"):
                for figure in table:
                    if not figure.error:
                        _measure(figure, workers, keepset_first=number % 2 == 0)
        except KeyboardInterrupt:
            print("interrupted: what is done follows", file=sys.stderr)
        versions = {name: worker.versions for name, worker in workers.items()}

    section = Section(
        "One event of one layer: processor time, batch 1", ["figure", "target", "ratio", "", "ms", "of ms"]
    )
    section.notes += notes + [f"{figure.name}: {figure.error}" for figure in table if figure.error]
    section.notes.append(
        "8 KV heads of 128 numbers, 32 query heads, float32. A selection starts from scores and usage; "
        "an event is all of it."
    )
    section.rows += [
        [
            figure.name,
            f"≤ {figure.target}" if figure.target else "-",
            shown(figure.ratio, 2),
            "failed" if figure.error else verdict(figure.ratio, figure.target),
            _milliseconds(figure.seconds),
            _milliseconds(figure.other_seconds),
        ]
        for figure in table
    ]
    rows = [{"name": figure.name, **figure.__dict__} for figure in table]
    settings = {"repeats": args.repeats, "threads": args.threads, "calls": CALLS}
    publish("events", [section], {"machine": machine(), "versions": versions, "settings": settings, "rows": rows})
    return 1 if any(figure.error for figure in table) else 0


def _workers(stack: ExitStack, threads: int, peer: bool, folder: Path | None) -> tuple[dict[str, Worker], list[str]]:
    """Return one process per side, and notes about missing ones."""
    workers = {"keepset": stack.enter_context(Worker("keepset_events", Path(sys.executable), [], threads))}
    if not peer:
        return workers, []
    check_peer()
    workers["kvpress"] = stack.enter_context(Worker("kvpress_events", PEER_PYTHON, [], threads))
    if folder is None:
        folder = Path(stack.enter_context(tempfile.TemporaryDirectory()))
        command = ["git", "-c", "core.askPass=true", "clone", "--quiet", "--depth", "1", AUTHORS, str(folder)]
        if subprocess.run(command, check=False, stdin=subprocess.DEVNULL, capture_output=True).returncode:
            return workers, [
                f"The AMS authors' program is missing: {AUTHORS} cannot be cloned; give --ams-peer FOLDER."
            ]
    elif not (folder / "kvpress").is_dir():
        raise WorkerError(f"{folder} is not the AMS authors' program: give a folder that holds their kvpress")
    path = {"PYTHONPATH": str(folder.resolve())}
    workers["authors"] = stack.enter_context(Worker("kvpress_events", PEER_PYTHON, [], threads, path))
    return workers, []


def _measure(figure: Figure, workers: dict[str, Worker], keepset_first: bool) -> None:
    """Time both sides one right after the other, in alternating order."""
    pair = [("keepset", figure.case, figure.seconds), (figure.side, figure.other, figure.other_seconds)]
    took = []
    try:
        for side, case, seconds in pair if keepset_first else pair[::-1]:
            request = {"tokens": figure.tokens, "keep": figure.keep, "calls": CALLS}
            took.append((seconds, workers[side].ask(case, **request)["seconds"]))
    except WorkerError as error:
        figure.error = str(error)
        return
    for seconds, each in took:
        seconds.append(each)


def _milliseconds(seconds: list[float]) -> str:
    summary = Summary.of([1e3 * each for each in seconds])
    return "-" if summary is None else f"{summary.median:.2f}"


if __name__ == "__main__":
    try:
        sys.exit(main())
    except WorkerError as error:
        sys.exit(str(error))
