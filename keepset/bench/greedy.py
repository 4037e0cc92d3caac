"""Greedy decoding of a given number of tokens, on whatever cache."""

from __future__ import annotations

import time
from collections.abc import Callable
from typing import TYPE_CHECKING, Any

import torch
from jaxtyping import Int
from torch import Tensor

if TYPE_CHECKING:
    import transformers


@torch.no_grad()
def greedy(
    model: transformers.PreTrainedModel,
    cache: Any,
    said: Int[Tensor, "1 n"],
    count: int,
    on_token: Callable[[], None] = lambda: None,
) -> tuple[list[int], float]:
    """The `count` most likely tokens after `said`, ends of text included, and the seconds that they took."""
    logits = model(said, past_key_values=cache, use_cache=True, logits_to_keep=1).logits
    ids: list[int] = []
    start = time.perf_counter()
    for _ in range(count):
        token = logits[:, -1].argmax(-1, keepdim=True)
        ids.append(int(token))
        logits = model(token, past_key_values=cache, use_cache=True).logits
        on_token()
    return ids, time.perf_counter() - start
