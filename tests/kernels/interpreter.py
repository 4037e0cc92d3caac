"""Kernels in Triton, run on a CPU by its interpreter, as fixtures."""

from __future__ import annotations

import pytest


@pytest.fixture(params=["pytorch", "triton"])
def implementation(request: pytest.FixtureRequest) -> str:
    """Kernels as PyTorch runs them, and in Triton's interpreter."""
    if request.param == "triton":
        request.getfixturevalue("triton_interpreted")
    return str(request.param)


@pytest.fixture
def triton_interpreted(monkeypatch: pytest.MonkeyPatch) -> None:
    """Kernels in Triton run on tensors of the CPU; `tests/conftest.py` has turned its interpreter on."""
    from keepset.kernels import dispatch  # loads torch, which the process that only divides the tests need not

    interpreter = pytest.importorskip("triton.runtime.interpreter")
    monkeypatch.setattr(dispatch, "INTERPRETED", True)
    product = interpreter.InterpreterBuilder.create_dot

    # The interpreter holds bfloat16 as its bits and would multiply these as integers.
    def create_dot(builder, a, b, *rest):  # type: ignore[no-untyped-def]
        return product(builder, *(_widened(interpreter, factor) for factor in (a, b)), *rest)

    monkeypatch.setattr(interpreter.InterpreterBuilder, "create_dot", create_dot)


def _widened(interpreter, factor):  # type: ignore[no-untyped-def]
    import numpy as np

    if str(factor.dtype.scalar) != "bf16":
        return factor
    bits = factor.data.astype(np.uint32) << 16
    return interpreter.TensorHandle(bits.view(np.float32), interpreter.tl.float32)
