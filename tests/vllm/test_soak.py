"""Random requests of two tenants: contexts, saves, next turns, aborts, and files that are damaged, come and go.

No page is lost, no answer is another's, and nobody goes on from what is not its own. KEEPSET_SOAK says how many.
"""

from __future__ import annotations

import os
import random
from pathlib import Path
from typing import Any, NamedTuple

import pytest
import torch
from transformers import PreTrainedModel

import keepset
from tests.hf.damage import flipped
from tests.vllm.compared import IDS
from tests.vllm.contexts import question, serving, write
from tests.vllm.engine import Ask, Result, Scenario, run, sealed
from tests.vllm.late import Late

pytestmark = pytest.mark.full
owned = Late("keepset.vllm.contexts")

REQUESTS = int(os.environ.get("KEEPSET_SOAK", "200"))
TENANTS = ["1" * 32, "2" * 32]
ONCE = "adakv(snapkv(window=8), keep=48)"
STEADY = {
    "uniform": "snapkv(window=8, keep=40)",
    "ragged": "adakv(snapkv(window=8), keep=0.3)",
    "biased": "match(pool(knorm), keep=0.3)",
}
ANSWER = 6
CHATS, TURNS = 3, 3


class Turn(NamedTuple):
    """A turn of a chat, and its possible answers: computed whole, or gone on from any turn before."""

    said: list[int]
    answers: list[list[int]]
    caches: list[keepset.Cache]


@torch.no_grad()
def turns(model: PreTrainedModel, start: int) -> list[Turn]:
    """A chat, whose user goes on from what was answered to it first."""

    def answered(inputs: dict[str, Any]) -> tuple[list[int], keepset.Cache]:
        output = model.generate(**inputs, max_new_tokens=ANSWER, do_sample=False, eos_token_id=None)[0].tolist()
        return output[-ANSWER:], inputs["past_key_values"]

    chat: list[Turn] = []
    said = IDS[start : start + 90]
    for number in range(TURNS):
        ways = [{"input_ids": torch.tensor([said]), "past_key_values": keepset.Cache(model, ONCE)}]
        for before in [cache for turn in chat for cache in turn.caches]:
            ways.append(before.ask(torch.tensor([said[before.get_seq_length() :]])))
        both = [answered(way) for way in ways]
        same = [cache for answer, cache in both if answer == both[-1][0]]
        chat.append(Turn(said, [answer for answer, _ in both], same))
        said = [*said, *both[-1][0], *IDS[start + 200 + 20 * number :][:12]]
    return chat


@pytest.fixture(scope="module")
def chats(tiny_model: PreTrainedModel) -> dict[tuple[str, int], list[Turn]]:
    return {
        (tenant, number): turns(tiny_model, 700 * place + 150 * number)
        for place, tenant in enumerate(TENANTS)
        for number in range(CHATS)
    }


def scenario(tiny: Path, folder: Path, recipe: str, some: list[Ask], **more: Any) -> Scenario:
    return serving(tiny, folder, some, recipe, save=260_000, engine={"num_gpu_blocks_override": 40}, **more)


def aborted(draw: random.Random, add: int) -> int | None:
    return draw.choice([None, None, None, None, add + draw.randrange(1, 9)])


def mixed(draw: random.Random, chats: dict[tuple[str, int], list[Turn]]) -> list[tuple[Ask, Any]]:
    """Requests, and what they are of: the name of a context, or a turn of a chat and who asks."""
    some: list[tuple[Ask, Any]] = []
    for number in range(REQUESTS):
        add = number // 2
        kind = draw.choice(["context", "chat", "chat", "stranger", "own"])
        if kind == "context":
            name = draw.choice([*STEADY, "coming", "flipped", "nowhere"])
            options = {"context": name, "owner": draw.choice(TENANTS)}
            asked, what = question(draw.randrange(8), draw.choice([1, 9, 33])), name
        elif kind == "own":
            asked, options, what = IDS[2000:2100], {"keep": draw.choice([30, 60]), "protect": [[0, 9]]}, kind
        else:
            owner, chat = draw.choice(list(chats))
            place = draw.randrange(TURNS)
            asked, what = chats[owner, chat][place].said, (kind, owner, chat, place)
            asks = owner if kind == "chat" else next(tenant for tenant in TENANTS if tenant != owner)
            options = {"owner": asks} | ({"save": f"chat{chat}"} if kind == "chat" else {})
        some.append((Ask(asked, ANSWER, add=add, abort=aborted(draw, add), extra=sealed(**options)), what))
    return some


