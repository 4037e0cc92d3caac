"""Waits on a real GPU: PyTorch raises where the host would wait for the device. `pytest --gpu` alone runs these."""

from __future__ import annotations

from collections.abc import Iterator
from contextlib import contextmanager
from typing import Any

import pytest
import torch

import keepset
from keepset.errors import KeepsetError
from tests.hf.models import prompt, recipe, tiny
from tests.hf.test_waits import COMPOSED
from tests.on_gpu import GPU

pytestmark = [pytest.mark.full, pytest.mark.skipif(not GPU, reason="counts waits of a real GPU")]
LENGTH, EVERY = 20, 4


@contextmanager
def no_wait() -> Iterator[None]:
    before = torch.cuda.get_sync_debug_mode()
    torch.cuda.set_sync_debug_mode("error")
    try:
        yield
    finally:
        torch.cuda.set_sync_debug_mode(before)


@pytest.mark.parametrize("method", [*keepset.METHODS, *COMPOSED])
@torch.no_grad()
def test_a_decoded_token_waits_for_nothing(method: str) -> None:
    model, ids = tiny("llama"), prompt(2, LENGTH)
    text = method if "(" in method else recipe(method, 12)
    try:
        cache = keepset.Cache(model, f"{text[:-1]}, every={EVERY})")
    except KeepsetError:  # at the prompt's end only
        cache = keepset.Cache(model, text)

    def step(tokens: Any) -> None:
        model(tokens, past_key_values=cache, use_cache=True, logits_to_keep=1)

    step(ids)
    for _ in range(EVERY):  # kernels are compiled, and an event has made room
        step(ids[:, :1])
    torch.cuda.synchronize()
    with no_wait():
        for _ in range(EVERY - 1):
            step(ids[:, :1])
