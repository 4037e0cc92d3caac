"""Bytes of a cache after a prefill and at its peak during it. Nothing is timed, so one run is enough."""

from collections.abc import Iterator, Sequence
from typing import Any

from harness.report import Section
from harness.worker import Answer, Worker, WorkerError

METHODS = ("snapkv", "adakv(snapkv)")
KEEPS = (0.5, 0.125)
HELD_OVER_KEEP = 1.02  # AdaKV's bytes, as a multiple of the requested share
PEAK_KEEP, PEAK_TARGET = 0.125, 0.25
# These drop nothing before all layers have run: their peak is the full cache's and that of their inputs.
WHOLE, WHOLE_KEEP, WHOLE_TARGET = ("kvcompose(task='self')", "kvcompose(chunk=128)", "kvcompose"), 0.5, 1.15

Key = tuple[str, float, int, str]  # method, keep, tokens, side
Table = dict[Key, Answer]


def measure(table: Table, workers: list[Worker], lengths: list[int]) -> Iterator[int]:
    """Fill `table`; yield the tokens of each request when it is done."""
    for tokens in lengths:
        for worker in workers:
            table["full", 1.0, tokens, worker.name] = worker.ask("bytes", tokens=tokens)
            yield tokens
            for method in METHODS:
                for keep in KEEPS:
                    table[method, keep, tokens, worker.name] = _asked(worker, method, keep, tokens)
                    yield tokens
            for method in WHOLE:
                table[method, WHOLE_KEEP, tokens, worker.name] = _asked(worker, method, WHOLE_KEEP, tokens)
                yield tokens


def planned(workers: list[Worker], lengths: list[int]) -> int:
    """Return the tokens of all requests."""
    return len(workers) * sum(lengths) * (1 + len(METHODS) * len(KEEPS) + len(WHOLE))


def rows(table: Table) -> list[dict[str, Any]]:
    """Return all figures for the JSON file."""
    return [
        {"method": method, "keep": keep, "tokens": tokens, "side": side, **answer}
        for (method, keep, tokens, side), answer in table.items()
    ]


def held(table: Table, lengths: list[int]) -> Section:
    """Return the table of bytes after the prefill."""
    columns = ["method", "keep", "tokens", "target", "keepset holds", "", "keepset says", "kvpress holds"]
    section = Section("KV bytes after the prefill / the full cache's", columns)
    for tokens in lengths:
        for method in METHODS:
            for keep in KEEPS:
                own, peer = (_shares(table, method, keep, tokens, side) for side in ("keepset", "kvpress"))
                target = HELD_OVER_KEEP * keep if method == "adakv(snapkv)" else None
                section.rows.append(
                    [
                        method,
                        str(keep),
                        str(tokens),
                        _bound(target),
                        _shown(own, "kv_bytes"),
                        _verdict(own, "kv_bytes", target),
                        _shown(own, "claimed_bytes"),
                        _shown(peer, "kv_bytes"),
                    ]
                )
    section.notes.append("holds: unique storages of all floating tensors that the cache reaches.")
    section.notes.append("says: the cache's own `nbytes`, which must not be less than what it holds.")
    section.notes += [
        f"{side}, {method}, keep {keep}, {tokens} tokens: {answer['error']}"
        for (method, keep, tokens, side), answer in table.items()
        if "error" in answer
    ]
    return section


def peak(table: Table, lengths: list[int]) -> Section:
    """Return the table of peaks during the prefill."""
    made = _peaks(table, lengths, METHODS, PEAK_KEEP, ("KV", "alive"), PEAK_TARGET)
    made.notes.append("KV: the most that the cache reached after any single operation of the prefill.")
    made.notes.append("alive: the most that all tensors made in the prefill took at once, activations too.")
    return made


def whole(table: Table, lengths: list[int]) -> Section:
    """Return the table of peaks of methods that need all layers, or a second pass over the prompt."""
    made = _peaks(table, lengths, WHOLE, WHOLE_KEEP, ("alive", "KV"), WHOLE_TARGET)
    made.title += ", all layers at once"
    made.notes.append("alive: all tensors made in the prefill, the model's weights not counted.")
    return made


def _peaks(
    table: Table, lengths: list[int], methods: Sequence[str], keep: float, measures: tuple[str, str], target: float
) -> Section:
    """Peaks by two measures; only the first has a target."""
    columns = ["method", "tokens", "target", f"keepset {measures[0]}", "", f"keepset {measures[1]}"]
    columns += [f"kvpress {measure}" for measure in measures]
    section = Section(f"Peak inside the prefill / the full cache's, keep {keep}", columns)
    judged, other = ({"KV": "kv_bytes_peak", "alive": "alive_bytes_peak"}[measure] for measure in measures)
    for tokens in lengths:
        for method in methods:
            own, peer = (_shares(table, method, keep, tokens, side) for side in ("keepset", "kvpress"))
            section.rows.append(
                [
                    method,
                    str(tokens),
                    _bound(target),
                    _shown(own, judged),
                    _verdict(own, judged, target),
                    _shown(own, other),
                    _shown(peer, judged),
                    _shown(peer, other),
                ]
            )
    return section


def _asked(worker: Worker, method: str, keep: float, tokens: int) -> Answer:
    try:
        return worker.ask("bytes", method, keep=keep, tokens=tokens)
    except WorkerError as error:
        return {"error": str(error)}


def _shares(table: Table, method: str, keep: float, tokens: int, side: str) -> dict[str, float]:
    """Divide by the same side's full cache; its KV bytes also divide the bytes that a cache reports."""
    answer, full = table.get((method, keep, tokens, side), {}), table.get(("full", 1.0, tokens, side), {})
    measures = {name: name for name in ("kv_bytes", "kv_bytes_peak", "alive_bytes_peak")}
    measures["claimed_bytes"] = "kv_bytes"
    return {name: answer[name] / full[by] for name, by in measures.items() if answer.get(name) and full}


def _bound(target: float | None) -> str:
    return f"≤ {target:.4g}" if target else "-"


def _shown(shares: dict[str, float], name: str) -> str:
    return f"{shares[name]:.3f}" if name in shares else "-"


def _verdict(shares: dict[str, float], name: str, target: float | None) -> str:
    if target is None or name not in shares:
        return "-"
    return "met" if shares[name] <= target else "not met"
