"""Requests that leave their compressed caches as contexts: the next turn goes on as the transformers runtime would."""

from __future__ import annotations

import json
import os
from pathlib import Path
from typing import Any, NamedTuple

import pytest
import torch
from transformers import PreTrainedModel

import keepset
from tests.hf.damage import flipped
from tests.vllm.compared import IDS, NO_BINDING, answers_of, result
from tests.vllm.contexts import serving, write
from tests.vllm.engine import BLOCK, Ask, Result, Scenario, sealed
from tests.vllm.late import Late

owned, stats = Late("keepset.vllm.contexts"), Late("keepset.vllm.stats")

TOKENS = 20
SHARED = {"equal": 64, "ragged": 64, "none": 128}
"""Tokens of the first prompt that no compression of it writes to: what vLLM's own prefix cache may have of it."""
RECIPES = {"equal": "snapkv(window=8, keep=40)", "ragged": "match(adakv(snapkv(window=8)), keep=48)", "none": None}
ONE, TWO = "1" * 32, "2" * 32
FORGED: list[Any] = [
    {"save": "chat"},
    {"save": "chat", "owner": ONE},
    json.dumps({"save": "chat", "owner": ONE}),
    "0" * 64 + json.dumps({"off": True}),
    sealed(save="chat", owner=TWO)["keepset"].replace(TWO, ONE),
    sealed(keep=30)["keepset"].replace("30", "31"),
    {"keep": 60},
    ["save", "chat"],
    7,
    "",
]
"""What nobody has signed so."""


class Turn(NamedTuple):
    """A turn of a chat: the text, its answer, and the cache after it."""

    said: list[int]
    answer: list[int]
    cache: keepset.Cache


@torch.no_grad()
def turn(model: PreTrainedModel, recipe: str, said: list[int], before: Turn | None = None) -> Turn:
    """A turn under transformers: the first, or one that goes on from another's cache."""
    inputs: dict[str, Any]
    if before is None:
        inputs = {"input_ids": torch.tensor([said]), "past_key_values": keepset.Cache(model, recipe)}
    else:
        new = said[before.cache.get_seq_length() :]
        inputs = before.cache.ask(torch.tensor([new]))
        inputs["past_key_values"].stop_watching()
    output = model.generate(**inputs, max_new_tokens=TOKENS, do_sample=False, eos_token_id=None)[0].tolist()
    return Turn(said, output[-TOKENS:], inputs["past_key_values"])


class Chat(NamedTuple):
    """Two turns, and what engines are asked for them."""

    first: Turn
    second: Turn
    asks: list[Ask]


def chat(model: PreTrainedModel, recipe: str | None) -> Chat:
    text = recipe or "streaming_llm(keep=1.0)"
    first = turn(model, text, IDS[:150])
    second = turn(model, text, [*first.said, *first.answer, *IDS[400:437]], first)
    third = [*second.said, *second.answer, *IDS[500:506]]
    whole = Ask(IDS[700:777], TOKENS, add=5)

    def ask(said: list[int], add: int, **options: Any) -> Ask:
        return Ask(said, TOKENS, add=add, extra=sealed(**options) if options else None)

    asks = [
        ask(first.said, 0, save="chat", owner=ONE),
        ask(first.said, 3, save="chat", owner=TWO),
        ask(IDS[900:980], 4, save="chat"),
        ask(second.said, 60, context="chat", save="chat", owner=ONE),
        ask(second.said, 60, context="chat"),  # everybody's is another
        ask(second.said, 61),  # finds none
        ask(second.said, 62, save="another", owner=TWO),  # finds its own
        ask(third, 120, context="chat", owner=ONE),
        ask(third, 120, context="chat", owner=TWO),
        ask(second.said, 121, context="nothing", owner=TWO),
        ask(IDS[:30], 121, context="chat", owner=ONE),  # does not begin with it
        whole,
        *[Ask(IDS[:40], TOKENS, add=122, extra={"keepset": words}) for words in FORGED],
    ]
    return Chat(first, second, asks)


@pytest.fixture(scope="module")
def chats(tiny_model: PreTrainedModel) -> dict[str, Chat]:
    return {name: chat(tiny_model, recipe) for name, recipe in RECIPES.items()}


ENGINES: dict[str, tuple[str, dict[str, Any]]] = {
    "equal": ("equal", {}),
    "none": ("none", {}),
    "apart": ("ragged", {"own_process": True}),
    # Each rank divides a budget over its own heads, so ranks are tested with equal heads.
    "ranks": ("equal", {"engine": {"tensor_parallel_size": 2}}),
    "ahead": ("ragged", {"engine": {"async_scheduling": True}, "stub_streams": True}),
}
"""The recipe of each, and what is other."""


