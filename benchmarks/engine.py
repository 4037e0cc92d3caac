"""vLLM with a recipe against vLLM without: a pool that is short, one that is ample, and heads that differ."""

import argparse
import json
import subprocess
import sys
from collections import defaultdict
from dataclasses import asdict, dataclass
from pathlib import Path
from typing import Any

from harness import progress
from harness.options import names
from harness.report import Section, machine, publish
from harness.summary import Summary, ratios, shown

from keepset.lab.texts import essay

WORKER = Path(__file__).parent / "workers" / "vllm_worker.py"
SHORT, AMPLE = 64, 400


@dataclass(frozen=True)
class Case:
    """One engine and its load."""

    recipe: str | None
    requests: int
    prompt: int
    output: int
    blocks: int
    max_model_len: int = 1024
    dtype: str = "float32"


KEEP = "snapkv(keep=96, every=64)"
RAGGED = "adakv(snapkv, keep=96, every=64)"
CASES = {
    "short pool, 12 requests: plain": Case(None, 12, 512, 256, SHORT),
    "short pool, 12 requests: snapkv": Case(KEEP, 12, 512, 256, SHORT),
    "short pool, 12 requests: adakv": Case(RAGGED, 12, 512, 256, SHORT),
    "short pool, 12 requests: adakv, prompt only": Case("adakv(snapkv, keep=96)", 12, 512, 256, SHORT),
    "short pool, 28 requests: snapkv": Case(KEEP, 28, 512, 256, SHORT),
    "short pool, 36 requests: snapkv": Case(KEEP, 36, 512, 256, SHORT),
    "short pool, 12 requests: knorm": Case("knorm(keep=96, every=64)", 12, 512, 256, SHORT),
    "short pool, 12 requests: distilled": Case("distilled(keep=96, every=64)", 12, 512, 256, SHORT),
    "short pool, 12 requests: adakv(distilled)": Case("adakv(distilled, keep=96, every=64)", 12, 512, 256, SHORT),
    "ample pool: knorm": Case("knorm(keep=96, every=64)", 8, 512, 256, AMPLE),
    "ample pool: distilled": Case("distilled(keep=96, every=64)", 8, 512, 256, AMPLE),
    "ample pool: plain": Case(None, 8, 512, 256, AMPLE),
    "ample pool: never compresses": Case("snapkv(keep=100000, every=64)", 8, 512, 256, AMPLE),
    "ample pool: snapkv": Case(KEEP, 8, 512, 256, AMPLE),
    "decoding: uniform": Case("snapkv(keep=128)", 8, 1000, 64, AMPLE, 2048),
    "decoding: adakv": Case("adakv(snapkv, keep=128)", 8, 1000, 64, AMPLE, 2048),
    **{
        f"decoding, half kept, {dtype}: {name}": Case(recipe, 8, 1000, 64, AMPLE, 2048, dtype)
        for dtype in ("float32", "bfloat16")
        for name, recipe in (("adakv", "adakv(snapkv, keep=512)"), ("in 8 bits", "int8(adakv(snapkv), keep=512)"))
    },
    "decoding: plain": Case(None, 8, 1000, 64, AMPLE, 2048),
    "one long prompt: snapkv": Case("snapkv(keep=256)", 1, 4096, 4, 160, 4608),
}


@dataclass(frozen=True)
class Ratio:
    """The ratio of one case's figure to another's, and its target."""

    title: str
    figure: str
    of: str
    to: str
    target: float
    at_most: bool = False


POOL = "short pool, 12 requests: plain"
RATIOS = [
    Ratio("short pool, snapkv", "tokens_per_second", "short pool, 12 requests: snapkv", POOL, 2.5),
    Ratio("short pool, adakv", "tokens_per_second", "short pool, 12 requests: adakv", POOL, 2.2),
    Ratio(
        "short pool, adakv of the prompt only",
        "tokens_per_second",
        "short pool, 12 requests: adakv, prompt only",
        POOL,
        2.2,
    ),
    Ratio(
        "28 requests / 12 requests",
        "tokens_per_second",
        "short pool, 28 requests: snapkv",
        "short pool, 12 requests: snapkv",
        1.0,
    ),
    # 28 requests run in rounds of 12, 12 and 4; 36 fill three rounds.
    Ratio(
        "36 requests / 12 requests",
        "tokens_per_second",
        "short pool, 36 requests: snapkv",
        "short pool, 12 requests: snapkv",
        1.0,
    ),
    Ratio(
        "ample pool, never compresses", "tokens_per_second", "ample pool: never compresses", "ample pool: plain", 0.95
    ),
    Ratio("ample pool, every 64 tokens", "tokens_per_second", "ample pool: snapkv", "ample pool: plain", 0.92),
    *(
        Ratio(f"{pool}, distilled / knorm", "tokens_per_second", f"{requests}: distilled", f"{requests}: knorm", 1.0)
        for pool, requests in (("short pool", "short pool, 12 requests"), ("ample pool", "ample pool"))
    ),
    Ratio("decode step, adakv / uniform", "decode_step", "decoding: adakv", "decoding: uniform", 1.05, at_most=True),
]


