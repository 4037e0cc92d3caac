"""Bad input is one sentence on standard error and exit code 2, and nothing else happens."""

from __future__ import annotations

import json
import os
import shutil
from pathlib import Path
from types import SimpleNamespace
from typing import Any

import pytest

import keepset
from keepset import models
from keepset.core.observation import Observation
from keepset.core.tables import save, say_neutral
from keepset.methods.knorm import Knorm
from tests.cli.conftest import Run
from tests.core.test_tables import random_tables
from tests.hf.models import statistics

COMPARE = ("compare", "--text", "text", "--prompt-tokens", "200", "--continuation", "16")


@pytest.fixture
def unloaded(monkeypatch: pytest.MonkeyPatch) -> None:
    """Whoever loads a model fails: bad input is to be refused at once."""
    monkeypatch.setattr(models, "load", lambda *_: pytest.fail("a model was loaded before input was checked"))


def check_refused(run: Run, *words: str, because: str) -> None:
    before = sorted(Path.cwd().rglob("*"))
    done = run(*words)
    assert (done.code, done.out) == (2, "")
    assert done.err.startswith("keepset: ") and done.err.endswith("\n")
    assert done.err.count("\n") == 1 and "\x1b" not in done.err
    assert because in done.err
    assert sorted(Path.cwd().rglob("*")) == before


@pytest.mark.usefixtures("unloaded", "text")
@pytest.mark.parametrize(
    ("keep", "because"),
    [
        ("0", "keep=0 is out of range"),
        ("-3", "keep=-3 is out of range"),
        ("0.0", "keep=0.0 is out of range"),
        ("-0.5", "keep=-0.5 is out of range"),
        ("1.5", "keep=1.5 is out of range: use a fraction in (0, 1]"),
        ("1e999", "keep="),
        ("nan", "keep="),
        ("half", "keep="),
        ("True", "keep="),
        ("1j", "keep="),
        ("9" * 20, "is too large a number"),
    ],
)
def test_keep(run: Run, keep: str, because: str) -> None:
    check_refused(run, *COMPARE, f"--keeps=0.5,{keep}", because=because)
    check_refused(run, *COMPARE, "--recipes", f"tova(keep={keep})", because=because)
    check_refused(run, "generate", "Hello", "--recipe", f"tova(keep={keep})", because=because)


@pytest.mark.usefixtures("unloaded", "text")
@pytest.mark.parametrize("keeps", ["", "0.5,", "0.5;0.25", "0.5 0.25"])
def test_list_of_keeps(run: Run, keeps: str) -> None:
    check_refused(run, *COMPARE, "--keeps", keeps, because="is not a number: use a fraction")


@pytest.mark.usefixtures("unloaded", "text")
@pytest.mark.parametrize(
    ("recipe", "because"),
    [
        ("snapvk", "There is no method 'snapvk'; did you mean 'snapkv'? There are: adakv, "),
        ("adakv(tovaa)", "There is no method 'tovaa'; did you mean 'tova'?"),
        ("snapkv(windw=3)", "snapkv has no parameter 'windw'; did you mean 'window'?"),
        ("snapkv(window=0)", "snapkv: window=0 is out of range: use 1 or more"),
        ("snapkv(window=4.5)", "snapkv: window=4.5 is not a whole number"),
        ("snapkv(window=64, keep=8)", "keep=8 is below the 64 entries that always stay"),
        ("tova(sinks=-1)", "sinks=-1 is not a number of tokens"),
        ("adakv", "adakv divides the budget of another method"),
        ("snapkv(", "write a method with its parameters"),
        ("", "write a method with its parameters"),
        ("__import__('os')", "There is no method '__import__'"),
        ("tova(keep=f'\x1b[31m')", "is not a plain value"),
        ("tova\n(\nkeep='\n')", "keep="),
    ],
)
def test_recipe(run: Run, recipe: str, because: str) -> None:
    check_refused(run, *COMPARE, "--recipes", recipe, because=because)
    check_refused(run, "generate", "Hello", "--recipe", recipe, because=because)


@pytest.mark.usefixtures("unloaded")
@pytest.mark.parametrize(
    ("words", "because"),
    [
        ([""], "The prompt is empty"),
        ([" \n\t"], "The prompt is empty"),
        (["\udcff"], "The prompt is not UTF-8"),
        (["Hello", "--recipe", "tova"], "says not how much to keep: write tova(keep=0.25)"),
        (["Hello", "--output-tokens", "0"], "--output-tokens 0 is not a number of tokens"),
        (["Hello", "--temperature", "-1"], "--temperature -1.0 is out of range"),
        (["Hello", "--temperature", "nan"], "--temperature nan is out of range"),
        (["Hello", "--temperature", "1e-30"], "--temperature 1e-30 is out of range"),
        (["Hello", "--temperature", "inf"], "--temperature inf is out of range"),
        (["Hello", "--seed", "-1"], "--seed -1 is out of range"),
        (["Hello", "--seed", "9" * 30], "is out of range: use an integer from 0"),
    ],
)
def test_generate(run: Run, words: list[str], because: str) -> None:
    check_refused(run, "generate", *words, because=because)


