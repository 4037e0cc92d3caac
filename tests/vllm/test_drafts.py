"""Drafts, by models, layers and n-grams: tokens and kept entries are those without them, whatever is taken back."""

from __future__ import annotations

import itertools
import json
from collections.abc import Sequence
from dataclasses import replace
from pathlib import Path
from typing import Any

import pytest
import torch
from safetensors.torch import load_file, save_file
from torch import Tensor
from transformers import Glm4MoeConfig, Glm4MoeForCausalLM

from keepset import Recipe
from tests.vllm.compared import IDS, answers_of, own_recipe, result
from tests.vllm.conftest import SHAPE
from tests.vllm.engine import Ask, Result, Scenario
from tests.vllm.late import Late
from tests.vllm.oracle import Oracle
from tests.vllm.test_processes import engine

pytestmark = pytest.mark.full

settings = Late("keepset.vllm.settings")

ONCE, EQUAL = "snapkv(window=16, keep=96)", "snapkv(window=8, keep=64, every=24)"
RAGGED, ACROSS = "adakv(snapkv(window=8), keep=64, every=24)", "pool(snapkv(window=8), keep=64, every=24)"
ASKS = [Ask(IDS[:60] * 4, 60), Ask(IDS[100:130] * 9, 40), Ask([*IDS[:60] * 4, *IDS[500:520]], 30, add=25)]
OWN = [
    replace(ask, extra=extra)
    for ask, extra in zip(ASKS, (None, {"keepset": {"keep": 40}}, {"keepset": {"off": True}}), strict=True)
]
LEAVING = [*ASKS, Ask(IDS[:150], 60, add=3, abort=20)]
PREEMPTED = (12, 30)


QUIET = 0.02
"""By which a layer's outputs are scaled, so that they do not drown what leads to right drafts."""
TOKENS = 60
"""At most as many tokens have a right draft: fewer than a hidden state has numbers."""


def _after(weights: dict[str, Tensor], answers: Sequence[Sequence[int]], unit: bool) -> Tensor:
    """Return a matrix that takes a token's embedding to the logits' row of the token that followed it last."""
    next_of = {token: later for answer in answers for token, later in itertools.pairwise(answer)}
    tokens = list(next_of)[-TOKENS:]
    embedded = weights["model.embed_tokens.weight"][tokens]
    if unit:
        embedded = embedded / embedded.pow(2).mean(-1, keepdim=True).sqrt()
    rows = weights["lm_head.weight"][[next_of[token] for token in tokens]]
    return torch.linalg.lstsq(embedded, rows, driver="gelsd").solution.T


def _layer(weights: dict[str, Tensor], source: str, target: str) -> dict[str, Tensor]:
    loud = {name.replace(source, target): weight for name, weight in weights.items() if source in name}
    quiet = ("o_proj", "down_proj")
    return {name: weight * (QUIET if any(part in name for part in quiet) else 1) for name, weight in loud.items()}


def _save(folder: Path, target: Path, weights: dict[str, Tensor], **changes: Any) -> Path:
    folder.mkdir()
    config = json.loads((target / "config.json").read_text()) | {"num_hidden_layers": 1, **changes}
    (folder / "config.json").write_text(json.dumps(config))
    save_file({name: weight.contiguous() for name, weight in weights.items()}, folder / "model.safetensors")
    return folder


def save_eagle(folder: Path, target: Path, answers: Sequence[Sequence[int]]) -> Path:
    """Save an EAGLE head for a tiny llama of three layers."""
    weights = load_file(target / "model.safetensors")
    own = _layer(weights, "model.layers.2.", "layers.0.")
    own.pop("layers.0.input_layernorm.weight")
    after = _after(weights, answers, unit=False)
    return _save(folder, target, own | {"fc.weight": torch.cat([after, torch.zeros_like(after)], 1)})


