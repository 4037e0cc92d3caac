"""What README and the guide show in Python runs as printed; `tests/lab/cli/test_documents.py` has the commands."""

from __future__ import annotations

import re
from pathlib import Path
from typing import Any

import pytest

from keepset import models
from tests import tiers
from tests.lab.cli.conftest import tiny_model

ROOT = Path(__file__).parents[1]


def pieces(document: str) -> list[str]:
    return re.findall(r"```python\n(.*?)```", (ROOT / document).read_text(encoding="utf-8"), flags=re.S)


def test_readmes_python_runs(
    embedded: Any, monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str], tmp_path: Path
) -> None:
    """Piece after piece in one session, as a reader would; in the full tier on the embedded model, and it is right."""
    monkeypatch.chdir(tmp_path)
    monkeypatch.setattr(models, "load", lambda *_: embedded if tiers.FULL else (tiny_model(), embedded[1]))
    session: dict[str, Any] = {}
    for code in pieces("README.md"):
        exec(compile(code, "README.md", "exec"), session)
    printed = capsys.readouterr().out
    again = session["tokenizer"].decode(session["answer"][0])
    size = re.search(r"Cache\(reread\(bytes=0.25\): (\d+) of (9\d\d) tokens, (.*) MB of (.*) in 16 bits; .*\)", printed)
    assert size and again
    numbers = 64 if tiers.FULL else 8  # of a key: beside 4 bytes of each there are 4 of its position
    assert int(size[1]) == round(0.25 * int(size[2]) * numbers / (numbers + 1))
    if tiers.FULL:
        assert "Oslo's secret number is 48217" in printed and "48217" in again
        assert 5.5 <= float(size[3]) < 6 and 20 <= float(size[4]) < 25
        assert size[0] in (ROOT / "README.md").read_text(encoding="utf-8")


@pytest.mark.full
@pytest.mark.parametrize("document", ["docs/api.md", "docs/guide.md"])
def test_documents_python_runs(document: str, embedded: Any, monkeypatch: pytest.MonkeyPatch, tmp_path: Path) -> None:
    """From top to bottom in one session that knows no name, on a tiny model."""
    monkeypatch.chdir(tmp_path)
    monkeypatch.setattr("transformers.dynamic_module_utils.HF_MODULES_CACHE", str(tmp_path / "modules"))
    (tmp_path / "examples").symlink_to(ROOT / "examples")
    monkeypatch.setattr(models, "load", lambda *_: (tiny_model(), embedded[1]))
    session: dict[str, Any] = {}
    for code in pieces(document):
        exec(compile(code, document, "exec"), session)
    assert session["answer"].shape[1] > session["question"].input_ids.shape[1]
    assert document != "docs/api.md" or session["cache"].nbytes > 0
