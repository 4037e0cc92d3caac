"""`keepset serve` becomes the right `vllm serve`."""

from __future__ import annotations

import json
import os
import sys
from pathlib import Path
from typing import Any

import pytest

from keepset import models
from keepset.serving import command
from tests.cli.conftest import Run


@pytest.fixture
def became(monkeypatch: pytest.MonkeyPatch, tmp_path: Path) -> list[list[str]]:
    """The words of the process that a command became."""
    taken: list[list[str]] = []

    def execvp(file: str, words: list[str]) -> None:
        assert file == words[0] == sys.executable
        taken.append(words)
        raise SystemExit(0)

    monkeypatch.setattr(os, "execvp", execvp)
    monkeypatch.setattr(command, "check_installed", lambda *_: None)
    monkeypatch.setattr(command, "_program", lambda model: [sys.executable, "-m", "vllm", "serve", model])
    monkeypatch.setattr(models, "embedded_folder", lambda: tmp_path / "embedded")
    return taken


def test_recipe_and_options(run: Run, became: list[list[str]]) -> None:
    done = run(
        *("serve", "a/model", "--block-size", "32", "--recipe", "snapkv(keep=512,every=256)"),
        *("--enforce-eager", "--dtype=float32", "-tp", "2", "-O3", "--port", "9"),
    )
    assert (done.code, done.out) == (0, "")
    (words,) = became
    assert words[1:5] == ["-m", "vllm", "serve", "a/model"]
    assert json.loads(words[words.index("--additional-config") + 1]) == {"keepset": "snapkv(keep=512, every=256)"}
    assert words[words.index("--host") + 1] == "127.0.0.1"
    rest = ["--block-size", "32", "--enforce-eager", "--dtype=float32", "-tp", "2", "-O3", "--port", "9"]
    assert words[-len(rest) :] == rest
    assert "serve a/model" in done.err and done.err.count("\n") == 1


def test_options_alone_serve_the_embedded_model(run: Run, became: list[list[str]], tmp_path: Path) -> None:
    assert run("serve", "--max-model-len", "1024").code == 0
    assert run("serve").code == 0
    assert run("serve", "--", "--max-model-len", "1024").code == 0
    assert [words[4] for words in became] == [str(tmp_path / "embedded")] * 3
    assert all("--additional-config" not in words for words in became)
    assert became[0] == became[2]
    assert became[0][-2:] == ["--max-model-len", "1024"]


def test_small_budgets_are_advised(run: Run, became: list[list[str]], monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr("torch.accelerator.is_available", lambda: False)
    done = run("serve", "--recipe", "snapkv(keep=96, every=64)")
    assert "add --block-size 32" in done.err.splitlines()[1]
    assert "--block-size" not in " ".join(became[0])


@pytest.mark.parametrize(
    ("words", "because"),
    [
        (["--recipe", "snapvk"], "did you mean 'snapkv'?"),
        (["--recipe", "snapkv"], "says not how much to keep"),
        (["m", "--additional-config", '{"keepset": "x"}'], "give the recipe with --recipe only"),
        (["m", "--recipe", "tova(keep=9)", "--additional-config", "{"], "is no JSON object"),
    ],
)
def test_refused(run: Run, became: list[list[str]], words: list[str], because: str) -> None:
    done = run("serve", *words)
    assert (done.code, done.out) == (2, "")
    assert because in done.err and done.err.count("\n") == 1
    assert became == []


def test_the_recipe_is_read_first(run: Run, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(command.importlib.util, "find_spec", lambda name: None)
    assert "did you mean" in run("serve", "--recipe", "snapvk").err
    done = run("serve", "--recipe", "snapkv(keep=0.5)")
    assert done.code == 2
    assert done.err == 'keepset: vLLM is not installed: run `pip install "keepset[vllm]"`.\n'


def test_nothing_heavy_is_loaded_before_it_is_needed(monkeypatch: pytest.MonkeyPatch) -> None:
    import subprocess

    heavy = {"torch", "transformers", "vllm", "httpx2", "prometheus_client", "plotly"}
    code = f"import sys, keepset.cli; print(sorted({heavy!r} & set(sys.modules)))"
    done: Any = subprocess.run([sys.executable, "-c", code], capture_output=True, text=True, check=True)
    assert done.stdout == "[]\n"