@pytest.fixture(scope="module")
def folders(tmp_path_factory: pytest.TempPathFactory) -> dict[str, Path]:
    return {name: tmp_path_factory.mktemp("saves") for name in ENGINES}


def saving(tiny: Path, folders: dict[str, Path], chats: dict[str, Chat], name: str) -> Scenario:
    kind, more = ENGINES[name]
    return serving(tiny, folders[name], chats[kind].asks, RECIPES[kind], 10**7, signed=True, **more)


@pytest.fixture(scope="module")
def engines(tiny: Path, folders: dict[str, Path], chats: dict[str, Chat]) -> dict[str, Any]:
    return answers_of({"equal": saving(tiny, folders, chats, "equal")})


@pytest.fixture(scope="module")
def others(tiny: Path, folders: dict[str, Path], chats: dict[str, Chat]) -> dict[str, Any]:
    scenarios = {name: saving(tiny, folders, chats, name) for name in ("none", "apart", "ranks")}
    again = chats["ragged"].asks[7:9]
    scenarios["restart"] = serving(tiny, folders["apart"], again, RECIPES["ragged"], signed=True)
    ahead = {"ahead": saving(tiny, folders, chats, "ahead")}
    return answers_of(scenarios, env=NO_BINDING) | answers_of(ahead)


def check(engine: Result, some: Chat, folder: Path, model: PreTrainedModel, name: str) -> None:
    recipe, shared = RECIPES[name], SHARED[name]
    first, second, asks = some
    expected = dict.fromkeys((0, 1), first.answer) | dict.fromkeys((3, 6), second.answer)
    for place, answer in expected.items():
        assert engine.tokens[place] == answer
    past = first.cache.get_seq_length()
    assert [engine.cached[place] for place in (0, 2, 3, 6)] == [0, 0, 149 + TOKENS, 149 + TOKENS]
    # vLLM's own prefix cache has what no compression wrote to, whoever asks; without one also of the answer.
    assert engine.cached[1] in (0, shared) and engine.cached[5] in (0, shared, *[160] * (recipe is None))
    assert past >= 149 + TOKENS
    for place in (4, 9, 10, *range(12, 12 + len(FORGED))):
        assert engine.reasons[place] == "error" and not engine.tokens[place]
    third = turn(model, recipe or "streaming_llm(keep=1.0)", asks[7].ids, second)
    assert engine.tokens[7] == third.answer
    # The other owner's has the first turn alone.
    other = turn(model, recipe or "streaming_llm(keep=1.0)", asks[7].ids, first)
    assert engine.tokens[8] == other.answer and engine.cached[7:9] == [len(second.said) + TOKENS - 1, 149 + TOKENS]
    path = owned.OwnedContexts(folder, ONE).newest()["chat"]
    assert path.parents[1].stat().st_mode & 0o777 == 0o700  # what people said is for this server's user alone
    loaded = keepset.Cache.load(path, model)
    length = loaded.get_seq_length()
    assert length == len(second.said) + TOKENS - 1
    for mine, theirs in zip(loaded.layers, second.cache.layers, strict=True):
        ours, reference = mine.store, theirs.store
        assert ours.counts == [count - (second.cache.get_seq_length() - length) for count in reference.counts]
        for column in reference.packed.keys() & {"positions", "keys", "values", "bias"}:
            parts = reference.packed[column].split(reference.counts)
            for own, part in zip(ours.packed[column].split(ours.counts), parts, strict=True):
                torch.testing.assert_close(own, part[: len(own)], atol=1e-4, rtol=1e-4)
    assert set(owned.OwnedContexts(folder, TWO).newest()) == {"chat", "another"}
    assert len(list(folder.glob("saved/*/*"))) == 4  # no version that was replaced, nothing unfinished
    if engine.tables:
        engine.check_nothing_left()


def test_the_next_turn_goes_on(
    engines: dict[str, Any], chats: dict[str, Chat], folders: dict[str, Path], tiny_model: PreTrainedModel
) -> None:
    check(result(engines, "equal"), chats["equal"], folders["equal"], tiny_model, "equal")


@pytest.mark.full
@pytest.mark.parametrize("name", ["none", "apart", "ranks", "ahead"])
def test_in_other_engines(
    name: str, others: dict[str, Any], chats: dict[str, Chat], folders: dict[str, Path], tiny_model: PreTrainedModel
) -> None:
    kind, _ = ENGINES[name]
    check(result(others, name), chats[kind], folders[name], tiny_model, kind)


