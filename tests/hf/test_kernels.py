"""A model's cache on the kernels of a GPU, run by Triton's interpreter, against the same on PyTorch's operators."""

from __future__ import annotations

from typing import Any

import pytest
import torch

import keepset
from keepset.kernels import dispatch
from tests.hf.models import LAYOUTS, generate, oracle_gap, padded_prompt, recipe, tiny

padded_or_not = pytest.mark.parametrize("padding", [[0, 0], [0, 7]], ids=["whole", "padded"])


def both(text: Any, padding: list[int], architecture: str, monkeypatch: pytest.MonkeyPatch) -> None:
    """Tokens and what stays are the same, and attention is that of the dense oracle."""
    (ids, mask), model = padded_prompt(padding, 20), tiny(architecture)
    cache = keepset.Cache(model, text)
    output = generate(model, ids, cache, mask, max_new_tokens=3)
    assert oracle_gap(model, cache, output, mask) < 1e-4
    monkeypatch.setattr(dispatch, "INTERPRETED", False)
    plain = keepset.Cache(model, text)
    expected = generate(model, ids, plain, mask, max_new_tokens=3)
    assert torch.equal(output.sequences, expected.sequences)
    assert cache.keep_set.iou(plain.keep_set).eq(1).all() and cache.nbytes == plain.nbytes


@pytest.mark.cross
@pytest.mark.parametrize("layout", LAYOUTS)
@pytest.mark.parametrize("architecture", ["llama", "llama_mqa", "llama_odd_head", "phi3_partial", "gemma3"])
@padded_or_not
def test_layouts(
    triton_interpreted: None, architecture: str, layout: str, padding: list[int], monkeypatch: pytest.MonkeyPatch
) -> None:
    both(LAYOUTS[layout].format(keep=9), padding, architecture, monkeypatch)


@pytest.mark.spread
@pytest.mark.full
@pytest.mark.parametrize("method", keepset.METHODS)
@padded_or_not
def test_methods(triton_interpreted: None, method: str, padding: list[int], monkeypatch: pytest.MonkeyPatch) -> None:
    both(recipe(method, 12), padding, "llama_shallow", monkeypatch)
