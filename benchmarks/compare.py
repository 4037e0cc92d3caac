"""The cost of a comparison that shares one prefill: the default recipes under 3 budgets, and the whole demo."""

import argparse
import subprocess
import sys
import tempfile
from pathlib import Path
from time import perf_counter
from typing import Any

import torch
from harness.report import Section, machine, publish
from harness.summary import Summary, shown, verdict
from transformers import DynamicCache

from keepset import Budget, models
from keepset.hf.prompt_session import CachedPrompt
from keepset.lab import texts
from keepset.lab.candidate import grid
from keepset.lab.cli.checks import offered_recipes
from keepset.lab.compare.prompt import PromptComparer
from keepset.lab.compare.text_task import make_text_task

KEEPS = (0.5, 0.25, 0.1)
TARGET, DEMO_TARGET = 4.0, 90.0


def main() -> int:
    """Measure, show, write."""
    parser = argparse.ArgumentParser(description=__doc__)
    parser.add_argument("--repeats", type=int, default=3, help="rounds (default 3)")
    parser.add_argument("--tokens", type=int, default=2048, help="tokens of the prompt (default 2048)")
    parser.add_argument("--threads", type=int, default=1, help="threads of the comparison (default 1)")
    args = parser.parse_args()
    torch.set_num_threads(args.threads)
    model, tokenizer = models.load()
    recipes = offered_recipes(model)
    candidates = grid(recipes, [Budget(keep) for keep in KEEPS])
    task = make_text_task(tokenizer, texts.essay(), tokens=args.tokens, continuation=128)
    ratios, demos = [], []
    for _ in range(args.repeats):
        prefill = _plain_prefill(model, task.prompt)
        clock = Clock()
        began = perf_counter()
        comparer = Timed(clock, model, tokenizer, task, "embedded", recipes)
        list(comparer.run(candidates))
        ratios.append((perf_counter() - began - clock.seconds) / prefill)
        demos.append(_demo())
    rows = [
        ("comparison less its continuations / one prefill", ratios, TARGET),
        ("keepset demo, seconds", demos, DEMO_TARGET),
    ]
    section = Section(f"{len(candidates)} rows on {args.tokens} + 128 tokens", ["what", "target", "measured", ""])
    for name, figures, target in rows:
        summary = Summary.of(figures)
        section.rows.append([name, f"≤ {target:g}", shown(summary, 2), verdict(summary, target)])
    publish("compare", [section], {"machine": machine(), "ratios": ratios, "demo_seconds": demos})
    return 0


class Clock:
    """Seconds of the work that every row needs: its continuation and its answer."""

    def __init__(self) -> None:
        self.seconds = 0.0


class Timed(PromptComparer):
    """A comparison that times its continuations."""

    def __init__(self, clock: Clock, *args: Any) -> None:
        self._clock = clock
        CachedPrompt.follow = self._timed(_FOLLOW)  # type: ignore[method-assign]
        super().__init__(*args)

    def _answer(self, cache: Any) -> Any:
        return self._timed(super()._answer)(cache)

    def _timed(self, step: Any) -> Any:
        def timed(*args: Any) -> Any:
            began = perf_counter()
            result = step(*args)
            self._clock.seconds += perf_counter() - began
            return result

        return timed


_FOLLOW = CachedPrompt.follow


@torch.no_grad()
def _plain_prefill(model: Any, ids: Any) -> float:
    model.set_attn_implementation("sdpa")
    model(ids[:, :64])
    began = perf_counter()
    model(ids, past_key_values=DynamicCache(config=model.config), use_cache=True, logits_to_keep=1)
    return perf_counter() - began


def _demo() -> float:
    with tempfile.TemporaryDirectory() as folder:
        command = [str(Path(sys.executable).with_name("keepset")), "demo", "--html", f"{folder}/demo.html"]
        began = perf_counter()
        subprocess.run(command, check=True, capture_output=True)
        return perf_counter() - began


if __name__ == "__main__":
    sys.exit(main())