@pytest.mark.usefixtures("unloaded", "text")
@pytest.mark.parametrize(
    ("words", "because"),
    [
        (["--prompt-tokens", "0"], "--prompt-tokens 0 is not a number of tokens: use an integer from 1"),
        (["--continuation", "-1"], "--continuation -1 is not a number of tokens"),
        (["--question", "Why?"], "give both --question and --answer"),
        (["--answer", "So."], "give both --question and --answer"),
        (["--question", " ", "--answer", "So."], "--question is empty"),
        (["--question", "Why?", "--answer", ""], "--answer is empty"),
        (["--question", "Why\udcff?", "--answer", "So."], "--question is not UTF-8"),
        (["--every", "8"], "give --decode too"),
        (["--generate", "8"], "give --decode too"),
        (["--decode", "--every", "0"], "--every 0 is not a number of tokens"),
        (["--decode", "--generate", "0"], "--generate 0 is not a number of tokens"),
        (["--decode", "--generate", "8"], "give one of them"),
        (["--decode", "--question", "Why?", "--answer", "So."], "leave --question and --answer out"),
    ],
)
def test_compare(run: Run, words: list[str], because: str) -> None:
    check_refused(run, *COMPARE, *words, because=because)


@pytest.mark.usefixtures("unloaded")
def test_question_without_a_text_of_ones_own(run: Run) -> None:
    check_refused(run, "compare", "--question", "Why?", "--answer", "So.", because="give it with --text")


@pytest.mark.usefixtures("unloaded")
@pytest.mark.parametrize(
    ("content", "because"),
    [
        (None, "cannot be read (No such file or directory)"),
        (b"Gr\xfc\xdfe", "is not UTF-8"),
        (b"", "is empty"),
        (b" \n\n", "is empty"),
    ],
)
def test_text_file(run: Run, tmp_path: Path, content: bytes | None, because: str) -> None:
    if content is not None:
        (tmp_path / "text").write_bytes(content)
    check_refused(run, *COMPARE, because=f"'text' {because}")
    check_refused(run, "generate", "Hello", "--text", "text", because=f"'text' {because}")


@pytest.mark.usefixtures("unloaded", "text")
@pytest.mark.parametrize("html", ["absent/page.html", "folder", ""])
def test_report_that_could_not_be_written(run: Run, tmp_path: Path, html: str) -> None:
    (tmp_path / "folder").mkdir()
    check_refused(run, *COMPARE, "--html", html, because="cannot be written: give a file in a folder that exists")
    check_refused(run, "demo", "--html", html, because="cannot be written: give a file in a folder that exists")


@pytest.mark.usefixtures("text")
@pytest.mark.parametrize("words", [COMPARE, ("generate", "Hello")])
@pytest.mark.parametrize(
    ("model", "because"),
    [
        ("./absent", "'./absent' is neither an existing folder nor the name of a model"),
        ("folder", "The folder 'folder' has no config.json"),
        ("text", "'text' is neither an existing folder"),
        ("damaged", "The model 'damaged' cannot be loaded"),
        ("", "The folder '' has no config.json"),
    ],
)
def test_model(run: Run, tmp_path: Path, words: list[str], model: str, because: str) -> None:
    for name in ("folder", "damaged"):
        (tmp_path / name).mkdir()
    (tmp_path / "damaged" / "config.json").write_text("{")
    check_refused(run, *words, "--model", model, because=because)


