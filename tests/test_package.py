from __future__ import annotations

import importlib
import importlib.metadata
import inspect
import json
import pkgutil
import subprocess
import sys
import tomllib
from pathlib import Path

import pytest

import keepset

ROOT = Path(__file__).parents[1]


def in_a_fresh_process(code: str) -> str:
    command = [sys.executable, "-c", code]
    return subprocess.run(command, cwd=ROOT, capture_output=True, text=True, check=True).stdout


HEAVY = {"torch", "transformers", "numpy", "jaxtyping", "plotly", "typer", "rich", "gguf", "vllm"}


def test_import_is_light() -> None:
    code = "import json, sys, keepset; keepset.__version__; dir(keepset); print(json.dumps(list(sys.modules)))"
    assert HEAVY.isdisjoint(json.loads(in_a_fresh_process(code)))


@pytest.mark.full
def test_each_name_is_all_that_it_needs() -> None:
    """No name works only because another one was used before it."""
    code = (
        "import keepset, sys; [print(name, getattr(keepset, name) is not None) for name in reversed(keepset.__all__)]"
    )
    assert in_a_fresh_process(code).splitlines() == [f"{name} True" for name in reversed(keepset.__all__)]


@pytest.mark.full
def test_types_of_recipes_do_not_load_transformers() -> None:
    code = "import keepset, sys; keepset.Recipe.parse('adakv(tova, keep=8)'); print('transformers' in sys.modules)"
    assert in_a_fresh_process(code) == "False\n"


def test_names_resolve_to_what_they_say() -> None:
    for name in keepset.__all__:
        thing = getattr(keepset, name)
        assert name in ("METHODS", "models") or thing.__name__ == name
        assert thing is getattr(keepset, name)
    assert keepset.models is sys.modules["keepset.models"]
    assert set(keepset.METHODS) >= {"snapkv", "h2o", "adakv"}
    assert len(set(keepset.__all__)) == len(keepset.__all__)
    assert set(dir(keepset)) == {*keepset.__all__, "__version__"}


def test_star_import_takes_the_public_names() -> None:
    names: dict[str, object] = {}
    exec("from keepset import *", names)
    assert set(names) - {"__builtins__"} == set(keepset.__all__)


@pytest.mark.parametrize("name", ["absent", "Caches", "torch", "_methods", "importlib_metadata"])
def test_unknown_name(name: str) -> None:
    with pytest.raises(AttributeError, match=f"module 'keepset' has no attribute '{name}'"):
        getattr(keepset, name)
    assert not hasattr(keepset, name)
    with pytest.raises(ImportError):
        exec(f"from keepset import {name}")


def test_public_methods_are_documented() -> None:
    """Where they are defined, or where a class above promised them."""
    undocumented = []
    for module in pkgutil.walk_packages(keepset.__path__, "keepset."):
        if module.name.startswith("keepset.vllm") or module.name == "keepset.__main__":
            continue
        for class_name, kind in inspect.getmembers(importlib.import_module(module.name), inspect.isclass):
            if kind.__module__ == module.name and not class_name.startswith("_"):
                undocumented += [
                    f"{module.name}.{class_name}.{name}"
                    for name, member in vars(kind).items()
                    if not name.startswith("_")
                    and (callable(member) or isinstance(member, (property, classmethod, staticmethod)))
                    and not inspect.getdoc(getattr(kind, name))
                ]
    assert undocumented == []


def test_version_is_the_projects() -> None:
    project = tomllib.loads((ROOT / "pyproject.toml").read_text(encoding="utf-8"))["project"]
    assert keepset.__version__ == project["version"] == importlib.metadata.version("keepset")


def test_types_are_published() -> None:
    package = Path(str(keepset.__file__)).parent
    assert (package / "py.typed").is_file()
    setup = tomllib.loads((ROOT / "pyproject.toml").read_text(encoding="utf-8"))["tool"]["setuptools"]
    assert "py.typed" in setup["package-data"]["keepset"]


def test_packages_have_docstrings_that_say_what_they_hold() -> None:
    for path in sorted((ROOT / "keepset").rglob("*.py")):
        assert path.read_text(encoding="utf-8").startswith('"""'), path.relative_to(ROOT)