@pytest.mark.full
def test_what_was_saved_is_there_after_a_restart_that_saves_nothing(
    others: dict[str, Any], folders: dict[str, Path]
) -> None:
    before, after = result(others, "apart"), result(others, "restart")
    assert after.tokens == before.tokens[7:9] and after.cached == before.cached[7:9]
    assert len(list(folders["apart"].glob("saved/*/*.safetensors"))) == 4  # who goes on from one deletes none
    after.check_nothing_left()


LONG = {
    "newest": "tova(keep=40, every=24)",
    "window": "snapkv(window=8, keep=40, every=32)",
    "ragged": "adakv(snapkv(window=4), keep=48, every=24)",
}
TURNS, NEW, SHORT = 14, 9, 8
"""Turns of a chat that each have fewer tokens than lie between two events: those of a message and of its answer."""


class LongChat(NamedTuple):
    """What an engine is asked, what it should answer, and the events of each turn: where, and what stays."""

    asks: list[Ask]
    answers: list[list[int]]
    events: list[list[keepset.hf.progress.Event]]


@torch.no_grad()
def long_chat(model: PreTrainedModel, recipe: str) -> LongChat:
    """A chat under transformers, whose cache goes on from turn to turn.

    A file holds no queries, so after a turn the next event waits until all that it looks at are new.
    """
    cache, said = keepset.Cache(model, recipe, history=True), IDS[1500:1650]
    chat, saved = LongChat([], [], []), 0
    for number in range(TURNS):
        name = {"save": "long", "owner": ONE} | ({"context": "long"} if number else {})
        chat.asks.append(Ask(said, SHORT, add=30 * number, extra=sealed(**name)))
        seen, answer, new = len(cache.events), list[int](), said[saved:]
        while len(answer) < SHORT:
            logits = model(torch.tensor([new]), past_key_values=cache, use_cache=True).logits
            new = [int(logits[0, -1].argmax())]
            answer += new
        chat.answers.append(answer)
        chat.events.append(cache.events[seen:])
        said, saved = [*said, *answer, *IDS[400 + 20 * number : 400 + 20 * number + NEW]], len(said) + SHORT - 1
        for layer in cache.managed_layers.values():
            layer.collector.next = max(layer.collector.next, saved + layer.collector.recorder.reach)
    return chat


@pytest.mark.full
def test_a_chat_of_short_turns_is_compressed_again_and_again(
    tiny: Path, tiny_model: PreTrainedModel, tmp_path: Path
) -> None:
    chats = {name: long_chat(tiny_model, recipe) for name, recipe in LONG.items()}
    folders = {name: tmp_path / name for name in LONG}
    for folder in folders.values():
        folder.mkdir()
    engines = answers_of(
        {
            name: serving(tiny, folders[name], chats[name].asks, recipe, 10**7, signed=True)
            for name, recipe in LONG.items()
        }
    )
    for name, some in chats.items():
        engine = result(engines, name)
        assert engine.tokens == some.answers
        for turn, events in enumerate(some.events):
            assert [event["at"] for event in engine.events[turn]] == [event.length for event in events]
        assert sum(map(len, some.events)) > 5
        cache = keepset.Cache.load(owned.OwnedContexts(folders[name], ONE).newest()["long"], tiny_model)
        keep, every = cache.recipe.budget.keep, cache.recipe.schedule.every
        counts = torch.tensor([layer.store.counts for layer in cache.managed_layers.values()])
        assert counts.double().mean() <= keep + every + cache.managed_layers[0].collector.recorder.reach
        engine.check_nothing_left()


LOST = {
    "equal": "snapkv(window=8, keep=40)",
    "going on": "adakv(snapkv(window=4), keep=48, every=24)",
    "whole": None,
    "ranks": "snapkv(window=8, keep=40)",
    "ahead": "adakv(snapkv(window=4), keep=48, every=24)",
}
LOST_AT = 6


def lost_asks() -> list[Ask]:
    """Requests at the step at which files go: by tokens, some at once and one aborted meanwhile; by name; and later."""
    mine, said = sealed(owner=ONE), [*IDS[1500:1650], *IDS[400:437]]
    return [
        *[Ask(said + IDS[600 : 600 + more], TOKENS, add=LOST_AT, extra=mine) for more in (0, 9, 40)],
        Ask(said, TOKENS, add=LOST_AT, extra=mine, abort=LOST_AT + 1),
        Ask(said, TOKENS, add=LOST_AT, extra=sealed(owner=ONE, context="chat", ticket="5" * 32)),
        Ask(IDS[1800:1990], TOKENS, add=LOST_AT, extra=mine),  # of a damaged file
        Ask(said, TOKENS, add=LOST_AT, extra=sealed(owner=ONE, save="again")),
        Ask(said + IDS[700:720], TOKENS, add=90, extra=mine),  # begins with the new version
        Ask(IDS[2200:2290], 60, add=LOST_AT - 3),  # runs meanwhile
    ]


