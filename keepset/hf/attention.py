"""The attention function that keepset registers with transformers, for all architectures with its interface.

It is not given the cache, so a layer that has just been updated is handed over here.
"""

from __future__ import annotations

import threading
from collections.abc import Callable, Iterator
from contextlib import contextmanager
from typing import Any, NamedTuple

from torch import Tensor, nn
from transformers import AttentionInterface, PreTrainedModel
from transformers.integrations.sdpa_attention import sdpa_attention_forward
from transformers.masking_utils import AttentionMaskInterface

from keepset.errors import KeepsetError, UnsupportedModelError
from keepset.hf.dynamo import uncompiled
from keepset.hf.mask import MaskRule, mask_rule

NAME = "keepset"
"""Name of the attention implementation."""
_SWITCHING = threading.Lock()
"""Held while a model gets it: transformers marks the model's configurations meanwhile."""


class BatchedAttention(NamedTuple):
    """What was made of some requests' tokens in one go with those of others: they are stored and attended.

    Attributes:
        output: of attention, `[batch, n, query_heads, value_dim]`.
        positions: of the tokens, `[batch, n]`.
        lengths: of the requests after them, `[batch]`.
    """

    output: Tensor
    positions: Tensor
    lengths: Tensor

    def row(self, index: int) -> BatchedAttention:
        """One request's part."""
        return BatchedAttention(*(part[index : index + 1] for part in self))


class AttentionCall(NamedTuple):
    """What transformers gives the attention function, for a layer that attends over its own entries.

    Queries are `[batch, query_heads, n, head_dim]`, after rotation; keys and values, of the same tokens,
    `[batch, kv_heads, n, dim]`. `rows` says which these requests are among those that the model was called with, and
    `joint` what is made of them already.
    """

    module: nn.Module
    query: Tensor
    key: Tensor
    value: Tensor
    mask: MaskRule | None
    scaling: float
    position_ids: Tensor | None
    rows: slice = slice(None)
    joint: BatchedAttention | None = None

    def row(self, index: int) -> AttentionCall:
        """One request's part."""
        rows = slice(index, index + 1)
        query, key, value = self.query[rows], self.key[rows], self.value[rows]
        at = None if self.position_ids is None else self.position_ids[rows]
        joint = None if self.joint is None else self.joint.row(index)
        return self._replace(query=query, key=key, value=value, position_ids=at, rows=rows, joint=joint)


Attend = Callable[[AttentionCall], Tensor]
"""Gives the attention's output, `[batch, n, query_heads, value_dim]`."""


class _Local(threading.local):
    updated: tuple[Attend, Tensor, Tensor] | None = None
    captured: list[Tensor] | None = None
    passed_by: str | None = None


_local = _Local()


def switch(model: PreTrainedModel) -> None:
    """Give the model this attention implementation."""
    with _SWITCHING:
        model.set_attn_implementation(NAME)


def set_pending_attention(attend: Attend, key: Tensor, value: Tensor) -> None:
    """Says who attends in the next call of the attention function, if that is given these keys."""
    _local.updated, _local.passed_by = (attend, key, value), None


def passed_by() -> str | None:
    """Return which attention module was given other keys than those handed over last; None if there was no such."""
    return _local.passed_by


@contextmanager
def capturing() -> Iterator[list[Tensor]]:
    """Attention modules called inside only report their queries, `[batch, query_heads, n, head_dim]`."""
    captured: list[Tensor] = []
    _local.captured = captured
    try:
        yield captured
    finally:
        _local.captured = None


@uncompiled
def keepset_attention(
    module: nn.Module,
    query: Tensor,
    key: Tensor,
    value: Tensor,
    attention_mask: MaskRule | Tensor | None,
    scaling: float | None = None,
    dropout: float = 0.0,
    **kwargs: Any,
) -> tuple[Tensor, None]:
    """Attention over what the layer kept; for every other cache, or none, transformers' own SDPA."""
    if _local.captured is not None:
        _local.captured.append(query)
        return query.new_zeros(query.shape[0], query.shape[2], query.shape[1], value.shape[-1]), None
    for feature, name in _UNSUPPORTED.items():
        if kwargs.get(feature) is not None:
            raise UnsupportedModelError(f"keepset's attention does not support {name}, which this model uses.")
    updated, _local.updated = _local.updated, None
    if updated is None or updated[1] is not key:
        _local.passed_by = None if updated is None else type(module).__name__
        mask = attention_mask.matrix if isinstance(attention_mask, MaskRule) else attention_mask
        return sdpa_attention_forward(module, query, key, value, mask, dropout, scaling, **kwargs)
    attend, _, cached = updated
    # With a mask, its rule says so.
    if attention_mask is None and getattr(module, "is_causal", True) is False:
        raise UnsupportedModelError(
            f"{type(module).__name__} lets tokens see later ones, and keepset compresses causal attention alone: a "
            "model that can be a decoder needs is_decoder=True in its config."
        )
    if cached is not value:
        raise UnsupportedModelError(
            f"{type(module).__name__} attends over other values than it caches, which keepset does not support."
        )
    if isinstance(attention_mask, Tensor):
        raise UnsupportedModelError(
            "keepset.Cache takes a two-dimensional attention mask [batch, tokens]; this call brought a finished matrix."
        )
    if kwargs.get("output_attentions"):
        raise KeepsetError(
            "output_attentions=True asks for weights that keepset's attention never holds: leave it out, or run the "
            "model without a keepset.Cache and with the attention implementation 'eager'."
        )
    scaling = query.shape[-1] ** -0.5 if scaling is None else scaling
    return attend(AttentionCall(module, query, key, value, attention_mask, scaling, kwargs.get("position_ids"))), None


_UNSUPPORTED = {
    "softcap": "soft-capping of attention logits",
    "s_aux": "attention sinks in the softmax",
    "position_bias": "additive position biases",
}

AttentionInterface.register(NAME, keepset_attention)
AttentionMaskInterface.register(NAME, mask_rule)
