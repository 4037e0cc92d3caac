"""The number of requests that run at once in a pool of fixed size: plain vLLM, 8-bit pages, and recipes; not timed.

`.venv/bin/python benchmarks/at_once.py`
"""

import argparse
import json
import subprocess
import sys
import tempfile
from dataclasses import asdict, dataclass
from pathlib import Path
from typing import Any

from harness import progress
from harness.report import Section, machine, publish
from transformers import LlamaConfig, LlamaForCausalLM

WORKER = Path(__file__).parent / "workers" / "at_once_worker.py"


@dataclass(frozen=True)
class Case:
    """One engine."""

    recipe: str | None
    cache: str = "auto"


CASES = (
    Case(None),
    Case("snapkv(keep=1.0)", "int8_per_token_head"),  # drops nothing; on CPUs vLLM itself does not read these pages
    Case("snapkv(keep=0.25)"),
    Case("snapkv(keep=0.25)", "int8_per_token_head"),
    Case("pool(snapkv, keep=0.25)", "int8_per_token_head"),
    Case("quantized(match(pool(snapkv)), bytes=0.125)", "int8_per_token_head"),
)


def main() -> int:
    parser = argparse.ArgumentParser(description=__doc__)
    parser.add_argument("--prompt", type=int, default=1024, help="tokens of a prompt (default 1024)")
    parser.add_argument("--output", type=int, default=64, help="tokens of an answer (default 64)")
    parser.add_argument("--whole", type=int, default=8, help="requests that plain vLLM has room for (default 8)")
    args = parser.parse_args()
    counted: list[tuple[Case, dict[str, Any]]] = []
    with tempfile.TemporaryDirectory() as folder, progress.bar() as bar:
        shape = {"hidden_size": 256, "intermediate_size": 256, "num_hidden_layers": 2, "head_dim": 128}
        heads = {"num_attention_heads": 4, "num_key_value_heads": 2, "vocab_size": 512}
        config = LlamaConfig(**shape, **heads, max_position_embeddings=4096, dtype="bfloat16")
        LlamaForCausalLM(config).bfloat16().save_pretrained(folder)
        task = bar.add_task("engines", total=len(CASES))
        for case in CASES:
            words = json.dumps({**asdict(case), **vars(args), "model": folder})
            done = subprocess.run([sys.executable, str(WORKER), words], capture_output=True, text=True, check=False)
            if done.returncode:
                raise SystemExit(f"{case} failed:\n{done.stderr[-3000:]}")
            counted.append((case, json.loads(done.stdout.splitlines()[-1])))
            bar.advance(task)
    plain = counted[0][1]
    section = Section(
        f"Prompts of {args.prompt} tokens, answers of {args.output}, a pool of the same bytes",
        ["recipe", "kv_cache_dtype", "blocks", "at once, most", "/ plain", "at once, mean", "/ plain"],
    )
    for case, figures in counted:
        most, mean = figures["most"], figures["mean"]
        ratios = f"{most / plain['most']:.2f}", f"{mean / plain['mean']:.2f}"
        row = [
            case.recipe or "none",
            case.cache,
            str(figures["blocks"]),
            str(most),
            ratios[0],
            f"{mean:.1f}",
            ratios[1],
        ]
        section.rows.append(row)
    section.notes.append("The mean is over the steps before the last request is admitted.")
    rows = [{**asdict(case), **figures} for case, figures in counted]
    publish("at_once", [section], {"machine": machine(), "settings": vars(args), "rows": rows})
    return 0


if __name__ == "__main__":
    sys.exit(main())
