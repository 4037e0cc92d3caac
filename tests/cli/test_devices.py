"""Commands on a model that lies elsewhere: every input goes there, and what comes back is read from there."""

from __future__ import annotations

from pathlib import Path
from typing import Any

import pytest

from keepset.cli import console
from tests.cli.conftest import Run, tiny_model

pytest.importorskip("triton")
from tests.posing import Gpu, on_gpu

pytestmark = pytest.mark.full

COMMANDS = {
    "generate": ("generate", "Hello there, you.", "--recipe", "snapkv(window=4, keep=0.5)", "--max-new-tokens", "3"),
    "compare": ("compare", "--recipes", "tova", "--keeps", "0.5", "--tokens", "64", "--continuation", "8"),
    "trace": ("trace", "Hello", "--recipe", "tova(keep=16, every=4)", "--tokens", "6", "--html", "trace.html"),
    "diagnose": ("diagnose", "gvote"),
    "latency": (
        "bench",
        "latency",
        "--recipes",
        "tova(keep=9)",
        "--tokens",
        "64",
        "--output-tokens",
        "4",
        "--rounds",
        "1",
    ),
    "context": ("context", "build", "--text", "text.txt", "--out", "c.safetensors", "--recipe", "snapkv(keep=0.5)"),
    "eval": ("eval", "needle", "--lengths", "128", "--limit", "1", "--recipes", "snapkv(window=4)", "--keeps", "0.5"),
}


@pytest.mark.parametrize("name", COMMANDS)
def test_every_input_follows_the_model(
    run: Run, name: str, embedded: Any, monkeypatch: pytest.MonkeyPatch, tmp_path: Path
) -> None:
    model = tiny_model()
    (tmp_path / "text.txt").write_text("A text that goes on and on. " * 40, "utf-8")
    monkeypatch.setattr(console, "load", lambda *_: (model, embedded[1]))
    with Gpu(monkeypatch):
        on_gpu(model)
        done = run(*COMMANDS[name])
    assert done.code == 0, done.err
