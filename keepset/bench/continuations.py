"""The log-likelihoods of texts that may follow a cache, on forks of it."""

from __future__ import annotations

from collections.abc import Sequence
from typing import TYPE_CHECKING

import torch
from jaxtyping import Float, Int
from torch import Tensor
from torch.nn.utils.rnn import pad_sequence

from keepset.hf.cache import Cache

if TYPE_CHECKING:
    import transformers


@torch.no_grad()
def likelihoods(
    model: transformers.PreTrainedModel,
    cache: Cache,
    first: Float[Tensor, "1 vocabulary"],
    continuations: Sequence[Sequence[int]],
    together: int,
    dtype: torch.dtype | None = None,
) -> list[tuple[float, bool]]:
    """Of every continuation its log-likelihood, and whether greedy decoding would say it.

    Args:
        first: the logits of the first token, which whatever was cached last has told.
        together: how many of them run at once.
        dtype: of the softmax; that of the logits if none.
    """
    tokens = [torch.tensor(continuation, device=first.device) for continuation in continuations]
    found: list[tuple[float, bool]] = []
    for start in range(0, len(tokens), together):
        part = tokens[start : start + together]
        logits = _follow(model, cache, first, pad_sequence([row[:-1] for row in part], batch_first=True))
        for row, target in zip(logits, part, strict=True):
            seen = row[: len(target)]
            likely = seen.log_softmax(-1, dtype).gather(-1, target[:, None])
            found.append((float(likely.sum()), bool((seen.argmax(-1) == target).all())))
    return found


def _follow(
    model: transformers.PreTrainedModel,
    cache: Cache,
    first: Float[Tensor, "1 vocabulary"],
    tokens: Int[Tensor, "rows n"],
) -> Float[Tensor, "rows n_and_one vocabulary"]:
    """The logits after the cache and after every token; shorter rows are padded at their end, unseen by them."""
    logits, (rows, length) = [first.expand(len(tokens), 1, -1)], tokens.shape
    if length:
        fork = cache.fork()
        try:
            # Not batch_repeat_interleave: layers with convolutions have none.
            fork.reorder_cache(torch.LongTensor([0] * rows))
            chunks = tokens.split(cache.schedule.every or length, 1)
            logits += [model(chunk, past_key_values=fork, use_cache=True).logits for chunk in chunks]
        finally:
            fork.stop_watching()
    return torch.cat(logits, 1)
