"""The input of a layer's attention, and the queries made of it, found without changes to the model."""

from __future__ import annotations

import gc
from types import SimpleNamespace
from typing import Any

import pytest
import torch
from torch import Tensor, nn

from keepset import KeepsetError, Recipe
from keepset.core.feature import Needs
from keepset.kernels.softmax import Softmax
from keepset.paged.observer import Observer
from keepset.recording import QueryRing, Recording
from tests.vllm.late import Late

query_projection = Late("keepset.vllm.query_projection")

HIDDEN, HEADS, SIZE = 10, 3, 4


class Layer(nn.Module):
    """An attention layer, as vLLM's: it has an implementation, and is called with queries after rotation."""

    impl = SimpleNamespace(unrotated=0, queries_of=lambda rows: rows.unflatten(-1, (-1, SIZE)))

    def forward(self, query: Tensor, key: Tensor, value: Tensor) -> Tensor:
        return query


class Rotation(nn.Module):
    """Turns the first two of a query's numbers by as many radians as its position; `gain` is what the table scales."""

    is_neox_style = True

    def __init__(self, gain: float = 1.0) -> None:
        super().__init__()
        angles = torch.arange(64.0)[:, None]
        self.cos_sin_cache = gain * torch.cat([angles.cos(), angles.sin()], -1)


class Attending(nn.Module):
    """A module that holds an attention layer, and calls it in a way of its own."""

    def __init__(self, normed: bool, stretch: float = 1.0, gain: float = 1.0) -> None:
        super().__init__()
        self.weight = torch.randn(HEADS * SIZE, HIDDEN, generator=torch.Generator().manual_seed(3))
        self.attn, self.rotary_emb, self.stretch = Layer(), Rotation(gain), stretch
        self.found = query_projection.VLLMQueryProjection(self, self.attn, True)
        self.normed = normed

    def forward(self, positions: Tensor, hidden_states: Tensor) -> Tensor:
        rows = (hidden_states @ self.weight.t()).view(-1, HEADS, SIZE)
        rows = 2 * rows / rows.norm(dim=-1, keepdim=True) if self.normed else rows
        turned, angle = rows.clone(), (self.stretch * positions)[:, None]
        turned[..., 0] = rows[..., 0] * angle.cos() - rows[..., 1] * angle.sin()
        turned[..., 1] = rows[..., 1] * angle.cos() + rows[..., 0] * angle.sin()
        turned[..., :2] *= self.rotary_emb.cos_sin_cache[0, 0]
        return self.attn(turned.flatten(1), hidden_states, hidden_states)


def find(*modules: Any) -> None:
    query_projection.find_rotation([module.found for module in modules], HIDDEN, torch.float32, 50)


def observing(module: Attending) -> Observer:
    recording = Recording.of_recipe(Recipe.parse("knorm(keep=4)"), 1, SIZE, 4)
    ring = QueryRing(recording, 1, 1, HEADS, SIZE, torch.float32)
    return Observer(Needs(), recording, ring, Softmax(1.0), None, [module.found])


def naive(module: Any, row: Tensor, head: int) -> Tensor:
    query = torch.stack([(module.weight[head * SIZE + i] * row).sum() for i in range(SIZE)])
    return 2 * query / query.square().sum().sqrt() if module.normed else query


@pytest.mark.parametrize("normed", [False, True])
@torch.no_grad()
def test_queries_of_hidden_states(normed: bool) -> None:
    module, hidden = Attending(normed, gain=1.3), torch.randn(2, 5, HIDDEN, generator=torch.Generator().manual_seed(4))
    find(module, Attending(normed, gain=1.3))
    queries = module.found.queries(hidden)
    assert queries.shape == (2, HEADS, 5, SIZE)
    for row in range(2):
        for head in range(HEADS):
            for token in range(5):
                torch.testing.assert_close(queries[row, head, token], naive(module, hidden[row, token], head))


@torch.no_grad()
def test_it_sees_what_enters_and_not_what_it_projects_itself() -> None:
    module, hidden = Attending(normed=False), torch.ones(6, HIDDEN)
    assert module.found.hidden is None
    assert module(torch.arange(6), hidden_states=hidden).shape == (6, HEADS * SIZE)
    assert module.found.hidden is hidden
    find(module)
    module.found.queries(torch.zeros(1, 2, HIDDEN))
    assert module.found.hidden is hidden
    assert module(torch.arange(6), hidden).shape == (6, HEADS * SIZE)  # its layer is what it was


def test_rotations_and_modules_that_are_not_known() -> None:
    with pytest.raises(KeepsetError, match="depend on their positions in a way that keepset cannot undo: choose a"):
        find(Attending(normed=True, stretch=1.1))
    with pytest.raises(KeepsetError, match="layers do not rotate their queries by one table: choose a method that"):
        find(Attending(normed=True), Attending(normed=True, gain=1.3))
    module: Any = Attending(normed=True)
    module.rotary_emb = None
    with pytest.raises(KeepsetError, match="layers do not rotate their queries by one table"):
        find(module)

    class Taking(Attending):
        def forward(self, positions: Tensor, hidden_states: Tensor, mask: Tensor) -> Tensor:  # type: ignore[override]
            return hidden_states

    with pytest.raises(KeepsetError, match="does not know how to call Taking under vLLM: choose a method"):
        find(Taking(normed=True))


@torch.no_grad()
def test_queries_that_are_made_in_another_way_are_refused() -> None:
    module, hidden = Attending(normed=True), torch.randn(1, 4, HIDDEN, generator=torch.Generator().manual_seed(5))
    find(module)
    queries, observer = module.found.queries(hidden), observing(module)
    with pytest.raises(KeepsetError, match="makes queries of hidden states in a way that keepset does not know"):
        observer.check(0, queries + 0.1, hidden)
    observer.check(0, queries, hidden)
    observer.check(0, queries + 0.1, hidden)  # once is enough
    hidden[0, 1] = torch.nan  # a text that overflows is no reason
    observing(module).check(0, module.found.queries(hidden), hidden)


def test_the_model_is_not_kept_alive() -> None:
    module = Attending(normed=False)
    find(module)
    found = module.found
    del module
    gc.collect()
    with pytest.raises(AttributeError):
        found.queries(torch.zeros(1, 1, HIDDEN))
