"""A forward that stops anywhere leaves a cache that answers as before, or refuses in a sentence."""

from __future__ import annotations

from collections.abc import Iterator
from contextlib import contextmanager
from pathlib import Path
from typing import Any

import pytest
import torch
from torch import Tensor
from torch.nn.modules.module import register_module_forward_hook, register_module_forward_pre_hook

import keepset
from keepset.hf.batch import go_together
from tests.hf.models import HYBRIDS, feed, left_padded, prompt, refusal, tiny
from tests.tiers import FULL

LENGTH, NEW = 24, 3
RECIPES = [
    "snapkv(window=4, keep=12)",
    "knorm(keep=12, every=4)",
    "pool(adakv(snapkv(window=4)), keep=12)",
    "quantized(match(reread), keep=16)",
    "expected_attention(buffer=4, keep=12, every=4)",
    "adakv(ams(tova), recent=4, keep=12, every=4)",
]
MODELS = ["llama_deep", "gemma3", "lfm2", *HYBRIDS]
ENDED = "ended before its last layer"


class Stop(KeyboardInterrupt):
    """An interrupt that the tests themselves send."""


@contextmanager
def stopped_at(number: int) -> Iterator[None]:
    """Raise at the n-th beginning or end of a module's call."""
    left = [number]

    def count(*args: Any) -> None:
        left[0] -= 1
        if left[0] < 0:
            raise Stop

    hooks = register_module_forward_pre_hook(count), register_module_forward_hook(count)
    try:
        yield
    except Stop:
        pass
    finally:
        for hook in hooks:
            hook.remove()


