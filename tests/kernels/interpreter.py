"""Kernels in Triton as fixtures: run on a CPU by its interpreter, or compiled where tests run on a GPU."""

from __future__ import annotations

from collections.abc import Iterator
from contextlib import contextmanager
from typing import Any

import pytest

from tests.on_gpu import GPU


@pytest.fixture(params=["triton"] if GPU else ["pytorch", "triton"])
def implementation(request: pytest.FixtureRequest) -> str:
    """Kernels as PyTorch runs them, and in Triton."""
    if request.param == "triton":
        request.getfixturevalue("triton_interpreted")
    return str(request.param)


@pytest.fixture
def triton_interpreted(monkeypatch: pytest.MonkeyPatch) -> Iterator[None]:
    """Kernels in Triton run on tensors of the CPU; `tests/conftest.py` has turned its interpreter on.

    Nothing is interpreted where tests run on a GPU.
    """
    if GPU:
        yield
        return
    from keepset.kernels import dispatch  # loads torch, which the process that only divides the tests need not

    interpreter = pytest.importorskip("triton.runtime.interpreter")
    monkeypatch.setattr(dispatch, "INTERPRETED", True)
    product = interpreter.InterpreterBuilder.create_dot

    # The interpreter holds bfloat16 as its bits and would multiply these as integers.
    def create_dot(builder, a, b, *rest):  # type: ignore[no-untyped-def]
        return product(builder, *(_widened(interpreter, factor) for factor in (a, b)), *rest)

    monkeypatch.setattr(interpreter.InterpreterBuilder, "create_dot", create_dot)
    with patched_once(interpreter):
        yield


def on_operators(monkeypatch: pytest.MonkeyPatch) -> None:
    """From here on a test runs on PyTorch's operators, on whichever device."""
    from keepset.kernels import dispatch

    monkeypatch.setattr(dispatch, "INTERPRETED", False)
    monkeypatch.setattr(dispatch, "_has_triton", lambda: False)


@contextmanager
def patched_once(interpreter: Any) -> Iterator[None]:
    """Meanwhile the interpreter's functions stay in place of the language's.

    It would look through all of the language for them at each launch, and at each call from one kernel to another.
    """
    patch, scopes, patched = interpreter._patch_lang, [], set()

    def patch_language(function: Any) -> Any:
        names = function.__globals__.values()
        languages = {each for each in (interpreter.tl, interpreter.tl.core) if any(name is each for name in names)}
        if not languages <= patched:
            scopes.append(patch(function))
            patched.update(languages)
        return interpreter._LangPatchScope()  # of nothing to restore after the launch

    interpreter._patch_lang = patch_language
    try:
        yield
    finally:
        interpreter._patch_lang = patch
        while scopes:
            scopes.pop().restore()


def _widened(interpreter, factor):  # type: ignore[no-untyped-def]
    import numpy as np

    if str(factor.dtype.scalar) != "bf16":
        return factor
    bits = factor.data.astype(np.uint32) << 16
    return interpreter.TensorHandle(bits.view(np.float32), interpreter.tl.float32)
