import json
import signal
import sys
import time
from collections.abc import Iterator
from itertools import product
from pathlib import Path
from typing import Any

import pytest

from keepset import models
from keepset.lab.record import FULL, Record
from keepset.lab.sweep import engine
from keepset.lab.sweep.engine import Portion, Skipped
from keepset.lab.sweep.prompts import Asking
from keepset.lab.sweep.store import Store
from keepset.lab.tasks import find as finding
from tests.lab.cli.conftest import Forked, Run, check_refused
from tests.lab.sweep.sweeping import Counting, cell

WHERE = "all figures are in 'sweep.jsonl': keepset results shows them again\n"


class Stub:
    """An engine that makes cells out of their names; `interrupt_at` comes before Ctrl-C."""

    made = answer_tokens = 0
    asking = Asking()
    interrupt_at: int | None = None
    no_memory_for = ""

    def __init__(self, model: Any, tokenizer: Any, asking: Asking) -> None:
        Stub.asking = asking

    def answer(self, portion: Portion) -> Iterator[Record | Skipped]:
        Stub.answer_tokens = portion.task.generation.tokens
        for (seed, example), candidate in product(portion.examples, portion.candidates):
            Stub.made += 1
            if Stub.made == Stub.interrupt_at:
                raise KeyboardInterrupt
            if candidate.text == Stub.no_memory_for:
                yield Skipped(portion.task.name, candidate.text, "memory was not enough")
            else:
                yield cell(portion.task, example, candidate, seed)


@pytest.fixture
def stub(tiny: Any, monkeypatch: pytest.MonkeyPatch) -> Iterator[type[Stub]]:
    """Tasks `counting` and `reckoning`, which decodes, and the engine above."""
    tasks = {"counting": Counting("counting"), "reckoning": Counting("reckoning", decodes=True)}
    monkeypatch.setattr(finding, "find", lambda names, settings: [tasks[name] for name in names])
    monkeypatch.setattr(finding, "check_names", lambda names: None)
    monkeypatch.setattr(engine, "Engine", Stub)
    yield Stub
    Stub.made, Stub.asking, Stub.interrupt_at, Stub.no_memory_for = 0, Asking(), None, ""


def stored(path: str = "sweep.jsonl") -> list[Record]:
    with Store.open(Path(path)) as store:
        return store.cells()


def recipes(task: str, path: str = "sweep.jsonl") -> list[str]:
    return list(dict.fromkeys(cell.recipe for cell in stored(path) if cell.task == task))


def test_options_reach_the_engine_and_the_file(
    run: Run, stub: type[Stub], tiny: Any, monkeypatch: pytest.MonkeyPatch
) -> None:
    options = "--mode agnostic --no-chat --temperature 0.5 --limit 2 --output-tokens 7 --seeds 3,5 --out x.jsonl"
    done = run("eval", "counting", *options.split())
    assert done.code == 0 and FULL in done.out and "streaming_llm(bytes=0.5)" in done.out  # the tables
    assert Stub.asking == Asking("agnostic", False, 0.5) and Stub.answer_tokens == 7
    assert {(each.seed, each.example) for each in stored("x.jsonl")} == {(s, e) for s in (3, 5) for e in "01"}
    with Store.open(Path("x.jsonl")) as store:
        assert store.model == "SmolLM2-135M-Instruct"
        expected = {"--mode": "agnostic", "--limit": 2, "--temperature": 0.5, "chat template": False}
        expected |= {"--output-tokens": 7, "--sample": None}
        assert {name: store.configuration[name] for name in expected} == expected
        assert store.configuration["number of layers"] == "2" and len(store.configuration["weights"]) == 64
    monkeypatch.setattr(tiny[1], "chat_template", None)
    assert run("eval", "counting").code == 0
    assert Stub.asking.chat is False
    monkeypatch.setitem(sys.modules, "ray", None)
    check_refused(run, "eval", "counting", "--ray", because='Ray is not installed: run `pip install "ray>=')


