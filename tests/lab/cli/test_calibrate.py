import json
from pathlib import Path
from typing import Any

import pytest
import torch
from safetensors import safe_open
from safetensors.torch import save_file
from transformers import AutoConfig

from keepset.core.statistics import load
from keepset.lab.calibrate import measure
from tests.lab.cli.conftest import Run

SMALL = ("--tokens", "300", "--length", "100", "--gate-steps", "1", "--text", "text")
GATELESS = ("--gate-steps", "0")
pytestmark = pytest.mark.usefixtures("text")


def provenance(path: Path) -> Any:
    with safe_open(path, framework="pt") as file:
        return json.loads(file.metadata()["keepset_statistics"])


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


def test_gates_can_be_left_out(run: Run, tiny: Any) -> None:
    assert run("calibrate", "--out", "a", *SMALL, *GATELESS).code == 0
    assert load("a").retrieval == {} and "gates" not in provenance(Path("a"))
    done = run("generate", "Hello", "--recipe", "duo_attention(stats='a', keep=100)")
    assert (done.code, done.out) == (2, "") and "'a' do not say which heads retrieve" in done.err


@pytest.mark.full
def test_imports_what_others_have_published(run: Run, tiny_folder: Path) -> None:
    """Gates are not trained if they are imported, and several files make one."""
    Path("pattern").mkdir()
    Path("pattern", "full_attention_heads.tsv").write_text("0.5\t0.25\n1.0\t0.0\n")
    Path("pattern", "config.json").write_text('{"sink_size": 128, "recent_size": 256}')
    config = AutoConfig.from_pretrained(tiny_folder)
    directions = torch.ones(2, config.num_key_value_heads, config.hidden_size // config.num_attention_heads)
    save_file({"q_filters": directions}, "a.safetensors")
    words = ("--model", str(tiny_folder), "--import", "pattern", "--import", "a.safetensors", "--out", "stats", *SMALL)
    done = run("calibrate", *words)
    assert done.code == 0 and "pattern: the gates were trained with duo_attention(sinks=128, recent=256)" in done.err
    assert "a.safetensors has the format of Q-Filters and gives: direction." in done.err
    statistics, written = load("stats"), provenance(Path("stats"))
    assert statistics.retrieval[1].tolist() == [1.0, 0.0] and "gates" not in written
    assert [each["format"] for each in written["imported"]] == ["DuoAttention", "Q-Filters"]
    recipe = "qfilter(stats='stats', keep=20)"
    done = run("generate", "Hello", "--model", str(tiny_folder), "--recipe", recipe, "--output-tokens", "4")
    assert done.code == 0 and "qfilter" in done.err
    done = run("calibrate", *words[:2], "--import", "text", "--out", "b", *SMALL)
    assert (done.code, done.out) == (2, "") and "holds nothing that keepset can import" in done.err


@pytest.mark.full
def test_essays_unless_texts_are_given_and_texts_that_are_shorter_than_asked(run: Run, tiny: Any) -> None:
    assert run("calibrate", "--out", "a", *SMALL[:4], *GATELESS).code == 0
    done = run("calibrate", "--out", "b", *SMALL[-2:], *GATELESS, "--length", "64")
    assert done.code == 0 and "fewer than the 16384 asked for" in done.err
    assert provenance(Path("a"))["corpus"]["sha256"] != provenance(Path("b"))["corpus"]["sha256"]
    # What is left is too little for a passage.
    done = run("calibrate", "--out", "c", *SMALL[-2:], *GATELESS, "--length", "64", "--tokens", "69")
    assert (done.code, done.err) == (0, "") and "over 64 tokens in 1 passages" in done.out


def test_an_interrupt_leaves_nothing(run: Run, tiny: Any, monkeypatch: pytest.MonkeyPatch) -> None:
    def interrupted(*_: Any) -> None:
        raise KeyboardInterrupt

    monkeypatch.setattr(measure._Layer, "add", interrupted)
    done = run("calibrate", "--out", "stats", *SMALL)
    assert (done.code, done.out) == (130, "")
    assert [path.name for path in Path.cwd().iterdir()] == ["text"]
