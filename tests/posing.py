"""A make-believe GPU: tensors that say they lie on one, hold a CPU's data, and log what would cost time there."""

from __future__ import annotations

import sys
from collections import Counter
from collections.abc import Callable
from typing import Any

import pytest
import torch
from torch import Tensor, nn
from torch.utils._python_dispatch import TorchDispatchMode

from keepset.kernels import dispatch
from keepset.kernels.triton import (
    attention,
    columns,
    four_bits,
    mixing,
    page_entries,
    paged,
    paged_window,
    predictor,
    window,
)

_DEVICE = torch.device("meta")
"""A name that PyTorch looks for no driver of."""
_WAITS = {"_local_scalar_dense", "nonzero", "equal", "masked_select", "unique", "_unique2"}
"""What makes the host wait for the device, wherever it is asked."""
_NO_LAUNCH = {
    *("view", "_unsafe_view", "expand", "transpose", "slice", "select", "unsqueeze", "as_strided", "split", "detach"),
    *("split_with_sizes", "unbind", "alias", "t", "permute", "squeeze", "_reshape_alias", "unfold", "lift_fresh"),
    *("empty", "new_empty", "empty_like", "empty_strided", "new_empty_strided", "_local_scalar_dense", "diagonal"),
    *("view_as_real", "view_as_complex"),
}
_ACROSS_DEVICES = {"_to_copy", "copy_", "index", "index_put", "index_put_", "lift_fresh"}
"""What may be given tensors of two devices."""
LAUNCHED = {
    attention: ("_attend_part", "_merge_parts", "_pack", "_append"),
    columns: ("_columns", "_log_sum_exp"),
    four_bits: ("_attend_four_bits", "_append_four_bits"),
    mixing: ("_times",),
    window: ("_window_lse", "_add_received"),
    predictor: ("_entry_codes",),
    page_entries: ("_read_pages", "_move_entries"),
    paged_window: ("_paged_lse", "_add_in_pages"),
    paged: ("_attend_pages", "_append_to_pages", "_follow", "_merge_parts", "_shift"),
}
"""The kernels that are launched, by the modules that launch them."""
_ATTENTION = {"_attend_part", "_attend_four_bits", "_merge_parts"}
_EMPTY = {"empty", "new_empty", "empty_like", "empty_strided", "new_empty_strided"}


class Posing(Tensor):
    """Says that it lies on a GPU."""

    held: Tensor

    @staticmethod
    def __new__(cls, held: Tensor) -> Posing:
        shape, strides, offset = held.shape, held.stride(), held.storage_offset()
        return Tensor._make_wrapper_subclass(
            cls, shape, strides=strides, storage_offset=offset, dtype=held.dtype, device=_DEVICE
        )

    def __init__(self, held: Tensor) -> None:
        self.held = held

    def __repr__(self) -> str:  # type: ignore[override]
        return f"Posing({self.held})"

    @classmethod
    def __torch_dispatch__(cls, function: Any, types: Any, args: Any = (), kwargs: Any = None) -> Any:
        return _dispatch(function, args, kwargs or {})

    def new_tensor(self, data: Any, **kwargs: Any) -> Tensor:  # type: ignore[override]
        return Posing(self.held.new_tensor(data, **kwargs))

    def data_ptr(self) -> int:
        return self.held.data_ptr()

    def tolist(self) -> Any:
        _log("waits", "tolist")
        return self.held.tolist()


class Gpu(TorchDispatchMode):
    """While it is active every tensor is made on the make-believe GPU that is asked for there.

    Args:
        computes: whether kernels run in Triton's interpreter, where nearly all of the time goes. Otherwise they are
            only counted, and whoever reads what they would have written reads zeros: also for positions, which of
            padded rows a kernel moves. Attention's outputs are zero either way: no count depends on them.

    Attributes:
        waits: where the host would have waited for the device.
        launches: of operators and kernels.
    """

    def __init__(self, monkeypatch: pytest.MonkeyPatch, computes: bool = True) -> None:
        super().__init__()
        self._computes = computes
        self.waits: Counter[str] = Counter()
        self.launches: Counter[str] = Counter()
        self._patch = monkeypatch

    def __enter__(self) -> Gpu:
        for module, names in LAUNCHED.items():
            for name in names:
                kernel = getattr(module, name) if self._computes and name not in _ATTENTION else None
                self._patch.setattr(module, name, _Launched(kernel, name))
        self._patch.setattr(torch, "tensor", _tensor)
        self._patch.setattr(dispatch, "processors", lambda device: 4)
        self._patch.setattr(f"{__name__}._log", self._logged)
        return super().__enter__()

    def __torch_dispatch__(self, function: Any, types: Any, args: Any = (), kwargs: Any = None) -> Any:
        return _dispatch(function, args, kwargs or {})

    def reset(self) -> None:
        """Begins to count anew."""
        self.waits.clear()
        self.launches.clear()

    def _logged(self, kind: str, what: str) -> None:
        if kind == "launches":  # of which there are so many that to look for where takes longer than they do
            self.launches[what] += 1
            return
        frame = sys._getframe(1)
        while "/keepset/" not in frame.f_code.co_filename and frame.f_back is not None:
            frame = frame.f_back
        where = frame.f_code.co_filename.rpartition("/keepset/")[2]
        getattr(self, kind)[f"{what} at {where}:{frame.f_lineno}"] += 1


