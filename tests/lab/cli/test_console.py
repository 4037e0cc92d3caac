"""What models and users write reaches the terminal as text, whatever is in it."""

import io
import subprocess
import sys
import time
from pathlib import Path
from typing import Any

import pytest
from rich.console import Console
from rich.progress import Progress

from keepset.lab import embedded
from keepset.lab.cli import checks, console
from keepset.lab.cli.compare import print_table
from keepset.lab.cli.grid import sanitize
from keepset.lab.cli.streaming import Streamer
from keepset.lab.compare.comparison import Comparison
from keepset.lab.record import Record
from keepset.lab.texts import Needle
from keepset.recipe import Recipe
from tests.lab.cli.conftest import Run

CONTROLS = "\x00\x07\x08\x0b\x1b\x7f\x9b\r\u200b\u202e\ufeff\ue000\udcff"
"""Bell, escape, carriage return, delete, the one-byte CSI, invisible and turning characters, half a pair."""
EVIL = "\x1b[31m[red]\x07[/red]\x1b]0;title\x07\r[link=x]"
HARMLESS = "�[31m[red]�[/red]�]0;title��[link=x]"


@pytest.fixture
def terminal(monkeypatch: pytest.MonkeyPatch) -> io.StringIO:
    """What a terminal without colours is sent."""
    sent = io.StringIO()
    shown = Console(file=sent, force_terminal=True, color_system=None, width=200)
    monkeypatch.setattr(console, "stdout", lambda: shown)
    return sent


def test_table_is_text_without_controls(terminal: io.StringIO) -> None:
    assert sanitize("Grüße,\t世界 🙂\n[red]") == "Grüße,\t世界 🙂\n[red]"
    assert sanitize(f"a{CONTROLS}z") == f"a{'�' * len(CONTROLS)}z"
    assert sanitize(EVIL) == HARMLESS
    figures = dict(
        keep=0.5, counted_bytes=1, kv_bytes=1, kv_bytes_full=2, kl=0.1, nll_delta=0.0, top1=1.0, prefill_seconds=2.0,
        prefill_seconds_full=1.0, select_seconds=0.1, decode_tokens_per_second=3.0, needle_found=False,
    )  # fmt: skip
    full = dict(
        counted_bytes=1, kv_bytes=2, fixed_bytes=0, nll=1.0, prefill_seconds=1.0, answer=EVIL, needle_found=True
    )
    rows = [
        Record(f"a({EVIL})", f"a({EVIL})", figures=figures, replies=[EVIL]),
        Record(f"b({EVIL})", "b", error=f"No {EVIL}."),
    ]
    print_table(Comparison(EVIL, 8, 4, full, Needle("", EVIL, "yes"), rows), f"So it is: {EVIL}.")
    shown = terminal.getvalue()
    assert "\x1b" not in shown and "\x07" not in shown and "\r" not in shown
    lines = [line.rstrip() for line in shown.splitlines()]
    assert lines[0] == f"{HARMLESS}: 8 tokens of prompt, 4 after it."
    said = ("Asked after compression: {}", "Full cache answers: {}", "b({0}): No {0}.", "So it is: {}.")
    assert {each.format(HARMLESS) for each in said} <= {*lines}
    assert any(line.startswith(f"  a({HARMLESS})") for line in lines)


ALWAYS = "always keeps the newest 64"


@pytest.mark.parametrize(
    ("recipe", "length", "said"),
    [
        ("knorm(keep=0.5, short=256)", 255, "The prompt stays whole: it has 255 tokens, fewer than short=256."),
        ("snapkv(keep=0.25)", 64, f"The prompt stays whole: it has 64 tokens, and snapkv(keep=0.25) {ALWAYS}."),
        *(
            (
                f"snapkv({share}=0.05)",
                700,
                f"More than the budget stays: snapkv({share}=0.05) {ALWAYS} of 700 tokens (9%).",
            )
            for share in ("keep", "bytes")
        ),
        ("snapkv(keep=64)", 700, f"Nothing is chosen: snapkv(keep=64) {ALWAYS}, which is the whole budget."),
        ("knorm(keep=0.05)", 700, ""),
        *((f"snapkv(keep={keep})", 700, "") for keep in (65, 0.1, 1.0)),
    ],
)
def test_what_stays_is_said(tiny: Any, monkeypatch: pytest.MonkeyPatch, recipe: str, length: int, said: str) -> None:
    notes = list[str]()
    monkeypatch.setattr(checks, "note", notes.append)
    checks.say_always(Recipe.parse(recipe), tiny[0], length)
    assert [note.removesuffix(" Give a larger one.") for note in notes] == ([said] if said else [])


