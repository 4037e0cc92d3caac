from __future__ import annotations

import json
import re
from pathlib import Path
from typing import Any

import pytest
import torch

import keepset
from keepset.bench.analysis.diagnostics import repetition_rate
from tests.cli.conftest import Run
from tests.cli.test_generate import encode
from tests.hf.models import generate

RECIPE = "tova(keep=24, every=8)"
MODEL = "SmolLM2-135M-Instruct"
SHORT = "A prompt of 34 tokens is short (minimum 256): the entries that were dropped will be missed.\n"


def alone(tiny: Any, ids: torch.Tensor, recipe: str, new: int) -> tuple[keepset.Cache, torch.Tensor]:
    """The same generation without a tracer."""
    cache = keepset.Cache(tiny[0], recipe, history=True)
    return cache, generate(tiny[0], ids, cache, max_new_tokens=new, eos_token_id=2).sequences[0]


def test_json(run: Run, tiny: Any) -> None:
    done = run("trace", "Go on.", "--recipe", RECIPE, "--output-tokens", "30", "--json", "-")
    assert (done.code, done.err) == (0, SHORT)
    figures = json.loads(done.out)
    assert figures["model"] == MODEL
    ids = encode(tiny[1], "", "Go on.")
    cache, sequence = alone(tiny, ids, RECIPE, 30)
    assert figures["recipe"] == RECIPE and figures["prompt_tokens"] == ids.shape[1]
    assert figures["tokens"] == len(sequence)
    assert figures["repetition"] == repetition_rate(sequence[ids.shape[1] :])
    assert figures["text"] == tiny[1].decode(sequence[ids.shape[1] :], skip_special_tokens=True)
    assert figures["tokens_per_second"] > 0
    assert len(cache.events) > 2
    for row, event in zip(figures["events"], cache.events, strict=True):
        assert (row["length"], row["entries"], row["kept"]) == (event.length, event.entries, event.kept)


def test_table(run: Run, tiny: Any) -> None:
    done = run("trace", "Go on.", "--recipe", RECIPE, "--output-tokens", "30")
    assert (done.code, done.err) == (0, SHORT)
    first, header, *rows, totals = done.out.split("\n")[:-1]
    length = encode(tiny[1], "", "Go on.").shape[1]
    assert first == f"{RECIPE}: {length} tokens of prompt, 30 after it."
    assert header.split() == ["length", "kept", "per", "head", "of", "wipe-out", "IoU", "middle", "longest", "gap"]
    lengths = list(range(length, length + 30, 8))
    assert [int(row.split()[0]) for row in rows] == lengths
    assert [len(row.split()) for row in rows] == [6] + [7] * (len(lengths) - 1)  # the first event has no IoU
    assert totals.startswith("Means over the events: wipe-out ") and "(regions of 16 tokens), IoU 0." in totals
    assert "Repeated 4-grams: " in totals and totals.endswith(" tokens/s.")


def test_where_a_text_comes_from(run: Run, tiny: Any, text: Path) -> None:
    tokenizer, words = tiny[1], ("--recipe", RECIPE, "--output-tokens", "2", "--json", "-")
    essay = text.read_text(encoding="utf-8")
    lengths = {
        ("--text", "text"): len(tokenizer(essay)["input_ids"]),
        ("Go on.", "--text", "text"): encode(tokenizer, essay, "Go on.").shape[1],
    }
    for source, length in lengths.items():
        assert json.loads(run("trace", *source, *words).out)["prompt_tokens"] == length


def test_interrupted(run: Run, tiny: Any, monkeypatch: pytest.MonkeyPatch) -> None:
    from keepset.bench.analysis.trace import Tracer

    put, calls = Tracer.put, []

    def stop(self: Any, value: torch.Tensor) -> None:
        put(self, value)
        calls.append(value)
        if len(calls) == 12:
            raise KeyboardInterrupt

    monkeypatch.setattr(Tracer, "put", stop)
    done = run("trace", "Go on.", "--recipe", RECIPE, "--output-tokens", "30", "--json", "-")
    assert done.code == 130 and done.err == f"{SHORT}interrupted after 11 of 30 tokens\n"
    figures = json.loads(done.out)
    assert figures["tokens"] - figures["prompt_tokens"] == 11 and len(figures["events"]) == 2


def test_nothing_compressed(run: Run, tiny: Any) -> None:
    done = run("trace", "Go on.", "--recipe", "tova(keep=8, prefill=False, every=99)", "--output-tokens", "4")
    assert done.code == 0 and "Nothing was compressed" in done.out


def test_every_column_is_explained(run: Run, tiny: Any) -> None:
    """In the help, and below the table on a terminal."""
    from keepset.cli.trace import _LEGEND, events_table

    table = events_table({"heads": 1, "events": []})
    shown = " ".join(run("trace", "--help").out.split())
    for name in (table.head, *(column.title for column in table.columns)):
        assert f"{name} is " in shown or f"{name} are " in shown or f"{name} and of are " in shown, name
        assert re.search(rf"(^|; |, ){name}[:,]", _LEGEND), name


def test_a_budget_that_always_stays_is_said_to_choose_nothing(run: Run, tiny: Any, text: Path) -> None:
    words = ("--text", "text", "--output-tokens", "2", "--recipe", "snapkv(window=8, keep=8, every=8)")
    assert run("trace", "Go on.", *words).err.startswith("Nothing is chosen: snapkv(window=8, keep=8, every=8) always")
