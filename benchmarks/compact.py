"""A conversation's compaction item from a server, beside a summary that the same model writes of it."""

from __future__ import annotations

import argparse
import os
import time
from statistics import median
from typing import Any

import httpx2 as httpx
from harness import progress
from harness.prompt import essays
from harness.report import Section, machine, publish
from transformers import AutoTokenizer

from keepset.lab.embedded import embedded_folder, name_statistics
from keepset.lab.server_process import ServerProcess, free_port
from keepset.recipe import Recipe
from keepset.serving.command import command
from keepset.serving.start_checks import limit_cpu_pool

OPTIONS = ["--enforce-eager", "--dtype", "float32", "--max-model-len", "4096", "--block-size", "32"]
SUMMARY = {"role": "user", "content": "Sum up all that was said so far, with every fact that may be needed later."}
PER_TURN, ANSWER, MOST = 160, 16, 128
"""Tokens of what a user says in a turn; the most of an answer, and of a summary."""
FIGURES = {
    "item": "item, s",
    "summary": "summary, s",
    "ratio": "item / summary",
    "written": "tokens of the summary",
    "computed": "prompt tokens computed for it",
    "bytes": "bytes of the item / token of the chat",
}


def main() -> None:
    """Hold a chat, time both in turns, show, write."""
    parser = argparse.ArgumentParser(description=__doc__)
    parser.add_argument("--recipe", default="pool(distilled, bytes=0.25, turns=True)", help="default %(default)s")
    parser.add_argument("--turns", type=int, default=8, help="turns of the chat, of some 190 tokens (default 8)")
    parser.add_argument("--rounds", type=int, default=5, help="rounds of an item and a summary each (default 5)")
    args = parser.parse_args()
    os.environ.setdefault("VLLM_CPU_OMP_THREADS_BIND", "nobind")
    limit_cpu_pool(OPTIONS)
    port, recipe = free_port(), name_statistics(Recipe.parse(args.recipe), None)
    words = command(str(embedded_folder()), recipe, [*OPTIONS, "--port", str(port)], served_name="base")
    with ServerProcess(words, port) as server, progress.bar() as bar:
        work = bar.add_task("turns and rounds", total=args.turns + args.rounds)
        server.wait(600)
        with httpx.Client(base_url=f"{server.url}/v1", timeout=600, trust_env=False) as client:
            history: list[dict[str, Any]] = []
            for text in _texts(args.turns):
                history.append({"role": "user", "content": text})
                _, answer = _timed(client, "/responses", history, max_output_tokens=ANSWER, temperature=0)
                history += answer["output"]
                bar.advance(work)
            rounds = []
            for number in range(args.rounds):
                rounds.append(_round(client, history, summary_first=bool(number % 2)))
                bar.advance(work)
    tokens = answer["usage"]["total_tokens"]
    for one in rounds:
        one["ratio"], one["bytes"] = one["item"] / one["summary"], one["bytes"] / tokens
    section = Section(f"A chat of {tokens:,} tokens, {args.recipe}", ["", f"median (range) of {args.rounds} rounds"])
    section.rows = [[shown, _shown([one[name] for one in rounds])] for name, shown in FIGURES.items()]
    publish("compact", [section], {"machine": machine(), "settings": vars(args), "tokens": tokens, "rounds": rounds})


def _round(client: httpx.Client, history: list[dict[str, Any]], *, summary_first: bool) -> dict[str, float]:
    """Time an item and a summary, one right after the other."""
    answers: dict[str, dict[str, Any]] = {}
    seconds: dict[str, float] = {}
    for what in ("summary", "item") if summary_first else ("item", "summary"):
        path, items, more = "/responses/compact", history, {}
        if what == "summary":
            path, items, more = "/responses", [*history, SUMMARY], {"max_output_tokens": MOST, "temperature": 0}
        seconds[what], answers[what] = _timed(client, path, items, **more)
    (item,), usage = answers["item"]["output"], answers["summary"]["usage"]
    return {
        **seconds,
        "written": usage["output_tokens"],
        "computed": usage["input_tokens"] - usage["input_tokens_details"]["cached_tokens"],
        "bytes": len(item["encrypted_content"]),
    }


def _timed(client: httpx.Client, path: str, items: list[dict[str, Any]], **more: Any) -> tuple[float, dict[str, Any]]:
    """Return the seconds of a request, and its answer."""
    began = time.perf_counter()
    answer = client.post(path, json={"model": "base", "input": items, **more})
    seconds = time.perf_counter() - began
    return seconds, answer.raise_for_status().json()


def _texts(number: int) -> list[str]:
    """Return what the user says in so many turns: pieces of the essays."""
    tokenizer = AutoTokenizer.from_pretrained(embedded_folder())
    ids = tokenizer(essays(), add_special_tokens=False, verbose=False)["input_ids"]
    return [tokenizer.decode(ids[turn * PER_TURN : (turn + 1) * PER_TURN]) for turn in range(number)]


def _shown(figures: list[float]) -> str:
    """Return the median, with the range."""
    return f"{median(figures):.3g} ({min(figures):.3g}..{max(figures):.3g})"


if __name__ == "__main__":
    main()
