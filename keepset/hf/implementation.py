"""`use_keepset_attention`: a model's attention implementation becomes keepset's, except while it serves a batch."""

from __future__ import annotations

from functools import wraps
from typing import Any

from transformers import PreTrainedModel
from transformers.generation import ContinuousBatchingManager

from keepset.hf.attention import NAME, SWITCHING


def use_keepset_attention(model: PreTrainedModel) -> None:
    """Set a model's attention implementation."""
    with SWITCHING:
        model.set_attn_implementation(NAME)


def _batching(switch: Any) -> Any:
    """Return `switch_to_cb_friendly_attn`, wrapped so that `generate_batch` takes a model with keepset's attention.

    It has a cache of its own, and takes the implementations that it knows by their names. When it ends, it sets again
    what it found.
    """

    @wraps(switch)
    def switched(self: ContinuousBatchingManager, model: Any, *args: Any, **kwargs: Any) -> None:
        is_own = model.config._attn_implementation == NAME
        if is_own:
            model.set_attn_implementation("sdpa" if model._supports_sdpa else "eager")
        switch(self, model, *args, **kwargs)
        if is_own:
            self._original_attn_impl = NAME

    return switched


ContinuousBatchingManager.switch_to_cb_friendly_attn = _batching(ContinuousBatchingManager.switch_to_cb_friendly_attn)
