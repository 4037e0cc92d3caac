"""`VLLMQueryProjection`: the hidden states that enter a layer's attention. vLLM gives the layer only its queries.

The module that holds the attention layer knows both. It is found while the model is built, when it registers the layer,
by a hook of PyTorch.
"""

from __future__ import annotations

import weakref
from collections.abc import Callable
from typing import Any

from jaxtyping import Float
from torch import Tensor, nn
from torch.nn.modules.module import register_module_module_registration_hook
from torch.utils.hooks import RemovableHandle

from keepset.core.shapes import HiddenStates, Queries
from keepset.paged.engine import QueryProjection


class VLLMQueryProjection(QueryProjection):
    """How one layer makes queries.

    Args:
        module: holds the layer, its projection `qkv_proj` and, if the model has one, its `q_norm`.
        heads, head_dim: the layer's query heads, and their size.
    """

    def __init__(self, module: Any, heads: int, head_dim: int) -> None:
        # Weakly, because the module holds the attention layer, which holds this.
        self._module: Callable[[], Any] = weakref.ref(module)
        self._heads, self._head_dim = heads, head_dim
        self.hidden: Float[Tensor, "n hidden"] | None = None
        module.qkv_proj.register_forward_pre_hook(self._enter)

    def _enter(self, projection: nn.Module, args: tuple[Any, ...]) -> None:
        (self.hidden,) = args

    def queries(self, hidden: HiddenStates) -> Queries:
        module = self._module()
        # `forward`, because calling it would run the hook.
        projected, *_ = module.qkv_proj.forward(hidden.flatten(0, 1))
        queries = projected[:, : self._heads * self._head_dim].reshape(-1, self._heads, self._head_dim)
        norm = getattr(module, "q_norm", None)
        queries = queries if norm is None else norm(queries)
        return queries.unflatten(0, hidden.shape[:2]).transpose(1, 2)


def watch_projections(projections: dict[str, VLLMQueryProjection]) -> RemovableHandle:
    """Collect the projection of every attention layer that a module registers from now on.

    Returns:
        A handle to stop collecting.
    """
    from vllm.model_executor.layers.attention import Attention

    def taken_in(module: nn.Module, name: str, child: nn.Module | None) -> None:
        if isinstance(child, Attention) and hasattr(module, "qkv_proj"):
            impl: Any = child.impl
            projections[child.layer_name] = VLLMQueryProjection(module, impl.num_heads, impl.head_size)

    return register_module_module_registration_hook(taken_in)
