"""What `vllm bench serve` does, as far as keepset reads it: sends prompts, and writes a report of the same shape."""

import argparse
import json
import time
import urllib.request
from concurrent.futures import ThreadPoolExecutor
from pathlib import Path
from typing import Any

parser = argparse.ArgumentParser()
for name in ("base-url", "model", "dataset-path", "result-dir", "result-filename"):
    parser.add_argument(f"--{name}")
for name in ("custom-output-len", "max-concurrency", "num-prompts"):
    parser.add_argument(f"--{name}", type=int)
words, _ = parser.parse_known_args()


def ask(prompt: str) -> dict[str, Any]:
    body = json.dumps({"model": words.model, "prompt": prompt, "max_tokens": words.custom_output_len}).encode()
    reply: dict[str, Any] = {"start_times": time.perf_counter(), "ttfts": 0.0, "itls": [], "errors": ""}
    reply |= {"output_lens": 0, "input_lens": 0, "latencies": 0.0}
    try:
        with urllib.request.urlopen(urllib.request.Request(f"{words.base_url}/v1/completions", body)) as answer:
            before = 0.0
            for line in answer:
                event = json.loads(line[6:]) if line.startswith(b"data: {") else {}
                now = time.perf_counter()
                if event.get("choices"):
                    if before:
                        reply["itls"].append(now - before)
                    else:
                        reply["ttfts"] = now - reply["start_times"]
                    before = now
                elif usage := event.get("usage"):
                    reply |= {"output_lens": usage["completion_tokens"], "input_lens": usage["prompt_tokens"]}
            reply["latencies"] = before - reply["start_times"]
    except OSError as error:
        reply["errors"] = f"Traceback\n{error}"
    return reply


lines = Path(words.dataset_path).read_text("utf-8").splitlines()
prompts = [json.loads(line)["prompt"] for line in lines]
assert len(prompts) == words.num_prompts
began = time.perf_counter()
with ThreadPoolExecutor(words.max_concurrency) as pool:
    replies = list(pool.map(ask, prompts))
report: dict[str, Any] = {name: [reply[name] for reply in replies] for name in replies[0]}
report["duration"] = time.perf_counter() - began
report |= {f"{p}_{name}_ms": 1.0 for p in ("p50", "p99") for name in ("ttft", "tpot", "e2el")}
(Path(words.result_dir) / words.result_filename).write_text(json.dumps(report), "utf-8")
