"""Kernels in Triton as fixtures: run on a CPU by its interpreter, or compiled where tests run on a GPU."""

from __future__ import annotations

import math
from collections.abc import Callable, Iterator
from contextlib import contextmanager
from dataclasses import replace
from typing import Any
from unittest.mock import patch

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


class Noted:
    """A kernel that is not run, and the grids of its launches."""

    def __init__(self) -> None:
        self.grids: list[tuple[int, ...]] = []

    def __getitem__(self, grid: tuple[int, ...]) -> Callable[..., None]:
        self.grids.append(grid)
        return lambda *args, **kwargs: None


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
    patch_lang, scopes, patched = interpreter._patch_lang, [], set()

    def patch_language(function: Any) -> Any:
        names = function.__globals__.values()
        languages = {each for each in (interpreter.tl, interpreter.tl.core) if any(name is each for name in names)}
        if not languages <= patched:
            scopes.append(patch_lang(function))
            patched.update(languages)
        return interpreter._LangPatchScope()  # of nothing to restore after the launch

    interpreter._patch_lang = patch_language
    try:
        with _without_repetition(interpreter):
            yield
    finally:
        interpreter._patch_lang = patch_lang
        while scopes:
            scopes.pop().restore()


@contextmanager
def _without_repetition(interpreter: Any) -> Iterator[None]:
    """Half the interpreter's time: types that it makes for each tensor are made once, and unused sums are left out.

    The unused ones are sums in 64 bits of whatever is added in 32, for an assertion that only debugging looks at.
    """
    core, numpy_type = interpreter.tl.core, interpreter._get_np_dtype
    make_block, builder = core.block_type.__init__, interpreter.interpreter_builder
    blocks: dict[Any, dict[str, Any]] = {}
    numpy_types: dict[str, Any] = {}
    assert not builder.options.debug

    def make_block_once(block: Any, element: Any, shape: Any) -> None:
        if element.is_ptr():  # whose name does not say all of it
            return make_block(block, element, shape)
        key = element.name, *(core._unwrap_if_constexpr(length) for length in shape)
        if key not in blocks:
            make_block(block, element, shape)
            blocks[key] = dict(vars(block))
        vars(block).update(blocks[key])

    def make_tensor(tensor: Any, handle: Any, type: Any) -> None:
        if "tensor_shape" not in vars(type):
            lengths = type.shape if type.is_block() else ()
            type.tensor_shape = core.tuple([core.constexpr(length) for length in lengths])
            type.tensor_size = core.constexpr(math.prod(lengths))
            if type.is_block() and not type.element_ty.is_ptr():
                blocks[type.element_ty.name, *lengths] |= vars(type)
        tensor.handle, tensor.type, tensor.dtype = handle, type, type.scalar
        tensor.shape, tensor.numel = type.tensor_shape, type.tensor_size

    def patch_attribute(owner: Any, name: str, function: Any, builder: Any, scope: Any) -> None:
        function = getattr(function, "__wrapped__", function)  # without a look for the argument that is given here

        def called(*args: Any, **options: Any) -> Any:
            options["_semantic"] = interpreter.interpreter_semantic
            return function(*args, **options)

        scope.set_attr(owner, name, called)

    def numpy_type_once(of: Any) -> Any:
        name = of.scalar.name
        if name not in numpy_types:
            numpy_types[name] = numpy_type(of)
        return numpy_types[name]

    with (
        patch.object(core.block_type, "__init__", make_block_once),
        patch.object(core.tensor, "__init__", make_tensor),
        patch.object(interpreter, "_get_np_dtype", numpy_type_once),
        patch.object(interpreter, "_patch_attr", patch_attribute),
        patch.object(builder, "options", replace(builder.options, sanitize_overflow=False)),
    ):
        yield


def _widened(interpreter, factor):  # type: ignore[no-untyped-def]
    import numpy as np

    if str(factor.dtype.scalar) != "bf16":
        return factor
    bits = factor.data.astype(np.uint32) << 16
    return interpreter.TensorHandle(bits.view(np.float32), interpreter.tl.float32)