def test_a_terminal_is_told_at_once(run: Run, monkeypatch: pytest.MonkeyPatch) -> None:
    """Before anything that takes long is imported; scripts are told nothing."""
    console.unsay_starting.cache_clear()
    assert run("methods", "snapvk").err.startswith("keepset: There is no method")
    console.unsay_starting.cache_clear()
    monkeypatch.setattr("sys.stderr.isatty", lambda: True)
    assert run("methods", "snapvk").err.startswith("loading...\r          \rkeepset: There is no method")


def test_without_a_terminal_silence_is_broken_by_what_is_under_way(
    monkeypatch: pytest.MonkeyPatch, tmp_path: Path
) -> None:
    """However long a step takes: notes come while it lasts, and none where something else is said."""
    said, path = list[str](), tmp_path / "statistics"
    monkeypatch.setattr(console, "_SILENT", 0.05)
    monkeypatch.setattr(console, "note", said.append)
    shown = Console(file=io.StringIO(), force_terminal=False)
    monkeypatch.setattr(console, "stderr", lambda: shown)

    def heard(text: str) -> bool:
        """Wait until a note says this; a machine may be slow."""
        end = time.monotonic() + 30
        while not any(line.startswith(text) for line in said) and time.monotonic() < end:
            time.sleep(0.01)
        return time.monotonic() < end

    with console.status("loading the model"):
        assert heard("loading the model (after ")
    with console.status("outside"), console.progress("getting ready") as bar:
        assert heard("getting ready (after ")
        console.counted(bar, "documents", 4)()
        assert heard("documents: 1 of 4, about ")
        assert not said[-1].startswith("outside")  # the innermost block knows best
    # Statistics that are measured first are announced and timed.
    monkeypatch.setattr(embedded, "statistics_path", lambda: path)
    monkeypatch.setattr(
        embedded, "embedded_statistics", lambda: (heard("measuring the embedded") and path.touch()) or path
    )
    assert console._measured() == path and path.is_file() and "took" in said[-1]
    said.clear()
    assert console._measured() == path and not said
    shown = Console(file=io.StringIO(), force_terminal=True)
    with console.status("a terminal shows it"):
        assert console._beating == []


def test_how_far_a_bar_has_come() -> None:
    """The mean step tells what is left, also where several come at once."""
    clock = [0.0]
    with console.progress() as bar:
        bar.get_time = lambda: clock[0]
        assert console.how_far(bar) == ""
        step = console.counted(bar, "documents", 20, 4)
        assert console.how_far(bar) == "documents: 4 of 20"
        for seconds in (20.0, 10.0):
            clock[0] += seconds
            step()
        assert console.how_far(bar) == "documents: 6 of 20, about 4 minutes left"
        step(2)
        assert console.how_far(bar) == "documents: 8 of 20, about 2 minutes left"


@pytest.mark.parametrize(
    ("seconds", "said"),
    [
        (0.2, "about 1 second"), (1.4, "about 1 second"), (1.6, "about 2 seconds"), (89, "about 89 seconds"),
        (89.9, "about 90 seconds"), (90, "about 2 minutes"), (5400, "about 1.5 hours"),
    ],
)  # fmt: skip
def test_a_duration_has_its_plural(seconds: float, said: str) -> None:
    assert console.duration(seconds) == said


SHORT = ("compare", "--text", "text", "--prompt-tokens", "80", "--recipes", "knorm, tova")


