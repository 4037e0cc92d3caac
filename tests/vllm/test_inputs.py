"""The input of a layer's attention, and the queries made of it, found without changes to the model."""

from __future__ import annotations

import gc
from typing import Any

import pytest
import torch
from torch import Tensor, nn

from keepset import KeepsetError, Recipe
from keepset.core.feature import Needs
from keepset.paged.observer import Observer
from keepset.recording.features import Recording
from keepset.recording.ring import QueryRing
from tests.vllm.late import Late

query_projection = Late("keepset.vllm.query_projection")

HIDDEN, HEADS, SIZE = 10, 3, 4


class Projection(nn.Module):
    """A projection to queries, a key and a value, with a second result as vLLM's has."""

    def __init__(self) -> None:
        super().__init__()
        self.weight = nn.Parameter(torch.randn((HEADS + 2) * SIZE, HIDDEN, generator=torch.Generator().manual_seed(3)))

    def forward(self, hidden: Tensor) -> tuple[Tensor, None]:
        return hidden @ self.weight.t(), None


class Norm(nn.Module):
    def forward(self, rows: Tensor) -> Tensor:
        return 2 * rows / rows.norm(dim=-1, keepdim=True)


class Attending(nn.Module):
    """A module that holds an attention layer."""

    def __init__(self, normed: bool) -> None:
        super().__init__()
        self.qkv_proj = Projection()
        self.found = query_projection.VLLMQueryProjection(self, HEADS, SIZE)
        if normed:
            self.q_norm = Norm()  # later than the attention layer, as in Qwen3


def observing(module: Attending) -> Observer:
    recording = Recording.of_recipe(Recipe.parse("knorm(keep=4)"), 1, SIZE, 4)
    ring = QueryRing(recording, 1, 1, HEADS, SIZE, torch.float32)
    return Observer(Needs(), recording, ring, 1.0, None, [module.found])


def naive(module: Any, row: Tensor, head: int) -> Tensor:
    query = torch.stack([(module.qkv_proj.weight[head * SIZE + i] * row).sum() for i in range(SIZE)])
    return 2 * query / query.square().sum().sqrt() if hasattr(module, "q_norm") else query


@pytest.mark.parametrize("normed", [False, True])
@torch.no_grad()
def test_queries_of_hidden_states(normed: bool) -> None:
    module, hidden = Attending(normed), torch.randn(2, 5, HIDDEN, generator=torch.Generator().manual_seed(4))
    queries = module.found.queries(hidden)
    assert queries.shape == (2, HEADS, 5, SIZE)
    for row in range(2):
        for head in range(HEADS):
            for token in range(5):
                torch.testing.assert_close(queries[row, head, token], naive(module, hidden[row, token], head))


@torch.no_grad()
def test_it_sees_what_is_projected_and_not_what_it_projects_itself() -> None:
    module, hidden = Attending(normed=False), torch.ones(6, HIDDEN)
    assert module.found.hidden is None
    module.qkv_proj(hidden)
    assert module.found.hidden is hidden
    module.found.queries(torch.zeros(1, 2, HIDDEN))
    assert module.found.hidden is hidden


@torch.no_grad()
def test_queries_that_are_made_in_another_way_are_refused() -> None:
    module, hidden = Attending(normed=True), torch.randn(1, 4, HIDDEN, generator=torch.Generator().manual_seed(5))
    queries, observer = module.found.queries(hidden), observing(module)
    with pytest.raises(KeepsetError, match="makes queries of hidden states in a way that keepset does not know"):
        observer.check(0, queries + 0.1, hidden)
    observer.check(0, queries, hidden)
    observer.check(0, queries + 0.1, hidden)  # once is enough


@torch.no_grad()
def test_a_text_that_overflows_is_no_reason() -> None:
    module, hidden = Attending(normed=False), torch.ones(1, 4, HIDDEN)
    hidden[0, 1] = torch.nan
    observing(module).check(0, module.found.queries(hidden), hidden)


def test_the_model_is_not_kept_alive() -> None:
    module = Attending(normed=False)
    found = module.found
    del module
    gc.collect()
    with pytest.raises(AttributeError):
        found.queries(torch.zeros(1, 1, HIDDEN))
