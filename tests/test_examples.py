"""Every example runs: in the fast tier on a tiny random model, in the full one on the embedded one, and is right.

What `memory_and_quality` prints beside its figures is the same of any model: it has the tiny one in both tiers.
"""

from __future__ import annotations

import ast
import json
import os
import re
import subprocess
import sys
from pathlib import Path
from typing import Any

import pytest

from keepset import models, registry
from tests import tiers
from tests.lab.cli.conftest import tiny_model
from tests.vllm.processes import SPARING

EXAMPLES = Path(__file__).parents[1] / "examples"
SCRIPTS = {
    "compress_a_prompt": r"Cache\(glance\(bytes=0\.25\): 2\d\d of 10\d\d tokens",
    "ask_again": r"Oslo's secret number is 48217.*\n*.*kept by Harald Berg",
    "long_answers": r"after +\d+ tokens: 48 entries of a head stay\nCache\(",
    "image_in_a_prompt": r"protect='image'\): 32 of 76 tokens.*\n(    +100% 100% 100% 100%\n){4}    answer: \[\d",
    "compare_recipes": r"random +KL 1\.\d+ (.|\n)*reread +KL 0\.0",
    "your_own_method": r"Oslo.*layout='dense'(.|\n)*Oslo.*layout='head-ragged'",
}
"""And what they print of the embedded model."""
SLOW = ("long_answers", "compare_recipes")
"""These are of the full tier."""


def each(*names: str) -> pytest.MarkDecorator:
    """A test for each of these."""
    return pytest.mark.parametrize(
        "name", [pytest.param(name, marks=[pytest.mark.full] if name in SLOW else []) for name in names]
    )


@pytest.fixture(autouse=True)
def small(request: pytest.FixtureRequest, embedded: Any, monkeypatch: pytest.MonkeyPatch, tmp_path: Path) -> None:
    """A model that is loaded already, an empty folder, and no method of an example left behind."""
    model, tokenizer = embedded
    whole = tiers.FULL and "memory_and_quality" not in request.node.name
    loaded = (model if whole else tiny_model(), tokenizer)
    monkeypatch.setattr(models, "load", lambda *_: loaded)
    monkeypatch.setattr(registry, "_methods", registered := dict(registry.METHODS))
    monkeypatch.setattr(registry, "METHODS", registered)
    monkeypatch.chdir(tmp_path)


def run(code: str, name: str) -> None:
    # A module of its own, in which dataclasses find their names.
    exec(compile(code, name, "exec"), {"__name__": "__main__"})


@each(*SCRIPTS)
def test_scripts(name: str, capsys: pytest.CaptureFixture[str]) -> None:
    run((EXAMPLES / f"{name}.py").read_text(encoding="utf-8"), name)
    printed = capsys.readouterr().out
    assert printed
    assert not tiers.FULL or re.search(SCRIPTS[name], printed), printed


@each("what_stays", "memory_and_quality")
def test_notebooks_print_what_they_have_stored(name: str, capsys: pytest.CaptureFixture[str]) -> None:
    session: dict[str, Any] = {"__name__": "__main__"}
    for cell in json.loads((EXAMPLES / f"{name}.ipynb").read_text(encoding="utf-8"))["cells"]:
        if cell["cell_type"] != "code":
            continue
        tree = ast.parse("".join(cell["source"]))
        last = tree.body.pop() if isinstance(tree.body[-1], ast.Expr) else None
        exec(compile(tree, name, "exec"), session)
        shown = None if last is None else eval(compile(ast.Expression(last.value), name, "eval"), session)
        assert shown is None or shown._repr_html_()
        printed = capsys.readouterr().out
        stored = "".join("".join(output.get("text", "")) for output in cell["outputs"])
        assert bool(printed) is bool(stored)
        if tiers.FULL:  # figures differ a little from machine to machine, words and entries do not
            assert re.findall(r"[^\W\d]+", printed) == re.findall(r"[^\W\d]+", stored)


def test_readme_names_all_of_them() -> None:
    listed = set(re.findall(r"\]\((\w+\.\w+)\)", (EXAMPLES / "README.md").read_text(encoding="utf-8")))
    assert listed == {path.name for path in EXAMPLES.iterdir() if path.suffix in (".py", ".ipynb")}


@pytest.mark.full
def test_a_server_is_asked_with_the_openai_client(monkeypatch: pytest.MonkeyPatch) -> None:
    pytest.importorskip("vllm")
    for name, value in SPARING.items():
        monkeypatch.setenv(name, value)
    from keepset.lab.embedded import EMBEDDED, embedded_folder
    from keepset.lab.server_process import ServerProcess, free_port
    from keepset.recipe import Recipe
    from keepset.serving.command import command
    from tests.vllm.serve import forked

    port, example = free_port(), EXAMPLES / "serve_with_vllm.py"
    [recipe] = re.findall(r'keepset serve --recipe "(.+)"', example.read_text(encoding="utf-8"))
    sparing = ["--port", str(port), "--max-model-len", "512", "--block-size", "32", "--num-gpu-blocks-override", "256"]
    options = [*sparing, "--dtype", "float32", "--enforce-eager"]
    model = str(embedded_folder())
    with ServerProcess(forked(command(model, Recipe.parse(recipe), options, served_name=EMBEDDED)), port) as server:
        server.wait(300)
        done = subprocess.run(
            [sys.executable, str(example)],
            env={**os.environ, "OPENAI_BASE_URL": f"{server.url}/v1", "NO_PROXY": "127.0.0.1"},
            capture_output=True,
            text=True,
            check=True,
        )
    assert "1887" in done.stdout
