"""`keepset context`: one text, compressed once, and questions about it."""

import io
import re
import shutil
from pathlib import Path
from typing import Any

import pytest
import safetensors.torch
import torch

import keepset
from keepset.contexts import file as context_files
from keepset.lab.cli.grid import sanitize
from keepset.lab.texts import chat_parts
from tests.hf.models import generate, hooks_on
from tests.lab.cli.conftest import Run, check_refused

RECIPE = "adakv(snapkv(window=8), keep=0.5)"
BUILD = ("context", "build", "--text", "text", "--out", "saved", "--recipe", RECIPE)


def parts(tokenizer: Any, text: str, question: str) -> list[torch.Tensor]:
    """Context and question, each encoded by itself."""
    said = chat_parts(tokenizer, text, question)
    return [tokenizer(part, add_special_tokens=False, return_tensors="pt")["input_ids"] for part in said]


def test_tells_what_was_kept(run: Run, tiny: Any, text: Path) -> None:
    done = run(*BUILD)
    assert done.code == 0 and done.err.startswith(f"{RECIPE} keeps what the newest 8 tokens of the text attend to")
    match = re.fullmatch(
        r"saved: (\d+) tokens under (.*) in [\d.]+ s; ([\d.]+) MB of keys and values in 16 bits before, "
        r"([\d.]+) MB after \(([\d.]+)%\); the file has ([\d.]+) MB\n",
        done.out,
    )
    assert match and match[2] == RECIPE
    length = parts(tiny[1], text.read_text(encoding="utf-8"), "")[0].shape[1]
    assert int(match[1]) == length
    heads = 2 * 2  # layers, KV heads
    # On a model of 16 bits an entry has 32 bytes and its position.
    assert (match[3], match[4]) == (f"{length * heads * 32 / 1e6:.1f}", f"{length // 2 * heads * 36 / 1e6:.1f}")
    assert match[5] == f"{100 * (length // 2) * 36 / (length * 32):.1f}"
    assert float(match[6]) == round(Path("saved").stat().st_size / 1e6, 1)
    assert sorted(path.name for path in Path.cwd().iterdir()) == ["saved", "text"]
    assert not hooks_on(tiny[0])
    words = ("context", "ask", "saved", "Why?", "--output-tokens", "5000")
    check_refused(run, *words, because="do not fit the model's context of 2048")


@pytest.mark.parametrize(("recipe", "count"), [("adakv(snapkv(window=32), bytes=0.5)", 32), ("knorm(bytes=0.5)", 0)])
def test_a_recipe_that_looks_at_the_texts_end_is_said_to_lose_facts(
    run: Run, tiny: Any, text: Path, recipe: str, count: int
) -> None:
    said = run("context", "build", "--text", "text", "--out", "saved", "--recipe", recipe).err
    assert (f"{recipe} keeps what the newest {count} tokens of the text attend to" in said) is bool(count)
    assert ("quantized(match(reread), bytes=0.25, short=256) looks at all of the text." in said) is bool(count)


def test_a_short_text_is_compressed_only_by_a_recipe_that_is_named(run: Run, tiny: Any) -> None:
    Path("few").write_text("A few words are no text that could spare any of them.")
    length = parts(tiny[1], Path("few").read_text(), "")[0].shape[1]
    done = run("context", "build", "--text", "few", "--out", "whole")
    assert f"The prompt stays whole: it has {length} tokens, fewer than short=256" in done.err and length < 256
    assert int(keepset.Cache.load("whole", tiny[0]).keep_set.counts.min()) == length
    done = run("context", "build", "--text", "few", "--out", "less", "--recipe", "knorm(keep=0.5)")
    assert f"A prompt of {length} tokens is short (minimum 256)" in done.err
    assert int(keepset.Cache.load("less", tiny[0]).keep_set.counts.max()) == length // 2


