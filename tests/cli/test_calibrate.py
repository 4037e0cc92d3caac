from __future__ import annotations

import json
from pathlib import Path
from typing import Any

import pytest
import torch
from safetensors import safe_open

from keepset import models, texts
from keepset.core.statistics import load
from keepset.offline.calibrate import measure
from tests.cli.conftest import Run

SMALL = ("--tokens", "300", "--length", "100", "--gate-steps", "1", "--text", "text")


def provenance(path: Path) -> Any:
    with safe_open(path, framework="pt") as file:
        return json.loads(file.metadata()["keepset_statistics"])


@pytest.mark.usefixtures("text")
def test_writes_a_file_that_recipes_can_name(run: Run, tiny_folder: Path) -> None:
    done = run("calibrate", "--model", str(tiny_folder), "--out", "stats.safetensors", *SMALL)
    assert (done.code, done.err) == (0, "")
    counted = f"2 layers of {tiny_folder.name}, measured over 300 tokens in 4 passages"
    assert done.out == f"stats.safetensors: {counted}\n"
    written = provenance(Path("stats.safetensors"))
    assert written["corpus"]["tokens"] == 300
    assert (written["model"]["name"], written["model"]["kv_heads"]) == (tiny_folder.name, 2)
    for method in ("qfilter", "triattention", "expected_attention"):
        recipe = f"adakv({method}(stats='stats.safetensors'), keep=20, every=4)"
        done = run("generate", "Hello", "--model", str(tiny_folder), "--recipe", recipe, "--output-tokens", "8")
        assert done.code == 0 and "compressed" in done.err
    assert written["gates"] == {"steps": 1, "tokens": 512, "sinks": 16, "recent": 64}
    recipe = "duo_attention(stats='stats.safetensors', keep=20, sinks=2, recent=8)"
    done = run("generate", "Hello", "--model", str(tiny_folder), "--recipe", recipe, "--output-tokens", "8")
    assert done.code == 0 and "duo_attention" in done.err


@pytest.mark.usefixtures("text", "tiny")
def test_gates_can_be_left_out(run: Run) -> None:
    assert run("calibrate", "--out", "a", "--gate-steps", "0", *SMALL[:4], *SMALL[6:]).code == 0
    assert load("a").retrieval == {} and "gates" not in provenance(Path("a"))
    done = run("generate", "Hello", "--recipe", "duo_attention(stats='a', keep=100)")
    assert (done.code, done.out) == (2, "") and "'a' do not say which heads retrieve" in done.err


@pytest.mark.full
@pytest.mark.usefixtures("text", "tiny")
def test_essays_unless_texts_are_given(run: Run) -> None:
    assert run("calibrate", "--out", "a", "--tokens", "64", "--length", "32").code == 0
    Path("other").write_text(texts.essay()[3000:5000], encoding="utf-8")
    assert run("calibrate", "--out", "b", *SMALL).code == 0
    assert run("calibrate", "--out", "c", *SMALL, "--text", "other").code == 0
    assert len({provenance(Path(name))["corpus"]["sha256"] for name in "abc"}) == 3


@pytest.mark.usefixtures("text", "tiny")
def test_the_same_again_and_another_seed(run: Run) -> None:
    for name, seed in (("a", "1"), ("b", "1"), ("c", "2")):
        assert run("calibrate", "--out", name, "--seed", seed, *SMALL).code == 0
    assert Path("a").read_bytes() == Path("b").read_bytes()
    a, c = load("a").layers[0], load("c").layers[0]
    assert not torch.equal(a.mean, c.mean)
    assert provenance(Path("c"))["seed"] == 2


@pytest.mark.full
@pytest.mark.usefixtures("text", "tiny")
def test_says_when_the_texts_are_shorter_than_asked(run: Run) -> None:
    done = run("calibrate", "--out", "a", "--text", "text", "--length", "64")
    assert done.code == 0
    assert "fewer than the 16384 asked for" in done.err
    # What is left is too little for a passage.
    done = run("calibrate", "--out", "b", "--text", "text", "--length", "64", "--tokens", "69")
    assert (done.code, done.err) == (0, "") and "over 64 tokens in 1 passages" in done.out