@pytest.mark.parametrize(
    ("command", "foretells", "without"),
    [
        (("context", "build", "--text", "text", "--out", "saved", "--recipe", "knorm(keep=0.5)"), {"layers"}, set()),
        # The layers run again inside the last one, and their number is the whole truth of it.
        (("context", "build", "--text", "text", "--out", "saved", "--recipe", "kvzip(keep=0.5)"), set(), {"layers"}),
        ((*SHORT, "--continuation", "8", "--budgets", "0.5"), {"recipes"}, {"full cache"}),
        (
            (*SHORT, "--budgets", "64", "--decode", "--every", "4", "--generate", "6"),
            {"tokens"},
            {"tokens of the full cache", "recipes"},
        ),
        (
            ("bench", "latency", "--prompt-tokens", "8", "--output-tokens", "2", "--rounds", "1", "--text", "text"),
            set(),
            {"generations"},
        ),
        (("calibrate", "--out", "new", "--text", "text", "--length", "64", "--gate-steps", "0"), {"passages"}, set()),
        (
            ("calibrate", "--out", "new", "--text", "text", "--length", "64", "--gate-steps", "2"),
            {"gates"},
            {"passages"},
        ),
    ],
)
def test_time_left_is_said_where_steps_tell_it(
    run: Run, tiny: Any, text: Path, monkeypatch: pytest.MonkeyPatch,
    command: tuple[str, ...], foretells: set[str], without: set[str],
) -> None:  # fmt: skip
    """Steps that others follow, or that differ, foretell nothing."""
    said, advance = list[str](), Progress.advance

    def told(bar: Progress, *args: Any) -> None:
        advance(bar, *args)
        assert all(line.completed <= line.total for line in bar.tasks if line.total is not None)
        said.append(console.how_far(bar))

    monkeypatch.setattr(Progress, "advance", told)
    assert run(*command).code == 0
    steps = [line for line in said if line]
    assert {line.split(":")[0] for line in steps if line.endswith(" left")} == foretells
    assert {line.split(":")[0] for line in steps if not line.endswith(" left")} == without


def test_streamed_text_is_text(run: Run, tiny: Any, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(tiny[1], "decode", lambda ids, **_: EVIL * len(ids))
    done = run("generate", "Hello", "--recipe", "tova(keep=4)", "--output-tokens", "3")
    assert done.code == 0
    assert done.out == HARMLESS * 3 + "\n" and done.err.startswith("tova(keep=4): kept ")
    assert "\x1b" not in done.out + done.err


def test_characters_are_streamed_whole_and_half_a_one_shown(embedded: Any, capsys: pytest.CaptureFixture[str]) -> None:
    tokenizer, text = embedded[1], "Grüße, 世界 🙂."
    streamer = Streamer(tokenizer)
    streamer.put(tokenizer("Never shown.", return_tensors="pt")["input_ids"])
    shown = []
    for token in tokenizer(text, return_tensors="pt")["input_ids"][0]:
        streamer.put(token[None])
        shown.append(capsys.readouterr().out)
    streamer.end()
    assert "".join(shown) == text and capsys.readouterr().out == ""
    assert len([piece for piece in shown if piece]) > 4 and "" in shown  # where a token is a part of a character
    ids, streamer = tokenizer("A🙂", return_tensors="pt")["input_ids"][0], Streamer(tokenizer)
    assert len(ids) > 2
    for part in (ids[None], ids[:1], ids[1:2]):
        streamer.put(part)
    streamer.end()
    assert capsys.readouterr().out == "A�"


@pytest.mark.full
def test_output_that_finds_no_room_is_a_sentence() -> None:
    full = Path("/dev/full")
    if not full.exists():
        pytest.skip("this system has no device that is always full")
    with full.open("w") as stdout:
        words = [sys.executable, "-m", "keepset", "methods"]
        done = subprocess.run(words, stdout=stdout, stderr=subprocess.PIPE, text=True, check=False, timeout=120)
    assert done.returncode == 2 and done.stderr.splitlines()[-1].startswith("keepset: There is no room for the output")
    assert "Traceback" not in done.stderr