def lost(tiny: Path, model: PreTrainedModel, folder: Path, name: str) -> Scenario:
    """An engine, while another one saves a newer version of a context, and deletes the one that requests begin with."""
    recipe, own = LOST[name] or "streaming_llm(keep=1.0)", folder / "saved" / ONE
    own.mkdir(parents=True)
    before, after = (own / f"chat@{number:020d}-{number}.safetensors" for number in (1, 2))
    text = IDS[1500:1650]
    for context, tokens in (("old", text), ("new", [*text, *IDS[400:410]]), ("bad", IDS[1800:1900])):
        write(folder, model, context, recipe, len(tokens), tokens)
    (folder / "old.safetensors").rename(before)
    coming = (folder / "new.safetensors").rename(folder / "new")
    damaged = folder / "bad.safetensors"
    damaged.write_bytes(flipped(damaged.read_bytes(), "layers.1.columns.values"))
    files = [(LOST_AT, coming, after), (LOST_AT, None, before)]
    return serving(
        tiny, folder, lost_asks(), LOST[name], 10**7, signed=True, files=files, **ENGINES.get(name, ("", {}))[1]
    )


def check_lost(engine: Result, folder: Path, model: PreTrainedModel, name: str) -> None:
    recipe, asks = LOST[name] or "streaming_llm(keep=1.0)", lost_asks()
    for place in (0, 1, 2, 5, 6, 8):
        inputs = {"input_ids": torch.tensor([asks[place].ids]), "past_key_values": keepset.Cache(model, recipe)}
        length = asks[place].max_tokens
        answer = model.generate(**inputs, max_new_tokens=length, do_sample=False, eos_token_id=None)[0, -length:]
        assert engine.tokens[place] == answer.tolist(), place
        assert engine.reasons[place] == "length" and (engine.cached[place] or 0) % BLOCK == 0
    assert engine.tokens[3] in (None, []) and engine.reasons[4] == "error" and not engine.tokens[4]
    (new,) = (folder / "saved" / ONE).glob("chat@*")
    assert len(engine.tokens[7] or []) == TOKENS and engine.cached[7] == keepset.Cache.load(new, model).get_seq_length()
    saved = keepset.Cache.load(owned.OwnedContexts(folder, ONE).newest()["again"], model)
    assert saved.get_seq_length() == len(asks[6].ids) + TOKENS - 1
    engine.check_nothing_left()


def test_a_prompt_is_computed_if_the_context_that_it_begins_with_is_gone(
    tiny: Path, tiny_model: PreTrainedModel, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setenv(stats.FOLDER, str(tmp_path / "stats"))
    scenario = lost(tiny, tiny_model, tmp_path / "contexts", "equal")
    answers = answers_of({"equal": scenario}, env={stats.FOLDER: os.environ[stats.FOLDER]})
    check_lost(result(answers, "equal"), tmp_path / "contexts", tiny_model, "equal")
    assert stats.refusal("5" * 32) == "Context 'chat' was replaced or deleted before it was loaded: ask again."


@pytest.mark.full
@pytest.mark.parametrize("name", ["going on", "whole", "ranks", "ahead"])
def test_a_prompt_is_computed_in_other_engines(
    name: str, tiny: Path, tiny_model: PreTrainedModel, tmp_path: Path
) -> None:
    answers = answers_of({name: lost(tiny, tiny_model, tmp_path, name)}, env=NO_BINDING)
    check_lost(result(answers, name), tmp_path, tiny_model, name)


def test_what_ranks_gather_arrives_bit_for_bit() -> None:
    """Columns of any type and length, or why a rank has nothing."""
    from keepset.vllm import context_transfer

    keys, lost = torch.randn(5, 8, generator=torch.Generator().manual_seed(0)), "keepset lost … of a request."
    part = {3: {"keys": keys.bfloat16(), "counts": torch.tensor([2, 3])}, 11: {"at": keys.int(), "keys": keys[:0]}}
    again = context_transfer._unpacked(context_transfer._packed(part))
    assert {layer: columns.keys() for layer, columns in again.items()} == {3: part[3].keys(), 11: part[11].keys()}
    for layer, columns in part.items():
        for name, column in columns.items():
            assert again[layer][name].dtype == column.dtype and torch.equal(again[layer][name], column)
    assert context_transfer._unpacked(context_transfer._packed(lost)) == lost
