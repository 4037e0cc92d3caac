"""`pytest --gpu`: the tensors that tests make lie on a GPU, and the kernels are compiled for it.

What keepset and transformers make is left where they put it, so that a tensor in the wrong place is found.
"""

from __future__ import annotations

import os
import sys
from collections.abc import Callable, Sequence
from pathlib import Path
from typing import Any

import pytest

GPU = "--gpu" in sys.argv or os.environ.get("KEEPSET_TESTS_ON_GPU") == "1"
"""Whether tests run on a GPU: said on the command line, or by the process that started this one."""
os.environ["KEEPSET_TESTS_ON_GPU"] = str(int(GPU))

pretends = pytest.mark.skipif(GPU, reason="pretends that tensors lie on a GPU")
"""Above a test that a real GPU has nothing to add to."""

_HERE = str(Path(__file__).parent)
_KERNELS = [f"test_{name}.py" for name in ("attention", "columns", "large", "paged")]
_KERNELS += [f"test_{name}.py" for name in ("page_format", "page_layout", "predictor", "second_pass", "window")]
_RUNTIME = [f"test_{name}.py" for name in ("exactness", "every", "batch", "other_entries", "gpu_waits", "saved")]
_FILES = {
    "kernels": _KERNELS,
    "hf": _RUNTIME,
    "paged": ["test_engine.py", "test_events.py"],
    "allocators": ["test_quantized.py"],
}


def has_tests(path: Path) -> bool:
    """Return whether a file's tests are worth running on a GPU: those of kernels, and of what runs on them."""
    return path.name in _FILES.get(path.parent.name, ())


def start() -> None:
    """Put all tensors that the tests' files make from now on onto the GPU, until the process ends.

    Raises:
        RuntimeError: PyTorch sees no GPU.
    """
    import torch
    from torch import Tensor
    from torch.overrides import TorchFunctionMode
    from torch.utils._device import _device_constructors

    if not torch.cuda.is_available():
        raise RuntimeError("--gpu needs a GPU that PyTorch can use")
    makers = _device_constructors()

    class OnGpu(TorchFunctionMode):
        def __torch_function__(
            self, function: Callable[..., Any], types: Sequence[Any], args: Any = (), kwargs: Any = None
        ) -> Any:
            kwargs = kwargs or {}
            if function is Tensor.numpy:
                return args[0].cpu().numpy()
            made_here = function in makers and sys._getframe(1).f_code.co_filename.startswith(_HERE)
            if not made_here or "device" in kwargs or kwargs.get("pin_memory"):
                return function(*args, **kwargs)
            if "generator" in kwargs:  # a CPU's, with the numbers that the test has there
                return function(*args, **kwargs).to("cuda")
            return function(*args, **kwargs, device="cuda")

    OnGpu().__enter__()
