"""A worker that measures one side of a comparison: it loads a model, and answers what is asked of it."""

import argparse
import json
from functools import partial
from importlib.metadata import version
from pathlib import Path

from measure import Answer, Setting, Side
from protocol import exchange, take_output


def serve(side: type[Side], packages: tuple[str, ...]) -> None:
    """Load the model, say which versions measure, then answer requests until standard input ends."""
    parser = argparse.ArgumentParser(description="Started by the benchmarks; answers requests line by line.")
    parser.add_argument("model", type=Path, help="folder of a converted model")
    parser.add_argument("ids", type=Path, help="JSON list of token ids")
    parser.add_argument("--threads", type=int, default=1)
    args = parser.parse_args()

    answers = take_output()
    worker = side(args.model, json.loads(args.ids.read_text()), args.threads)
    exchange(answers, {name: version(name) for name in packages}, partial(_answer, worker))


def _answer(worker: Side, request: Answer) -> Answer:
    what, repeats = request["what"], request.get("repeats", 1)
    if what == "forget":
        return worker.forget()
    setting = Setting(request["method"], request.get("keep", 1.0), request["tokens"])
    if what == "prefill":
        return worker.prefill(setting, repeats)
    if what == "decode":
        return worker.decode(setting, repeats, request["steps"])
    if what == "bytes":
        return worker.bytes(setting)
    raise ValueError(f"what is {what!r}; known: prefill, decode, bytes, forget")
