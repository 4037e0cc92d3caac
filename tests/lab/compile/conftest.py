"""Contexts for tiny models."""

import torch

from keepset.lab.compile.corpus import ContextPool, Passage
from tests.hf.models import prompt

TOKENS, CONTINUATION = 24, 6


def context(seed: int) -> Passage:
    ids = prompt(1, TOKENS + CONTINUATION, seed)[0]
    # The second half repeats the first: something that attention can look for.
    ids[TOKENS // 2 :] = torch.cat([ids, ids])[: len(ids) - TOKENS // 2]
    return Passage(ids, TOKENS, f"context {seed}", (f"{seed:016x}",))


def corpus(count: int, seed: int = 0) -> ContextPool:
    return ContextPool([context(100 * seed + i) for i in range(count)], "0f3a")