def places(run: Any) -> list[int]:
    """Places at which to stop a call: all of them, or in the fast tier some."""
    calls = [0]

    def count(*args: Any) -> None:
        calls[0] += 1

    hooks = register_module_forward_pre_hook(count), register_module_forward_hook(count)
    try:
        run()
    finally:
        for hook in hooks:
            hook.remove()
    return list(range(0, calls[0], 1 if FULL else max(calls[0] // 9, 1)))


@pytest.mark.cross
@pytest.mark.parametrize("padding", [[0], [0, 5]], ids=["whole", "padded"])
@pytest.mark.parametrize("recipe", RECIPES)
@pytest.mark.parametrize("architecture", MODELS)
def test_after_an_interrupt_anywhere(architecture: str, recipe: str, padding: list[int], tmp_path: Path) -> None:
    model = tiny(architecture)
    ids, mask = left_padded(prompt(len(padding), LENGTH + NEW), padding)
    before, after = (ids[:, :LENGTH], mask[:, :LENGTH]), (ids[:, LENGTH:], mask)
    try:
        cache = keepset.Cache(model, recipe)
        feed(model, cache, *before)
    except keepset.KeepsetError as error:
        pytest.skip(str(error))
    expected = feed(model, cache.fork(), *after)
    refused = 0
    for call in places(lambda: feed(model, cache.fork(), *after)):
        past = cache.fork()
        with stopped_at(call):
            feed(model, past, *after)
        refused += goes_on_or_refuses(model, past, after, expected, tmp_path)
    assert refused
    for call in places(lambda: feed(model, keepset.Cache(model, recipe), *before)):
        past = keepset.Cache(model, recipe)
        with stopped_at(call):
            feed(model, past, *before)
        if past.progress is None and not past._is_changed:
            feed(model, past, *before)
            assert torch.allclose(feed(model, past, *after), expected, atol=1e-5)
        else:
            goes_on_or_refuses(model, past, after, expected, tmp_path)


def goes_on_or_refuses(
    model: Any, past: keepset.Cache, after: tuple[Tensor, Tensor], expected: Tensor, folder: Path
) -> bool:
    """Check that a cache that was stopped goes on as if nothing had happened, or does nothing at all any more."""
    ids, mask = after
    try:
        past.fork()
    except keepset.KeepsetError:
        pass
    else:  # nothing had been changed yet, or all had
        assert past.progress is not None and past.progress.logical in (LENGTH, LENGTH + NEW)
        if past.progress.logical == LENGTH:
            assert torch.allclose(feed(model, past, ids, mask), expected, atol=1e-5)
        else:
            again = torch.cat([mask, mask[:, -1:]], 1)
            assert feed(model, past, ids[:, -1:], again).isfinite().all()
        return False
    with refusal(ENDED):
        feed(model, past, ids, mask)
    rows = torch.arange(len(ids))
    for use in (
        *(past.fork, lambda: past.crop(-1), lambda: past.reorder_cache(rows), lambda: past.batch_repeat_interleave(2)),
        *(lambda: past.save(folder / "file"), lambda: past.ask(ids)),
        lambda: model.generate(torch.cat([ids, ids], 1), past_key_values=past, max_new_tokens=1),
    ):
        with refusal(ENDED):
            use()
    if model.config.model_type == "llama" and len(ids) == 1:
        assert ENDED in str(go_together(model, [past], ids)[1][0])
    assert not list(folder.iterdir())
    past.reset()
    assert past.progress is None and past.get_seq_length() == 0
    return True


@pytest.mark.parametrize("recipe", [recipe for recipe in RECIPES if "every" in recipe])
def test_after_an_interrupt_inside_an_event(recipe: str, monkeypatch: pytest.MonkeyPatch) -> None:
    model, ids = tiny("llama_deep"), prompt(1, LENGTH + 8)
    mask = torch.ones_like(ids)
    cache = keepset.Cache(model, recipe)
    feed(model, cache, ids[:, :LENGTH], mask[:, :LENGTH])
    choose = type(cache)._choose
    calls = []

    def interrupted(self: Any, observations: Any) -> None:
        calls.append(1)
        if len(calls) == 1:
            raise Stop
        choose(self, observations)

    past = cache.fork()
    monkeypatch.setattr(keepset.Cache, "_choose", interrupted)
    with pytest.raises(Stop):
        feed(model, past, ids[:, LENGTH:], mask)
    with refusal(ENDED):
        feed(model, past, ids[:, LENGTH:], mask)
    # Other copies go on.
    assert feed(model, cache, ids[:, LENGTH:], mask).isfinite().all()


def test_caches_that_go_together_stop_together() -> None:
    model, ids = tiny("llama_deep"), prompt(2, LENGTH)
    caches = [keepset.Cache(model, "knorm(keep=12, every=4)") for _ in range(2)]
    for row, cache in zip(ids, caches, strict=True):
        feed(model, cache, row[None], torch.ones_like(row[None]))
    with stopped_at(20):
        go_together(model, caches, ids[:, :1])
    for cache in caches:
        with refusal(ENDED):
            cache.fork()


def test_a_call_that_is_refused_changes_nothing() -> None:
    model, ids = tiny("llama_deep"), prompt(1, LENGTH + NEW)
    mask = torch.ones_like(ids)
    cache = keepset.Cache(model, "snapkv(window=4, keep=12)")
    feed(model, cache, ids[:, :LENGTH], mask[:, :LENGTH])
    expected = feed(model, cache.fork(), ids[:, LENGTH:], mask)
    with refusal("The attention mask covers"):
        feed(model, cache, ids[:, LENGTH:], mask[:, :LENGTH])
    with refusal("repeats positions"):
        model(ids[:, :NEW], past_key_values=cache, position_ids=torch.arange(NEW)[None])
    assert torch.equal(feed(model, cache, ids[:, LENGTH:], mask), expected)


@pytest.mark.parametrize("recipe", ["knorm(keep=1.0)", "snapkv(window=4, keep=12)"])
@pytest.mark.parametrize("new", [1, 3])
def test_a_mask_that_hides_cached_tokens_is_refused(new: int, recipe: str) -> None:
    """Left padding that came with the prompt may stay; tokens that the cache holds may not be hidden later."""
    model, (ids, mask) = tiny("llama"), left_padded(prompt(2, LENGTH + new), [0, 5])
    cache = keepset.Cache(model, recipe)
    feed(model, cache, ids[:, :LENGTH], mask[:, :LENGTH])
    expected = feed(model, cache.fork(), ids[:, LENGTH:], mask)
    hidden, shown = mask.clone(), torch.ones_like(mask)
    hidden[0, 5:12] = 0
    positions = (mask.cumsum(-1) - 1).clamp(min=0)[:, LENGTH:]
    for wrong_mask in (hidden, shown):
        with refusal("hides tokens that the cache holds"), torch.no_grad():
            model(ids[:, LENGTH:], attention_mask=wrong_mask, position_ids=positions, past_key_values=cache)
    assert torch.equal(feed(model, cache, ids[:, LENGTH:], mask), expected)
