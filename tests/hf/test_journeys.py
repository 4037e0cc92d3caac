"""How much of keepset a token, an event and an evaluated example run through: a reader has to know as many files."""

from __future__ import annotations

import sys

import pytest
import torch

import keepset
from keepset.lab.candidate import candidates
from keepset.lab.sweep.engine import Engine, Portion, Skipped
from keepset.lab.sweep.prompts import Asking
from keepset.lab.tasks.task import Example, Question
from tests import tiers
from tests.calls import called
from tests.hf.models import prompt, tiny
from tests.lab.sweep.asked import Exact, letters

EVERY, WINDOW = 24, 8
# A check of types is itself called.
pytestmark = pytest.mark.skipif(tiers.TYPECHECK, reason="types are checked while tests run")


@torch.no_grad()
def test_few_calls_in_few_files() -> None:
    """Under two layers, where nothing is set up any more."""
    model = tiny("llama")
    past = keepset.Cache(model, f"snapkv(window={WINDOW}, keep=32, every={EVERY})")
    model(prompt(1, 60), past_key_values=past)
    journeys = [called(lambda: model(prompt(1, 1), past_key_values=past)) for _ in range(3 * EVERY)]
    assert len(past.events) == 4
    # The newest event; and a token between two of them, before the window of the next.
    event, token = journeys[-1], journeys[-EVERY // 2]
    # 10 of a token's calls are for the model, and 20 for each layer.
    assert token.total() <= 50 and len(token) <= 6, token
    assert event.total() <= 314 and len(event) <= 17, event


def test_an_example_is_evaluated_in_few_files(monkeypatch: pytest.MonkeyPatch) -> None:
    """Under the full cache and one recipe, after another example: what starts a command and reports is apart."""
    monkeypatch.delitem(sys.modules, "peft", raising=False)  # with it, adapters are looked for, too
    engine = Engine(tiny("llama"), letters(), Asking(chat=False))
    asked = candidates([keepset.Recipe.parse("snapkv(window=8, bytes=0.5)")], [])

    def cells(name: str) -> list[str | None]:
        example = Example(
            name, f"All that is known of {name} is said here, and no more.", (Question(" Who?", "x"),), {}
        )
        cells = list(engine.answer(Portion(Exact(), [(0, example)], asked)))
        return [cell.reason if isinstance(cell, Skipped) else cell.error for cell in cells]

    assert cells("cats") == [None, None]
    example = called(lambda: cells("dogs"))
    assert len(example) <= 37, example
