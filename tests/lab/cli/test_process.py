"""The command line as users start it."""

import json
import subprocess
import sys
from pathlib import Path

import pytest

import keepset

pytestmark = pytest.mark.full

MODULE = [sys.executable, "-m", "keepset"]
SCRIPT = [str(Path(sys.executable).with_name("keepset"))]


def start(command: list[str], folder: Path) -> subprocess.CompletedProcess[str]:
    return subprocess.run(command, cwd=folder, capture_output=True, text=True, check=False)


@pytest.mark.parametrize("how", [SCRIPT, MODULE], ids=["script", "module"])
def test_refuses_without_a_trace_back(how: list[str], tmp_path: Path) -> None:
    done = start([*how, "methods", "snapvk"], tmp_path)
    assert (done.returncode, done.stdout) == (2, "")
    assert done.stderr.startswith("keepset: There is no method 'snapvk'") and done.stderr.count("\n") == 1
    assert list(tmp_path.iterdir()) == []


def test_a_module_says_what_is_asked_and_nothing_else(tmp_path: Path) -> None:
    done = start([*MODULE, "methods", "--json", "-"], tmp_path)
    assert (done.returncode, done.stderr) == (0, "")
    assert [entry["name"] for entry in json.loads(done.stdout)] == list(keepset.METHODS)