def measure(case: Case, text: str, model: str | None) -> dict[str, Any]:
    """Run a case in a separate process."""
    words = json.dumps({**asdict(case), "text": text, "model": model})
    done = subprocess.run([sys.executable, str(WORKER), words], capture_output=True, text=True, check=False)
    if done.returncode:
        raise SystemExit(f"{case} failed:\n{done.stderr[-3000:]}")
    return json.loads(done.stdout.splitlines()[-1])


def held(case: Case) -> float:
    """Return how many requests the pool can hold: without one prompt, by the blocks of keep + every entries."""
    return (case.blocks - -(-case.prompt // 32)) / -(-(96 + 64) // 32)


def main() -> int:
    parser = argparse.ArgumentParser(description=__doc__)
    parser.add_argument("--repeats", type=int, default=3, help="rounds (default 3)")
    parser.add_argument("--only", type=names, default=[""], help="cases whose names contain one of these, with commas")
    parser.add_argument("--model", help="folder of a converted model (default: the embedded one)")
    args = parser.parse_args()
    text = essay()
    cases = {name: case for name, case in CASES.items() if any(part in name for part in args.only)}
    figures: defaultdict[str, list[dict[str, Any]]] = defaultdict(list)
    try:
        with progress.bar() as bar:
            task = bar.add_task("engines", total=args.repeats * len(cases))
            for _ in range(args.repeats):
                for name, case in cases.items():
                    bar.update(task, description=name)
                    figures[name].append(measure(case, text, args.model))
                    bar.advance(task)
    except KeyboardInterrupt:
        print("interrupted: what is done follows", file=sys.stderr)

    def values(name: str, figure: str) -> list[float]:
        return [run[figure] for run in figures[name] if run[figure] is not None]

    each = Section("Each engine", ["", "tokens/s", "running, mean", "most", "preemptions", "decode step, ms"])
    for name in figures:
        steps = Summary.of([1e3 * value for value in values(name, "decode_step")])
        row = [shown(Summary.of(values(name, figure)), 1) for figure in ("tokens_per_second", "running_mean")]
        most, preempted = max(values(name, "running_max")), max(values(name, "preemptions"))
        each.rows.append([name, *row, str(most), str(preempted), shown(steps, 1)])
    against = Section("Ratios, round by round", ["", "ratio", "target", ""])
    for ratio in RATIOS:
        summary = ratios(values(ratio.of, ratio.figure), values(ratio.to, ratio.figure))
        if summary is not None:
            met = summary.median <= ratio.target if ratio.at_most else summary.median >= ratio.target
            sign = "≤" if ratio.at_most else "≥"
            verdict = "met" if met else "not met"
            against.rows.append([ratio.title, shown(summary), f"{sign} {ratio.target:.2f}", verdict])
    many = "short pool, 28 requests: snapkv"
    if figures[many]:
        share = Summary.of([value / held(CASES[many]) for value in values(many, "running_mean")])
        assert share is not None
        verdict = "met" if share.median >= 0.85 else "not met"
        against.rows.append(["28 requests: mean running / what the pool can hold", shown(share), "≥ 0.85", verdict])
    long = "one long prompt: snapkv"
    if figures[long]:
        pages = -(-CASES[long].prompt // 32)
        # The pool before, in the step that computed the prompt's end, and in the next step.
        free = Summary.of([max(run["free"][1:-1]) - (run["free"][0] - pages) for run in figures[long]])
        assert free is not None
        verdict = "met" if free.median >= 14 / 16 * pages else "not met"
        against.rows.append([f"one prompt of {pages} pages: free after the event", shown(free, 0), "≥ 112", verdict])
    data = {"machine": machine(), "cases": {name: asdict(case) for name, case in cases.items()}, "runs": figures}
    publish("engine", [each, against], data)
    return 0


if __name__ == "__main__":
    sys.exit(main())
