import dataclasses
import json
import re
import subprocess
import sys
from pathlib import Path
from typing import Any

import pytest
from jaxtyping import Float
from rich.console import Console
from torch import Tensor
from typer.main import get_command

import keepset
from keepset import registry
from keepset.core.method import Allocator
from keepset.lab.cli import SECTIONS, app, console
from tests.lab.cli.conftest import Run

KEEPSET: Any = get_command(app)


def test_table_lists_every_method(run: Run, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(console, "stdout", lambda: Console(width=500))  # no row is folded
    done = run("methods")
    assert (done.code, done.err) == (0, "")
    header, *rows = done.out.splitlines()
    rows = rows[: len(keepset.METHODS)]
    assert header.split() == ["method", "what", "it", "does", "always", "every", "vLLM", "passes"]
    assert [row.split()[0].removesuffix("(scorer)") for row in rows] == list(keepset.METHODS)
    figures = {row.split()[0]: row.split()[-3:] for row in rows}
    assert figures["snapkv"] == ["yes", "yes", "1"] and figures["kvzip"] == ["no", "no", "2"]
    assert figures["h2o"] == ["no", "yes", "1"] and figures["adakv(scorer)"] == ["yes", "yes", "1"]


@pytest.mark.parametrize("name", ["snapkv", "adakv", "gvote", "random", "match"])
def test_a_page_on_one_method(run: Run, name: str) -> None:
    done = run("methods", name)
    assert (done.code, done.err) == (0, "")
    kind = keepset.METHODS[name]
    assert f"paper: {kind.paper}" in done.out
    for field in dataclasses.fields(kind):
        assert any(line.split()[:1] == [field.name] for line in done.out.splitlines())
    example = done.out.rstrip().rpartition('--recipes "')[2].removesuffix('"')
    assert type(keepset.Recipe.parse(example).require_budget().method) is kind
    assert ("gvote(sinks=4, recent=32) does far better" in done.out) is (name == "gvote")


def test_a_page_says_what_a_parameter_may_be_and_markup_stays_text(run: Run, monkeypatch: pytest.MonkeyPatch) -> None:
    rows = [line.split() for line in run("methods", "snapkv").out.splitlines()]
    assert ["window", "from", "1", "64"] in rows and ["kernel", "odd,", "from", "1", "5"] in rows

    class Loud(keepset.Method):
        """[red]Doe[/red] \x1b[31m2026."""

        name = "loud"
        paper = "[red]Doe[/red] \x1b[31m2026"

        def score(self, observation: keepset.Observation) -> Float[Tensor, "batch kv_heads entries"]:
            return observation.positions.float()

    monkeypatch.setitem(registry._methods, "loud", Loud)
    done = run("methods")
    assert "[red]Doe[/red] \N{REPLACEMENT CHARACTER}[31m2026" in done.out and "\x1b" not in done.out


RAGGED = {
    "layer-ragged": {"composite", "dynamic", "kvcompose", "pyramid", "zigzag"},
    "head-ragged": {"adakv", "duo_attention", "glance", "gvote", "kvzip", "pool", "reread"},
}


def test_json_lists_every_method(run: Run) -> None:
    done = run("methods", "--json", "-")
    assert (done.code, done.err) == (0, "")
    entries = json.loads(done.out)
    assert [entry["name"] for entry in entries] == list(keepset.METHODS)
    for entry in entries:
        kind = keepset.METHODS[entry["name"]]
        assert (entry["family"], entry["paper"]) == (kind.family, kind.paper)
        assert entry["layout"] == next((layout for layout, of in RAGGED.items() if entry["name"] in of), "dense")
        assert all(isinstance(need, str) and need for need in entry["needs"])
        assert list(entry["parameters"]) == [field.name for field in dataclasses.fields(kind)]
        assert entry["summary"] and "\n" not in entry["summary"]
        # Defaults are those that recipes take.
        scorer = "tova, " if issubclass(kind, Allocator) else ""
        values = [f"{name}={value!r}" for name, value in entry["parameters"].items() if name != "scorer"]
        spelled_out = f"{entry['name']}({scorer}{', '.join(values)})"
        assert keepset.Recipe.parse(spelled_out) == keepset.Recipe.parse(f"{entry['name']}({scorer})")


def test_help_has_every_command_and_lists_are_plural(run: Run) -> None:
    assert run("bench", "latency", "-h") == run("bench", "latency", "--help")
    shown = run("--help").out
    listed = re.findall(r"^  ([a-z]+) +[A-Z]", shown.partition("Commands to begin with:")[2], flags=re.M)
    assert sorted(listed) == sorted(name for name, each in KEEPSET.commands.items() if not each.hidden)
    headings = re.findall(r"^(\S.*):$", shown, flags=re.M)
    assert headings == ["Options", *SECTIONS]
    # Every option that takes either, in every command.
    groups = [KEEPSET]
    for group in groups:
        for command in group.commands.values():
            groups += [command] if hasattr(command, "commands") else []
            for option in command.params:
                text = (getattr(option, "help", None) or "").lower()
                for one in ("recipe", "budget", "keep", "seed"):
                    if f"--{one}" in option.opts or f"--{one}s" in option.opts:
                        assert one != "keep", command.name
                        assert (f"--{one}s" in option.opts) == ("separated by commas" in text), command.name


@pytest.mark.full
def test_it_starts_as_a_script_and_as_a_module(tmp_path: Path) -> None:
    def start(*words: str) -> tuple[int, str, str]:
        done = subprocess.run([*words], cwd=tmp_path, capture_output=True, text=True, check=False)
        return done.returncode, done.stdout, done.stderr

    module = (sys.executable, "-m", "keepset", "methods")
    for words in (module, (str(Path(sys.executable).with_name("keepset")), "methods")):
        code, out, err = start(*words, "snapvk")
        assert (code, out) == (2, "") and list(tmp_path.iterdir()) == []
        assert err.startswith("keepset: There is no method 'snapvk'") and err.count("\n") == 1
    code, out, err = start(*module, "--json", "-")  # what is asked and nothing else
    assert (code, err) == (0, "") and [entry["name"] for entry in json.loads(out)] == list(keepset.METHODS)
