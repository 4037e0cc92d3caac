from __future__ import annotations

import json
import re
from pathlib import Path
from typing import Any

import pytest
from rich.console import Console

from keepset import texts
from keepset.bench.tune import measure as module
from keepset.bench.tune import space
from keepset.cli import console
from keepset.recipe import Recipe
from tests.bench.report.pages import data_of
from tests.cli.conftest import Run
from tests.cli.test_bad_input import check_refused, unloaded  # noqa: F401

MODEL = "SmolLM2-135M-Instruct"
TUNE = ("tune", "--text", "text")
RESULT = [
    *("model", "keep", "tokens", "continuation_tokens", "pieces", "facts", "round", "rounds", "measured", "full"),
    *("recipe", "recipe_in_full", "tied", "verdict", "rows", "dropped"),
]
ROW = {
    "recipe": str,
    "pieces": int,
    "finalist": bool,
    "kl": dict,
    "top1": float,
    "keep": float,
    "kv_bytes": float,
    "kv_bytes_full": float,
    "prefill_seconds": float,
    "prefill_seconds_full": float,
}


@pytest.fixture
def small(tiny: Any, text: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    """Few recipes, one of which cannot run, on a tiny model and a small text."""
    recipes = "streaming_llm, tova, knorm, qfilter(stats='absent')"
    monkeypatch.setattr(space, "scorers", lambda: Recipe.parse_list(recipes))
    monkeypatch.setattr(space, "compositions", lambda best: [])


def load(printed: str) -> Any:
    def no_constants(word: str) -> None:
        raise AssertionError(f"{word} is not JSON")

    return json.loads(printed, parse_constant=no_constants)


def types(row: dict[str, Any]) -> dict[str, type]:
    return {name: type(value) for name, value in row.items()}


@pytest.mark.usefixtures("small")
def test_json_and_report(run: Run) -> None:
    done = run(*TUNE, "--keep", "0.3", "--json", "-", "--html", "page.html")
    assert (done.code, done.err) == (0, "report: page.html\n")
    result = load(done.out)
    assert list(result) == RESULT
    assert (result["model"], result["keep"], result["tokens"], result["continuation_tokens"]) == (MODEL, 0.3, 240, 16)
    assert result["pieces"] == result["measured"] == 16 and result["round"] == result["rounds"] == 4
    assert result["facts"] == 0 and list(result["full"]) == ["kv_bytes"]
    names = {"streaming_llm(keep=0.3)", "tova(keep=0.3)", "knorm(keep=0.3)"}
    assert {row["recipe"] for row in result["rows"]} == names
    for row in result["rows"]:
        assert types(row) == ROW
        assert row["kl"]["low"] <= row["kl"]["mean"] <= row["kl"]["high"]
        assert row["pieces"] == 16 and row["finalist"] and row["keep"] == 72 / 240
    (dropped,) = result["dropped"]
    assert dropped["recipe"] == "qfilter(stats='absent', keep=0.3)" and "There is no file 'absent'" in dropped["reason"]
    assert (
        result["recipe"] in result["tied"] and set(result["tied"]) <= names and result["recipe"] in result["verdict"][0]
    )
    page = Path("page.html").read_text(encoding="utf-8")
    assert data_of(page)["figures"] == result


@pytest.mark.full
@pytest.mark.usefixtures("small")
def test_table_with_facts(run: Run) -> None:
    Path("text").write_text(texts.essay()[:3000], encoding="utf-8")
    done = run(*TUNE, "--keep", "64", "--retrieval", "--seed", "3")
    # Only where it takes long is there a word of how long.
    assert done.code == 0
    assert re.fullmatch(r"(3 recipes and what the best of them compose to: about .+ from here on\n)?", done.err)
    first, second, header, *rows = done.out.splitlines()
    assert first.startswith(f"{MODEL}, keep=64: 16 pieces of ") and first.endswith(" tokens, 16 after each.")
    # What a random model says is hardly ever a fact.
    assert second.startswith("Found of 4 facts in each piece by the full cache: 0% (0%..")
    assert header.split() == [
        "recipe",
        "pieces",
        "MB",
        "bytes",
        "KL",
        "95",
        "%",
        "top-1",
        "prefill",
        "found",
        "95",
        "%",
    ]
    assert [row.split()[1] for row in rows[:3]] == ["16"] * 3
    assert {row.split()[0] for row in rows[:3]} == {"streaming_llm(keep=64)", "tova(keep=64)", "knorm(keep=64)"}
    assert "There is no file 'absent'" in rows[3]
    assert "(keep=64)" in rows[4] and "retrieval says nothing" in rows[5] and len(rows) == 6


@pytest.mark.full
@pytest.mark.usefixtures("small")
def test_several_texts_and_the_same_seed_twice(run: Run) -> None:
    Path("other").write_text(texts.essay("worked")[5000:8000], encoding="utf-8")
    results = [load(run(*TUNE, "--text", "other", "--keep", "0.3", "--json", "-").out) for _ in range(2)]
    rows = [[{k: v for k, v in row.items() if "seconds" not in k} for row in each["rows"]] for each in results]
    assert rows[0] == rows[1]
    other = load(run(*TUNE, "--text", "other", "--keep", "0.3", "--seed", "1", "--json", "-").out)["rows"]
    assert other[0]["kl"] != results[0]["rows"][0]["kl"]


@pytest.mark.full
@pytest.mark.usefixtures("small")
@pytest.mark.parametrize(("after", "known"), [(0, 0), (2, 2), (21, 3), (36, 3)])
def test_interrupt_shows_what_is_known(run: Run, monkeypatch: pytest.MonkeyPatch, after: int, known: int) -> None:
    fidelity, done_so_far = module.fidelity, []

    def interrupted(*words: Any) -> Any:
        if len(done_so_far) == after:
            raise KeyboardInterrupt
        done_so_far.append(None)
        return fidelity(*words)

    monkeypatch.setattr(module, "fidelity", interrupted)
    done = run(*TUNE, "--json", "-")
    assert done.code == 130 and "Traceback" not in done.err
    if not known:
        assert (done.out, done.err) == ("", "interrupted\n")
        return
    assert done.err == f"interrupted in round {1 + (after > 6) + (after > 12) + (after > 24)} of 4\n"
    result = load(done.out)
    assert result["measured"] == after // 3 and len(result["rows"]) == known
    assert sum(row["pieces"] for row in result["rows"]) == after
    # Six pieces are the fewest that tell anything.
    assert (result["recipe"] is None) == (after < 18)
    assert ("Too little is known to name" in result["verdict"][0]) == (after < 18)


@pytest.mark.usefixtures("small")
def test_a_terminal_shows_how_far_it_is(run: Run, monkeypatch: pytest.MonkeyPatch) -> None:
    terminal = Console(width=200, stderr=True, force_terminal=True)
    monkeypatch.setattr(console, "stderr", lambda: terminal)
    stop: list[None] = []

    def figures(*words: Any) -> dict[str, float]:
        stop.append(None)
        if len(stop) == 20:
            raise KeyboardInterrupt
        costs = {"kv_bytes": 1, "kv_bytes_full": 2, "prefill_seconds": 1.0, "prefill_seconds_full": 1.0}
        return {"kl": 0.1, "top1": 1.0, "keep": 0.3, **costs}

    monkeypatch.setattr(module, "fidelity", figures)
    done = run(*TUNE)
    assert done.code == 130 and "round 3 of 4: 3 recipes" in done.err and "interrupted in round 3 of 4" in done.err
    # 3 recipes on 16 pieces, whose prefills count ten each; 19 and 7 of them are done.
    assert "89/208" in done.err


# --- bad input


@pytest.mark.usefixtures("unloaded", "text")
@pytest.mark.parametrize(
    ("words", "because"),
    [
        (["--keep", "0"], "keep=0 is out of range"),
        (["--keep", "1.5"], "keep=1.5 is out of range: use a fraction in (0, 1]"),
        (["--keep", "half"], "keep='half' is not a number"),
        (["--keep", "0.5,0.25"], "keep='0.5,0.25' is more than one budget"),
        (["--seed", "-1"], "--seed -1 is out of range"),
        (["--text", "text"], "'text' is given twice"),
        (["--text", "./text"], "is given twice"),
        (["--text", "absent"], "'absent' cannot be read"),
        (["--html", "absent/page.html"], "cannot be written"),
    ],
)
def test_bad_words(run: Run, words: list[str], because: str) -> None:
    check_refused(run, *TUNE, *words, because=because)


def test_no_text(run: Run) -> None:
    done = run("tune", "--keep", "0.25")
    assert done.code == 2 and "--text" in done.err and "Traceback" not in done.err


@pytest.mark.usefixtures("tiny")
@pytest.mark.parametrize("keep", ["1.0", "240"])
def test_a_budget_that_drops_nothing(run: Run, text: Path, keep: str) -> None:
    check_refused(run, *TUNE, "--keep", keep, because=f"keep={keep} drops nothing of pieces of 240 tokens")


@pytest.mark.usefixtures("tiny")
def test_too_short_a_text(run: Run, text: Path) -> None:
    text.write_text("Two words.", encoding="utf-8")
    check_refused(
        run, *TUNE, because="tokens, too few for 16 pieces of 256: give one of 496 tokens or more, or several"
    )


@pytest.mark.usefixtures("text")
def test_a_model_that_is_not_there(run: Run) -> None:
    check_refused(run, *TUNE, "--model", "./absent", because="'./absent' is neither an existing folder nor the name")
