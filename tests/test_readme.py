"""What README and the documents show runs as it is printed."""

from __future__ import annotations

import re
import shlex
from pathlib import Path
from typing import Any

import pytest
from typer.main import get_command

from keepset import METHODS, Recipe, models
from keepset.cli import app

ROOT = Path(__file__).parents[1]
README = ROOT / "README.md"
DOCUMENTS = [README, *sorted((ROOT / "docs").glob("*.md"))]

# A line of code may go on after a backslash.
COMMAND = re.compile(r"^ {4,}(keepset (?:.*\\\n)*.*)$", re.M)
QUOTED = re.compile(r"`((\w+)\([^`]*\))`")

STARTS_OTHERS = ("serve", "bench serve", "reproduce", "compile", "calibrate --model", "eval niah", "eval needle,gsm8k")
"""Engines, the hub, or hours: of these the words are read, and nothing is run."""


def commands(document: Path) -> list[list[str]]:
    """The words of every command in it that begins a line of code, without comments."""
    return [
        shlex.split(text.replace("\\\n", " "), comments=True)
        for text in COMMAND.findall(document.read_text(encoding="utf-8"))
    ]


def test_python_runs(
    embedded: Any, monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str], tmp_path: Path
) -> None:
    """Piece after piece in one session, as a reader would."""
    monkeypatch.chdir(tmp_path)
    monkeypatch.setattr(models, "load", lambda *_: embedded)
    session: dict[str, Any] = {}
    for code in re.findall(r"```python\n(.*?)```", README.read_text(encoding="utf-8"), flags=re.S):
        exec(compile(code, "README.md", "exec"), session)
    printed = capsys.readouterr().out
    assert "Oslo's secret number is 48217" in printed
    assert re.search(r"Cache\(reread\(keep=0.25\): 24\d of 9\d\d tokens, 11\.\d MB of 4\d\.\d\)", printed)
    again = session["tokenizer"].decode(session["answer"][0])
    assert "48217" in again


@pytest.mark.parametrize("document", DOCUMENTS, ids=lambda path: path.stem)
def test_commands_are_known_and_so_are_their_options(document: Path) -> None:
    for words in commands(document):
        command: Any = get_command(app)
        rest = words[1:]
        while hasattr(command, "commands"):
            command, rest = command.commands[rest[0]], rest[1:]
        context = command.make_context(words[0], rest)
        assert command.context_settings.get("ignore_unknown_options") or not context.args, words


@pytest.mark.parametrize("document", DOCUMENTS, ids=lambda path: path.stem)
def test_recipes_can_be_read(document: Path) -> None:
    for text, name in QUOTED.findall(document.read_text(encoding="utf-8")):
        if name in METHODS and not re.search(r"\.\.\.|scorer|recipe", text):
            Recipe.parse(text)
