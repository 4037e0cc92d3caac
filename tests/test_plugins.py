"""Methods of other packages: found by entry points and by --plugin, in this process and those that it starts."""

from __future__ import annotations

import importlib.metadata
import os
import subprocess
import sys
from collections.abc import Iterator
from dataclasses import dataclass
from pathlib import Path

import pytest
from torch import Tensor

from keepset import Budget, KeepsetError, Observation, Recipe, registry
from keepset.core.features.moments import HiddenMoments
from keepset.core.method import Method, parameter
from keepset.errors import RecipeError
from keepset.recipe import in_full
from keepset.registry import GROUP, MODULES, add, load_methods, register
from tests.methods.naive import Shape, observe

MODULE = '''
from dataclasses import dataclass

from keepset.core.features.moments import HiddenMoments
from keepset.core.method import Method, parameter
from keepset.registry import register


@register
@dataclass(frozen=True)
class Later(Method):
    """Keeps what comes later."""

    name = "later_of_a_test"
    power: float = parameter(1.0)

    def score(self, observation):
        return observation.positions.float() ** self.power
'''


@pytest.fixture
def module(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> Iterator[str]:
    """A module on Python's path that registers a method."""
    (tmp_path / "methods_of_a_test.py").write_text(MODULE, encoding="utf-8")
    monkeypatch.syspath_prepend(tmp_path)
    monkeypatch.setenv("PYTHONPATH", os.pathsep.join([str(tmp_path), *sys.path]))
    monkeypatch.setenv(MODULES, "")  # and back to what it was, whatever the test adds
    load_methods.cache_clear()
    yield "methods_of_a_test"
    load_methods.cache_clear()
    registry._methods.pop("later_of_a_test", None)
    sys.modules.pop("methods_of_a_test", None)


@pytest.mark.parametrize("how", ["option", "entry point"])
def test_a_recipe_names_a_method_of_another_package(how: str, module: str, monkeypatch: pytest.MonkeyPatch) -> None:
    text = "adakv(later_of_a_test(power=2.0), keep=3)"
    with pytest.raises(RecipeError, match="There is no method 'later_of_a_test'"):
        Recipe.parse(text)
    load_methods.cache_clear()
    if how == "option":
        add(module)
    else:
        point = importlib.metadata.EntryPoint("mine", module, GROUP)
        monkeypatch.setattr(importlib.metadata, "entry_points", lambda group: [point] if group == GROUP else [])
    recipe = Recipe.parse(text)
    assert str(recipe) == text
    assert recipe.select(observe(Shape((7,), 1, 1, 2, 2))).positions(0, 0, 0).tolist() == [4, 5, 6]
    assert "later_of_a_test" in {entry["name"] for entry in registry.catalogue()}


@pytest.mark.full
def test_the_command_line_imports_it(module: str) -> None:
    words = [sys.executable, "-m", "keepset", "--plugin", module, "methods", "later_of_a_test"]
    done = subprocess.run(words, capture_output=True, text=True, check=False, timeout=120)
    assert done.returncode == 0 and "Keeps what comes later." in done.stdout, done.stderr
    words[4] = "no.such.module"
    done = subprocess.run(words, capture_output=True, text=True, check=False, timeout=120)
    assert done.returncode == 2 and "The plug-in 'no.such.module' cannot be imported" in done.stderr
    assert done.stderr.count("\n") == 1


class Forgotten(Method):
    """A method without `@dataclass`."""

    name = "forgotten"
    power: float = parameter(1.0)

    def score(self, observation: Observation) -> Tensor:
        return observation.positions.float()


@dataclass(frozen=True)
class Short(Forgotten):
    name = "short"

    def score(self, observation: Observation) -> Tensor:
        return super().score(observation)[..., :-1]


def test_what_is_wrong_about_a_module_or_method_is_said() -> None:
    with pytest.raises(KeepsetError, match=r"--plugin 'a b' is no name of a module"):
        add("a b")
    with pytest.raises(RecipeError, match=r"Forgotten has the parameter 'power' and is no dataclass.*@dataclass"):
        registry.register(Forgotten)
    with pytest.raises(RecipeError, match="register a class that derives from keepset"):
        registry.register(lambda observation: observation)  # type: ignore[arg-type]
    with pytest.raises(RecipeError, match="'my method', which no recipe can contain"):
        registry.register(type("Spaced", (Short,), {"name": "my method"}))
    for wrong, words in (
        (lambda self, observation: None, "returned NoneType as scores: its score must be a tensor"),
        (lambda self, observation: observation[HiddenMoments(0)].mean, "put .* into their needs"),
    ):
        with pytest.raises(KeepsetError, match=words):
            type("Wrong", (Short,), {"score": wrong})().select(observe(Shape((7,), 2, 1, 2, 2)), Budget(3))
    with pytest.raises(KeepsetError, match=r"short has returned scores of the shape \[1, 2, 6\].*here is \[1, 2, 7\]"):
        Short().select(observe(Shape((7,), 2, 1, 2, 2)), Budget(3))


def cell(default: float) -> type[Method]:
    """What a notebook's cell does, each time that it runs."""

    @dataclass(frozen=True)
    class MyMethod(Method):
        """Keeps what comes first."""

        name = "mine_of_a_test"
        power: float = parameter(default)

        def score(self, observation: Observation) -> Tensor:
            return -observation.positions.float()

    return MyMethod


def test_a_cell_that_runs_again_replaces_its_method(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(registry, "_methods", dict(registry._methods))
    monkeypatch.setattr(registry, "METHODS", registry._methods)
    first, second = cell(1.0), cell(2.0)
    register(first)
    assert "power=1.0" in in_full("mine_of_a_test(keep=3)")
    register(second)
    assert registry.find("mine_of_a_test") is second and "power=2.0" in in_full("mine_of_a_test(keep=3)")
    with pytest.raises(RecipeError, match="registered already: choose another name"):
        register(type("Another", (first,), {}))


@pytest.mark.full
def test_a_module_of_the_current_folder_is_found(tmp_path: Path) -> None:
    (tmp_path / "my_methods.py").write_text(MODULE, encoding="utf-8")
    script = [str(Path(sys.executable).parent / "keepset"), "--plugin", "my_methods", "methods", "later_of_a_test"]
    done = subprocess.run(script, capture_output=True, text=True, check=False, timeout=120, cwd=tmp_path)
    assert done.returncode == 0 and "Keeps what comes later." in done.stdout, done.stderr
