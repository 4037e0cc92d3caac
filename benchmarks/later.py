"""How near events after the prompt stay to the full cache: between the turns of a chat, and while a text goes on."""

import argparse
import sys
from collections import defaultdict
from collections.abc import Iterator
from statistics import fmean
from typing import Any

import torch
from harness import progress
from harness.report import Section, machine, publish
from torch import Tensor

from keepset import Cache, models
from keepset.lab import texts
from keepset.lab.analysis import intervals

TURNS, TURN, NEXT = 3, 500, 200
PROMPT, LATER, STEP = 600, 640, 32


def recipes() -> list[str]:
    """Return the recipes: with `match` that fits after the prompt, that fits nothing then, and without it."""
    turns = [
        f"{method}, bytes={share}, turns=True)"
        for share in (0.25, 0.1)
        for method in ("pool(distilled", "match(pool(distilled)", "quantized(pool(distilled)")
    ]
    turns += [f"quantized(match(pool(distilled)), bytes={share}, turns=True)" for share in (0.25, 0.1)]
    whiles = [
        f"{method}, keep=256, every={every})"
        for every in (64, 128, 320)
        for method in ("pool(distilled", "match(pool(distilled), window=0", "match(pool(distilled)")
    ]
    return turns + whiles


def chunks(recipe: str) -> list[int]:
    """Return where the forwards of a recipe's text end."""
    if "turns" in recipe:
        return [*range(TURN, TURNS * TURN + 1, TURN), TURNS * TURN + NEXT]
    return list(range(PROMPT, PROMPT + LATER + 1, STEP))


def predicted(model: Any, ids: Tensor, recipe: str) -> Iterator[Tensor]:
    """Yield the log-probabilities of a text's tokens after its first event.

    Args:
        model: the model.
        ids: the text, `[1, tokens]`.
        recipe: the cache's recipe; with `turns=True` each forward is a turn.
    """
    cache, ends = Cache(model, recipe), chunks(recipe)
    for first, end in zip([0, *ends], ends, strict=False):
        if first and "turns" in recipe:
            cache.compact()
        logits = model(ids[:, first:end], past_key_values=cache).logits[0]
        if first >= (TURNS * TURN if "turns" in recipe else PROMPT):
            yield logits.log_softmax(-1)


@torch.no_grad()
def main() -> int:
    """Measure, show and write."""
    parser = argparse.ArgumentParser(description=__doc__)
    parser.add_argument("--texts", type=int, default=8, help="essays that are long enough, by name (default 8)")
    parser.add_argument("--threads", type=int, default=1, help="torch threads (default 1)")
    args = parser.parse_args()
    torch.set_num_threads(args.threads)
    model, tokenizer = models.load()
    needed, found, names = TURNS * TURN + NEXT, defaultdict[str, list[float]](list), list[str]()
    essays = ((name, tokenizer(texts.essay(name), return_tensors="pt").input_ids) for name in texts.essays())
    long_enough = [(name, ids[:, :needed]) for name, ids in essays if ids.shape[1] >= needed][: args.texts]
    try:
        with progress.bar() as bar:
            bars = bar.add_task("", total=len(long_enough) * len(recipes()))
            for name, ids in long_enough:
                bar.update(bars, description=name)
                full = model(ids).logits[0].log_softmax(-1)
                of_text = dict[str, float]()
                for recipe in recipes():
                    ours = torch.cat(list(predicted(model, ids, recipe)))
                    end = chunks(recipe)[-1]
                    target = full[end - len(ours) : end]
                    of_text[recipe] = float((target.exp() * (target - ours)).sum(-1).mean())
                    bar.advance(bars)
                for recipe, divergence in of_text.items():  # a text counts with all its recipes or not at all
                    found[recipe].append(divergence)
                names.append(name)
    except KeyboardInterrupt:
        print("interrupted: whole texts follow", file=sys.stderr)
    section = Section(f"{len(names)} texts", ["recipe", "KL, nats", "95 %"])
    for recipe, figures in found.items():
        interval = intervals.of_mean(figures)
        bounds = "" if interval is None else f"{interval.low:.4f}..{interval.high:.4f}"
        section.rows.append([recipe, f"{fmean(figures):.4f}", bounds])
    section.notes.append(
        f"turns=True: {TURNS} turns of {TURN} tokens, and {NEXT} more. every=: a prompt of {PROMPT}, and {LATER} "
        f"more, {STEP} at a time. Intervals: bootstrap over texts, {intervals.DRAWS} draws."
    )
    data = {"machine": machine(), "texts": names, "settings": vars(args), "kl": found}
    publish("later", [section], data)
    return 0


if __name__ == "__main__":
    sys.exit(main())
