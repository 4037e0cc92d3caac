# First of all: only what is imported of keepset after this line is checked while it runs.
import atexit
import gc

from tests import imports, lifetime, on_gpu, tiers, typecheck

if gc.isenabled():
    imports.begin()
if tiers.TYPECHECK:
    typecheck.install()

import os
from collections.abc import Iterator
from pathlib import Path
from typing import TYPE_CHECKING

import pytest

if TYPE_CHECKING:  # the process that only divides the tests among others need not wait for them
    from transformers import PreTrainedModel, PreTrainedTokenizerBase

lifetime.begin()
# Not earlier, since pytest looks for garbage twice as it ends; nor never, since nanobind complains of what is left.
atexit.register(gc.unfreeze)
# Read when PyTorch is first imported, here and in processes that tests start: threads over tiny tensors only wait.
os.environ.setdefault("OMP_NUM_THREADS", "1")
if on_gpu.GPU:
    on_gpu.start()
else:
    # Read when Triton is first imported, by whoever does; kernels run in it where a test says so.
    os.environ["TRITON_INTERPRET"] = "1"

pytest_plugins = ["tests.kernels.interpreter"]

FILE = pytest.StashKey[Path]()
"""Of the newest test."""


def pytest_addoption(parser: pytest.Parser) -> None:
    parser.addoption("--full", action="store_true", help="all tests, with more examples and types checked at run time")
    parser.addoption("--gpu", action="store_true", help="tensors lie on a GPU, for which kernels are compiled")
    parser.addoption("--papers", action="store_true", help="only those marked papers, which no tier has; with --full")
    parser.addoption("--contract", action="store_true", help="only those marked contract, which no tier has")


def pytest_ignore_collect(collection_path: Path) -> bool | None:
    """In the fast tier modules that are of the full one as a whole are not even imported; on a GPU, few are."""
    if on_gpu.GPU and collection_path.suffix == ".py" and not on_gpu.has_tests(collection_path):
        return True
    if tiers.FULL or collection_path.suffix != ".py":
        return None
    return "\npytestmark = pytest.mark.full\n" in collection_path.read_text(encoding="utf-8") or None


def pytest_collection_finish() -> None:
    imports.end()


@pytest.hookimpl(wrapper=True)
def pytest_generate_tests(metafunc: pytest.Metafunc) -> Iterator[None]:
    yield
    tiers.narrow(metafunc)


def pytest_collection_modifyitems(config: pytest.Config, items: list[pytest.Item]) -> None:
    left_out = set() if tiers.FULL else {item for item in items if item.get_closest_marker("full")}
    for name in ("papers", "contract"):
        asked = config.getoption(f"--{name}")
        left_out = left_out | {item for item in items if asked is not bool(item.get_closest_marker(name))}
    config.hook.pytest_deselected(items=[item for item in items if item in left_out])
    items[:] = [item for item in items if item not in left_out]

    # Processes take work from each other's end, so what takes half a minute comes first. So does Ray: each process that
    # has one of its tests starts a cluster.
    def order(item: pytest.Item) -> list[bool]:
        name = item.path.name
        return [name != "test_ray_sweep.py", "vllm" not in item.path.parts, name != "test_examples.py"]

    items.sort(key=order)


def pytest_runtest_setup(item: pytest.Item) -> None:
    if item.path != item.config.stash.get(FILE, None):
        item.config.stash[FILE] = item.path
        leave_to_themselves()
    typecheck.begin_test(getattr(item, "function", item), full=item.get_closest_marker("full") is not None)


def leave_to_themselves() -> None:
    """What there is stays: garbage is looked for among what a file's tests make, or each look takes half a second."""
    gc.collect()
    gc.freeze()


@pytest.fixture(scope="session")
def embedded() -> "tuple[PreTrainedModel, PreTrainedTokenizerBase]":
    """The embedded model and its tokenizer: shared, so leave them as they are."""
    from keepset import models

    return models.load()


@pytest.fixture(scope="session")
def gemma() -> "tuple[PreTrainedModel, PreTrainedTokenizerBase]":
    """Gemma 3 270M and its tokenizer: shared, so leave them as they are."""
    from keepset import models
    from tests.gemma import folder

    if not folder().is_dir():
        pytest.skip("Gemma 3 270M is not installed: run `make setup-gemma`.")
    return models.load(str(folder()))
