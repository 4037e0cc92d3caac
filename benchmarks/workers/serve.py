"""A worker's protocol: one request a line on standard input, one answer a line on standard output."""

import argparse
import json
import os
import sys
from importlib.metadata import version
from pathlib import Path

from measure import Answer, Setting, Side


def serve(side: type[Side], packages: tuple[str, ...]) -> None:
    """Load the model, say which versions measure, then answer requests until standard input ends."""
    parser = argparse.ArgumentParser(description="Started by the benchmarks; answers requests line by line.")
    parser.add_argument("model", type=Path, help="folder of a converted model")
    parser.add_argument("ids", type=Path, help="JSON list of token ids")
    parser.add_argument("--threads", type=int, default=1)
    args = parser.parse_args()

    answers = os.fdopen(os.dup(1), "w", buffering=1)
    os.dup2(2, 1)  # output of libraries must not mix with the answers
    worker = side(args.model, json.loads(args.ids.read_text()), args.threads)
    print(json.dumps({"versions": {name: version(name) for name in packages}}), file=answers)
    for line in sys.stdin:
        try:
            answer = _answer(worker, json.loads(line))
        except Exception as error:
            answer = {"error": f"{type(error).__name__}: {error}"}
        print(json.dumps(answer), file=answers)


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
