"""Time that the scheduler takes to predict blocks: per step of all running requests, and per waiting request.

`.venv/bin/python benchmarks/admission.py`
"""

from __future__ import annotations

import random
import time
from statistics import median

from keepset.paged.admission import Admission
from keepset.paged.eviction_schedule import EvictionSchedule
from keepset.recipe import Recipe

STEPS = 512


def main() -> None:
    print(f"{'recipe':40} {'running':>8} {'step, us':>10} {'waiting, us':>12}")
    for text in ("snapkv(keep=512, every=256)", "adakv(snapkv, keep=512, every=256)", "snapkv(keep=512, every=16)"):
        for running in (64, 256, 1024):
            draw = random.Random(0)
            schedule = EvictionSchedule(Recipe.parse(text), 0, tuple(range(32)), 8, 128, 16)
            admission = Admission(schedule, 8192, 1)
            prompts = [draw.randint(500, 8000) for _ in range(running)]
            lengths = [prompt + draw.randint(0, 2000) for prompt in prompts]
            stepping, waiting = [], []
            for step in range(STEPS):
                began = time.perf_counter()
                for name, prompt in enumerate(prompts):
                    admission.update(str(name), prompt, lengths[name] + step)
                middle = time.perf_counter()
                admission.required_blocks(4000, 250, lambda _: 0)
                if step:  # in the first all are new
                    stepping.append(middle - began)
                    waiting.append(time.perf_counter() - middle)
            print(f"{text:40} {running:8} {1e6 * median(stepping):10.0f} {1e6 * median(waiting):12.0f}")


if __name__ == "__main__":
    main()
