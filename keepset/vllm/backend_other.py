"""Attention backends that keepset does not know: vLLM's own without a recipe, and a refusal with one.

A recipe that is silently ignored would be worse than an engine that does not start.
"""

from __future__ import annotations

from typing import Any

from vllm.config import get_current_vllm_config_or_none
from vllm.utils.import_utils import resolve_obj_by_qualname
from vllm.v1.attention.backends.registry import AttentionBackendEnum

from keepset.errors import KeepsetError
from keepset.vllm.settings import recipe_of


def __getattr__(name: str) -> type[Any]:
    """The class of the backend that vLLM calls by this name."""
    if name not in AttentionBackendEnum.__members__:
        raise AttributeError(name)
    plain: type[Any] = resolve_obj_by_qualname(AttentionBackendEnum[name].value)
    recipe = recipe_of(get_current_vllm_config_or_none())
    if recipe is None:
        return plain

    def refuse() -> type[Any]:
        raise KeepsetError(
            f"keepset cannot serve {recipe}: this engine chose the attention backend {name}; choose one of "
            "FLASH_ATTN, TRITON_ATTN (--attention-backend) or, on CPUs, CPU_ATTN."
        )

    return type(plain.__name__, (plain,), {"get_impl_cls": staticmethod(refuse)})