@pytest.mark.usefixtures("text")
@pytest.mark.parametrize("words", [COMPARE, ("generate", "Hello")])
def test_no_space_for_the_converted_model(
    run: Run, words: list[str], tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setenv("KEEPSET_HOME", str(tmp_path))
    monkeypatch.setattr(shutil, "disk_usage", lambda path: SimpleNamespace(free=2**20))
    check_refused(run, *words, because="only 1 MB are free")


@pytest.mark.usefixtures("tiny", "text")
def test_statistics_of_another_model(run: Run) -> None:
    recipes = f"snapkv(keep=0.5), adakv(qfilter(stats={str(statistics('llama_mqa'))!r}), keep=0.5)"
    for words in ((*COMPARE, "--recipes"), ("bench", "latency", "--recipes"), ("eval", "needle", "--recipes")):
        check_refused(run, *words, recipes, because="are of another model: theirs has 2 layers with 1 KV heads")


@pytest.mark.usefixtures("tiny", "text")
def test_scores_that_are_nan(run: Run, monkeypatch: pytest.MonkeyPatch, tmp_path: Path) -> None:
    """Of finite logits: the recipe's row fails, others are there, and what is written is JSON."""
    score = Knorm.score

    def half_nan(method: Knorm, observation: Observation) -> Any:
        scores = score(method, observation).clone()
        scores[..., ::2] = float("nan")
        return scores

    monkeypatch.setattr(Knorm, "score", half_nan)
    sentence = "Scores of layer 0 are NaN, so nothing says what to keep"
    done = run(*COMPARE, "--recipes", "knorm(keep=0.5), tova(keep=0.5)", "--json", "figures")
    assert done.code == 1 and f"knorm(keep=0.5): {sentence}" in " ".join(done.out.split())
    rows = json.loads(Path("figures").read_text())["rows"]
    assert sentence in rows[0]["error"] and "kl" not in rows[0] and rows[1]["kl"] > 0
    for words in (("generate", "Hello, who is there?", "--recipe"), ("trace", "--text", "text", "--recipe")):
        done = run(*words, "adakv(knorm, keep=8)")
        assert done.code == 2 and sentence in done.err
    # Whoever serves a request wants an answer, though one number overflowed: NaN is the worst of scores there.
    model, tokenizer = models.load()
    cache = keepset.Cache(model, "knorm(keep=8)")
    model(**tokenizer("Hello, who is there in the hall?", return_tensors="pt"), past_key_values=cache)
    assert cache.keep_set is not None


@pytest.mark.usefixtures("tiny", "text")
def test_tables_of_another_model(run: Run) -> None:
    save(random_tables(7, 5), Path("tables"))
    recipe = "compilerkv(tables='tables', window=8, keep=20)"
    for words in ((*COMPARE, "--recipes"), ("generate", "Hello", "--recipe"), ("bench", "latency", "--recipes")):
        check_refused(run, *words, recipe, because="theirs has 7 layers of 5 query heads, this one 2 of 4")


@pytest.mark.usefixtures("tiny")
def test_warnings_are_sentences(run: Run) -> None:
    say_neutral.cache_clear()
    done = run("generate", "Hello, who is there?", "--recipe", "compilerkv(window=4, keep=8)", "--output-tokens", "1")
    assert done.code == 0 and "\ncompilerkv has no tables: all heads count the same" in f"\n{done.err}"
    assert "Warning" not in done.err and ".py" not in done.err


@pytest.mark.full
@pytest.mark.usefixtures("tiny")
def test_a_hub_out_of_reach_leaves_nothing_behind(run: Run, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr("huggingface_hub.constants.HF_HUB_OFFLINE", True)
    monkeypatch.setattr("datasets.config.HF_HUB_OFFLINE", True)
    check_refused(run, "eval", "gsm8k", "--limit", "1", because="gsm8k")


def test_text_is_too_short(run: Run, tiny: Any, text: Path) -> None:
    text.write_text("Two words.", encoding="utf-8")
    check_refused(run, *COMPARE, because="tokens, too few for a prompt and 16 tokens of continuation")


def test_tokens_beyond_the_context(run: Run, tiny_folder: Path, text: Path) -> None:
    words = [*COMPARE, "--model", str(tiny_folder), "--prompt-tokens", "4000"]
    check_refused(run, *words, because="do not fit the model's context of 2048: ask for fewer tokens")


def test_prompt_beyond_the_context(run: Run, tiny_folder: Path, text: Path) -> None:
    text.write_text("word " * 3000, encoding="utf-8")
    words = ["generate", "Hello", "--text", "text", "--model", str(tiny_folder)]
    check_refused(run, *words, because="do not fit the model's context of 2048: give a shorter text")


def test_tokens_that_the_question_takes_up(run: Run, tiny: Any) -> None:
    check_refused(run, "compare", "--prompt-tokens", "10", because="10 tokens of prompt leave no room for the text")


@pytest.mark.parametrize(
    "words", [["compare", "--prompt-tokens", "many"], ["comprae"], ["generate"], ["methods", "--loud"]]
)
def test_words_that_are_no_command(run: Run, words: list[str]) -> None:
    done = run(*words)
    assert (done.code, done.out) == (2, "")
    assert "Usage: " in done.err and "Traceback" not in done.err


@pytest.mark.usefixtures("tiny", "text")
def test_more_to_generate_than_the_model_holds(run: Run) -> None:
    check_refused(
        run,
        "compare",
        "--decode",
        "--text",
        "text",
        "--prompt-tokens",
        "100",
        "--generate",
        "5000",
        because="100 tokens of prompt and 5012 after it do not fit the model's context of 2048",
    )


@pytest.mark.usefixtures("unloaded", "text")
@pytest.mark.parametrize(
    "words",
    [
        (*COMPARE, "--html"),
        (*COMPARE, "--json"),
        ("eval", "needle", "--out"),
        ("eval", "gsm8k", "--data"),
        ("calibrate", "--out"),
        ("context", "build", "--text", "text", "--out"),
        ("results",),
        ("serve",),
    ],
    ids=lambda words: " ".join(words[:1] + words[-1:]),
)
def test_names_that_are_too_long(run: Run, words: tuple[str, ...]) -> None:
    done = run(*words, "n" * 5000)
    assert done.code == 2 and done.err.startswith("keepset: ") and done.err.count("\n") == 1 and not done.out


@pytest.mark.usefixtures("unloaded", "text")
@pytest.mark.parametrize("option", ["--html", "--json"])
def test_a_pipe_is_not_replaced(run: Run, option: str) -> None:
    os.mkfifo("pipe")
    check_refused(run, *COMPARE, option, "pipe", because="'pipe' cannot be written (it is no regular file)")
    assert Path("pipe").is_fifo()
