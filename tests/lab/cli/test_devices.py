"""Commands on a model that lies elsewhere: every input goes there, and what comes back is read from there."""

from contextlib import nullcontext
from pathlib import Path
from typing import Any

import pytest
import torch

from keepset import models
from keepset.lab import tune
from keepset.lab.compile import cql
from tests.lab.cli.conftest import Run, tiny_model

pytest.importorskip("triton")
from tests.posing import Gpu, on_gpu

pytestmark = pytest.mark.full

LATENCY = ("--prompt-tokens", "64", "--output-tokens", "4", "--rounds", "1")
CALIBRATE = ("--tokens", "80", "--length", "40", "--gate-steps", "1", "--text", "text.txt")
COMPILE = (
    *("--recipe", "compilerkv(window=8)", "--budgets", "16", "--sample", "1", "--prompt-tokens", "40"),
    *("--continuation", "5", "--text", "text.txt"),
)
NEEDLE = ("--prompt-tokens", "128", "--limit", "1", "--recipes", "snapkv(window=4)", "--budgets", "0.5")
REPRODUCE = ("--model", "embedded", "--limit", "1", "--output-tokens", "4", "--data", ".")
COMMANDS = {
    "generate": ("generate", "Hello there, you.", "--recipe", "snapkv(window=4, keep=0.5)", "--output-tokens", "3"),
    "compare": ("compare", "--recipes", "tova", "--budgets", "0.5", "--prompt-tokens", "64", "--continuation", "8"),
    "latency": ("bench", "latency", "--recipes", "tova(keep=9)", *LATENCY),
    "context": ("context", "build", "--text", "text.txt", "--out", "c.safetensors", "--recipe", "snapkv(keep=0.5)"),
    "ask": ("context", "ask", "c.safetensors", "Why?", "--output-tokens", "3"),
    "eval": ("eval", "needle", *NEEDLE),
    "calibrate": ("calibrate", "--out", "stats.safetensors", *CALIBRATE),
    "compile": ("compile", "--out", "tables.safetensors", *COMPILE),
    "tune": ("tune", "--text", "text.txt", "--budget", "0.3", "--recipes", "tova, streaming_llm"),
    "reproduce": ("reproduce", "ams-table-2", *REPRODUCE),
}


@pytest.mark.parametrize("name", COMMANDS)
def test_every_input_follows_the_model(
    run: Run, name: str, embedded: Any, monkeypatch: pytest.MonkeyPatch, tmp_path: Path
) -> None:
    model = tiny_model(layers=1)
    (tmp_path / "text.txt").write_text("A text that goes on and on. " * 70, "utf-8")
    (tmp_path / "gsm8k.jsonl").write_text('{"question": "What is 1 plus 1?", "answer": "#### 2"}', "utf-8")
    # Of tune's race one round, of two.
    monkeypatch.setattr(tune, "PIECES", 2)
    monkeypatch.setattr(cql, "STEPS", 20)
    # Tensors that pose are none of inference's.
    monkeypatch.setattr(torch, "inference_mode", lambda mode=True: torch.no_grad() if mode else nullcontext())
    monkeypatch.setattr(models, "load", lambda *_: (model, embedded[1]))
    with Gpu(monkeypatch, computes=False) as gpu:
        on_gpu(model)
        if name == "ask":
            assert run(*COMMANDS["context"]).code == 0
            gpu.reset()
        done = run(*COMMANDS[name])
    assert done.code == 0, done.err
    assert gpu.launches.total() > 100, "the model that was run lies elsewhere"
