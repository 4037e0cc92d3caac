"""The command line in this process, on a model so small that a run takes a moment."""

import json
import math
import multiprocessing
import os
import signal
import sys
from collections.abc import Callable, Iterator
from dataclasses import dataclass
from functools import cache
from pathlib import Path
from typing import Any

import pytest
import torch
import typer.main
from rich.console import Console
from transformers import LlamaConfig, LlamaForCausalLM

from keepset import models
from keepset.lab import texts
from keepset.lab.cli import console, main


@dataclass(frozen=True)
class Done:
    """What a command left behind."""

    code: int
    out: str
    err: str


Run = Callable[..., Done]
get_command = cache(typer.main.get_command)
"""Makes the commands once: it takes longer than most of them."""


@pytest.fixture
def run(monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str], tmp_path: Path) -> Run:
    """`keepset` with these words as its arguments, in an empty folder."""
    monkeypatch.chdir(tmp_path)
    monkeypatch.setattr(typer.main, "get_command", get_command)
    stdout, stderr = Console(width=200), Console(width=200, stderr=True)
    monkeypatch.setattr(console, "stdout", lambda: stdout)
    monkeypatch.setattr(console, "stderr", lambda: stderr)
    monkeypatch.setattr(console, "_SILENT", math.inf)

    def run(*words: str) -> Done:
        monkeypatch.setattr(sys, "argv", ["keepset", *words])
        capsys.readouterr()
        with pytest.raises(SystemExit) as stop:
            main()
        captured = capsys.readouterr()
        return Done(int(stop.value.code or 0), captured.out, captured.err)

    return run


class Forked:
    """`keepset` with these words in a process of its own: a fork of this one, where all is imported and patched."""

    def __init__(self, *words: str) -> None:
        self._files = [os.memfd_create(name) for name in ("out", "err")]
        self._process = multiprocessing.get_context("fork").Process(target=self._run, args=(words,))
        self._process.start()
        assert self._process.pid is not None
        self.pid = self._process.pid

    def _run(self, words: tuple[str, ...]) -> None:
        for number, file in enumerate(self._files, 1):
            os.dup2(file, number)
        sys.stdout, sys.stderr = os.fdopen(1, "w", closefd=False), os.fdopen(2, "w", closefd=False)
        sys.argv = ["keepset", *words]
        main()

    def interrupt(self, number: signal.Signals) -> Done:
        """What it left behind after this signal."""
        assert self._process.is_alive()
        os.kill(self.pid, number)
        self._process.join(60)
        assert self._process.exitcode is not None
        out, err = (os.pread(file, 2**20, 0).decode() for file in self._files)
        return Done(self._process.exitcode, out, err)

    def is_alive(self) -> bool:
        return self._process.is_alive()


@pytest.fixture
def interrupts() -> Iterator[None]:
    """What a shell runs in the background ignores them, and so would the processes that it starts."""
    before = signal.signal(signal.SIGINT, signal.default_int_handler)
    yield
    signal.signal(signal.SIGINT, before)


def tiny_model(layers: int = 2) -> LlamaForCausalLM:
    """A tiny random model for the embedded model's tokenizer."""
    sizes = dict(hidden_size=32, intermediate_size=32, num_hidden_layers=layers, max_position_embeddings=2048)
    tokens = dict(vocab_size=49152, bos_token_id=1, eos_token_id=2, pad_token_id=2)
    config = LlamaConfig(num_attention_heads=4, num_key_value_heads=2, **sizes, **tokens)
    torch.manual_seed(0)
    model = LlamaForCausalLM(config).eval()
    for parameter in model.parameters():
        if parameter.ndim > 1:  # Large enough that what is dropped is missed.
            parameter.data = 0.2 * torch.randn_like(parameter)
    return model


@pytest.fixture(scope="session")
def tiny_folder(embedded: Any, tmp_path_factory: pytest.TempPathFactory) -> Path:
    """The folder of the tiny model and its tokenizer."""
    folder = tmp_path_factory.mktemp("tiny")
    tiny_model().save_pretrained(folder)
    embedded[1].save_pretrained(folder)
    return folder


@pytest.fixture(scope="session")
def tiny_pair(tiny_folder: Path) -> tuple[Any, Any]:
    return models.load(str(tiny_folder))


@pytest.fixture
def tiny(tiny_pair: tuple[Any, Any], monkeypatch: pytest.MonkeyPatch) -> tuple[Any, Any]:
    """The tiny model and its tokenizer, which every command is given."""
    monkeypatch.setattr(models, "load", lambda *_: tiny_pair)
    return tiny_pair


@pytest.fixture
def unloaded(monkeypatch: pytest.MonkeyPatch) -> None:
    """Whoever loads a model fails: bad input is to be refused at once."""
    monkeypatch.setattr(models, "load", lambda *_: pytest.fail("a model was loaded before input was checked"))


def check_refused(run: Run, *words: str, because: str) -> None:
    """One sentence on standard error, exit code 2, and nothing else happens."""
    before = sorted(Path.cwd().rglob("*"))
    done = run(*words)
    assert (done.code, done.out) == (2, "")
    assert done.err.startswith("keepset: ") and done.err.endswith("\n")
    assert done.err.count("\n") == 1 and "\x1b" not in done.err
    assert because in done.err
    assert sorted(Path.cwd().rglob("*")) == before


def load_json(text: str) -> Any:
    """JSON as the standard has it, which has no word for NaN."""
    return json.loads(text, parse_constant=lambda word: pytest.fail(f"{word} is not JSON"))


@pytest.fixture
def text(tmp_path: Path) -> Path:
    """A text of some 700 tokens."""
    path = tmp_path / "text"
    path.write_text(texts.essay()[:3000], encoding="utf-8")
    return path
