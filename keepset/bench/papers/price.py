"""The price of an entry on one H100: seconds from tokens, FLOPs and bytes, without running anything.

A prefill is bound by FLOPs and a decoded token by bytes. Both are divided by the share of the card's peak that
programs usually reach (`PREFILL_SHARE`, `DECODE_SHARE`). The choice of entries is left out, and transformers is slower
if answers are decoded one by one, so a price is a lower bound.
"""

from collections.abc import Mapping
from dataclasses import dataclass
from typing import NamedTuple

from keepset.bench.papers.entry import Entry, Sweep, SweepLine

FLOPS, BANDWIDTH = 989e12, 3.35e12
"""Peaks of an H100 SXM: dense bfloat16 operations and bytes of its memory, per second."""
PREFILL_SHARE, DECODE_SHARE = 0.4, 0.5
BATCH = 16
"""Answers that are decoded side by side, unless an entry asks for one at a time."""
_NUMBER = 2
"""Bytes of a number in bfloat16."""


class ModelSize(NamedTuple):
    """Sizes from a model's configuration."""

    parameters: float
    layers: int
    heads: int
    kv_heads: int
    head_dim: int = 128


MODELS: Mapping[str, ModelSize] = {
    "deepseek-ai/DeepSeek-R1-Distill-Qwen-7B": ModelSize(7.6e9, 28, 28, 4),
    "deepseek-ai/DeepSeek-R1-Distill-Qwen-32B": ModelSize(32.8e9, 64, 40, 8),
    "open-thoughts/OpenThinker3-7B": ModelSize(7.6e9, 28, 28, 4),
    "meta-llama/Llama-3.1-8B-Instruct": ModelSize(8.0e9, 32, 32, 8),
    "meta-llama/Llama-3.1-8B": ModelSize(8.0e9, 32, 32, 8),
    "meta-llama/Llama-3.2-3B-Instruct": ModelSize(3.2e9, 28, 24, 8),
    "meta-llama/Meta-Llama-3-8B-Instruct": ModelSize(8.0e9, 32, 32, 8),
    "mistralai/Mistral-7B-Instruct-v0.2": ModelSize(7.2e9, 32, 32, 8),
    "internlm/internlm2_5-7b-chat-1m": ModelSize(7.7e9, 32, 32, 8),
    "Qwen/Qwen2-7B-Instruct": ModelSize(7.6e9, 28, 28, 4),
    "Qwen/Qwen2.5-7B-Instruct": ModelSize(7.6e9, 28, 28, 4),
    "Qwen/Qwen2.5-14B-Instruct": ModelSize(14.8e9, 48, 40, 8),
    "Qwen/Qwen3-14B": ModelSize(14.8e9, 40, 40, 8),
}


class TaskSize(NamedTuple):
    """A benchmark's size: tasks, examples of each, tokens of a prompt (0: the sweep's lengths) and of an answer."""

    tasks: int
    examples: int
    prompt: int
    answer: int


TASKS: Mapping[str, TaskSize] = {
    "math500": TaskSize(1, 500, 100, 4096),
    "aime24": TaskSize(1, 30, 150, 32768),
    "aime25": TaskSize(1, 30, 150, 32768),
    "gsm8k": TaskSize(1, 1319, 100, 1024),
    # Its abstract: 6,711 words on average, at four tokens for three words. 148 is the mean of the longest answers.
    "longbench": TaskSize(16, 200, 9000, 148),
    # Lengths of GVote's Figure 1; the mean of both for all tasks.
    "longbench2_single": TaskSize(1, 175, 51_000, 128),
    "longbench2_multi": TaskSize(1, 125, 34_000, 128),
    "longbench2": TaskSize(1, 503, 42_500, 128),
    "ruler": TaskSize(13, 500, 0, 99),
    "ruler_cwe": TaskSize(1, 500, 0, 120),
    "needle": TaskSize(1, 50, 0, 10),
}


@dataclass(frozen=True)
class Price:
    """The price of an entry on one H100 over all its models: the most tokens of prefills and of answers, and hours.

    One prefill serves all recipes that need no separate pass.
    """

    prompt_tokens: float = 0.0
    answer_tokens: float = 0.0
    hours: float = 0.0

    def __add__(self, other: "Price") -> "Price":
        return Price(
            self.prompt_tokens + other.prompt_tokens,
            self.answer_tokens + other.answer_tokens,
            self.hours + other.hours,
        )

    @property
    def text(self) -> str:
        """Return the hours with two digits, or "minutes" if they are few."""
        if self.hours < 0.1:
            return "minutes"
        return f"{self.hours:.1f} h" if self.hours < 10 else f"{float(f'{self.hours:.2g}'):.0f} h"


def price_of(entry: Entry) -> Price:
    """Return the price of an entry with the paper's models, tasks, budgets and answers."""
    sizes = [MODELS[model] for model in entry.models]
    total = Price()
    for size in sizes:
        for sweep in entry.sweeps:
            total += _of_sweep(sweep, size)
    settings = getattr(entry.measure, "keywords", {})
    for length in settings.get("lengths", ()):
        caches = 1 + len(settings["methods"])
        runs = caches * (settings["rounds"] + 1)
        answer = settings.get("output") or length // 4
        for size in sizes:
            total += _priced(size, runs, length, runs, answer, length + answer / 2, batch=1)
    return total


def _of_sweep(sweep: Sweep, size: ModelSize) -> Price:
    total, lines = Price(), sweep.lines({})
    for name in sweep.tasks:
        task = TASKS[name]
        examples = sweep.limit or (round(task.examples * sweep.sample) if sweep.sample else task.examples)
        answer = sweep.answer_tokens.get(name, task.answer)
        for length in (task.prompt,) if task.prompt else sweep.lengths:
            asked = task.tasks * examples
            texts = [line.candidate.text for line in lines]
            passes = 1 + sum("kvcompose" in text or "kvzip" in text for text in texts)
            total += _priced(size, asked * passes, length, 0, 0, 0)
            for line in lines:
                entries = _entries(line, length, answer)
                total += _priced(size, 0, 0, asked, answer, entries, batch=1 if sweep.alone else BATCH)
    return total


def _entries(line: SweepLine, prompt: int, answer: int) -> float:
    """Return the mean number of entries to which a decoded token attends."""
    recipe, whole = line.candidate.recipe, prompt + answer / 2
    if recipe is None or line.keep is None:
        return whole
    kept = line.keep if isinstance(line.keep, int) else line.keep * prompt
    grown = answer if recipe.schedule.every is None else recipe.schedule.every
    return min(whole, kept + grown / 2)


def _priced(
    size: ModelSize, prefills: int, prompt: int, answers: int, answer: int, entries: float, batch: int = BATCH
) -> Price:
    """Return the price of so many prefills of `prompt` tokens and so many answers of `answer` tokens."""
    attention = 2 * size.layers * size.heads * size.head_dim * prompt
    prefill = prefills * prompt * (2 * size.parameters + attention) / (FLOPS * PREFILL_SHARE)
    entry = 2 * _NUMBER * size.layers * size.kv_heads * size.head_dim
    token = (_NUMBER * size.parameters / batch + entry * entries) / (BANDWIDTH * DECODE_SHARE)
    return Price(prefills * prompt, answers * answer, (prefill + answers * answer * token) / 3600)