def test_recipes_and_baselines_where_none_are_named(run: Run, stub: type[Stub]) -> None:
    assert run("eval", "counting,reckoning").code == 0
    made = ("snapkv({})", "adakv(expected_attention, {})", "kvzip({})", "random({})", "streaming_llm({})")
    shares = [each.format(f"bytes={share}") for each in made for share in (0.5, 0.25)]
    assert recipes("counting") == [FULL, *shares]
    made = ("snapkv({})", "r_kv({})", "ams(tova, {})", "random({}, protect_prompt=True)", "streaming_llm({})")
    keeps = [f"{each[:-1]}, every=64)".format(f"keep={keep}") for each in made for keep in (256, 128)]
    assert recipes("reckoning") == [FULL, *keeps]
    assert all(each.error is None for each in stored())


def test_a_task_that_decodes_may_have_its_prompt_compressed_only(run: Run, stub: type[Stub]) -> None:
    words = ("--recipes", "gvote, tova, snapkv(every=8, keep=64)", "--budgets", "0.5")
    run("eval", "reckoning", "--every", "0", *words)
    assert recipes("reckoning") == [
        *(FULL, "gvote", "tova(bytes=0.5)", "snapkv(keep=64, every=8)"),
        *("random(keep=64)", "random(bytes=0.5)", "streaming_llm(keep=64)", "streaming_llm(bytes=0.5)"),
    ]
    run("eval", "reckoning", "--every", "0", "--out", "x.jsonl")
    run("eval", "counting", "--out", "y.jsonl")
    assert recipes("reckoning", "x.jsonl") == recipes("counting", "y.jsonl")


def test_a_sample_is_drawn_and_goes_on_as_itself_only(run: Run, stub: type[Stub]) -> None:
    words = ("eval", "counting", "--recipes", "knorm", "--budgets", "0.5", "--sample", "0.5")
    assert run(*words).code == 0
    drawn = {each.example for each in stored()}
    assert len(drawn) == 2 and len(stored()) == 2 * 4
    assert run(*words, "--recipes", "tova").code == 0 and {each.example for each in stored()} == drawn
    check_refused(run, *words[:-1], "2", because="(--sample: 0.5, not 2)")
    check_refused(run, *words[:-2], because="(--sample: 0.5, not none)")


def test_tokens_that_stay_under_every_recipe(run: Run, stub: type[Stub]) -> None:
    words = ("--recipes", "tova, r_kv(recent=64)", "--budgets", "128", "--always", "4, 32")
    assert run("eval", "reckoning", *words).code == 0
    assert recipes("reckoning") == [
        FULL,
        *("tova(keep=128, sinks=4, recent=32, every=64)", "r_kv(keep=128, recent=64, every=64)"),
        "random(keep=128, sinks=4, recent=32, protect_prompt=True, every=64)",
        "streaming_llm(keep=128, recent=32, every=64)",
    ]


DECODED = ("random(keep=64, protect_prompt=True, every=64)", "streaming_llm(keep=64, every=64)")


@pytest.mark.parametrize(
    ("words", "counting", "reckoning"),
    [
        (
            "--recipes tova,knorm(keep=0.1) --budgets 0.5,64 --every 16",
            [
                *("tova(bytes=0.5)", "tova(keep=64)", "knorm(keep=0.1)"),
                *(
                    f"{name}({keep})"
                    for name in ("random", "streaming_llm")
                    for keep in ("keep=0.1", "bytes=0.5", "keep=64")
                ),
            ],
            [
                *("tova(keep=64, every=16)", "knorm(keep=0.1, every=16)"),
                *("random(keep=64, protect_prompt=True, every=16)", "streaming_llm(keep=64, every=16)"),
            ],
        ),
        (
            "--recipes tova(keep=99,every=8)",
            ["tova(keep=99, every=8)", "random(keep=99)", "streaming_llm(keep=99)"],
            ["tova(keep=99, every=8)", *(baseline.replace("64", "99", 1) for baseline in DECODED)],
        ),
        (
            "--recipes tova,random --budgets 64 --no-baselines",
            ["tova(keep=64)", "random(keep=64)"],
            ["tova(keep=64, every=64)", "random(keep=64, every=64)"],
        ),
        (
            "--recipes gvote --budgets 64",
            ["gvote", "random(keep=64)", "streaming_llm(keep=64)"],
            ["gvote(every=64)", *DECODED],
        ),
    ],
)
def test_baselines_have_the_budgets_of_the_others(
    run: Run, stub: type[Stub], words: str, counting: list[str], reckoning: list[str]
) -> None:
    run("eval", "counting", "reckoning", "--limit", "1", *words.split())
    assert recipes("counting") == [FULL, *counting]
    assert recipes("reckoning") == [FULL, *reckoning]