def save_eagle3(folder: Path, target: Path) -> Path:
    """Save a random EAGLE-3 head for a tiny llama of three layers; its drafts are wrong."""
    weights, draw = load_file(target / "model.safetensors"), torch.Generator().manual_seed(0)
    own = _layer(weights, "model.layers.2.", "midlayer.")
    for name in [name for name in own if name.split(".")[-2] in ("q_proj", "k_proj", "v_proj")]:
        own[name] = torch.cat([own[name], own[name]], 1)
    hidden = SHAPE["hidden_size"]
    own |= {name: torch.ones(hidden) for name in ("midlayer.hidden_norm.weight", "norm.weight")}
    own["fc.weight"] = torch.randn(hidden, 3 * hidden, generator=draw) / 8
    own["lm_head.weight"] = weights["lm_head.weight"]
    return _save(folder, target, own, architectures=["LlamaForCausalLMEagle3"], draft_vocab_size=SHAPE["vocab_size"])


def save_with_mtp(folder: Path) -> Path:
    """Save a tiny GLM-4 MoE of three layers with one more that drafts; `teach_mtp` makes that right."""
    torch.manual_seed(0)
    experts = {"n_routed_experts": 4, "n_shared_experts": 1, "num_experts_per_tok": 2, "moe_intermediate_size": 32}
    more = {"n_group": 1, "topk_group": 1, "first_k_dense_replace": 2, "partial_rotary_factor": 1.0}
    Glm4MoeForCausalLM(Glm4MoeConfig(**SHAPE, **experts, **more, num_hidden_layers=3)).save_pretrained(folder)
    config = json.loads((folder / "config.json").read_text())
    (folder / "config.json").write_text(json.dumps(config | {"num_nextn_predict_layers": 1}))
    teach_mtp(folder, [])
    return folder


def teach_mtp(folder: Path, answers: Sequence[Sequence[int]]) -> None:
    """Make the layer that drafts right for a part of these answers."""
    saved = load_file(folder / "model.safetensors")
    weights = {name: weight for name, weight in saved.items() if not name.startswith("model.layers.3.")}
    own, hidden = _layer(weights, "model.layers.2.", "model.layers.3."), SHAPE["hidden_size"]
    after = 5 * _after(weights, answers, unit=True) if answers else torch.zeros(hidden, hidden)
    own["model.layers.3.eh_proj.weight"] = torch.cat([after, torch.zeros_like(after)], 1)
    norms = ("enorm", "hnorm", "shared_head.norm")
    own |= {f"model.layers.3.{name}.weight": torch.ones(hidden) for name in norms}
    own["model.layers.3.shared_head.head.weight"] = weights["lm_head.weight"].clone()
    own["model.layers.3.embed_tokens.weight"] = weights["model.embed_tokens.weight"].clone()
    save_file(weights | own, folder / "model.safetensors", metadata={"format": "pt"})


def without_drafts(steps: Sequence[tuple[int, int]], prompt: int, answered: int, most: int) -> list[tuple[int, int]]:
    """Return the steps of a request (first token, number of tokens) in which it would have had the same tokens.

    Args:
        steps: the steps that it had, whose newest tokens may have been taken back.
        prompt: tokens of its prompt.
        answered: tokens of its answer.
        most: how many tokens are drafted for a step, at most.
    """
    taken: list[tuple[int, int]] = []
    for place, (start, number) in enumerate(steps):
        # The next step of the answer says how many tokens were known by then, also after a preemption.
        later = [next_one for next_one, some in steps[place + 1 :] if next_one >= prompt and some <= 1 + most]
        if start < prompt or number > 1 + most:
            taken.append((start, number))
            continue
        end = later[0] if later else prompt + answered - 1
        is_next = place + 1 < len(steps) and steps[place + 1][0] == end
        kept = end - start if is_next or not later else end - 1 - start
        taken += [(start + more, 1) for more in range(kept)]
    return taken


def drafting(method: str, number: int, model: Path | None = None, **more: Any) -> dict[str, Any]:
    """An engine's arguments."""
    config = {"method": method, "num_speculative_tokens": number, **more} | ({"model": str(model)} if model else {})
    return {"speculative_config": config, "kv_transfer_config": settings.CONNECTOR}


