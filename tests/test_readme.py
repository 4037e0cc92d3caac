"""What README shows first runs as it is printed."""

from __future__ import annotations

import re
from pathlib import Path
from typing import Any

import pytest

from keepset import models

README = (Path(__file__).parents[1] / "README.md").read_text(encoding="utf-8")


def test_the_first_lines_run(
    embedded: Any, monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]
) -> None:
    monkeypatch.setattr(models, "load", lambda *_: embedded)
    (first, *_) = re.findall(r"```python\n(.*?)```", README, flags=re.S)
    exec(compile(first, "README.md", "exec"), {})
    printed = capsys.readouterr().out
    assert "Oslo's secret number is 48217" in printed
    assert re.search(r"Cache\(reread\(keep=0.25\): 24\d of 9\d\d tokens, 11\.\d MB of 4\d\.\d\)", printed)
