from __future__ import annotations

import ast
import importlib
import importlib.metadata
import importlib.util
import inspect
import os
import pkgutil
import re
import shutil
import subprocess
import sys
import tomllib
from pathlib import Path

import pytest
import yaml
from packaging.requirements import Requirement
from packaging.version import Version
from typer.main import get_command

import keepset
from keepset.lab.cli import app

ROOT = Path(__file__).parents[1]


def in_a_fresh_process(code: str) -> str:
    command = [sys.executable, "-c", code]
    return subprocess.run(command, cwd=ROOT, capture_output=True, text=True, check=True).stdout


HEAVY = {"torch", "transformers", "numpy", "jaxtyping", "plotly", "typer", "rich", "gguf", "vllm"}


@pytest.mark.parametrize("folder", ["benchmarks", "examples"])
def test_programs_import_names_that_exist(folder: str) -> None:
    """Nothing else runs the long ones."""
    for file in sorted((ROOT / folder).rglob("*.py")):
        for node in ast.walk(ast.parse(file.read_text(encoding="utf-8"))):
            module = node.module or "" if isinstance(node, ast.ImportFrom) else ""
            if module.split(".")[0] == "keepset":
                home = importlib.import_module(module)
                for name in (each.name for each in node.names):
                    assert hasattr(home, name) or importlib.util.find_spec(f"{module}.{name}"), (file, name)


def test_what_imports_load() -> None:
    """First nothing heavy, then neither transformers nor vLLM, and all of the library without a module of the lab."""
    code = f"""
import sys
sys.modules["sklearn"] = None  # transformers imports it where it is installed
import keepset
def show(*names): print(*(name for name in sys.modules if name in names or ".".join(name.split(".")[:2]) in names))
keepset.__version__, dir(keepset), show(*{HEAVY})
keepset.Recipe.parse("adakv(tova, keep=8)"), keepset.models, show("transformers", "vllm")
import keepset.vllm
show("transformers", "vllm")
keepset.Cache, show("keepset.lab")
"""
    assert in_a_fresh_process(code) == "\n" * 4


@pytest.mark.full
def test_each_name_is_all_that_it_needs() -> None:
    """No name works only because another one was used before it."""
    code = "import keepset; [print(name, getattr(keepset, name) is not None) for name in reversed(keepset.__all__)]"
    assert in_a_fresh_process(code).splitlines() == [f"{name} True" for name in reversed(keepset.__all__)]


def test_names_resolve_to_what_they_say() -> None:
    for name in keepset.__all__:
        thing = getattr(keepset, name)
        assert name in ("METHODS", "models") or thing.__name__ == name
        assert thing is getattr(keepset, name)
    assert keepset.models is sys.modules["keepset.models"]
    assert set(keepset.METHODS) >= {"snapkv", "h2o", "adakv"}
    assert len(set(keepset.__all__)) == len(keepset.__all__)
    imported: dict[str, object] = {}
    exec("from keepset import *", imported)
    assert set(dir(keepset)) == set(keepset.__all__) == set(imported) - {"__builtins__"}


@pytest.mark.parametrize("name", ["absent", "Caches", "torch", "_methods", "importlib_metadata"])
def test_unknown_name(name: str) -> None:
    with pytest.raises(AttributeError, match=name):
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


def test_the_project_says_the_same_version_and_that_there_are_types() -> None:
    project = tomllib.loads((ROOT / "pyproject.toml").read_text(encoding="utf-8"))
    assert keepset.__version__ == project["project"]["version"] == importlib.metadata.version("keepset")
    assert (Path(str(keepset.__file__)).parent / "py.typed").is_file()
    assert "py.typed" in project["tool"]["setuptools"]["package-data"]["keepset"]


def test_what_an_index_shows_leads_nowhere_and_is_readmes() -> None:
    """No address of the project is known, and files of the repository are not on an index."""
    project = tomllib.loads((ROOT / "pyproject.toml").read_text(encoding="utf-8"))["project"]
    shown = project["readme"]["text"]
    assert project["readme"]["content-type"] == "text/markdown"
    assert not re.search(r"\]\((?!https://)", shown) and "<img" not in shown
    readme = (ROOT / "README.md").read_text(encoding="utf-8")
    (code,) = re.findall(r"```python\n(.*?)```", shown, flags=re.S)
    assert all(line in readme for line in code.splitlines())
    assert set(re.findall(r"`keepset (\w+)", shown)) - {"help"} <= get_command(app).commands.keys()


