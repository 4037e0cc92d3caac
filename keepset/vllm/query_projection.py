"""`VLLMQueryProjection`: how a layer's queries are made from hidden states. vLLM gives the layer only its queries.

The module that holds the attention layer makes them. A PyTorch hook finds this module while the model is built, when it
registers the layer. To make queries from other hidden states the module is called like in the model, up to the layer.
"""

from __future__ import annotations

import inspect
import weakref
from collections.abc import Callable, Sequence
from typing import Any

import torch
from jaxtyping import Float, Int
from torch import Tensor, nn
from torch.nn.modules.module import register_module_module_registration_hook
from torch.utils.hooks import RemovableHandle

from keepset.core.rope import RotaryTable, matches_unrotated
from keepset.core.shapes import HiddenStates, Queries
from keepset.errors import UnsupportedModelError
from keepset.paged.engine import QueryProjection

_OTHERS = "choose a method that does not look at future queries, such as snapkv"


class _CapturedError(Exception):
    """Ends the call of a module when it calls its attention layer."""

    def __init__(self, query: Tensor) -> None:
        self.query = query


class VLLMQueryProjection(QueryProjection):
    """The query projection of one layer.

    Args:
        module: the module that holds the layer.
        layer: vLLM's attention layer.
        watches: whether the module's input is recorded.

    Attributes:
        hidden: the module's input in the current forward, if it is recorded.
        rotary: the rotation of the layer's queries, once it is known.
    """

    def __init__(self, module: nn.Module, layer: nn.Module, watches: bool) -> None:
        # Weak references, because the module holds the attention layer, which holds this object.
        self._module: Callable[[], Any] = weakref.ref(module)
        self._layer: Callable[[], Any] = weakref.ref(layer)
        self._parameters = inspect.signature(module.forward)
        self.hidden: Float[Tensor, "n hidden"] | None = None
        self.rotary: RotaryTable | None = None
        if watches:
            module.register_forward_pre_hook(self._enter, with_kwargs=True)

    def _enter(self, module: nn.Module, args: tuple[Any, ...], kwargs: dict[str, Any]) -> None:
        self.hidden = self._parameters.bind_partial(*args, **kwargs).arguments.get("hidden_states")

    @property
    def table(self) -> Any:
        """vLLM's rotary embedding of the layer; None if it has no table of cosines and sines."""
        rope = getattr(self._module(), "rotary_emb", None)
        return rope if isinstance(getattr(rope, "cos_sin_cache", None), Tensor) else None

    @property
    def unrotated(self) -> int:
        """How many of a query's first numbers are not rotated."""
        return self._layer().impl.unrotated  # type: ignore[no-any-return]

    def queries(self, hidden: HiddenStates) -> Queries:
        assert self.rotary is not None
        batch, n, _ = hidden.shape
        positions = torch.zeros(batch, n, dtype=torch.int64, device=hidden.device)
        return self.rotary.undo(self.rotated(hidden, positions), positions).to(hidden.dtype)

    def rotated(self, hidden: HiddenStates, positions: Int[Tensor, "batch n"]) -> Queries:
        """Return the layer's queries for hidden states at these positions.

        Args:
            hidden: inputs of the module that holds the layer.
            positions: positions of the inputs.

        Raises:
            UnsupportedModelError: the module needs more than hidden states and positions.
        """
        rows = hidden.flatten(0, 1)
        candidates = {"hidden_states": rows, "positions": positions.flatten(), "output": torch.empty_like(rows)}
        needed = [
            name for name, parameter in self._parameters.parameters.items() if parameter.default is parameter.empty
        ]
        arguments = {name: value for name, value in candidates.items() if name in self._parameters.parameters}
        if "hidden_states" not in arguments or not {name for name in needed if name != "kwargs"} <= arguments.keys():
            raise UnsupportedModelError(
                f"keepset does not know how to call {type(self._module()).__name__} under vLLM: {_OTHERS}."
            )
        layer = self._layer()
        layer.forward = _capture
        try:
            self._module().forward(**arguments)
        except _CapturedError as captured:
            queries: Tensor = layer.impl.queries_of(captured.query.reshape(len(rows), -1))
            return queries.unflatten(0, hidden.shape[:2]).transpose(1, 2)
        finally:
            del layer.forward
        raise UnsupportedModelError(f"keepset does not find the queries of {type(layer).__name__}: {_OTHERS}.")


def _capture(query: Tensor, *args: Any, **kwargs: Any) -> None:
    raise _CapturedError(query)


@torch.inference_mode()
def find_rotation(
    projections: Sequence[VLLMQueryProjection], hidden_size: int, dtype: torch.dtype, longest: int
) -> RotaryTable:
    """Return the rotation of some layers' queries, after comparing it with each layer's.

    Args:
        projections: the layers' query projections; `rotary` of each is set.
        hidden_size, dtype: size and dtype of the model's hidden states.
        longest: the most tokens of a request.

    Raises:
        UnsupportedModelError: the layers do not rotate by one table.
    """
    ropes = [projection.table for projection in projections]
    first = ropes[0]
    if first is None or any(rope is None or not _equal(rope, first) for rope in ropes):
        raise UnsupportedModelError(f"This model's layers do not rotate their queries by one table: {_OTHERS}.")
    table = first.cos_sin_cache
    rotary = RotaryTable(table, first.is_neox_style, projections[0].unrotated)
    last = min(longest, len(table)) - 1
    positions = torch.tensor([[0, 1, last // 2, last]], dtype=torch.long, device=table.device)
    draw = torch.Generator().manual_seed(0)
    hidden = torch.randn(*positions.shape, hidden_size, generator=draw, dtype=torch.float32).to(table.device, dtype)
    for projection in projections:
        projection.rotary = rotary
        undone = rotary.undo(projection.rotated(hidden, positions), positions)
        if not matches_unrotated(undone, projection.queries(hidden).float(), dtype):
            raise UnsupportedModelError(
                f"This model's queries depend on their positions in a way that keepset cannot undo: {_OTHERS}."
            )
    return rotary


def _equal(rope: Any, other_rope: Any) -> bool:
    return rope.is_neox_style == other_rope.is_neox_style and (
        rope is other_rope or torch.equal(rope.cos_sin_cache, other_rope.cos_sin_cache)
    )


def watch_projections(projections: dict[str, VLLMQueryProjection], hidden: bool) -> RemovableHandle:
    """Collect the projection of every attention layer that a module registers from now on.

    Args:
        projections: the dictionary that collects them by the layers' names.
        hidden: whether the modules' inputs are recorded.

    Returns:
        A handle that stops collecting.
    """
    from vllm.model_executor.layers.attention import Attention, MLAAttention

    def taken_in(module: nn.Module, name: str, child: nn.Module | None) -> None:
        if isinstance(child, Attention | MLAAttention):
            projections[child.layer_name] = VLLMQueryProjection(module, child, hidden)

    return register_module_module_registration_hook(taken_in)
