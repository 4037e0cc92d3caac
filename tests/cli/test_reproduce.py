from __future__ import annotations

import json
from pathlib import Path
from typing import Any

import pytest

from keepset.bench.papers.catalogue import ENTRIES
from keepset.bench.sweep import runner
from keepset.bench.sweep.runner import Runner
from keepset.bench.sweep.store import Store
from keepset.models import EMBEDDED
from tests.cli.conftest import Run
from tests.cli.test_bad_input import check_refused

CHEAP = ("--model", "embedded", "--limit", "2", "--answer-tokens", "12")


@pytest.fixture
def data(tmp_path: Path) -> str:
    """A folder with three problems of GSM8K's kind."""
    folder = tmp_path / "data"
    folder.mkdir()
    rows = [{"question": f"What is {n} plus {n}?", "answer": f"It is {2 * n}. #### {2 * n}"} for n in range(3)]
    (folder / "gsm8k.jsonl").write_text("\n".join(map(json.dumps, rows)), encoding="utf-8")
    return str(folder)


def test_list(run: Run) -> None:
    done = run("reproduce", "--json")
    assert done.code == 0
    listed = {each["name"]: each for each in json.loads(done.out)}
    assert list(listed) == list(ENTRIES)
    assert listed["ams-table-2"]["state"] == "needs a model of 7B and data: gsm8k (the hub's, or --data)"
    text = run("reproduce", "list")
    assert text.code == 0 and all(name in text.out for name in ENTRIES)


def test_a_table_is_stopped_gone_on_with_and_shown(
    run: Run, tiny: Any, data: str, monkeypatch: pytest.MonkeyPatch
) -> None:
    command = ("reproduce", "ams-table-2", *CHEAP, "--data", data)
    path = Path("reproduced") / f"ams-table-2-{EMBEDDED}.sqlite"
    monkeypatch.setattr(runner, "Runner", Interrupted)
    stopped = run(*command)
    assert stopped.code == 130
    announced, note = stopped.err.splitlines()
    assert announced.startswith("16 cells of 2 examples: ") and "at most 192 of answers" in announced
    assert note.startswith("stopped after 3 of 16 cells")
    with Store.open(path) as store:
        first = store.cells()
    assert len(first) == 3

    monkeypatch.setattr(runner, "Runner", Runner)
    done = run(*command, "--json")
    assert done.code == 0
    with Store.open(path) as store:
        cells = store.cells()
    assert len(cells) == 16 and all(cell in cells for cell in first)
    (result,) = json.loads(done.out)
    assert (result["model"], result["paper_model"]) == (EMBEDDED, "deepseek-ai/DeepSeek-R1-Distill-Qwen-7B")
    rows = {(row["method"], row["keep"]): row for row in result["rows"]}
    assert rows["AMS-Expected", 64]["paper"] == 0.567 and rows["TOVA", 128]["paper"] == 0.571
    recipe = "tova(keep=64, sinks=4, recent=32, prefill=False, every=512)"
    scores = [cell.score for cell in cells if cell.recipe == recipe]
    assert len(scores) == 2 and rows["TOVA", 64]["figure"]["value"] == sum(scores) / 2

    table = run(*command)
    assert table.code == 0 and "its scores mean nothing" in table.out
    (line,) = [line.split() for line in table.out.splitlines() if line.startswith("  AMS-Expected") and " 64 " in line]
    assert line[1:3] == ["64", "56.7"] and line[-1] == "2"


class Interrupted(Runner):
    """A runner that somebody stops before its fourth cell."""

    def run(self, *args: Any) -> Any:
        for number, cell in enumerate(super().run(*args)):
            if number == 3:
                raise KeyboardInterrupt
            yield cell


def test_what_cannot_be(run: Run, tiny: Any) -> None:
    check_refused(run, "reproduce", "ams-table-99", because="There is no table or figure 'ams-table-99'")
    check_refused(run, "reproduce", "ams-table-2", "--limit", "0", because="--limit 0 is out of range")
    check_refused(run, "reproduce", "ams-table-2", "--lengths", "x", because="--lengths 'x' is no list")