@pytest.mark.full
def test_type_checkers_find_them_in_an_installed_wheel(tmp_path: Path) -> None:
    """Outside the checkout, without what keepset requires: its own types stand for themselves."""

    outside = {name: value for name, value in os.environ.items() if name != "PYTHONPATH"}

    def run(*words: str | Path, check: bool = True) -> str:
        return subprocess.run(words, cwd=tmp_path, env=outside, capture_output=True, text=True, check=check).stdout

    source, pip = tmp_path / "source", [sys.executable, "-m", "pip", "--quiet", "--disable-pip-version-check"]
    shutil.copytree(ROOT / "keepset", source / "keepset", ignore=shutil.ignore_patterns("__pycache__"))
    for name in ("pyproject.toml", "README.md", "LICENSE"):
        shutil.copy(ROOT / name, source)
    run(*pip, "wheel", "--no-deps", "--no-build-isolation", "--wheel-dir", tmp_path, source)
    (wheel,) = tmp_path.glob("keepset-*.whl")
    run(sys.executable, "-m", "venv", "--without-pip", tmp_path / "fresh")
    python = tmp_path / "fresh" / "bin" / "python"
    run(*pip, "--python", python, "install", "--no-deps", wheel)
    where = "import importlib.util; print(importlib.util.find_spec('keepset').origin)"
    assert run(python, "-c", where).startswith(str(tmp_path / "fresh"))
    (tmp_path / "user.py").write_text(
        'import keepset\nreveal_type(keepset.Recipe.parse("tova").budget)\nkeepset.Recipe.parse(3)\n'
    )
    said = run(sys.executable, "-m", "mypy", "--python-executable", python, "user.py", check=False)
    assert 'user.py:2: note: Revealed type is "keepset.core.budget.Budget"' in said
    assert 'user.py:3: error: Argument 1 to "parse" of "Recipe" has incompatible type "int"; expected "str"' in said
    assert "Found 1 error" in said


def test_ci_runs_both_ends_of_what_is_supported() -> None:
    project = tomllib.loads((ROOT / "pyproject.toml").read_text(encoding="utf-8"))["project"]
    (transformers,) = (Requirement(line) for line in project["dependencies"] if line.startswith("transformers"))
    workflow = yaml.safe_load((ROOT / ".github/workflows/test.yml").read_text(encoding="utf-8"))
    runs = workflow["jobs"]["test"]["strategy"]["matrix"]["include"]
    versions = [Version(run["transformers"].removesuffix(".*")) for run in runs]
    assert f">={min(versions)}" in str(transformers.specifier)
    assert f"<{max(versions).major}.{max(versions).minor + 1}" in str(transformers.specifier)
    pythons = sorted(line.rpartition(" ")[2] for line in project["classifiers"] if ":: 3." in line)
    assert pythons == sorted({run["python"] for run in runs})
    assert project["requires-python"] == f">={pythons[0]}"


def test_shapes_are_texts() -> None:
    """A shape without its quotes is an expression of names that do not exist, and checks nothing."""
    found = [(path, node) for path in (ROOT / "keepset").rglob("*.py") for node in shaped_types(path)]
    unquoted = [f"{path}:{node.lineno}, {ast.unparse(node)}" for path, node in found if not has_a_text(node.slice)]
    assert unquoted == [] and len(found) > 500


def shaped_types(path: Path) -> list[ast.Subscript]:
    """What is written in brackets after a name of jaxtyping's."""
    text = path.read_text(encoding="utf-8")
    nodes = list(ast.walk(ast.parse(text))) if "jaxtyping" in text else []
    imports = [node for node in nodes if isinstance(node, ast.ImportFrom) and node.module == "jaxtyping"]
    types = {alias.asname or alias.name for node in imports for alias in node.names}
    subscripts = [node for node in nodes if isinstance(node, ast.Subscript)]
    return [node for node in subscripts if isinstance(node.value, ast.Name) and node.value.id in types]


def has_a_text(written: ast.expr) -> bool:
    shape = written.elts[-1] if isinstance(written, ast.Tuple) and len(written.elts) == 2 else None
    return isinstance(shape, ast.JoinedStr) or (isinstance(shape, ast.Constant) and isinstance(shape.value, str))


FACTORIES = {
    "zeros",
    "ones",
    "empty",
    "full",
    "tensor",
    "as_tensor",
    "asarray",
    "scalar_tensor",
    "eye",
    "empty_strided",
}
FACTORIES |= {"rand", "randn", "normal", "linspace", "logspace", "hann_window", "hamming_window"}
"""Functions of torch whose result may be of the default type; those that need no look at their arguments."""


def test_tensors_say_their_types() -> None:
    """Or `torch.set_default_dtype` would change what a method chooses."""
    untyped, typed = [], 0
    for path in (ROOT / "keepset").rglob("*.py"):
        for node in ast.walk(ast.parse(path.read_text(encoding="utf-8"))):
            if isinstance(node, ast.Call) and makes_a_tensor(node):
                says = any(keyword.arg in ("dtype", "out") for keyword in node.keywords)
                untyped += [] if says else [f"{path}:{node.lineno}, {ast.unparse(node)}"]
                typed += says
    assert untyped == [] and typed > 100


CALLS = {"torch.zeros(3)": True, "torch.arange(3 * n)": False, "torch.arange(n / 2)": True, "zeros(3)": False}
CALLS |= {"torch.arange(0, 1.5)": True, "torch.zeros_like(x)": False, "torch.full((2,), x)": True}


@pytest.mark.parametrize("code", CALLS)
def test_which_calls_make_tensors_of_the_default_type(code: str) -> None:
    (call,) = (node for node in ast.walk(ast.parse(code)) if isinstance(node, ast.Call))
    assert makes_a_tensor(call) is CALLS[code]


def makes_a_tensor(call: ast.Call) -> bool:
    """Whether torch may give what is made here its default type. `arange` does so for fractions alone."""
    made = call.func
    if not (isinstance(made, ast.Attribute) and isinstance(made.value, ast.Name) and made.value.id == "torch"):
        return False
    parts = [part for argument in call.args for part in ast.walk(argument)]
    fractions = any(isinstance(part, ast.Div) or isinstance(getattr(part, "value", None), float) for part in parts)
    return made.attr in FACTORIES or (made.attr == "arange" and fractions)
