from __future__ import annotations

import json
from pathlib import Path
from typing import Any

import pytest
from safetensors import safe_open

from keepset import texts
from keepset.core.statistics import load
from keepset.offline.calibrate import measure
from tests.cli.conftest import Run

SMALL = ("--tokens", "300", "--length", "100", "--gate-steps", "1", "--text", "text")


def provenance(path: Path) -> Any:
    with safe_open(path, framework="pt") as file:
        return json.loads(file.metadata()["keepset_statistics"])


@pytest.mark.usefixtures("text")
def test_writes_a_file_that_recipes_can_name(run: Run, tiny_folder: Path) -> None:
    words = ("--model", str(tiny_folder), "--out", "stats.safetensors", "--seed", "2", *SMALL)
    done = run("calibrate", *words)
    assert (done.code, done.err) == (0, "")
    assert done.out == f"stats.safetensors: 2 layers of {tiny_folder.name}, measured over 300 tokens in 4 passages\n"
    written = provenance(Path("stats.safetensors"))
    assert (written["corpus"]["tokens"], written["seed"]) == (300, 2)
    assert (written["model"]["name"], written["model"]["kv_heads"]) == (tiny_folder.name, 2)
    assert written["gates"] == {"steps": 1, "tokens": 512, "sinks": 16, "recent": 64}
    for recipe in (
        "adakv(qfilter(stats='stats.safetensors'), keep=20)",
        "duo_attention(stats='stats.safetensors', keep=90)",
    ):
        done = run("generate", "Hello", "--model", str(tiny_folder), "--recipe", recipe, "--output-tokens", "4")
        assert done.code == 0 and recipe.partition("(")[0] in done.err


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


@pytest.mark.full
@pytest.mark.usefixtures("text", "tiny")
def test_says_when_the_texts_are_shorter_than_asked(run: Run) -> None:
    done = run("calibrate", "--out", "a", "--text", "text", "--length", "64", "--gate-steps", "0")
    assert done.code == 0
    assert "fewer than the 16384 asked for" in done.err
    # What is left is too little for a passage.
    done = run("calibrate", "--out", "b", "--text", "text", "--length", "64", "--tokens", "69", "--gate-steps", "0")
    assert (done.code, done.err) == (0, "") and "over 64 tokens in 1 passages" in done.out


@pytest.mark.usefixtures("text", "tiny")
def test_an_interrupt_leaves_nothing(run: Run, monkeypatch: pytest.MonkeyPatch) -> None:
    def interrupted(*_: Any) -> None:
        raise KeyboardInterrupt

    monkeypatch.setattr(measure._Layer, "add", interrupted)
    done = run("calibrate", "--out", "stats", *SMALL)
    assert (done.code, done.out) == (130, "")
    assert [path.name for path in Path.cwd().iterdir()] == ["text"]
