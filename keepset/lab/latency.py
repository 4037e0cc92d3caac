"""Time and memory of a generation under recipes and the full cache, measured in turns.

CompilerKV (arXiv 2602.08686), Table A1: time to the first token, tokens per second, latency, peak memory by length.
"""

import ctypes
import gc
import time
from collections.abc import Callable, Iterator, Sequence
from dataclasses import asdict, dataclass, field
from pathlib import Path
from statistics import median
from typing import Any

import torch
from jaxtyping import Int
from torch import Tensor
from transformers import DynamicCache, PreTrainedModel

from keepset.errors import KeepsetError
from keepset.hf.cache import Cache
from keepset.lab.memory import dynamic_nbytes, watch_peak
from keepset.lab.record import FULL
from keepset.recipe import Recipe


@dataclass(frozen=True)
class Round:
    """One generation.

    Attributes:
        first_seconds: seconds to the first new token, compression included; `rest_seconds`: those of all other tokens.
        kv_bytes: bytes of keys and values at the end.
        peak_bytes: the most bytes allocated on the device, or resident on a CPU; None if unknown.
    """

    first_seconds: float
    rest_seconds: float
    kv_bytes: int
    peak_bytes: int | None


@dataclass
class Timing:
    """Rounds of one recipe, or of `FULL`, at one length; an end-of-text token does not end a round."""

    recipe: str
    prompt_tokens: int
    output_tokens: int
    rounds: list[Round] = field(default_factory=list)
    error: str | None = None

    def figures(self) -> dict[str, float | None]:
        """Return medians over the rounds; an empty dictionary without rounds."""
        if not self.rounds:
            return {}
        peaks = [run.peak_bytes for run in self.rounds if run.peak_bytes is not None]
        decoded = self.output_tokens - 1
        return {
            "first_seconds": median(run.first_seconds for run in self.rounds),
            "tokens_per_second": median(decoded / run.rest_seconds for run in self.rounds) if decoded else None,
            "seconds": median(run.first_seconds + run.rest_seconds for run in self.rounds),
            "kv_bytes": median(run.kv_bytes for run in self.rounds),
            "peak_bytes": median(peaks) if peaks else None,
        }

    def to_json(self) -> dict[str, Any]:
        """Return every round, and the medians."""
        return {**asdict(self), **self.figures()}


def latency(
    model: PreTrainedModel,
    prompts: Sequence[Int[Tensor, "1 _"]],
    recipes: Sequence[Recipe],
    output_tokens: int,
    rounds: int,
) -> Iterator[list[Timing]]:
    """Yield all timings so far after each generation: prompt by prompt, the full cache and every recipe in turns.

    A recipe that cannot run gets an error and is left out from then on. A short round before the others is not counted.

    Args:
        model: the model.
        prompts: the prompts.
        recipes: the recipes; the full cache comes before them.
        output_tokens: tokens to generate.
        rounds: generations of each cache after each prompt.
    """
    timings: list[Timing] = []
    for prompt in prompts:
        prompt_timings = [Timing(name, prompt.shape[1], output_tokens) for name in (FULL, *map(str, recipes))]
        timings += prompt_timings
        gc.collect()
        for number in range(rounds + 1):
            # The first round is short and does not count: it fills thread pools, allocators and compiled kernels.
            count = output_tokens if number else min(2, output_tokens)
            for timing, recipe in zip(prompt_timings, (None, *recipes), strict=True):
                if timing.error is None:
                    try:
                        generation = _generation(model, prompt, recipe, count)
                    except KeepsetError as error:
                        timing.error = str(error)
                    else:
                        timing.rounds += [generation] if number else []
                yield timings


def _generation(model: PreTrainedModel, prompt: Int[Tensor, "1 tokens"], recipe: Recipe | None, count: int) -> Round:
    """Generate greedily past ends of text; compute only the last token's logits, as `generate` does."""
    cache: Any = DynamicCache(config=model.config) if recipe is None else Cache(model, recipe)
    peak = _watch(prompt.device)
    wait = torch.cuda.synchronize if prompt.is_cuda else lambda: None
    ids, first, start = prompt, 0.0, time.perf_counter()
    try:
        with torch.inference_mode():
            for number in range(count):
                logits = model(ids, past_key_values=cache, use_cache=True, logits_to_keep=1).logits
                ids = logits[:, -1].argmax(-1, keepdim=True)
                if number == 0:
                    wait()
                    first = time.perf_counter() - start
        wait()
        rest_seconds = time.perf_counter() - start - first
        return Round(first, rest_seconds, cache.nbytes if recipe else dynamic_nbytes(cache), peak())
    finally:
        if recipe is not None:
            cache.stop_watching()


def _watch(device: torch.device) -> Callable[[], int | None]:
    """Start watching the peak of memory in use; return a function that returns it."""
    if device.type == "cuda":
        return watch_peak(device)
    try:
        # Memory that the allocator reserves would hide the peak, so it is given back to the system first.
        ctypes.CDLL(None).malloc_trim(0)
        Path("/proc/self/clear_refs").write_text("5", encoding="ascii")  # proc(5): resets the peak
    except (OSError, AttributeError):
        return lambda: None
    return _resident_peak


def _resident_peak() -> int | None:
    """Return Linux's peak of resident memory in bytes."""
    status = Path("/proc/self/status").read_text(encoding="ascii", errors="replace")
    line = next((line for line in status.splitlines() if line.startswith("VmHWM:")), None)
    return None if line is None else int(line.split()[1]) * 1024