class _Launched:
    """A kernel, run on what posing tensors hold or only counted."""

    def __init__(self, kernel: Any, name: str) -> None:
        self._kernel, self._name = kernel, name

    def __getitem__(self, grid: Any) -> Any:
        def launch(*args: Any, **kwargs: Any) -> None:
            _log("launches", self._name)
            if self._kernel is not None:
                self._kernel[grid](*_held(args), **_held(kwargs))

        return launch


_plain_tensor = torch.tensor


def _tensor(data: Any, *args: Any, device: Any = None, **kwargs: Any) -> Tensor:
    """Which is made before any mode hears of it."""
    made = _plain_tensor(data, *args, **kwargs)
    if device is not None and torch.device(device) == _DEVICE:
        _log("waits", "tensor")
    return made if device is None or torch.device(device) != _DEVICE else Posing(made)


def _log(kind: str, what: str) -> None:
    raise AssertionError("a posing tensor was used outside of its GPU")


def on_gpu(model: nn.Module) -> nn.Module:
    """The same model, as if it were there."""
    for module in model.modules():
        for name, parameter in module._parameters.items():
            if parameter is not None:
                module._parameters[name] = nn.Parameter(Posing(parameter.data), requires_grad=False)
        for name, buffer in module._buffers.items():
            if buffer is not None:
                module._buffers[name] = Posing(buffer)
    return model


def _mapped(change: Callable[[Tensor], Any], tree: Any) -> Any:
    """What an operator takes or gives, its tensors changed: `torch.utils._pytree` takes longer than most of them."""
    if isinstance(tree, Tensor):
        return change(tree)
    if isinstance(tree, dict):
        return {name: _mapped(change, each) for name, each in tree.items()}
    if isinstance(tree, tuple | list):
        return type(tree)([_mapped(change, each) for each in tree])
    return tree


def _held(tree: Any) -> Any:
    return _mapped(lambda each: each.held if isinstance(each, Posing) else each, tree)


def _dispatch(function: Any, args: Any, kwargs: dict[str, Any]) -> Any:
    name = function.overloadpacket.__name__
    tensors: list[Tensor] = []
    _mapped(tensors.append, (args, kwargs))
    posing = any(isinstance(each, Posing) for each in tensors)
    target = None if kwargs.get("device") is None else torch.device(kwargs["device"]).type
    there = posing or target == _DEVICE.type
    if not there:
        return function(*args, **kwargs)
    if posing:
        strays = [each for each in tensors if not isinstance(each, Posing)]
        if name not in _ACROSS_DEVICES and any(each.ndim for each in strays):
            raise RuntimeError(
                f"{name} mixes tensors of two devices, of shapes {[tuple(each.shape) for each in strays]}"
            )
        boolean = name in ("index", "index_put", "index_put_") and any(
            isinstance(each, Tensor) and each.dtype == torch.bool for each in args[1]
        )
        unsized = name == "repeat_interleave" and kwargs.get("output_size") is None
        if name in _WAITS or boolean or unsized or (name == "_to_copy" and target == "cpu"):
            _log("waits", name)
    if name == "_to_copy" and target == _DEVICE.type and not posing and not kwargs.get("non_blocking"):
        _log("waits", "upload")
    if name not in _NO_LAUNCH:
        _log("launches", name)
    if target == _DEVICE.type:
        kwargs = {**kwargs, "device": "cpu"}
    output = function(*_held(args), **_held(kwargs))
    if name in _EMPTY:
        output.zero_()
    if name.endswith("_") and not name.endswith("__") and posing:
        return args[0]
    if target == "cpu":
        return output
    return _mapped(Posing, output)