@pytest.fixture(scope="module")
def scenarios(tiny: Path, tmp_path_factory: pytest.TempPathFactory) -> dict[str, Scenario]:
    folder = tmp_path_factory.mktemp("drafts")
    answers = answers_of({"none": Scenario(EQUAL, ASKS, engine=engine(tiny))})
    said = [tokens or [] for tokens in result(answers, "none").tokens]
    eagle = save_eagle(folder / "eagle", tiny, said)
    eagle3 = drafting("eagle3", 1, save_eagle3(folder / "eagle3", tiny))
    ngram, shared = drafting("ngram", 3, prompt_lookup_max=3, prompt_lookup_min=1), {"enable_prefix_caching": True}
    return {
        "eagle": Scenario(EQUAL, LEAVING, PREEMPTED, engine(tiny, **drafting("eagle", 3, eagle))),
        "shared": Scenario(ONCE, ASKS, engine=engine(tiny, **drafting("eagle", 2, eagle), **shared)),
        "ragged": Scenario(RAGGED, LEAVING, PREEMPTED, engine(tiny, **drafting("eagle", 3, eagle))),
        "across": Scenario(ACROSS, ASKS, engine=engine(tiny, **drafting("eagle", 1, eagle))),
        "wrong": Scenario(EQUAL, ASKS, engine=engine(tiny, **eagle3)),
        "ngram": Scenario(EQUAL, OWN, engine=engine(tiny, **ngram)),
    }


@pytest.fixture(scope="module")
def engines(scenarios: dict[str, Scenario]) -> dict[str, Any]:
    return answers_of(scenarios)


@pytest.mark.parametrize("kind", ["eagle", "shared", "ragged", "across", "wrong", "ngram"])
def test_answers_are_those_without_drafts(
    kind: str, scenarios: dict[str, Scenario], engines: dict[str, Any], tiny_oracle: Oracle
) -> None:
    scenario, drafted = scenarios[kind], result(engines, kind)
    assert scenario.recipe is not None
    for index, ask in enumerate(scenario.requests):
        tokens, recipe = drafted.tokens[index] or [], own_recipe(Recipe.parse(scenario.recipe), ask)
        most = scenario.engine["speculative_config"]["num_speculative_tokens"]
        steps = without_drafts(drafted.steps_of(index), len(ask.ids), len(tokens), most)
        replay = tiny_oracle.replay(recipe, ask.ids, tokens, steps)
        assert replay.best[: len(tokens)] == tokens
        assert ask.abort is not None or len(tokens) == ask.max_tokens
        assert drafted.events_of(index) == replay.events[: len(drafted.events[index])]
        assert ask.abort is not None or len(drafted.events[index]) == len(replay.events)
    check_drafted(drafted, scenario.requests, right=kind == "eagle")
    drafted.check_nothing_left()


def check_drafted(drafted: Result, asks: Any, right: bool) -> None:
    """Check that tokens were drafted, that some were wrong and, if so asked, that some were right."""
    number = [
        (tokens - 1, later - start - 1)
        for ask, log in zip(asks, drafted.log, strict=True)
        for (_, start, tokens), (_, later, _) in itertools.pairwise(log)
        if start >= len(ask.ids) and start < later <= start + tokens
    ]
    assert any(some > taken for some, taken in number)
    assert any(taken for _, taken in number) or not right


def test_a_models_own_layer_that_drafts(tmp_path: Path) -> None:
    model = save_with_mtp(tmp_path / "model")
    without = result(answers_of({"none": Scenario(ONCE, ASKS, engine=engine(model))}), "none")
    teach_mtp(model, [tokens or [] for tokens in without.tokens])
    (drafted,) = answers_of({"mtp": Scenario(ONCE, ASKS, engine=engine(model, **drafting("mtp", 2)))}).values()
    drafted = result({"mtp": drafted}, "mtp")
    assert drafted.tokens == without.tokens
    events = [[(event["at"], event["layers"]) for event in own] for own in drafted.events]
    assert events == [[(event["at"], event["layers"]) for event in own] for own in without.events]
    check_drafted(drafted, ASKS, right=True)
    drafted.check_nothing_left()
