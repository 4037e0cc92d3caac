"""Gates between full and streaming attention: what a gate does, and that those open stay open which matter."""

import copy
from dataclasses import replace
from types import SimpleNamespace
from typing import Any

import pytest
import torch

from keepset import KeepsetError
from keepset.lab.calibrate import gates
from keepset.lab.calibrate.gates import PASSKEYS, Passkeys, draw, retrieval_gates
from tests.hf.models import prompt, tiny
from tests.kernels.test_attention import attention_of, other_softmax
from tests.methods.naive import dot


@pytest.fixture
def near(monkeypatch: pytest.MonkeyPatch) -> None:
    """Streaming attention of few tokens, for short texts."""
    monkeypatch.setattr(gates, "SINKS", 2)
    monkeypatch.setattr(gates, "RECENT", 3)


@pytest.mark.usefixtures("near")
@pytest.mark.parametrize("kind", [0, 3])
@pytest.mark.parametrize("window", [None, 4])
def test_a_gate_mixes_two_attentions(window: int | None, kind: int) -> None:
    """Those of a model with a soft cap and sinks, too."""
    own = replace(other_softmax(4)[kind], scaling=0.4)
    more: dict[str, Any] = dict(sliding_window=window, softcap=own.softcap, s_aux=own.sinks)
    torch.manual_seed(0)
    query, key, value = torch.randn(1, 4, 9, 5), torch.randn(1, 2, 9, 5), torch.randn(1, 2, 9, 3)
    gates._gates.set({7: torch.tensor([0.3, 1.0])})
    try:
        module: Any = SimpleNamespace(layer_idx=7)
        output, _ = gates._attention(module, query, key, value, None, 0.4, **more)
        module.layer_idx = 6
        plain, _ = gates._attention(module, query, key, value, None, 0.4, **more)
    finally:
        gates._gates.set(None)

    def attend(head: int, at: int, streams: bool) -> list[float]:
        places = [t for t in range(at + 1) if window is None or at - t < window]
        places = [t for t in places if not streams or t < 2 or at - t < 3]
        keys, values = key[0, head // 2].tolist(), value[0, head // 2].tolist()
        products = [0.4 * dot(query[0, head, at].tolist(), keys[t]) for t in places]
        weights = attention_of(torch.tensor(products), own, head).tolist()
        return [sum(weight * values[t][i] for weight, t in zip(weights, places, strict=True)) for i in range(3)]

    for head in range(4):
        gate = 0.3 if head < 2 else 1.0
        for at in range(9):
            full, streaming = attend(head, at, False), attend(head, at, True)
            mixed = [gate * a + (1 - gate) * b for a, b in zip(full, streaming, strict=True)]
            assert output[0, at, head].tolist() == pytest.approx(mixed, abs=1e-5)
            assert plain[0, at, head].tolist() == pytest.approx(full, abs=1e-5)


@pytest.mark.usefixtures("near")
@pytest.mark.parametrize("architecture", ["llama", "gpt2", "gemma3"])
def test_the_head_that_matters_stays_open(architecture: str) -> None:
    """Values of all heads but one are not looked at by the output projection: closing their gates costs nothing."""
    model = copy.deepcopy(tiny(architecture))
    layer, head, heads = {"llama": (1, 1, 2), "gpt2": (1, 3, 4), "gemma3": (3, 1, 2)}[architecture]
    for module in model.modules():
        if not hasattr(module, "layer_idx"):
            continue
        projection = getattr(module, "o_proj", None) or getattr(module, "c_proj", None)
        if projection is None:
            continue
        inwards = projection.weight.data if architecture == "gpt2" else projection.weight.data.t()
        kept = inwards.unflatten(0, (heads, -1))[head].clone()
        inwards.zero_()
        if module.layer_idx == layer:
            inwards.unflatten(0, (heads, -1))[head] = kept * 20
    texts = [Passkeys(prompt(1, 40, seed)[0], 30) for seed in range(8)]
    layers = [1, 3] if architecture == "gemma3" else range(2)
    implementation = model.config._attn_implementation
    trained = retrieval_gates(model, texts, dict.fromkeys(layers, heads))
    assert list(trained) == list(layers)
    for index, gate in trained.items():
        for one in range(heads):
            open_ = index == layer and one == head
            assert gate[one] > 0.7 if open_ else gate[one] < 0.5
    assert model.config._attn_implementation == implementation
    assert all(parameter.requires_grad and parameter.grad is None for parameter in model.parameters())
    assert gates._gates.get() is None


@pytest.mark.usefixtures("near")
def test_hidden_states_that_are_not_finite_are_refused() -> None:
    model = copy.deepcopy(tiny("llama"))
    model.model.norm.weight.data[0] = float("inf")
    with pytest.raises(KeepsetError, match="not finite"):
        retrieval_gates(model, [Passkeys(prompt(1, 20)[0], 10)], dict.fromkeys(range(2), 2))
    assert gates._gates.get() is None


def test_passkeys_are_told_once_and_asked_for_once(embedded: Any) -> None:
    _, tokenizer = embedded
    passage = torch.tensor(tokenizer("The weather was fine. " * 10, add_special_tokens=False)["input_ids"])
    texts = draw(tokenizer, [passage], count=3, seed=1)
    assert [len(text.ids) for text in texts] == [512] * 3
    for text in texts:
        before, after = tokenizer.decode(text.ids[: text.asked]), tokenizer.decode(text.ids[text.asked :])
        assert after.count("What is the") == PASSKEYS and "weather" not in after and "weather" in before[-60:]
        for which in ("first", "second", "third", "fourth"):
            key = before.split(f"the {which} passkey is ")[1].partition(".")[0]
            assert len(key.split()) == 8 and f"the {which} passkey? It is {key}." in after
    again, other = (draw(tokenizer, [passage], count=3, seed=seed) for seed in (1, 2))
    assert torch.equal(texts[2].ids, again[2].ids) and not torch.equal(texts[2].ids, other[2].ids)
    with pytest.raises(KeepsetError, match="do not fit the model's context of 128 tokens"):
        draw(tokenizer, [passage], count=1, length=128, seed=1)