@pytest.mark.usefixtures("text", "tiny")
def test_a_file_is_replaced_only_by_force(run: Run) -> None:
    Path("stats").write_text("precious", encoding="utf-8")
    done = run("calibrate", "--out", "stats", *SMALL)
    assert (done.code, done.out) == (2, "")
    assert done.err == "keepset: 'stats' exists: name another file with --out, or replace it with --force.\n"
    assert Path("stats").read_text(encoding="utf-8") == "precious"
    assert run("calibrate", "--out", "stats", "--force", *SMALL).code == 0
    assert len(load("stats").layers) == 2


@pytest.mark.usefixtures("text", "tiny")
def test_an_interrupt_leaves_nothing(run: Run, monkeypatch: pytest.MonkeyPatch) -> None:
    def interrupted(*_: Any) -> None:
        raise KeyboardInterrupt

    monkeypatch.setattr(measure._Layer, "add", interrupted)
    done = run("calibrate", "--out", "stats", *SMALL)
    assert (done.code, done.out) == (130, "")
    assert [path.name for path in Path.cwd().iterdir()] == ["text"]


@pytest.mark.usefixtures("text")
@pytest.mark.parametrize(
    ("words", "because"),
    [
        (("--out", "a", "--tokens", "15"), "--tokens 15 is out of range: use a whole number from 16"),
        (("--out", "a", "--length", "3"), "--length 3 is out of range"),
        (("--out", "a", "--seed", "-1"), "--seed -1 is out of range"),
        (("--out", "a", "--gate-steps", "-1"), "--gate-steps -1 is out of range"),
        (("--out", "."), "--out '.' is no place for a file"),
        (("--out", "absent/a"), "--out 'absent/a' is no place for a file"),
        (("--out", "a", "--text", "absent"), "'absent' cannot be read"),
    ],
)
def test_bad_input_is_refused_before_a_model_is_loaded(
    run: Run, monkeypatch: pytest.MonkeyPatch, words: tuple[str, ...], because: str
) -> None:
    monkeypatch.setattr(models, "load", lambda *_: pytest.fail("a model was loaded"))
    done = run("calibrate", *words)
    assert (done.code, done.out) == (2, "")
    assert done.err.startswith("keepset: ") and because in done.err and done.err.count("\n") == 1
    assert [path.name for path in Path.cwd().iterdir()] == ["text"]


def test_a_models_folder_is_no_place_for_statistics(run: Run, tiny_folder: Path) -> None:
    before = sorted(tiny_folder.iterdir())
    done = run("calibrate", "--model", str(tiny_folder), "--out", str(tiny_folder / "stats.safetensors"))
    assert done.code == 2 and "is in a model's folder" in done.err
    assert sorted(tiny_folder.iterdir()) == before


@pytest.mark.usefixtures("text", "tiny")
def test_passages_fit_the_models_context(run: Run) -> None:
    done = run("calibrate", "--out", "a", "--length", "4096")
    assert done.code == 2 and "is more than the model's context of 2048" in done.err


@pytest.mark.usefixtures("text")
def test_a_recipe_without_a_file_says_what_to_run(run: Run, tiny_folder: Path) -> None:
    done = run("generate", "Hello", "--model", str(tiny_folder), "--recipe", "qfilter(keep=8)")
    assert (done.code, done.out) == (2, "")
    assert f"`keepset calibrate --model {tiny_folder} --out stats.safetensors`" in done.err
    done = run("generate", "Hello", "--model", str(tiny_folder), "--recipe", "triattention(stats='no', keep=8)")
    assert done.code == 2 and "There is no file 'no' with statistics" in done.err
