from __future__ import annotations

import re
from pathlib import Path
from typing import Any

import pytest
import torch

import keepset
from keepset import models
from keepset.cli.console import sanitize
from tests.cli.conftest import Run
from tests.hf.models import generate

SUMMARY = re.compile(
    r"[\d.]+ MB of KV cache at the end, first token after [\d.]+ s, (\d+) tokens, ([\d.]+|nan) tokens/s"
)


def encode(tokenizer: Any, before: str, prompt: str) -> torch.Tensor:
    """One user message, as the tokenizer's own chat template has it."""
    message = [{"role": "user", "content": f"{before}\n\n{prompt}"}]
    options = dict(add_generation_prompt=True, return_dict=False, return_tensors="pt")
    return tokenizer.apply_chat_template(message, **options)


def test_streams_what_the_model_generates(run: Run, embedded: Any, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(models, "load", lambda *_: embedded)
    model, tokenizer = embedded
    prompt, recipe = "Name the capital of France.", "snapkv(window=8, keep=0.5)"
    done = run("generate", prompt, "--recipe", recipe, "--max-new-tokens", "8")
    assert (done.code, done.err) == (0, "")

    ids = encode(tokenizer, "", prompt)
    output = generate(model, ids, keepset.Cache(model, recipe), max_new_tokens=8, eos_token_id=2)
    new = output.sequences[0, ids.shape[1] :]
    text = tokenizer.decode(new, skip_special_tokens=True)
    kept = int(0.5 * ids.shape[1]) / ids.shape[1]
    head, tail = done.out.rstrip("\n").rsplit("\n", 1)
    assert head == text
    assert tail.startswith(f"{recipe}: kept {kept:.1%} of {ids.shape[1]} prompt tokens; ")
    match = SUMMARY.search(tail)
    assert match and int(match[1]) == len(new)


@pytest.mark.parametrize("keep", ["1.0", "100000"])
def test_nothing_dropped_gives_the_same_text(run: Run, tiny: Any, text: Path, keep: str) -> None:
    words = ["--text", "text", "--max-new-tokens", "8", "--compare-full"]
    done = run("generate", "Go on.", "--recipe", f"pyramid(tova, keep={keep})", *words)
    assert (done.code, done.err) == (0, "")
    *_, ours, full, verdict = done.out.splitlines()
    assert ours.startswith(f"pyramid(tova, keep={keep}): kept 100.0% of ")
    assert full.startswith("full cache: ")
    assert verdict == "The two texts are the same."
    tokens = SUMMARY.search(ours)
    assert tokens and tokens[1] == "8"


def test_first_difference_is_the_one_shown(run: Run, tiny: Any, text: Path) -> None:
    model, tokenizer = tiny
    recipe = "streaming_llm(keep=16)"
    words = ["--recipe", recipe, "--text", "text", "--max-new-tokens", "12", "--compare-full"]
    done = run("generate", "Go on.", *words)
    ids = encode(tokenizer, text.read_text(encoding="utf-8"), "Go on.")
    ours, full = (
        generate(model, ids, cache, max_new_tokens=12, eos_token_id=2).sequences[0, ids.shape[1] :].tolist()
        for cache in (keepset.Cache(model, recipe), None)
    )
    assert ours != full
    first = next(i for i, (a, b) in enumerate(zip(ours, full, strict=False)) if a != b)
    assert done.out.splitlines()[-1] == f"The two texts differ from token {first} on."
    assert done.out.startswith(sanitize(tokenizer.decode(ours, skip_special_tokens=True)))


def test_a_seed_repeats_a_sample(run: Run, tiny: Any) -> None:
    words = ["generate", "Hello", "--recipe", "knorm(keep=0.5)", "--max-new-tokens", "8", "--temperature", "1"]
    samples = [run(*words, "--seed", seed).out.rsplit("\n", 2)[0] for seed in ("1", "1", "2")]
    assert samples[0] == samples[1] != samples[2]


@pytest.mark.parametrize(("schedule", "kept", "later"), [("every=3", 8, 3), ("prefill=False, every=4", None, 2)])
def test_compressions_while_decoding_are_counted(
    run: Run, tiny: Any, schedule: str, kept: int | None, later: int
) -> None:
    recipe = f"tova(keep=8, {schedule})"
    canonical = str(keepset.Recipe.parse(recipe))
    done = run("generate", "Go on.", "--recipe", recipe, "--max-new-tokens", "11")
    assert (done.code, done.err) == (0, "")
    ours = done.out.splitlines()[-1]
    match = re.match(r"(.*): kept ([\d.]+)% of (\d+) prompt tokens, compressed (\d+) times while decoding; ", ours)
    assert match and match[1] == canonical and int(match[4]) == later
    length = int(match[3])
    assert match[2] == f"{100 * (kept or length) / length:.1f}"


def test_a_known_question_decides_what_stays(run: Run, tiny: Any, text: Path) -> None:
    model, tokenizer = tiny
    recipe, question = "kvcompose(keep=12)", "When does it end?"
    words = ["generate", "Go on.", "--recipe", recipe, "--text", "text", "--max-new-tokens", "12"]
    done = run(*words, "--question", question)
    assert (done.code, done.err) == (0, "")
    ids = encode(tokenizer, text.read_text(encoding="utf-8"), "Go on.")
    task = torch.tensor([tokenizer.encode(question, add_special_tokens=False)])
    aware = keepset.Cache(model, recipe, task_tokens=task)
    ours = generate(model, ids, aware, max_new_tokens=12, eos_token_id=2).sequences[0, ids.shape[1] :].tolist()
    assert done.out.startswith(sanitize(tokenizer.decode(ours, skip_special_tokens=True)))
    agnostic = keepset.Cache(model, recipe)
    generate(model, ids, agnostic, max_new_tokens=1)
    assert not torch.equal(agnostic.keep_set.mask(ids.shape[1]), aware.keep_set.mask(ids.shape[1]))


def test_a_question_that_nobody_looks_at_is_refused(run: Run, tiny: Any) -> None:
    done = run("generate", "Go on.", "--recipe", "knorm(keep=8)", "--question", "When?")
    assert done.code == 2 and "knorm is not aware of a task" in done.err
