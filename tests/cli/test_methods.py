from __future__ import annotations

import dataclasses
import json

import pytest
from jaxtyping import Float
from rich.console import Console
from torch import Tensor

import keepset
from keepset import registry
from keepset.cli import console
from keepset.core.method import Allocator
from tests.cli.conftest import Run


def test_table_lists_every_method(run: Run, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(console, "stdout", lambda: Console(width=500))  # no row is folded
    done = run("methods")
    assert (done.code, done.err) == (0, "")
    header, *rows = done.out.splitlines()
    assert header.split() == ["method", "and", "defaults", "kind", "looks", "at", "paper"]
    assert [row.partition("(")[0] for row in rows] == list(keepset.METHODS)
    for row, kind in zip(rows, keepset.METHODS.values(), strict=True):
        assert row.rstrip().endswith(kind.paper)


def test_json_lists_every_method(run: Run) -> None:
    done = run("methods", "--json", "-")
    assert (done.code, done.err) == (0, "")
    entries = json.loads(done.out)
    assert [entry["name"] for entry in entries] == list(keepset.METHODS)
    for entry in entries:
        kind = keepset.METHODS[entry["name"]]
        assert (entry["family"], entry["layout"], entry["paper"]) == (kind.family, kind.layout, kind.paper)
        assert all(isinstance(need, str) and need for need in entry["needs"])
        assert list(entry["parameters"]) == [field.name for field in dataclasses.fields(kind)]
        assert entry["summary"] and "\n" not in entry["summary"]


def test_json_holds_defaults_that_recipes_take(run: Run) -> None:
    for entry in json.loads(run("methods", "--json", "-").out):
        scorer = "tova, " if issubclass(keepset.METHODS[entry["name"]], Allocator) else ""
        values = [f"{name}={value!r}" for name, value in entry["parameters"].items() if name != "scorer"]
        spelled_out = f"{entry['name']}({scorer}{', '.join(values)})"
        plain = f"{entry['name']}({scorer})"
        assert keepset.Recipe.parse(spelled_out) == keepset.Recipe.parse(plain)


def test_markup_of_a_method_of_ones_own_stays_text(run: Run, monkeypatch: pytest.MonkeyPatch) -> None:
    class Loud(keepset.Method):
        name = "loud"
        paper = "[red]Doe[/red] \x1b[31m2026"

        def score(self, observation: keepset.Observation) -> Float[Tensor, "batch kv_heads entries"]:
            return observation.positions.float()

    monkeypatch.setitem(registry._methods, "loud", Loud)
    done = run("methods")
    assert done.out.splitlines()[-1].rstrip().endswith("[red]Doe[/red] \N{REPLACEMENT CHARACTER}[31m2026")
