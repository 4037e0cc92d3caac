"""Times kvpress's own evaluation of one context: its pipeline, one press after another."""

import argparse
import json
import os
import sys
from importlib.metadata import version
from time import perf_counter, process_time
from typing import Any

import torch
from kvpress import KVPressTextGenerationPipeline
from kvpress_worker import PRESSES
from transformers import AutoModelForCausalLM, AutoTokenizer


def main() -> None:
    """Say which versions measure, then evaluate contexts until standard input ends."""
    parser = argparse.ArgumentParser(description="Started by sweep.py; answers requests line by line.")
    parser.add_argument("model")
    parser.add_argument("--threads", type=int, default=1)
    args = parser.parse_args()
    torch.set_num_threads(args.threads)
    torch.set_grad_enabled(False)

    answers = os.fdopen(os.dup(1), "w", buffering=1)
    os.dup2(2, 1)  # output of libraries must not mix with the answers
    model = AutoModelForCausalLM.from_pretrained(args.model, dtype=torch.float32).eval()
    pipeline = KVPressTextGenerationPipeline(
        model=model, tokenizer=AutoTokenizer.from_pretrained(args.model), device="cpu"
    )
    versions = {name: version(name) for name in ("kvpress", "transformers", "torch")}
    print(json.dumps({"versions": versions}), file=answers)
    for line in sys.stdin:
        try:
            answer = evaluate(pipeline, json.loads(line))
        except Exception as error:
            answer = {"error": f"{type(error).__name__}: {error}"}
        print(json.dumps(answer), file=answers)


def evaluate(pipeline: Any, request: dict[str, Any]) -> dict[str, Any]:
    """Return the full cache, then every press with every share that it drops."""
    presses = [None, *(PRESSES[name](1 - keep) for name in request["recipes"] for keep in request["keeps"])]
    replies = []
    began, cpu_began = perf_counter(), process_time()
    for press in presses:
        asked = {"question": request["question"], "answer_prefix": request["prefix"]}
        said = pipeline(request["context"], **asked, press=press, max_new_tokens=request["tokens"])
        replies.append(said["answer"])
    return {"seconds": perf_counter() - began, "cpu_seconds": process_time() - cpu_began, "replies": replies}


if __name__ == "__main__":
    main()
