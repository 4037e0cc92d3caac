"""What README shows in Python runs as it is printed; `tests/cli/test_documents.py` has the commands."""

from __future__ import annotations

import re
from pathlib import Path
from typing import Any

import pytest

from keepset import models

README = (Path(__file__).parents[1] / "README.md").read_text(encoding="utf-8")


def test_python_runs(
    embedded: Any, monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str], tmp_path: Path
) -> None:
    """Piece after piece in one session, as a reader would."""
    monkeypatch.chdir(tmp_path)
    monkeypatch.setattr(models, "load", lambda *_: embedded)
    session: dict[str, Any] = {}
    for code in re.findall(r"```python\n(.*?)```", README, flags=re.S):
        exec(compile(code, "README.md", "exec"), session)
    printed = capsys.readouterr().out
    assert "Oslo's secret number is 48217" in printed
    assert re.search(r"Cache\(reread\(keep=0.25\): 24\d of 9\d\d tokens, 11\.\d MB of 4\d\.\d\)", printed)
    again = session["tokenizer"].decode(session["answer"][0])
    assert "48217" in again