def test_a_recipe_that_fails_is_a_result_and_said(run: Run, stub: type[Stub]) -> None:
    words = ("eval", "counting", "--recipes", "snapkv, tova", "--budgets", "8", "--no-baselines", "--json", "-")
    done = run(*words)
    few = "The budget 8 is 8 entries of every head; 8 % of the bytes are 0.08.\n"
    assert (done.code, done.err) == (1, few + WHERE)
    rows = {row["recipe"]: row for row in json.loads(done.out)["rows"]}
    assert "below the 64 entries that always stay" in rows["snapkv(keep=8)"]["error"]
    assert rows["tova(keep=8)"]["error"] is None
    assert run(*words) == done and Stub.made == 12


def test_ctrl_c_keeps_what_is_there_and_the_same_command_goes_on(run: Run, stub: type[Stub]) -> None:
    words = ("eval", "counting", "--recipes", "knorm", "--budgets", "0.5", "--json", "-")
    Stub.interrupt_at = 7
    done = run(*words)
    assert (done.code, done.out) == (130, "")
    assert done.err == "stopped after 6 of 16 cells, which are in 'sweep.jsonl': the same command goes on\n"
    assert len(stored()) == 6
    Stub.interrupt_at = 8
    nothing = run(*words, "--out", "nothing.jsonl")
    assert (nothing.code, nothing.err) == (130, "stopped before one of 16 cells was made\n")
    assert not list(Path.cwd().glob("nothing*"))
    again = run(*words)
    assert again.code == 0 and Stub.made == 8 + 10
    whole = run(*words, "--out", "another.jsonl")
    assert whole.out == again.out and stored() == stored("another.jsonl")


def test_what_memory_was_not_enough_for_is_said(run: Run, stub: type[Stub]) -> None:
    words = ("eval", "counting", "--limit", "3", "--recipes", "knorm", "--budgets", "0.5", "--json", "-")
    Stub.no_memory_for = "knorm(bytes=0.5)"
    done = run(*words)
    assert done.code == 1
    said = "counting: knorm(bytes=0.5) was left out, 3 times (memory was not enough); the same command tries again\n"
    assert done.err == WHERE + said
    Stub.no_memory_for = ""
    assert run(*words).code == 0
    assert recipes("counting") == [FULL, "random(bytes=0.5)", "streaming_llm(bytes=0.5)", "knorm(bytes=0.5)"]


def test_what_is_done_is_shown_without_the_model(run: Run, stub: type[Stub], monkeypatch: pytest.MonkeyPatch) -> None:
    words = ("eval", "counting", "--recipes", "knorm", "--budgets", "0.5,0.25", "--seeds", "0,1", "--json", "-")
    first = run(*words)
    monkeypatch.setattr(models, "load", lambda *_: pytest.fail("a model was loaded for nothing"))
    assert run(*words) == first
    part = run("eval", "counting", "--recipes", "knorm", "--budgets", "0.25", "--no-baselines", "--json", "-")
    assert [row["recipe"] for row in json.loads(part.out)["rows"]] == [FULL, "knorm(bytes=0.25)"]
    for more in (["--no-chat"], ["--model", "another"], ["--seeds", "2"], ["--recipes", "tova"]):
        with pytest.raises(pytest.fail.Exception, match="a model was loaded for nothing"):
            run(*words, *more)


