"""Models that PyTorch compiles, against the same as they are."""

from __future__ import annotations

import copy

import pytest
import torch

import keepset
from keepset.errors import UnsupportedModelError
from tests.hf.models import generate, padded_prompt, prompt, tiny


@pytest.mark.full
@pytest.mark.parametrize("text", ["adakv(snapkv(window=4), keep=9, every=4)", "second_pass(keep=9)"])
@pytest.mark.filterwarnings("ignore")
def test_a_compiled_model_says_the_same(text: str) -> None:
    """No backend makes code of keepset's part."""
    (ids, mask), model = padded_prompt([0, 7], 20), tiny("llama_shallow")
    expected = generate(model, ids, plain := keepset.Cache(model, text), mask, max_new_tokens=8)
    compiled, graphs = copy.deepcopy(model), []

    def backend(graph: torch.fx.GraphModule, _: object) -> torch.fx.GraphModule:
        graphs.append(graph)
        return graph

    torch._dynamo.reset()
    compiled.compile(backend=backend)
    output = generate(compiled, ids, cache := keepset.Cache(compiled, text), mask, max_new_tokens=8)
    torch._dynamo.reset()
    assert graphs and any("linear" in str(node.target) for graph in graphs for node in graph.graph.nodes)
    assert torch.equal(output.sequences, expected.sequences)
    assert cache.keep_set.iou(plain.keep_set).eq(1).all() and cache.nbytes == plain.nbytes


def test_the_wrapper_around_a_compiled_model_is_refused() -> None:
    model = torch.compile(copy.deepcopy(tiny("llama")), backend="eager")
    with pytest.raises(UnsupportedModelError, match=r"give keepset the model itself, or compile it in place"):
        keepset.Cache(model, "knorm(keep=9)")


@pytest.mark.parametrize("implementation", ["static", "dynamic"])
def test_two_caches_are_refused_by_generate(implementation: str) -> None:
    model, ids = tiny("llama"), prompt(1, 9)
    with pytest.raises(ValueError, match="Passing both `cache_implementation`"):
        generate(model, ids, keepset.Cache(model, "knorm(keep=5)"), cache_implementation=implementation)
