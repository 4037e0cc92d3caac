"""Cost and gain of compressing while decoding: the events' share of the time, and the speed at the end."""

import argparse
import copy
import json
import sys
from collections.abc import Callable
from dataclasses import dataclass, field
from pathlib import Path
from time import perf_counter
from typing import Any

import torch
from harness import progress
from harness.prompt import prepared
from harness.report import Section, machine, publish
from harness.summary import Summary, ratios, shown
from torch import Tensor
from transformers import AutoModelForCausalLM, DynamicCache
from transformers.utils import logging

import keepset
from keepset.lab.compare.decode import feed_slices

RECIPES = (
    "snapkv(keep={keep}, every={every})",
    "expected_attention(keep={keep}, every={every})",
    "ams(tova, keep={keep}, every={every})",
)
EVENTS_TARGET, SPEED_TARGET = 0.03, 1.25
STEPS = 16  # of each cache in a round
PROMPT = 64  # if only the length at the end counts, all other tokens are generated


@dataclass
class Measured:
    """One recipe's rounds: the events' share of decoding time, and seconds per token at the end, for both caches."""

    shares: list[float] = field(default_factory=list)
    seconds: list[float] = field(default_factory=list)
    full_seconds: list[float] = field(default_factory=list)
    events: int = 0
    error: str | None = None

    @property
    def speed(self) -> Summary | None:
        return ratios(self.full_seconds, self.seconds)


def main() -> int:
    """Measure, show, write; fail if a measurement failed."""
    parser = argparse.ArgumentParser(description=__doc__)
    parser.add_argument("--repeats", type=int, default=5, help="rounds (default 5)")
    parser.add_argument("--threads", type=int, default=1, help="torch threads (default 1)")
    parser.add_argument("--model", type=Path, help="folder of a converted model (default: the embedded one)")
    parser.add_argument("--generated", type=int, default=1024, help="tokens of a generation whose events are timed")
    parser.add_argument("--length", type=int, default=4096, help="tokens at whose end the speed is taken")
    parser.add_argument("--keep", type=int, default=512, help="entries per head")
    parser.add_argument("--every", type=int, default=256, help="tokens between events")
    args = parser.parse_args()
    torch.set_num_threads(args.threads)
    torch.set_grad_enabled(False)
    logging.disable_progress_bar()

    recipes = [recipe.format(keep=args.keep, every=args.every) for recipe in RECIPES]
    table = {recipe: Measured() for recipe in recipes}
    # The rounds at the end, and one before them to warm up.
    tokens = max(args.keep + args.generated, args.length + (args.repeats + 1) * STEPS)
    with prepared(args.model, tokens) as prompt:
        model = AutoModelForCausalLM.from_pretrained(prompt.model, dtype=torch.float32).eval()
        ids = torch.tensor([json.loads(prompt.ids_file.read_text())])
    plain = copy.deepcopy(model, {id(weight): weight for weight in model.parameters()})
    try:
        with progress.bar() as bar:
            task = bar.add_task("", total=len(recipes) * (args.repeats + 1))
            for recipe, measured in table.items():
                bar.update(task, description=recipe)
                _recipe(measured, recipe, (model, plain), ids, args, lambda: bar.advance(task))
    except KeyboardInterrupt:
        print("interrupted: what is done follows", file=sys.stderr)

    sections = [_shares(table, args), _speeds(table, args)]
    settings = {name: getattr(args, name) for name in ("generated", "length", "keep", "every", "repeats", "threads")}
    rows = [{"recipe": recipe, **measured.__dict__} for recipe, measured in table.items()]
    publish("decode", sections, {"machine": machine(), "settings": settings, "rows": rows})
    return 1 if any(measured.error for measured in table.values()) else 0


def _recipe(
    measured: Measured, recipe: str, models: tuple[Any, Any], ids: Tensor, args: Any, done: Callable[[], None]
) -> None:
    model, plain = models
    try:
        for _ in range(args.repeats):
            _share(measured, model, recipe, ids, args)
            done()
        ours = keepset.Cache(model, recipe)
        full = DynamicCache(config=plain.config)
        for each, cache in ((model, ours), (plain, full)):
            each(ids[:, :PROMPT], past_key_values=cache, logits_to_keep=1)
            for piece in feed_slices(args.length - PROMPT, args.every):
                part = ids[:, PROMPT : args.length][:, piece]
                each(part, past_key_values=cache, logits_to_keep=1)
        for number in range(args.repeats + 1):
            start = args.length + number * STEPS
            pair = [(measured.seconds, model, ours), (measured.full_seconds, plain, full)]
            for seconds, each, cache in pair if number % 2 else pair[::-1]:
                took = _decode(each, cache, ids[:, start : start + STEPS])
                if number > 0:  # the first round warms up
                    seconds.append(took / STEPS)
        done()
    except keepset.KeepsetError as error:
        measured.error = str(error)


def _share(measured: Measured, model: Any, recipe: str, ids: Tensor, args: Any) -> None:
    """Feed a prompt as long as the kept entries, then one token after another."""
    cache = keepset.Cache(model, recipe)
    model(ids[:, : args.keep], past_key_values=cache, logits_to_keep=1)
    took = _decode(model, cache, ids[:, args.keep : args.keep + args.generated])
    events = [event for event in cache.events if event.length > args.keep]
    measured.events = len(events)
    measured.shares.append(sum(event.seconds for event in events) / took)


def _decode(model: Any, cache: Any, tokens: Tensor) -> float:
    """Return the seconds of feeding the tokens one by one."""
    began = perf_counter()
    for token in tokens[0]:
        model(token[None, None], past_key_values=cache)
    return perf_counter() - began


def _shares(table: dict[str, Measured], args: Any) -> Section:
    title = f"All events of {args.generated} decoded tokens / their decoding time"
    section = Section(title, ["recipe", "target", "share of time", "", "events"])
    for recipe, measured in table.items():
        share = Summary.of(measured.shares)
        met = share is not None and share.median <= EVENTS_TARGET
        section.rows.append(
            [
                recipe,
                f"≤ {EVENTS_TARGET}",
                shown(share, 4),
                "failed" if measured.error else "-" if share is None else "met" if met else "not met",
                str(measured.events),
            ]
        )
        section.notes += [f"{recipe}: {measured.error}"] if measured.error else []
    return section


def _speeds(table: dict[str, Measured], args: Any) -> Section:
    title = f"Tokens per second after {args.length} tokens: with a recipe / full cache"
    section = Section(title, ["recipe", "target", "speed", "", "tokens/s", "full"])
    for recipe, measured in table.items():
        met = measured.speed is not None and measured.speed.median >= SPEED_TARGET
        section.rows.append(
            [
                recipe,
                f"≥ {SPEED_TARGET}",
                shown(measured.speed, 2),
                "failed" if measured.error else "-" if measured.speed is None else "met" if met else "not met",
                *(shown(Summary.of([1 / s for s in each]), 1) for each in (measured.seconds, measured.full_seconds)),
            ]
        )
    return section


if __name__ == "__main__":
    sys.exit(main())
