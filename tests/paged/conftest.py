from __future__ import annotations

import sys
from collections.abc import Iterator

import pytest

from tests.paged.methods import registered


@pytest.fixture(autouse=True, scope="package")
def without_vllm() -> Iterator[None]:
    """Paged caches know no engine: while their tests run, vLLM cannot be imported, installed or not."""
    with pytest.MonkeyPatch.context() as patch:
        for name in {"vllm", *(name for name in sys.modules if name.startswith("vllm."))}:
            patch.setitem(sys.modules, name, None)
        yield


@pytest.fixture(autouse=True)
def methods_of_tests() -> Iterator[None]:
    """Recipes may name the methods that only these tests know."""
    with registered():
        yield
