import json
from itertools import islice
from pathlib import Path

import pytest

import keepset
from keepset import KeepsetError
from tests.lab.cli.conftest import Run

LATENCY = ("bench", "latency", "--prompt-tokens", "32,64", "--output-tokens", "3", "--rounds", "2")
pytestmark = pytest.mark.usefixtures("tiny", "text")


def test_table_and_json_and_a_recipe_that_cannot_run(run: Run, monkeypatch: pytest.MonkeyPatch) -> None:
    files = ("--text", "text", "--json", "a.json")
    done = run(*LATENCY, "--recipes", "tova(keep=20), knorm(keep=20)", *files)
    assert (done.code, done.err) == (0, "figures: a.json\n")
    lines = [line.split() for line in done.out.splitlines()]
    assert " ".join(lines[1]) == "recipe first token tokens/s latency allocated, MB peak, MB"
    for line, name in zip(lines[3:6] + lines[7:10], 2 * ["full cache", "tova(keep=20)", "knorm(keep=20)"], strict=True):
        assert " ".join(line).startswith(name)
    assert [lines[at] for at in (2, 6)] == [f"{tokens} tokens of prompt".split() for tokens in (32, 64)]
    result = json.loads(Path("a.json").read_text())
    assert result["rounds"] == 2 and len(result["rows"]) == 6
    assert all(len(row["rounds"]) == 2 and row["error"] is None for row in result["rows"])
    words = ("--prompt-tokens", "32", "--output-tokens", "1", "--rounds", "1", "--json", "a", "--text", "text")
    done = run("bench", "latency", *words, "--recipes", "tova(keep=9)")
    assert done.code == 0
    assert [row["tokens_per_second"] for row in json.loads(Path("a").read_text())["rows"]] == [None] * 2

    def refuse(*_: object) -> None:
        raise KeepsetError("It does not go.")

    monkeypatch.setattr(keepset.METHODS["knorm"], "score", refuse)
    done = run(*LATENCY, "--recipes", "knorm(keep=20), tova(keep=20)", "--text", "text")
    assert done.code == 1 and "tokens: It does not go." in done.out
    assert "full cache" in done.out and "tova" in done.out


@pytest.mark.parametrize("after", [1, 7])
def test_interrupted_shows_what_is_done(run: Run, monkeypatch: pytest.MonkeyPatch, after: int) -> None:
    from keepset.lab import latency as module

    measure = module.latency

    def stopped(*args: object) -> object:
        yield from islice(measure(*args), after)  # type: ignore[arg-type]
        raise KeyboardInterrupt

    monkeypatch.setattr(module, "latency", stopped)
    done = run(*LATENCY, "--recipes", "knorm(keep=20)", "--text", "text")
    assert done.code == 130 and done.err.startswith("interrupted")
    assert "knorm(keep=20" in done.out if after == 7 else not done.out
