"""Requests of which the prompt holds nothing but padding."""

from __future__ import annotations

import pytest
import torch
from torch import Tensor

import keepset
from keepset.core.features.attention import SecondPass
from tests.hf.models import feed, padded_prompt, recipe, tiny
from tests.hf.test_refusals import refusal

LENGTH, PROMPT, EMPTY = 30, 18, 22
pytestmark = pytest.mark.filterwarnings("ignore:compilerkv has no tables")


@torch.no_grad()
def fed(cache: keepset.Cache | None, ids: Tensor, mask: Tensor) -> Tensor:
    """Logits of the newest token, of texts that come in two parts; without a cache at once."""
    if cache is None:
        positions = (mask.cumsum(-1) - 1).clamp(min=0)
        return tiny("llama")(ids, attention_mask=mask, position_ids=positions, use_cache=False).logits[:, -1]
    for part in (slice(0, PROMPT), slice(PROMPT, LENGTH)):
        logits = feed(tiny("llama"), cache, ids[:, part], mask[:, : part.stop])
    return logits[:, -1]


@pytest.mark.parametrize("name", keepset.METHODS)
def test_a_request_without_a_token_in_the_prompt_keeps_nothing(name: str) -> None:
    ids, mask = padded_prompt([0, EMPTY], LENGTH)
    rows = {"both": [0, 1], "the empty one": [1], "the other": [0]}
    caches = {who: keepset.Cache(tiny("llama"), recipe(name, 14), prompt_length=PROMPT) for who in rows}
    if caches["both"].recipe.method.traits.needs.of(SecondPass):
        for who, index in (("both", 1), ("the empty one", 0)):
            with refusal(f"Request {index} has nothing but padding within the prompt"):
                fed(caches[who], ids[rows[who]], mask[rows[who]])
        return
    logits = {who: fed(cache, ids[rows[who]], mask[rows[who]]) for who, cache in caches.items()}
    whole = fed(None, ids[1:], mask[1:])[0]
    both, other = (caches[who].keep_set for who in ("both", "the other"))
    for layer in both.layers:
        for head in range(2):
            assert len(both.positions(layer, 1, head)) == 0
            assert len(caches["the empty one"].keep_set.positions(layer, 0, head)) == 0
            assert torch.equal(both.positions(layer, 0, head), other.positions(layer, 0, head))
    rounded = 0.05 if name == "int8" else 1e-4  # tokens after the prompt are stored in 8 bits, too
    for found in (logits["both"][1], logits["the empty one"][0]):
        torch.testing.assert_close(found, whole, rtol=1e-4, atol=rounded)
    torch.testing.assert_close(logits["both"][0], logits["the other"][0], rtol=1e-4, atol=1e-4)
