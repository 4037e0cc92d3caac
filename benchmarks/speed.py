"""The cost of compressing a prompt: prefill time with a method / that of the full cache in the same round."""

import sys
from collections import defaultdict
from collections.abc import Iterator
from contextlib import ExitStack
from dataclasses import dataclass, field
from typing import Any

from harness import options, progress
from harness.prompt import prepared
from harness.report import Section, machine, publish
from harness.summary import Summary, ratios, shown, verdict
from harness.worker import Worker, WorkerError, start_workers

SIDES = ("keepset", "kvpress")
KEEP = 0.5
WARM_UP_TOKENS = 256  # enough for every method to run once, and to fail if it must
TARGETS: dict[str, float | None] = {
    "quantized(match(pool(distilled)))": 1.12,
    "match(pool(distilled))": None,
    "streaming_llm": 1.03,
    "knorm": 1.03,
    "tova": 1.03,
    "snapkv": 1.03,
    "expected_attention": 1.06,
    "h2o": 1.5,
    "kvcompose(task='self')": 1.35,
    "kvcompose(chunk=128)": 2.5,
    "kvcompose": None,
    "gvote": 1.10,
    "glance": 1.25,
    "pool(prompt_queries)": None,
    "pool(distilled)": 1.05,
    "reread": None,
    "adakv(expected_attention)": 1.08,
    "pyramid(snapkv)": None,
    "adakv(snapkv)": None,
    "kvzip": None,
    "compilerkv": 1.05,
}
GROWTH_TARGET = 1.2
PEER_TARGETS = {"kvzip": 0.5}  # what the method adds to a prefill, over what kvpress' adds
# A method that holds more than this at the end of the prefill has not compressed, so its time is meaningless.
MOST_HELD = 1.05 * KEEP


@dataclass
class Measured:
    """One side's rounds of one method at one length. The lists grow together."""

    seconds: list[float] = field(default_factory=list)
    full_seconds: list[float] = field(default_factory=list)
    cpu_seconds: list[float] = field(default_factory=list)
    full_cpu_seconds: list[float] = field(default_factory=list)
    kv_bytes: int = 0
    kv_bytes_full: int = 0
    claimed_bytes: int | None = None
    error: str | None = None

    @property
    def ratio(self) -> Summary | None:
        return ratios(self.seconds, self.full_seconds)

    @property
    def cpu_ratio(self) -> Summary | None:
        return ratios(self.cpu_seconds, self.full_cpu_seconds)

    @property
    def held(self) -> float | None:
        return self.kv_bytes / self.kv_bytes_full if self.kv_bytes_full else None

    def as_json(self) -> dict[str, Any]:
        summaries = {"ratio": self.ratio, "cpu_ratio": self.cpu_ratio}
        shares = {name: summary.as_json() if summary else None for name, summary in summaries.items()}
        return {**self.__dict__, "held": self.held, **shares}


Key = tuple[str, int, str]  # method, tokens, side
Table = dict[Key, Measured]


def main() -> int:
    """Measure, show, write; fail if a measurement of keepset failed."""
    parser = options.parser(__doc__ or "", repeats=7)
    parser.add_argument("--only", type=options.names, default=list(TARGETS), help="methods, with commas")
    args = parser.parse_args()
    if unknown := set(args.only) - set(TARGETS):
        parser.error(f"unknown: {', '.join(sorted(unknown))}; known: {', '.join(TARGETS)}")

    table: Table = defaultdict(Measured)
    with ExitStack() as stack:
        prompt = stack.enter_context(prepared(args.model, max(*args.tokens, WARM_UP_TOKENS)))
        workers = start_workers(stack, prompt, args.threads, args.peer)
        versions = {worker.name: worker.versions for worker in workers}
        try:
            _measure(table, workers, args.only, args.tokens, args.repeats)
        except KeyboardInterrupt:
            print("interrupted: what is done follows", file=sys.stderr)
    _judge(table)
    settings = {"keep": KEEP, "tokens": args.tokens, "repeats": args.repeats, "threads": args.threads}
    rows = [
        {"method": method, "tokens": tokens, "side": side, "target": TARGETS[method], **measured.as_json()}
        for (method, tokens, side), measured in table.items()
    ]
    data = {"machine": machine(), "versions": versions, "settings": settings, "rows": rows}
    sections = [_section(table, args.only, tokens) for tokens in args.tokens]
    sections += [_growth(table, args.only, args.tokens)] if len(args.tokens) > 1 else []
    publish("speed", sections, data)
    return 1 if any(table[key].error for key in table if key[2] == "keepset") else 0


def _measure(table: Table, workers: list[Worker], methods: list[str], lengths: list[int], rounds: int) -> None:
    plan = [(method, tokens, worker) for tokens in lengths for method in methods for worker in workers]
    warm_up = len(workers) * (sum(lengths) + len(methods) * WARM_UP_TOKENS)
    with progress.bar() as bar:
        task = bar.add_task("warm-up", total=warm_up + 2 * rounds * sum(tokens for _, tokens, _ in plan))
        for step in _warm_up(table, workers, methods, lengths):
            bar.advance(task, step)
        for number in range(rounds):
            for method, tokens, worker in plan:
                bar.update(task, description=f"round {number + 1}/{rounds} {worker.name} {method} {tokens}")
                measured = table[method, tokens, worker.name]
                if not measured.error:
                    _pair(measured, worker, method, tokens, full_first=number % 2 == 0)
                bar.advance(task, 2 * tokens)