@torch.no_grad()
def test_nothing_is_lost_and_nobody_mixed_up(
    tiny: Path, tiny_model: PreTrainedModel, chats: dict[tuple[str, int], list[Turn]], tmp_path: Path
) -> None:
    folder, aside = tmp_path / "contexts", tmp_path / "aside"
    folder.mkdir()
    aside.mkdir()
    for name, recipe in STEADY.items():
        write(folder, tiny_model, name, recipe, 150)
    coming = write(aside, tiny_model, "coming", STEADY["uniform"], 100)
    (folder / "flipped.safetensors").write_bytes(flipped(coming.read_bytes(), "layers.1.columns.values"))
    some = mixed(random.Random(0), chats)
    place = folder / "coming.safetensors"
    files = [(step, coming if step % 40 else None, place) for step in range(10, REQUESTS, 20)]
    files += [(step, folder / "flipped.safetensors", place) for step in range(55, REQUESTS, 80)]
    (engine,) = run(scenario(tiny, folder, ONCE, [one for one, _ in some], signed=True, files=files))
    engine.check_nothing_left()
    check(tiny_model, folder, coming, some, engine, chats)
    for tenant in TENANTS:
        kept = owned.OwnedContexts(folder, tenant)
        assert kept.newest().keys() <= {f"chat{number}" for number in range(CHATS)}
        assert sum(path.stat().st_size for path in kept.folder.glob("*")) <= 260_000
        assert set(kept.folder.glob("*")) == set(kept.newest().values())


def check(
    model: PreTrainedModel,
    folder: Path,
    coming: Path,
    some: list[tuple[Ask, Any]],
    engine: Result,
    chats: dict[tuple[str, int], list[Turn]],
) -> None:
    known: dict[Any, list[int]] = {}
    gone_on = served = 0
    for index, (one, what) in enumerate(some):
        tokens, cached, whole = engine.tokens[index] or [], engine.cached[index] or 0, one.abort is None
        if isinstance(what, str) and what != "own":
            if what == "nowhere":
                assert not tokens
            elif tokens:
                # Pages are found by the digest that a file names: those of the undamaged one serve both.
                path = coming if what in ("coming", "flipped") else folder / f"{what}.safetensors"
                key = what, tuple(one.ids)
                if key not in known:
                    inputs = keepset.Cache.load(path, model).ask(torch.tensor([one.ids]))
                    output = model.generate(**inputs, max_new_tokens=ANSWER, do_sample=False, eos_token_id=None)
                    known[key] = output[0, len(one.ids) :].tolist()
                assert tokens == known[key][: len(tokens)] and (not whole or len(tokens) == ANSWER)
                served += 1
            else:
                assert not whole or what in ("coming", "flipped")
        elif what == "own":
            assert len(tokens) == ANSWER or not whole
        else:
            kind, owner, chat, place = what
            turn = chats[owner, chat][place]
            assert len(tokens) == ANSWER or not whole
            # Else it is what vLLM's own prefix cache has, full blocks that no compression wrote to.
            saved = cached in [len(each.said) + ANSWER - 1 for each in chats[owner, chat][:place]]
            assert saved or cached % 32 == 0
            assert not (saved and kind == "stranger")
            gone_on += saved
            if engine.preemptions[index] == 0 and tokens:
                assert any(tokens == answer[: len(tokens)] for answer in turn.answers[: None if saved else 1])
    assert gone_on > REQUESTS // 20 and served > REQUESTS // 20


LOAD = REQUESTS * 3 // 10
LOADED = {
    "auto": "snapkv(window=8, keep=40, every=24)",
    "fp8_per_token_head": "adakv(tova, keep=64, every=48)",
    "int8_per_token_head": "int8(match(adakv(snapkv(window=8)), window=8), keep=40, every=36)",
}
"""A recipe for each kind of cache."""


def random_asks() -> list[Ask]:
    """Some requests come at once, some are aborted while they wait or run."""
    draw, some = random.Random(1), []
    for number in range(LOAD):
        tokens, add = draw.randint(1, 120), max(0, number - 30) * 4
        abort = draw.choice([None, None, None, None, add, add + draw.randint(1, 2 * tokens)])
        some.append(Ask([draw.randrange(3, 512) for _ in range(draw.randint(1, 250))], tokens, add, abort))
    return some


def test_an_engine_loses_no_page_and_no_answer(tiny: Path) -> None:
    """Under random load, in so few blocks that requests wait and are preempted."""
    some = random_asks()
    engine = {"num_gpu_blocks_override": 48, "max_model_len": 384, "max_num_seqs": 24, "max_num_batched_tokens": 128}
    caches = [engine | {"model": str(tiny), "kv_cache_dtype": cache} for cache in LOADED]
    scenarios = [
        Scenario(recipe, some, (90, 200), cache) for recipe, cache in zip(LOADED.values(), caches, strict=True)
    ]
    for result in run(*scenarios):
        whole = [len(tokens or []) == ask.max_tokens for ask, tokens in zip(some, result.tokens, strict=True)]
        assert all(ask.abort is not None or is_whole for ask, is_whole in zip(some, whole, strict=True))
        assert LOAD * 0.5 < sum(whole) < LOAD, "some must have been answered, and some aborted"
        assert sum(result.preemptions) > 0
        assert result.stats["events"] > LOAD // 2 and result.stats["blocks_freed"] > LOAD
        result.check_nothing_left()
