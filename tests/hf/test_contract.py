"""Every model type of transformers is in the table of models; with `--contract` each is checked."""

from __future__ import annotations

import re
from collections import Counter
from typing import Any

import pytest
import torch

import keepset
from tests.hf.contract.builds import KINDS, NOT_BUILT, build
from tests.hf.contract.check import LENGTH, NEEDS, NEW, OK, check, masked
from tests.hf.contract.page import PAGE, types_in
from tests.hf.models import generate, prompt
from tests.tiers import FULL

WORK = {
    "aya_vision": 2,  # beside sliding windows
    "bert": 2,  # an encoder made a decoder
    "bigbird_pegasus": 2,  # attention that calls itself not causal, and leaves it to the mask
    "gemma2": 2,  # soft caps
    "got_ocr2": 2,  # whose decoder alone uses the attention interface
    "gpt_oss": 2,  # sinks in the softmax, beside sliding windows with them
    "granitemoehybrid": 2,  # beside states
    "jamba": 2,  # beside states that its mixers forget before several tokens
    "llama4_text": 2,  # rotations as complex numbers, beside chunks
    "modernbert-decoder": 2,  # whose head is called decoder
    "paligemma": 2,  # which hands a finished mask to its decoder
}
"""Types that all methods run on, and how many layers of the tiny model are compressed."""
REFUSED = {
    "blt": "makes no cache for BltForCausalLM, because its configuration does not tell the layers",
    "deepseek_v32": "caches more than keys and values \\(DynamicIndexedLayer\\)",
    "deepseek_v4": "caches more than keys and values \\(DeepseekV4HCACache\\)",
    "git": "adds its attention mask to logits by itself",
    "minimax_m3_vl_text": "does not support selection of blocks of keys",
    "mllama": "attends to images in layers of their own",
    "qwen4_exp_text": "caches more than keys and values \\(DynamicIndexedLayer\\)",
    "t5gemma2": "is an encoder-decoder",
}
"""Types that are refused, and by which words."""


def test_every_type_is_in_the_table() -> None:
    """A type that a newer transformers has is added by `python -m tests.hf.contract --write`."""
    listed = Counter(types_in(PAGE.read_text(encoding="utf-8")))
    assert set(KINDS) - listed.keys() == set()
    assert [kind for kind, times in listed.items() if times > 1] == []


@pytest.mark.few(3)
@pytest.mark.parametrize("kind", sorted(WORK.keys() & {*KINDS}))
def test_some_types_work(kind: str) -> None:
    """The fast tier has three kinds of recipes on each type, and each kind of recipe on some types."""
    index, needs = sorted(WORK).index(kind), list(NEEDS)
    row = check(kind, build(kind), needs if FULL else [needs[(3 * index + i) % len(needs)] for i in range(3)])
    assert row.findings == {} and set(row.says.values()) == {OK}
    assert row.compressed == WORK[kind]


@pytest.mark.few(3)
@pytest.mark.parametrize("kind", sorted(REFUSED.keys() & {*KINDS}))
def test_some_types_are_refused_for_what_they_are(kind: str) -> None:
    row = check(kind, build(kind))
    assert row.findings == {} and re.search(REFUSED[kind], row.refused)


def test_tokens_of_an_image_see_each_other() -> None:
    model, ids = build("gemma3"), prompt(1, LENGTH)
    image = torch.zeros_like(ids)
    image[:, 10:30] = 1

    def said(past: Any) -> Any:
        return generate(model, ids, past, token_type_ids=image, max_new_tokens=NEW)

    expected, as_text = said(None), generate(model, ids, max_new_tokens=NEW)
    assert (expected.logits[0] - as_text.logits[0]).abs().max() > 0.01
    assert torch.equal(said(keepset.Cache(model, "h2o(keep=1.0)")).sequences, expected.sequences)
    past = keepset.Cache(model, "snapkv(window=8, keep=20)", history=True)
    output = said(past)
    longer = torch.nn.functional.pad(image, (0, output.sequences.shape[1] - 1 - LENGTH))
    gap = torch.stack(output.logits, 1) - masked(model, past, output, token_type_ids=longer)
    assert past.keep_set.counts.unique().tolist() == [20] and gap.abs().max() < 1e-3


@pytest.mark.contract
@pytest.mark.parametrize("kind", [kind for kind in KINDS if kind not in NOT_BUILT])
def test_a_type(kind: str) -> None:
    """It works, or is refused in a sentence."""
    assert check(kind, build(kind)).findings == {}
