"""What GVote assumes: synthetic queries against the model's own attention, normality against loops over numbers."""

import math
from statistics import fmean, pstdev
from typing import Any

import pytest
import torch
from torch import Tensor
from transformers import DynamicCache

from keepset import KeepsetError
from keepset.lab.analysis.synthetic import agreement, gaussianity, hidden_gaussianity, next_query
from keepset.methods.gvote import GVote
from tests.hf.models import ARCHITECTURES, hooks_on, prompt, tiny

TOKENS = 30


def test_a_case_made_by_hand() -> None:
    synthetic = torch.tensor([[[0.6, 0.3, 0.1, 0.0], [0.0, 0.1, 0.2, 0.7]]])
    true = torch.tensor([[0.5, 0.25, 0.125, 0.125]])
    found = agreement(synthetic, true, 0.8)
    # {0, 1} hold 0.9 and {2, 3} hold 0.9; of the true attention 0.75 and 0.25.
    assert found.overlap.tolist() == found.usage.tolist() == [0.5]
    # 0.5 + 0.25 + 0.125.
    assert found.needed.tolist() == [0.75]
    # Means are 0.3, 0.2, 0.15, 0.35 and deviations 0.05, -0.05, -0.1, 0.1 against 0.25, 0, -0.125, -0.125.
    covariance = 0.05 * 0.25 + 0.1 * 0.125 - 0.1 * 0.125
    spread = math.sqrt((0.05**2 + 0.05**2 + 0.1**2 + 0.1**2) * (0.25**2 + 2 * 0.125**2))
    assert found.correlation.tolist() == [pytest.approx(covariance / spread, rel=1e-6)]
    # The same attention agrees with itself.
    true = torch.rand(3, 5, 17, generator=torch.Generator().manual_seed(0)).softmax(-1)
    found = agreement(true[:, :, None], true, 0.9)
    torch.testing.assert_close(found.correlation, torch.ones_like(found.correlation))
    assert torch.equal(found.usage, found.needed)
    assert ((found.overlap >= 0.9) & (found.overlap < 1)).all()
    uniform = torch.full((1, 4), 0.25)
    assert agreement(uniform[:, None], uniform, 0.9).correlation.isnan().all()


@torch.no_grad()
def true_attention(architecture: str, ids: Tensor) -> dict[int, Tensor]:
    """The last token's attention over those before it, from the model's own attention matrices."""
    model = tiny(architecture)
    model.set_attn_implementation("eager")
    matrices = model(ids, output_attentions=True, past_key_values=DynamicCache(config=model.config)).attentions
    rows = {layer: matrix[0, :, -1, :-1] for layer, matrix in enumerate(matrices)}
    return {layer: row / row.sum(-1, keepdim=True) for layer, row in rows.items()}


@pytest.mark.few(2)
@pytest.mark.parametrize("architecture", ["llama", "qwen3", "llama_mqa", "gpt2"])
def test_the_true_query_is_the_model_s(architecture: str) -> None:
    ids, method = prompt(1, TOKENS), GVote(p_nuc=0.7)
    found = next_query(tiny(architecture), method, ids)
    expected = true_attention(architecture, ids)
    assert list(found) == list(expected)
    for layer, attention in expected.items():
        heads = ARCHITECTURES[architecture][1].get("num_attention_heads", 4)
        assert found[layer].needed.shape == (heads,)
        for head, row in enumerate(attention.tolist()):
            held = count = 0.0
            for share in sorted(row, reverse=True):
                held, count = held + share, count + (held < 0.7)
            assert found[layer].needed[head] == pytest.approx(count / (TOKENS - 1))
        assert ((found[layer].overlap > 0) & (found[layer].overlap <= 1.0001)).all()


def test_all_of_it_overlaps_with_everything() -> None:
    for each in next_query(tiny("llama"), GVote(p_nuc=1.0), prompt(1, TOKENS)).values():
        torch.testing.assert_close(each.overlap, torch.ones_like(each.overlap))
        assert each.usage.unique().tolist() == each.needed.unique().tolist() == [1.0]


def test_the_last_token_is_masked() -> None:
    """Whatever it is, synthetic queries use the same share of the tokens before it."""
    ids = prompt(1, TOKENS)
    other = torch.cat([ids[:, :-1], (ids[:, -1:] + 1) % 190 + 3], 1)
    ours, theirs = (next_query(tiny("llama"), GVote(p_nuc=0.7), each) for each in (ids, other))
    for layer, each in ours.items():
        assert torch.equal(each.usage, theirs[layer].usage)
        assert not torch.equal(each.overlap, theirs[layer].overlap)


def by_loops(values: list[float]) -> tuple[float, float, float]:
    mean, spread = fmean(values), pstdev(values)
    scaled = sorted((value - mean) / spread for value in values)
    n, distance = len(scaled), 0.0
    for x in scaled:
        normal = 0.5 * (1 + math.erf(x / math.sqrt(2)))
        below, through = sum(y < x for y in scaled) / n, sum(y <= x for y in scaled) / n
        distance = max(distance, abs(normal - below), abs(normal - through))
    return distance, fmean(x**3 for x in scaled), fmean(x**4 for x in scaled) - 3


@pytest.mark.parametrize("tokens", [3, 17, 200])
def test_normality_is_that_of_loops(tokens: int) -> None:
    hidden = torch.randn(tokens, 3, generator=torch.Generator().manual_seed(tokens)) ** 2 + 5
    measured = gaussianity(hidden)
    for channel, figures in enumerate(zip(*vars(measured).values(), strict=True)):
        assert figures == pytest.approx(by_loops(hidden[:, channel].double().tolist()), abs=1e-9)


def test_normal_draws_are_near_others_far_and_too_few_refused() -> None:
    draws = torch.randn(4000, 1, generator=torch.Generator().manual_seed(0))
    near, far = gaussianity(7 * draws - 2), gaussianity(draws.exp())
    assert near.distance.item() < 0.03 and abs(near.skewness.item()) < 0.15 and abs(near.kurtosis.item()) < 0.3
    assert far.distance.item() > 0.15 and far.skewness.item() > 2
    assert gaussianity(torch.ones(5, 2)).distance.isnan().all()
    with pytest.raises(KeepsetError, match="6 tokens are too few: statistics leave out the first 4"):
        next_query(tiny("llama"), GVote(), prompt(1, 6))
    with pytest.raises(KeepsetError, match="6 tokens are too few: the first 4 are left out, so give 7"):
        hidden_gaussianity(tiny("llama"), prompt(1, 6), skip=4)
    next_query(tiny("llama"), GVote(), prompt(1, 7))


def test_hidden_states_are_the_layer_norms_outputs() -> None:
    model: Any = tiny("llama")
    outputs: list[torch.Tensor] = []
    others = hooks_on(model)
    hooks = [
        layer.input_layernorm.register_forward_hook(lambda module, args, output: outputs.append(output))
        for layer in model.model.layers
    ]
    measured = hidden_gaussianity(model, torch.arange(3, 40)[None], skip=4)
    for hook in hooks:
        hook.remove()
    assert list(measured) == [0, 1] and len(outputs) == 2
    assert hooks_on(model) == others
    for layer, output in enumerate(outputs):
        distance, _, _ = by_loops(output[0, 4:, 5].double().tolist())
        assert measured[layer].distance[5].item() == pytest.approx(distance, abs=1e-6)