def _warm_up(table: Table, workers: list[Worker], methods: list[str], lengths: list[int]) -> Iterator[int]:
    for worker in workers:
        for tokens in lengths:
            worker.ask("prefill", tokens=tokens)
            yield tokens
        for method in methods:
            try:
                worker.ask("prefill", method, keep=KEEP, tokens=WARM_UP_TOKENS)
            except WorkerError as error:
                for tokens in lengths:
                    table[method, tokens, worker.name].error = str(error)
            yield WARM_UP_TOKENS


def _pair(measured: Measured, worker: Worker, method: str, tokens: int, full_first: bool) -> None:
    """Time the method and the full cache one right after the other, in alternating order."""
    try:
        if full_first:
            full = worker.ask("prefill", tokens=tokens)
        answer = worker.ask("prefill", method, keep=KEEP, tokens=tokens)
        if not full_first:
            full = worker.ask("prefill", tokens=tokens)
    except WorkerError as error:
        measured.error = str(error)
        return
    measured.seconds += answer["seconds"]
    measured.full_seconds += full["seconds"]
    measured.cpu_seconds += answer["cpu_seconds"]
    measured.full_cpu_seconds += full["cpu_seconds"]
    measured.kv_bytes, measured.kv_bytes_full = answer["kv_bytes"], full["kv_bytes"]
    measured.claimed_bytes = answer["claimed_bytes"]


def _judge(table: Table) -> None:
    for (_, _, side), measured in table.items():
        if side == "keepset" and measured.held is not None and measured.held > MOST_HELD:
            measured.error = f"holds {measured.held:.2f} of the full cache at keep {KEEP}: not compressed"


def _section(table: Table, methods: list[str], tokens: int) -> Section:
    columns = ["method", "target", "keepset", "", "CPU", "holds", "kvpress", "CPU", "holds", "keepset / kvpress"]
    section = Section(f"Prefill of {tokens} tokens: time with a method / full cache, keep {KEEP}", columns)
    for method in methods:
        own, peer = (table[method, tokens, side] for side in SIDES)
        target = TARGETS[method]
        section.rows.append(
            [
                method,
                f"≤ {target}" if target else "-",
                shown(own.ratio),
                "failed" if own.error else verdict(own.ratio, target),
                _middle(own.cpu_ratio),
                _share(own),
                shown(peer.ratio),
                _middle(peer.cpu_ratio),
                _share(peer),
                shown(ratios(own.seconds, peer.seconds)),
            ]
        )
    section.notes.append(
        "By the wall clock: median of the rounds (smallest..largest). CPU: by processor time. "
        "holds: KV bytes after the prefill, of the full cache's."
    )
    for method in methods:
        own, peer = (table[method, tokens, side] for side in SIDES)
        section.notes += [f"{method}: {note}" for note in _over_peer(own, peer, PEER_TARGETS.get(method))]
    for side in SIDES:
        both = {method: table[method, tokens, side] for method in methods}
        section.notes += [f"{side}, {method}: {one.error}" for method, one in both.items() if one.error]
        if full := Summary.of([seconds for one in both.values() for seconds in one.full_seconds]):
            section.notes.append(f"Full cache in {side}'s environment: {shown(full, 2)} s.")
    return section


def _growth(table: Table, methods: list[str], lengths: list[int]) -> Section:
    """Return how the ratios change from the shortest prompt to the longest."""
    short, long = min(lengths), max(lengths)
    title = f"The same ratio at {long} tokens / at {short}, by processor time"
    section = Section(title, ["method", "target", "keepset", "", "kvpress"])
    for method in methods:
        grown = []
        for side in SIDES:
            of, to = (table[method, tokens, side].cpu_ratio for tokens in (long, short))
            grown.append(None if of is None or to is None else of.median / to.median)
        own, peer = (None if g is None else Summary.of([g]) for g in grown)
        row = [method, f"≤ {GROWTH_TARGET}", shown(own), verdict(own, GROWTH_TARGET), shown(peer)]
        section.rows.append(row)
    return section


def _over_peer(own: Measured, peer: Measured, target: float | None) -> list[str]:
    """Return the time that the method adds to a prefill / that the peer's method adds, by processor time."""
    if target is None or own.cpu_ratio is None or peer.cpu_ratio is None:
        return []
    share = (own.cpu_ratio.median - 1) / (peer.cpu_ratio.median - 1)
    judged = verdict(Summary.of([share]), target)
    return [f"added time / kvpress' added time: {share:.2f} (≤ {target}: {judged})"]


def _middle(summary: Summary | None) -> str:
    return f"{summary.median:.3f}" if summary else "-"


def _share(measured: Measured) -> str:
    return "-" if measured.held is None else f"{measured.held:.2f}"


if __name__ == "__main__":
    try:
        sys.exit(main())
    except WorkerError as error:
        sys.exit(str(error))