def test_another_configuration_is_refused_at_once(run: Run, stub: type[Stub], monkeypatch: pytest.MonkeyPatch) -> None:
    assert run("eval", "counting", "--limit", "2").code == 0
    loaded = models.load
    monkeypatch.setattr(models, "load", lambda *_: pytest.fail("a model was loaded before input was checked"))
    check_refused(run, "eval", "counting", "--limit", "3", because="has other settings (--limit: 2, not 3)")
    two = ("eval", "counting", "--limit", "2")
    check_refused(run, *two, "--mode", "agnostic", because="(--mode: prompt, not agnostic)")
    monkeypatch.setattr(models, "load", loaded)
    check_refused(run, *two, "--no-chat", because="(chat template: yes, not no)")


@pytest.mark.full
@pytest.mark.usefixtures("interrupts")
def test_ctrl_c_in_a_process_of_its_own(tiny_folder: Path, tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    words = ["eval", "needle", "--prompt-tokens", "256,260,264", "--model", str(tiny_folder), "--recipes", "knorm"]
    monkeypatch.chdir(tmp_path)
    process = Forked(*words)
    end = time.monotonic() + 120
    # Four lines are no cells, and an interruption may take back the newest one.
    while not Path("sweep.jsonl").exists() or Path("sweep.jsonl").read_bytes().count(b"\n") < 6:
        assert time.monotonic() < end and process.is_alive()
        time.sleep(0.05)
    done = process.interrupt(signal.SIGINT)
    cells = stored()
    assert (done.code, done.out) == (130, "")
    stopped = f"stopped after {len(cells)} of 210 cells, which are in 'sweep.jsonl': the same command goes on"
    assert done.err.splitlines()[-1] == stopped and "Traceback" not in done.err


def test_conversations_are_compressed_between_turns_beside_what_needs_no_recipe(run: Run, tiny: Any) -> None:
    options = "--turns 3 --questions 3 --compactions 1,3 --prompt-tokens 260 --limit 1 --budgets 64"
    options += " --recipes snapkv(window=8)"
    done = run("eval", "chat", *options.split())
    assert done.code == 0, done.err
    others = ["streaming_llm(keep=64, turns=True)", "newest_turns(keep=64)", "summary(keep=64)"]
    for times in ("once", "3 times"):
        assert recipes(f"chat@260, compressed {times}") == [FULL, "snapkv(window=8, keep=64, turns=True)", *others]
    assert all(set(cell.scores) >= {"right", "told 1 to 1", "corrected no"} for cell in stored())
    assert "with --by told it shows them by the turn" in done.err
    split = run("results", "sweep.jsonl", "--by", "told")
    assert split.code == 0 and "chat@260, compressed 3 times, told 3 to 3" in split.out
    before = Path("sweep.jsonl").read_bytes()
    assert run("eval", "chat", *options.split()).out == done.out and Path("sweep.jsonl").read_bytes() == before


@pytest.mark.parametrize("wrong", ["--mode agnostic", "--no-chat", "--temperature 0.5"])
def test_conversations_have_no_other_ways_of_asking(run: Run, tiny: Any, wrong: str) -> None:
    because = f"Conversations are chats that are answered greedily: leave {wrong.split(maxsplit=1)[0]} out."
    check_refused(run, "eval", "chat", *wrong.split(), because=because)


def test_recorded_conversations_are_read_from_a_file(run: Run, tiny: Any, tmp_path: Path) -> None:
    path = tmp_path / "chats.jsonl"
    chats = [{"conv": [{"user": f"{n}?", "sys": f"It is {n}."} for n in range(first, 4)]} for first in range(3)]
    path.write_text("\n".join(map(json.dumps, chats)), "utf-8")
    options = f"--file {path} --compactions 1 --prompt-tokens 260 --recipes snapkv(window=8) --budgets 64"
    done = run("eval", "chat", *options.split(), "--no-baselines")
    assert done.code == 0, done.err
    task = "mt_eval@260, compressed once"
    assert recipes(task) == [FULL, "snapkv(window=8, keep=64, turns=True)"] and len(stored()) == 2 * 3
    assert all(0 < cell.scores["likelihood"] < 1 for cell in stored())
    check_refused(run, "eval", "needle", "--file", str(path), because="--file is for recorded conversations")
    options = options.replace("--compactions 1", "--compactions 1 --answers own --out own.jsonl")
    assert run("eval", "chat", *options.split(), "--no-baselines").code == 0
