import io
import re
from pathlib import Path
from typing import Any

import pytest
import torch

import keepset
from keepset import models
from keepset.lab.cli.grid import sanitize
from keepset.lab.texts import TextStreamer
from tests.hf.models import generate
from tests.lab.cli.conftest import Run

SUMMARY = re.compile(
    r"[\d.]+ MB of KV cache at the end(?:, [\d.]+ MB of it for tokens to come and the next event)?, "
    r"first token after [\d.]+ s, (\d+) tokens, ([\d.]+|nan) tokens/s"
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
    done = run("generate", prompt, "--recipe", recipe, "--output-tokens", "4")
    assert done.code == 0

    ids = encode(tokenizer, "", prompt)
    output = generate(model, ids, keepset.Cache(model, recipe), max_new_tokens=4, eos_token_id=2)
    new = output.sequences[0, ids.shape[1] :]
    text = tokenizer.decode(new, skip_special_tokens=True)
    kept = int(0.5 * ids.shape[1]) / ids.shape[1]
    assert done.out == f"{text}\n"
    tail, short = done.err.splitlines()
    assert short.startswith(f"A prompt of {ids.shape[1]} tokens is short (minimum 256): ")
    assert tail.startswith(f"{recipe}: kept {kept:.1%} of {ids.shape[1]} prompt tokens; ")
    match = SUMMARY.search(tail)
    assert match and int(match[1]) == len(new)


def test_nothing_dropped_gives_the_same_text(run: Run, tiny: Any, text: Path) -> None:
    words = ["--text", "text", "--output-tokens", "8", "--compare-full"]
    done = run("generate", "Go on.", "--recipe", "pyramid(tova, keep=1.0)", *words)
    assert done.code == 0
    ours, full, verdict = done.err.splitlines()
    written, again = done.out.split("\nThe full cache:\n")
    assert written == again
    assert ours.startswith("pyramid(tova, keep=1.0): kept 100.0% of ")
    assert full.startswith("full cache: ")
    assert verdict == "The two texts are the same."
    tokens = SUMMARY.search(ours)
    assert tokens and tokens[1] == "8"


def test_first_difference_is_the_one_shown_and_a_seed_repeats_a_sample(run: Run, tiny: Any, text: Path) -> None:
    words = ["generate", "Hello", "--recipe", "knorm(keep=0.5)", "--output-tokens", "8", "--temperature", "1"]
    samples = [run(*words, "--seed", seed).out for seed in ("1", "1", "2")]
    assert samples[0] == samples[1] != samples[2]
    model, tokenizer = tiny
    recipe = "streaming_llm(keep=16)"
    words = ["--recipe", recipe, "--text", "text", "--output-tokens", "12", "--compare-full"]
    done = run("generate", "Go on.", *words)
    ids = encode(tokenizer, text.read_text(encoding="utf-8"), "Go on.")
    ours, full = (
        generate(model, ids, cache, max_new_tokens=12, eos_token_id=2).sequences[0, ids.shape[1] :].tolist()
        for cache in (keepset.Cache(model, recipe), None)
    )
    assert ours != full
    first = next(i for i, (a, b) in enumerate(zip(ours, full, strict=False)) if a != b)
    assert done.err.splitlines()[-1] == f"The two texts differ from token {first} on."
    written = [sanitize(tokenizer.decode(ids, skip_special_tokens=True)) for ids in (ours, full)]
    assert done.out == f"{written[0]}\n\nThe full cache:\n{written[1]}\n"


@pytest.mark.parametrize(("schedule", "kept", "later"), [("every=3", 8, 3), ("prefill=False, every=4", None, 2)])
def test_compressions_in_decoding_are_counted(run: Run, tiny: Any, schedule: str, kept: int | None, later: int) -> None:
    recipe = f"tova(keep=8, {schedule})"
    canonical = str(keepset.Recipe.parse(recipe))
    done = run("generate", "Go on.", "--recipe", recipe, "--output-tokens", "11")
    assert done.code == 0
    ours = done.err.splitlines()[0]
    match = re.match(r"(.*): kept ([\d.]+)% of (\d+) prompt tokens, compressed (\d+) times while decoding; ", ours)
    assert match and match[1] == canonical and int(match[4]) == later
    length = int(match[3])
    assert match[2] == f"{100 * (kept or length) / length:.1f}"


def test_a_known_question_decides_what_stays(run: Run, tiny: Any, text: Path) -> None:
    model, tokenizer = tiny
    recipe, question = "kvcompose(keep=12)", "When does it end?"
    words = ["generate", "Go on.", "--recipe", recipe, "--text", "text", "--output-tokens", "12"]
    done = run(*words, "--question", question)
    assert done.code == 0
    ids = encode(tokenizer, text.read_text(encoding="utf-8"), "Go on.")
    task = torch.tensor([tokenizer.encode(question, add_special_tokens=False)])
    aware = keepset.Cache(model, recipe, task_tokens=task)
    ours = generate(model, ids, aware, max_new_tokens=12, eos_token_id=2).sequences[0, ids.shape[1] :].tolist()
    assert done.out.startswith(sanitize(tokenizer.decode(ours, skip_special_tokens=True)))
    agnostic = keepset.Cache(model, recipe)
    generate(model, ids, agnostic, max_new_tokens=1)
    assert not torch.equal(agnostic.keep_set.mask(ids.shape[1]), aware.keep_set.mask(ids.shape[1]))


@pytest.mark.parametrize("command", ["generate", "chat"])
def test_an_answer_that_ctrl_c_ends_ends_its_line(
    run: Run, tiny: Any, monkeypatch: pytest.MonkeyPatch, command: str
) -> None:
    put = TextStreamer.put

    def interrupted(streamer: TextStreamer, value: Any) -> None:
        if len(streamer.ids) == 2:
            raise KeyboardInterrupt
        put(streamer, value)

    monkeypatch.setattr(TextStreamer, "put", interrupted)
    monkeypatch.setattr(tiny[1], "decode", lambda ids, **_: "a" * len(ids))
    monkeypatch.setattr("sys.stdin", io.StringIO("Hello\n"))
    turns = ["--recipe", "snapkv(window=8, bytes=0.5, turns=True)"]
    done = run("generate", "Hello", "--recipe", "tova(keep=4)") if command == "generate" else run("chat", *turns)
    assert (done.code, done.out, done.err) == (130, "aa\n", "interrupted\n")
