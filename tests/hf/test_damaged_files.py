"""Saved contexts' files with any damage: each loads as what was saved, or is refused with a KeepsetError.

`python -m tests.hf.test_damaged_files --minutes 60 --seed 1` goes on by hand.
"""

from __future__ import annotations

import random
import tempfile
import time
from collections import Counter
from contextlib import suppress
from pathlib import Path
from typing import Any

import pytest
import torch

import keepset
from keepset import KeepsetError
from keepset.contexts import file as context_files
from tests.hf.damage import damaged
from tests.hf.models import LAYOUTS, prompt, tiny
from tests.proof import by_hand, take_steps

CONTEXTS = {
    "dense": ("llama", LAYOUTS["dense"].format(keep=12)),
    "ragged": ("llama", LAYOUTS["head-ragged"].format(keep=12)),
    "goes on": ("llama", "snapkv(window=5, kernel=3, keep=12, every=4)"),
    "moments": ("llama", "expected_attention(future=16, buffer=6, keep=12, every=4)"),
    "remembers": ("llama", "ams(snapkv(window=4), window=5, kernel=3, sinks=2, recent=4, keep=12, every=4)"),
    "8 bits": ("llama", "int8(snapkv(window=5, kernel=3), keep=12, every=4)"),
    "4 bits": ("llama", "quantized(adakv(snapkv(window=5, kernel=3)), bits=4, keep=12, every=4)"),
    "biases": ("llama", "match(knorm, keep=12)"),
    "windows": ("gemma3", "knorm(keep=12)"),
    "states": ("falcon_h1", "snapkv(window=5, kernel=3, keep=12, every=4)"),
    "layers of states": ("lfm2", "knorm(keep=12)"),
}
"""A model's name and a recipe; rows of two contexts are padded."""
SECONDS = 10.0
"""In which a file is refused or loaded and gone on with: far more than that takes."""


class Proof:
    """Damages files, reads them in every way and goes on from what was read."""

    def __init__(self, folder: Path) -> None:
        self._folder = folder
        self.counts: Counter[str] = Counter()
        self._whole: dict[str, tuple[Any, bytes, torch.Tensor]] = {}
        for name, (model_name, recipe) in CONTEXTS.items():
            model, path = tiny(model_name), folder / "whole"
            rows = 2 if name in ("ragged", "windows") else 1
            ids = prompt(rows, 30)
            mask = torch.ones_like(ids)
            mask[1:, :7] = 0
            cache = keepset.Cache(model, recipe)
            with torch.no_grad():
                model(ids, attention_mask=mask, past_key_values=cache)
            cache.save(path, force=True, token_ids=ids[0].tolist() if rows == 1 else None)
            self._whole[name] = model, path.read_bytes(), self._answer(model, keepset.Cache.load(path, model))

    def step(self, seed: str) -> None:
        """Damage one file by this seed, and use it."""
        draw = random.Random(seed)
        name = draw.choice(list(self._whole))
        model, content, answer = self._whole[name]
        damage, new, sealed = damaged(content, draw)
        path = self._folder / "damaged"
        path.write_bytes(new)
        begun = time.monotonic()
        for read in (context_files.header, context_files.contents):
            with suppress(KeepsetError):
                read(path)
        with suppress(KeepsetError):
            context_files.entries(path, context_files.contents(path).digest)
        try:
            found = self._answer(model, keepset.Cache.load(path, model))
        except KeepsetError as error:
            message = str(error)
            assert "\n" not in message and len(message) < 1000, message
            self.counts["refused"] += 1
        else:
            self.counts["loaded"] += 1
            assert sealed or new == content or torch.equal(found, answer), "it was damaged and gave other answers"
        self.counts["files"] += 1
        self.counts[damage.removesuffix(", sealed").split(" and ")[0]] += 1
        assert time.monotonic() - begun < SECONDS, damage

    @staticmethod
    @torch.no_grad()
    def _answer(model: Any, cache: keepset.Cache) -> torch.Tensor:
        """The logits of ten further tokens, with events among them, and those of a question to a fork."""
        rows = len(cache.require_prompt().lengths)
        logits = []
        question = cache.ask(prompt(rows, 3, 5))
        logits.append(model(**question).logits)
        length = cache.get_seq_length()
        if cache.require_prompt().valid is None:
            for index in range(10):
                positions = torch.full((rows, 1), length + index)
                logits.append(model(prompt(rows, 1, index), position_ids=positions, past_key_values=cache).logits)
        return torch.cat(logits, 1)


def prove(folder: Path, seed: int, steps: range, minutes: float | None = None, show: bool = False) -> Counter[str]:
    """Take steps, as `take_steps` says, and return what was counted."""
    proof = Proof(folder)
    take_steps(proof.step, proof.counts, seed, steps, minutes, show)
    return proof.counts


@pytest.mark.parametrize(
    "steps", [range(60), pytest.param(range(60, 1000), marks=pytest.mark.full)], ids=["few", "many"]
)
def test_a_file_of_any_content_is_what_was_saved_or_refused(steps: range, tmp_path: Path) -> None:
    counts = prove(tmp_path, 1, steps)
    assert counts["files"] == len(steps) and counts["refused"] > counts["loaded"] > 0


if __name__ == "__main__":
    with tempfile.TemporaryDirectory() as name:
        by_hand(lambda seed, steps, minutes: prove(Path(name), seed, steps, minutes, show=True))
