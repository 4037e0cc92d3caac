from pathlib import Path
from typing import Any

import pytest

from keepset.lab import tune as module
from tests.lab.cli.conftest import Run, load_json

MODEL = "SmolLM2-135M-Instruct"
pytestmark = pytest.mark.usefixtures("tiny", "text")
# One of them cannot run.
TUNE = ("tune", "--text", "text", "--recipes", "streaming_llm, tova, knorm, qfilter(stats='absent')")


def test_figures_and_table(run: Run) -> None:
    done = run(*TUNE, "--budget", "0.3", "--json", "figures")
    assert (done.code, done.err) == (0, "figures: figures\n")
    first, _, *rows = done.out.splitlines()
    assert first == f"{MODEL}, bytes=0.3: 16 pieces of 240 tokens, 16 after each."
    result = load_json(Path("figures").read_text(encoding="utf-8"))
    assert [row.split()[0] for row in rows[:3]] == [row["recipe"] for row in result["rows"]]
    assert "There is no file 'absent'" in rows[3] and rows[4:] == result["verdict"]
    assert (result["model"], result["budget"], result["tokens"]) == (MODEL, "bytes=0.3", 240)
    assert result["continuation_tokens"] == 16
    assert result["pieces"] == result["measured"] == 16 and result["round"] == result["rounds"] == 4
    names = {"streaming_llm(bytes=0.3)", "tova(bytes=0.3)", "knorm(bytes=0.3)"}
    assert {row["recipe"] for row in result["rows"]} == names
    for row in result["rows"]:
        assert row["kl"]["low"] <= row["kl"]["mean"] <= row["kl"]["high"]
        assert row["pieces"] == 16 and row["finalist"] and row["keep"] == 64 / 240 and row["share"] == 0.3
    (dropped,) = result["dropped"]
    assert dropped["recipe"] == "qfilter(stats='absent', bytes=0.3)" and "no file 'absent'" in dropped["reason"]
    assert result["recipe"] in result["tied"] and set(result["tied"]) <= names
    assert result["recipe"] in result["verdict"][0]


def test_without_recipes_those_that_compare_takes(run: Run, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(module, "PIECES", 1)
    monkeypatch.setattr("keepset.defaults.COMPARED", ("random",))
    result = load_json(run("tune", "--text", "text", "--json", "-").out)
    tried = {*(row["recipe"] for row in result["rows"]), *(each["recipe"] for each in result["dropped"])}
    defaults = ("quantized(match(reread), bytes=0.25)", "quantized(pool(prompt_queries), bytes=0.25)")
    assert tried == {*defaults, "random(bytes=0.25)"}


@pytest.mark.full
@pytest.mark.parametrize(("after", "known"), [(0, 0), (2, 2), (21, 3)])
def test_interrupt_shows_what_is_known(run: Run, monkeypatch: pytest.MonkeyPatch, after: int, known: int) -> None:
    fidelity, left = module.fidelity, iter(range(after))

    def interrupted(*words: Any) -> Any:
        if next(left, None) is None:
            raise KeyboardInterrupt
        return fidelity(*words)

    monkeypatch.setattr(module, "fidelity", interrupted)
    done = run(*TUNE, "--json", "-")
    assert done.code == 130
    assert done.err == (f"interrupted in round {1 if after == 2 else 3} of 4\n" if known else "interrupted\n")
    if known:
        result = load_json(done.out)
        assert (result["measured"], len(result["rows"])) == (after // 3, known)
        # Six pieces are the fewest that tell anything.
        assert (result["recipe"] is None) == ("Too little is known to name" in result["verdict"][0]) == (after < 18)
