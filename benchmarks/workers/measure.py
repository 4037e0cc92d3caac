"""The measurements of both workers: one prefill, decode steps after it, bytes of the cache."""

import copy
import gc
from abc import ABC, abstractmethod
from contextlib import AbstractContextManager, nullcontext
from dataclasses import dataclass, field
from pathlib import Path
from time import perf_counter, process_time
from typing import Any

import torch
from kv_bytes import PeakBytes, held_bytes
from torch import Tensor
from transformers import AutoModelForCausalLM, DynamicCache

Answer = dict[str, Any]
WARM_UP_STEPS = 2


@dataclass(frozen=True)
class Setting:
    """What to run: the full cache, or a method with the share of entries that it keeps."""

    method: str
    keep: float
    tokens: int


@dataclass
class Start:
    """Everything that is prepared before the clock: a model, an empty cache, the context of the prefill."""

    model: Any
    cache: Any
    during_prefill: AbstractContextManager[Any] = field(default_factory=nullcontext)


class Side(ABC):
    """One library under measurement. A subclass only defines how it starts a method."""

    def __init__(self, folder: Path, ids: list[int], threads: int):
        torch.set_num_threads(threads)
        torch.set_grad_enabled(False)
        self._ids = torch.tensor([ids])
        self._weights = AutoModelForCausalLM.from_pretrained(folder, dtype=torch.float32).eval()
        self._twins: dict[str, Any] = {}
        self._decoding: dict[Setting, tuple[Start, int]] = {}

    @abstractmethod
    def start(self, setting: Setting) -> Start:
        """Prepare a prefill with `setting`'s method."""

    def start_full(self) -> Start:
        """Prepare a prefill of plain transformers with its usual cache and attention."""
        return Start(self.model_for("full", "sdpa"), DynamicCache())

    def model_for(self, method: str, attention: str | None = None) -> Any:
        """Give each method its own modules over the same weights: no hook reaches another's model."""
        if method not in self._twins:
            shared = {id(weight): weight for weight in self._weights.parameters()}
            model = copy.deepcopy(self._weights, shared)
            if attention:
                model.set_attn_implementation(attention)
            self._twins[method] = model
        return self._twins[method]

    def prefill(self, setting: Setting, repeats: int) -> Answer:
        """Return the seconds of each of `repeats` prefills into a fresh cache, and the bytes of the last cache."""
        seconds, cpu_seconds = [], []
        for _ in range(repeats):
            start = self._begin(setting)
            gc.collect()
            wall, cpu = self._prefill(start, setting.tokens)
            seconds.append(wall)
            cpu_seconds.append(cpu)
            held = _bytes(start.cache)
            del start
        return {"seconds": seconds, "cpu_seconds": cpu_seconds, **held}

    def decode(self, setting: Setting, repeats: int, steps: int) -> Answer:
        """Return seconds per token of `repeats` times `steps` steps, continuing from the last such request."""
        if setting not in self._decoding:
            start = self._begin(setting)
            self._prefill(start, setting.tokens)
            for step in range(WARM_UP_STEPS):
                self._step(start, setting.tokens + step)
            self._decoding[setting] = start, setting.tokens + WARM_UP_STEPS
        seconds = []
        for _ in range(repeats):
            start, position = self._decoding[setting]
            gc.collect()
            began = perf_counter()
            for step in range(steps):
                self._step(start, position + step)
            seconds.append((perf_counter() - began) / steps)
            self._decoding[setting] = start, position + steps
        return {"seconds": seconds, **_bytes(start.cache)}

    def bytes(self, setting: Setting) -> Answer:
        """Return the bytes held after a prefill and at its peak. Watching every operation is too slow to be timed."""
        start = self._begin(setting)
        gc.collect()
        with PeakBytes(start.cache) as peak:
            self._prefill(start, setting.tokens)
        return {**_bytes(start.cache), "kv_bytes_peak": peak.cache_peak, "alive_bytes_peak": peak.alive_peak}

    def forget(self) -> Answer:
        """Release the caches of decode requests."""
        self._decoding.clear()
        return {}

    def _begin(self, setting: Setting) -> Start:
        return self.start_full() if setting.method == "full" else self.start(setting)

    def _prefill(self, start: Start, tokens: int) -> tuple[float, float]:
        """Return wall-clock seconds and processor seconds; other programs hardly affect the second."""
        prompt = self._take(0, tokens)
        with start.during_prefill:
            began, cpu_began = perf_counter(), process_time()
            start.model(prompt, past_key_values=start.cache, use_cache=True, logits_to_keep=1)
        return perf_counter() - began, process_time() - cpu_began  # some presses compress as they are left

    def _step(self, start: Start, position: int) -> None:
        # A cache that is shorter than the text cannot know the position, so it is given.
        start.model(
            self._take(position, position + 1),
            past_key_values=start.cache,
            position_ids=torch.tensor([[position]]),
            use_cache=True,
        )

    def _take(self, begin: int, end: int) -> Tensor:
        if end > self._ids.shape[1]:
            raise ValueError(f"the text has {self._ids.shape[1]} tokens, {end} are needed")
        return self._ids[:, begin:end]


def _bytes(cache: Any) -> Answer:
    held = held_bytes(cache)
    return {"kv_bytes": held.floating, "other_bytes": held.other, "claimed_bytes": getattr(cache, "nbytes", None)}