@pytest.mark.few(1)
@pytest.mark.parametrize("recipe", ["tova(keep=24, every=4)", RECIPE, "tova(keep=24, prefill=False, every=900)"])
def test_answers_are_those_of_a_cache_that_was_never_saved(run: Run, tiny: Any, text: Path, recipe: str) -> None:
    model, tokenizer = tiny
    assert run("context", "build", "--text", "text", "--out", "saved", "--recipe", recipe).code == 0
    before = Path("saved").read_bytes()
    for question in ("What is this about?", "Who wrote it, and when?"):
        done = run("context", "ask", "saved", question, "--output-tokens", "9")
        assert done.code == 0
        context, rest = parts(tokenizer, text.read_text(encoding="utf-8"), question)
        cache = keepset.Cache(model, recipe)
        with torch.no_grad():
            model(context, past_key_values=cache)
        output = generate(model, torch.cat([context, rest], 1), cache, max_new_tokens=9, eos_token_id=2)
        new = output.sequences[0, context.shape[1] + rest.shape[1] :]
        answer, last = done.out.removesuffix("\n"), done.err
        assert answer == sanitize(tokenizer.decode(new, skip_special_tokens=True))
        canonical = str(keepset.Recipe.parse(recipe))
        assert last.startswith(f"{canonical}: {context.shape[1]} tokens of context, {rest.shape[1]} of question; ")
        assert f" {len(new)} tokens, " in last
    assert Path("saved").read_bytes() == before


@pytest.mark.full
def test_the_file_says_which_model(run: Run, tiny_folder: Path, tmp_path: Path, text: Path) -> None:
    folder = tmp_path / "model"
    shutil.copytree(tiny_folder, folder)
    assert run(*BUILD, "--model", "model").code == 0
    words = ("context", "ask", "saved", "Why?", "--output-tokens", "4")
    assert run(*words).code == 0
    folder.rename(tmp_path / "moved")
    because = f"'saved' is of the model {str(folder)!r}, which is not there: give its place with --model"
    check_refused(run, *words, because=because)
    assert run(*words, "--model", "moved").code == 0


def test_a_file_is_replaced_only_by_force(run: Run, tiny: Any, text: Path) -> None:
    Path("saved").write_text("precious", encoding="utf-8")
    check_refused(run, *BUILD, because="'saved' exists: name another file with --out, or replace it with --force.")
    assert Path("saved").read_text(encoding="utf-8") == "precious"
    assert run(*BUILD, "--force").code == 0
    assert run("context", "ask", "saved", "Why?", "--output-tokens", "2").code == 0


@pytest.mark.parametrize("error", [KeyboardInterrupt, OSError(28, "No space left on device")])
def test_what_fails_leaves_nothing(
    run: Run, tiny: Any, text: Path, monkeypatch: pytest.MonkeyPatch, error: Any
) -> None:
    def half(tensors: Any, name: Path, metadata: Any) -> None:
        name.write_bytes(b"half")
        raise error

    monkeypatch.setattr(safetensors.torch, "save_file", half)
    said = "keepset: 'saved' cannot be written (No space left on device): name another file.\n"
    done = run(*BUILD)
    assert (done.code, done.out) == (130 if error is KeyboardInterrupt else 2, "")
    assert error is KeyboardInterrupt or done.err == said
    assert [path.name for path in Path.cwd().iterdir()] == ["text"]


def test_a_text_and_a_question_from_standard_input(
    run: Run, tiny: Any, text: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    def given(content: bytes, *words: str) -> Any:
        monkeypatch.setattr("sys.stdin", io.TextIOWrapper(io.BytesIO(content)))
        return run(*words)

    assert run(*BUILD).code == 0
    piped = ("context", "build", "--text", "-", "--out", "piped", "--recipe", RECIPE)
    assert given(text.read_bytes(), *piped).code == 0
    held = [context_files.contents(Path(name)) for name in ("piped", "saved")]
    assert held[0].text == held[1].text and held[0].header == held[1].header
    answers = [given(b"Why?\n", "context", "ask", "saved", said, "--output-tokens", "3").out for said in ("-", "Why?")]
    assert answers[0] == answers[1]
    for content, because in (
        (b" \n", "is empty: standard input has no text"),
        (b"\xff", "cannot be read from"),
    ):
        assert because in given(content, *piped, "--force").err
    check_refused(run, "context", "ask", "saved", " ", because="The question is empty")
