"""Paged caches are of no engine: they, and these tests, work where neither vLLM nor transformers is installed."""

from __future__ import annotations

import subprocess
import sys
from pathlib import Path

ROOT = Path(__file__).parents[2]

IMPORT_ALL = """
import importlib, pathlib, sys
sys.modules["vllm"] = sys.modules["transformers"] = None
for folder in ("keepset/paged", "tests/paged"):
    for file in pathlib.Path(folder).glob("*.py"):
        importlib.import_module(f"{folder}/{file.stem}".replace("/", "."))
assert "keepset.paged.planner" in sys.modules and "tests.paged.test_pages" in sys.modules
"""


def test_without_them_everything_can_be_imported() -> None:
    process = subprocess.run([sys.executable, "-c", IMPORT_ALL], cwd=ROOT, capture_output=True, text=True, check=False)
    assert process.returncode == 0, process.stderr
