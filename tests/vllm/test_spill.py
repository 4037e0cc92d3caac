"""Conversations that lose their pages go to files and come back: tokens and kept entries are as if they had stayed."""

from __future__ import annotations

import json
from collections.abc import Iterator
from dataclasses import replace
from pathlib import Path
from typing import Any

import pytest
import torch

from keepset.core.files import opened
from tests.tiers import FULL
from tests.vllm.chats import ChatTurn, replay
from tests.vllm.compared import IDS, NO_BINDING, answers_of, full, result
from tests.vllm.conftest import oracle_of, save_tiny
from tests.vllm.engine import Ask, Result, Scenario, sealed
from tests.vllm.late import Late
from tests.vllm.oracle import Oracle
from tests.vllm.served import save_model, served
from tests.vllm.test_conversations import (
    ANSWERS,
    APART,
    CHATS,
    EQUAL,
    FITTED,
    NETWORKS,
    POOLED,
    RAGGED,
    SAID,
    WAYS,
    WHOLE,
    check,
    check_disturbed,
    disturbed,
    followed,
    question,
    windows,
    with_networks,
)
from tests.vllm.test_conversations import scenario as of_pool

conversation = Late("keepset.vllm.conversation")
page_files = Late("keepset.vllm.page_files")
spilled = Late("keepset.vllm.spilled")

FEW: dict[str, Any] = {"num_gpu_blocks_override": 64, "max_model_len": 600}
OTHERS = 4
"""Requests between two turns, which need all pages of a small pool."""
EVERY = "pool(snapkv(window=8), keep=70, every=6, turns=True)"

__all__ = ["windows"]  # a fixture


@pytest.fixture(scope="module")
def model(tmp_path_factory: pytest.TempPathFactory) -> Path:
    return save_tiny(tmp_path_factory.mktemp("spilled"))


@pytest.fixture(scope="module")
def oracle(model: Path) -> Oracle:
    return oracle_of(model)


def scenario(recipe: str, model: Path, folder: Path, asks: list[Ask], **engine: Any) -> Scenario:
    """An engine with few pages, which writes conversations to files."""
    spills = {"folder": str(folder), "bytes": 10**9, "owner_bytes": 10**9, **engine.pop("limits", {})}
    more = {"keepset": recipe, "keepset_conversations": spills, "keepset_signed": engine.pop("signed", False)}
    return of_pool(recipe, model, asks, **{**FEW, "additional_config": more, **engine})


def apart(turns: list[ChatTurn], first: int = 0, extra: Any = None) -> list[Ask]:
    """The turns of a client, with time between them for others."""
    return [
        Ask(turn.prompt, len(turn.answer), add=2 * APART * (first + number), extra=extra)
        for number, turn in enumerate(turns)
    ]


def others(numbers: Iterator[int] | range) -> list[Ask]:
    """Requests after the turns of these numbers, which get all pages of the pool."""
    return [
        Ask(IDS[1000 + 7 * (OTHERS * number + one) :][:570], 2, add=(2 * number + 1) * APART)
        for number in numbers
        for one in range(OTHERS)
    ]


def files_in(folder: Path) -> list[Path]:
    """The files of conversations, and whatever else was left there."""
    return sorted((folder / "conversations").iterdir(), key=lambda path: path.stat().st_mtime_ns)


def said_of(path: Path) -> dict[str, Any]:
    """What a file says of its conversation."""
    with opened(path) as reader:
        said: dict[str, Any] = json.loads(reader.metadata["keepset_conversation"])
        return said


CASES = [(POOLED, "goes on", "")]
MORE = [
    *((recipe, "goes on", "") for recipe in (EQUAL, RAGGED, NETWORKS, WHOLE)),
    *((recipe, "goes on", way) for recipe in (EQUAL, POOLED) for way in ("ahead", "own process")),
    *((recipe, chat, "") for recipe in (RAGGED, POOLED) for chat in ("again", "left out", "reworded")),
    (RAGGED, "left out", "own process"),
    (EVERY, "goes on", ""),
    (FITTED, "again", ""),
]


@pytest.mark.parametrize("case", [*CASES, *full(MORE)], ids=" ".join)
def test_comes_back_as_it_was(case: tuple[str, str, str], model: Path, oracle: Oracle, tmp_path: Path) -> None:
    """Other requests get its pages after each turn, whatever the client does next; no file is left over."""
    recipe, chat, way = case
    recipe = with_networks(recipe, model)
    if recipe == FITTED:
        turns = followed(recipe, model, **CHATS[chat])
    else:
        turns = replay(oracle, recipe, SAID if FULL else SAID[:3], ANSWERS, **CHATS[chat])
    asks = [*apart(turns), *others(range(len(turns) - 1))]
    engine = result(answers_of({"": scenario(recipe, model, tmp_path, asks, **WAYS[way])}), "")
    if recipe == EVERY:
        assert engine.tokens[: len(turns)] == [turn.answer for turn in turns]
    else:
        check(turns, engine)
    told = {name: engine.stats[f"conversations_{name}"] for name in ("spilled", "read", "lost", "evicted")}
    assert told["read"] == sum(turn.reused > 0 for turn in turns) and not (told["lost"] or told["evicted"])
    assert len(files_in(tmp_path)) == told["spilled"] - told["read"] > 0


@pytest.mark.full
@pytest.mark.parametrize(("recipe", "way"), [(POOLED, ""), (POOLED, "ahead"), (POOLED, "own process"), (NETWORKS, "")])
def test_pages_that_others_get_at_once(recipe: str, way: str, model: Path, oracle: Oracle, tmp_path: Path) -> None:
    """In the step after a turn's end, in which it is also chosen what stays of it."""
    turns = replay(oracle, with_networks(recipe, model), SAID[:2], ANSWERS)
    waiting = [Ask(IDS[1000 + 7 * number :][:570], 2, add=1) for number in range(OTHERS)]
    at_once = {"max_num_batched_tokens": 2048, "max_num_seqs": OTHERS, "num_gpu_blocks_override": 58}
    asks = [*apart(turns), *waiting]
    few = scenario(with_networks(recipe, model), model, tmp_path, asks, **at_once, **WAYS[way])
    engine = result(answers_of({"": few}), "")
    check(turns, engine)
    assert engine.stats["conversations_read"] == 1 and not engine.stats["conversations_lost"]


@pytest.mark.parametrize("recipe", full([POOLED, WHOLE]))
def test_with_what_windows_see(recipe: str, windows: Path, tmp_path: Path) -> None:
    turns = replay(oracle_of(windows), recipe, SAID, ANSWERS)
    asks = [*apart(turns), *others(range(len(turns) - 1))]
    engine = result(answers_of({"": scenario(recipe, windows, tmp_path, asks, num_gpu_blocks_override=100)}), "")
    check(turns, engine)
    assert engine.stats["conversations_read"] > 2


@pytest.mark.full
def test_ranks_write_their_own_heads(model: Path, oracle: Oracle, tmp_path: Path) -> None:
    turns = replay(oracle, EQUAL, SAID[:3], ANSWERS)
    asks = [*apart(turns), *others(range(2))]
    ranks = scenario(EQUAL, model, tmp_path, asks, tensor_parallel_size=2)
    engine = result(answers_of({"": ranks}, env=NO_BINDING), "")
    check(turns, engine)
    assert engine.stats["conversations_read"] == 2
    assert {path.stem[-2:] for path in files_in(tmp_path)} == {"-0", "-1"}


@pytest.mark.full
@pytest.mark.parametrize("kind", ["int8_per_token_head", "fp8"])
def test_pages_of_8_bits(kind: str, model: Path, tmp_path: Path) -> None:
    """With their scales: answers are those of an engine whose pool is large enough."""
    texts = [IDS[:end] for end in (150, 230, 400, 416)]
    asks = [Ask(text, ANSWERS, add=2 * APART * number) for number, text in enumerate(texts)] + others(range(3))
    large = of_pool(WHOLE, model, asks, kv_cache_dtype=kind, num_gpu_blocks_override=1000)
    engines = answers_of({"large": large, "": scenario(WHOLE, model, tmp_path, asks, kv_cache_dtype=kind)})
    assert result(engines, "").stats["conversations_read"] == 3 and not result(engines, "large").stats["turns"] > 3
    assert result(engines, "").tokens == result(engines, "large").tokens
    assert result(engines, "").cached[:4] == result(engines, "large").cached[:4] == [0, 150, 230, 400]


@pytest.mark.full
@pytest.mark.parametrize(("way", "seed"), [("", 0), ("ahead", 1), ("own process", 3), ("", 4)])
def test_nothing_is_mixed_up(way: str, seed: int, model: Path, oracle: Oracle, tmp_path: Path) -> None:
    """Many conversations in few pages, asked again, given up, and of more bytes than there may be on disk."""
    asks, expected = disturbed(oracle, seed)
    few = {"num_gpu_blocks_override": 40, "max_num_seqs": 6, "limits": {"bytes": 2 * 10**6}}
    engine = result(answers_of({"": scenario(WHOLE, model, tmp_path, asks, **few, **WAYS[way])}), "")
    check_disturbed(asks, expected, engine)
    told = {name: engine.stats[f"conversations_{name}"] for name in ("spilled", "read", "lost", "evicted")}
    assert told["read"] and told["evicted"]  # how many depends on when the disk is done
    assert sum(path.stat().st_size for path in files_in(tmp_path)) <= 2 * 10**6
    if engine.log:
        engine.check_nothing_left()


@pytest.mark.full
def test_runner_v2_spills_what_has_waited_for_a_step(model: Path, oracle: Oracle, tmp_path: Path) -> None:
    """The runner plans a step before it says that pages are given away."""
    turns = replay(oracle, POOLED, SAID[:3], ANSWERS)
    asks = [*apart(turns), *others(range(2))]
    engine = result(answers_of({"": replace(scenario(POOLED, model, tmp_path, asks), runner_v2=True)}), "")
    check(turns, engine)
    assert engine.stats["conversations_read"] == 2


def then(recipe: str, model: Path, folder: Path, turns: list[ChatTurn], **engine: Any) -> Result:
    """An engine that is started again, and asked for these turns, which others do not disturb."""
    return result(answers_of({"": scenario(recipe, model, folder, apart(turns), **engine)}), "")


@pytest.fixture(scope="module")
def left(model: Path, oracle: Oracle, tmp_path_factory: pytest.TempPathFactory) -> tuple[Path, list[ChatTurn]]:
    """A folder in which an engine has left a conversation of two turns, and the turns that go on, one asked twice."""
    folder, turns = tmp_path_factory.mktemp("left"), replay(oracle, POOLED, SAID[:3], ANSWERS, again=(2,))
    first = scenario(POOLED, model, folder, [*apart(turns[:2]), *others(range(2))])
    check(turns[:2], result(answers_of({"": first}), ""))
    return folder, turns[2:]


def copied(left: tuple[Path, list[ChatTurn]], folder: Path) -> list[Path]:
    """The same files in another folder, the conversation's own as the only ones."""
    (folder / "conversations").mkdir()
    for path in files_in(left[0]):
        if len(said_of(path)["ids"]) < 500:
            (folder / "conversations" / path.name).write_bytes(path.read_bytes())
    return files_in(folder)


@pytest.mark.full
def test_another_engine_goes_on(left: tuple[Path, list[ChatTurn]], model: Path, tmp_path: Path) -> None:
    """With the same model and recipe, and exactly, if the turn is asked for again."""
    assert len(copied(left, tmp_path)) == 1
    check(left[1], then(POOLED, model, tmp_path, left[1]))
    assert not files_in(tmp_path)


def rewritten(path: Path, change: Any) -> None:
    """Write a file of other entries, with the right check sums."""
    with opened(path) as reader:
        tensors = {name: reader[name] for name in reader.layout}
    metadata = said_of(path)
    change(tensors, metadata)
    metadata["checks"] = {name: page_files.check_sum(tensor) for name, tensor in tensors.items()}
    spilled.FORMAT.write(path, tensors, metadata)


def zeros(tensors: dict[str, torch.Tensor], _: Any) -> None:
    tensors.update({name: torch.zeros_like(part) for name, part in tensors.items() if name.startswith("pages")})


@pytest.mark.full
def test_what_is_read_is_what_is_attended_to(left: tuple[Path, list[ChatTurn]], model: Path, tmp_path: Path) -> None:
    """A control: with other keys and values in the file the answer is another."""
    (path,) = copied(left, tmp_path)
    rewritten(path, zeros)
    engine = then(POOLED, model, tmp_path, left[1][:1])
    assert engine.cached == [left[1][0].reused] and engine.tokens != [left[1][0].answer]


def shorter(tensors: dict[str, torch.Tensor], _: Any) -> None:
    tensors["pages.0.0"] = tensors["pages.0.0"][1:]


def wider(tensors: dict[str, torch.Tensor], _: Any) -> None:
    tensors["columns.0.stays"] = tensors["columns.0.stays"].double()


def beyond(tensors: dict[str, torch.Tensor], _: Any) -> None:
    tensors["layout.0.first"] = tensors["layout.0.first"] + 9


def more_blocks(_: Any, metadata: dict[str, Any]) -> None:
    metadata["stored"][0][1] += 1


def no_tokens(_: Any, metadata: dict[str, Any]) -> None:
    metadata["ids"] = ["a"]


DAMAGES = [shorter, wider, beyond, more_blocks, no_tokens]


@pytest.mark.full
@pytest.mark.parametrize("damage", ["cut", "flipped", *DAMAGES], ids=lambda one: getattr(one, "__name__", one))
def test_a_damaged_file_is_computed_anew(
    damage: Any, left: tuple[Path, list[ChatTurn]], model: Path, oracle: Oracle, tmp_path: Path
) -> None:
    """Without an error, whatever is wrong in it."""
    (path,) = copied(left, tmp_path)
    content = path.read_bytes()
    if damage == "cut":
        path.write_bytes(content[:-7])
    elif damage == "flipped":
        path.write_bytes(content[:-7] + bytes([content[-7] ^ 1]) + content[-6:])
    else:
        rewritten(path, damage)
    (anew,) = replay(oracle, POOLED, [left[1][0].prompt], ANSWERS)
    engine = then(POOLED, model, tmp_path, left[1][:1])
    assert engine.tokens == [anew.answer] and engine.cached == [0]
    engine.check_nothing_left()


@pytest.mark.full
def test_other_recipes_leave_a_file_alone(left: tuple[Path, list[ChatTurn]], model: Path, tmp_path: Path) -> None:
    (path,) = copied(left, tmp_path)
    for recipe, engine in ((RAGGED, {}), (POOLED, {"block_size": 64}), (POOLED, {"dtype": "bfloat16"})):
        assert then(recipe, model, tmp_path, left[1][:1], **engine).cached == [0]
    assert files_in(tmp_path) == [path]
    assert then(POOLED, model, tmp_path, left[1][:1]).cached == [left[1][0].reused]


@pytest.mark.full
def test_files_that_vanish_are_computed_anew(model: Path, oracle: Oracle, tmp_path: Path) -> None:
    """As if there were no disk: also if none can be written any more."""
    turns = replay(oracle, RAGGED, SAID[:2], ANSWERS)
    (anew,) = replay(oracle, RAGGED, [turns[1].prompt], ANSWERS)
    asks = [*apart(turns), *others(range(1))]
    (tmp_path / "a").write_text("no folder")
    folder, there = tmp_path / "folder", tmp_path / "folder" / "conversations"
    folder.mkdir()
    there.symlink_to(tmp_path / "elsewhere")
    (tmp_path / "elsewhere").mkdir()
    lost = replace(scenario(RAGGED, model, folder, asks), files=[(2, tmp_path / "a", there)])
    engine = result(answers_of({"": lost}), "")
    assert engine.tokens[:2] == [turns[0].answer, anew.answer] and engine.cached[1] == 0
    assert engine.stats["conversations_lost"] > 0 == engine.stats["conversations_spilled"]
    engine.check_nothing_left()


def test_a_full_disk_is_told_once(tmp_path: Path, monkeypatch: pytest.MonkeyPatch, caplog: Any) -> None:
    """Nothing half is left; once there is room again, files are written."""
    import safetensors.torch

    write = safetensors.torch.save_file

    def full_disk(tensors: Any, path: Path, metadata: Any) -> None:
        write(tensors, path, metadata)
        raise OSError(28, "No space left on device")

    said: list[str] = []
    monkeypatch.setattr(page_files.logger, "warning", lambda sentence, *parts: said.append(sentence % parts))
    files, tensors = page_files.PageFiles(tmp_path, 0), {"a": torch.arange(9)}
    monkeypatch.setattr(safetensors.torch, "save_file", full_disk)
    for name in ("one", "two"):
        files.write(name, tensors, {})
    files._thread.submit(lambda: None).result()
    assert files.written() == {"one": [-1], "two": [-1]}
    assert len(said) == 1 and "No space left on device" in said[0] and not list(tmp_path.iterdir())
    monkeypatch.setattr(safetensors.torch, "save_file", write)
    files.write("three", tensors, {})
    assert files.read("three").result()["a"].equal(tensors["a"])
    assert files.written() == {"three": [(tmp_path / "three-0.safetensors").stat().st_size]}
    files.close()
    assert files.written() == {}


def test_the_least_recently_used_go_first() -> None:
    """Of an owner who has too much, or of all. What is too large by itself is the only one that goes."""
    limits = spilled.SpillSettings("", bytes=10, owner_bytes=6)
    files = spilled.SpilledBytes(limits)
    for name, owner, nbytes in [("a", "1", 3), ("b", "2", 3), ("c", "1", 3), ("d", "2", 1)]:
        files.add(name, owner, nbytes)
    assert files.too_many() == []
    files.add("e", "1", 2)
    assert files.too_many() == ["a"]
    files.remove("a")
    files.add("f", "3", 2)
    assert files.too_many() == ["b"]
    files.add("g", "3", 7)
    assert files.too_many() == ["g", "b"]


@pytest.mark.full
def test_owners_limits_and_deletion(model: Path, oracle: Oracle, tmp_path: Path) -> None:
    """Two owners have a conversation of one name; a deleted one leaves no file, and too many bytes neither."""
    owners = mine, theirs = "1" * 32, "2" * 32
    said = [[[IDS[1100 + number], *SAID[0][1:]], *SAID[1:3]] for number in range(2)]
    chats = {owner: replay(oracle, RAGGED, one, ANSWERS) for owner, one in zip(owners, said, strict=True)}
    named = {owner: sealed(owner=owner, conversation="chat") for owner in owners}
    asks = [ask for owner, turns in chats.items() for ask in apart(turns[:2], extra=named[owner])]
    deleted = Ask([0], 1, APART + 50, APART + 50, extra=question(owner=theirs, delete="chat"))
    first = scenario(RAGGED, model, tmp_path, [*asks, deleted, *others(range(2))], signed=True)
    engine = result(answers_of({"": first}), "")
    assert engine.tokens[:3] == [*(turn.answer for turn in chats[mine][:2]), chats[theirs][0].answer]
    assert engine.cached[:4] == [0, chats[mine][1].reused, 0, 0]
    third = [Ask(chats[mine][2].prompt, ANSWERS, extra=named[owner]) for owner in (theirs, mine)]
    engine = result(answers_of({"": scenario(RAGGED, model, tmp_path, third[:1], signed=True)}), "")
    assert engine.cached == [0]
    limits = {"owner_bytes": max(path.stat().st_size for path in files_in(tmp_path))}
    engine = result(answers_of({"": scenario(RAGGED, model, tmp_path, third, signed=True, limits=limits)}), "")
    assert engine.cached == [0, chats[mine][2].reused] and engine.tokens[1] == chats[mine][2].answer
    assert engine.stats["conversations_evicted"] > 1
    assert sum(path.stat().st_size for path in files_in(tmp_path)) <= 3 * limits["owner_bytes"]


@pytest.mark.full
def test_a_reset_forgets_files(left: tuple[Path, list[ChatTurn]], model: Path, tmp_path: Path) -> None:
    """Weights may have changed, also for what is written to files since: no engine will have these again."""
    copied(left, tmp_path)
    turn = left[1][0]
    early = [Ask(IDS[2000:2100], 8), Ask(turn.prompt, ANSWERS, add=30), *others(range(1))]
    reset = replace(scenario(POOLED, model, tmp_path, early), resets=[(20, 1.0)])
    engine = result(answers_of({"": reset}), "")
    assert engine.cached[1] == 0 and engine.stats["conversations_spilled"] > 0 and files_in(tmp_path)
    assert then(POOLED, model, tmp_path, [turn]).cached == [0]
    assert not files_in(tmp_path)


@pytest.mark.full
def test_a_newer_conversation_replaces_a_file(model: Path, tmp_path: Path) -> None:
    """If nobody can find it any more: a turn that is asked for again was computed anew, because of `every`."""
    asks = [Ask(SAID[0], ANSWERS, add=2 * APART * number) for number in range(2)]
    engine = result(answers_of({"": scenario(EVERY, model, tmp_path, [*asks, *others(range(2))])}), "")
    assert engine.tokens[0] == engine.tokens[1] and engine.cached[:2] == [0, 0]
    begins = [ids[: len(SAID[0])] for path in files_in(tmp_path) for ids in [said_of(path)["ids"]]]
    assert begins.count(SAID[0]) == 1


def test_what_a_file_says_of_a_conversation(tmp_path: Path) -> None:
    """Nothing is lost of it, and an adapter must be as it was."""
    adapter = tmp_path / "adapter.safetensors"
    adapter.write_text("weights")
    parts = {"left_out": [(1, 3)], "prompt": 4, "blocks": [], "hashes": [], "name": "a", "is_plain": True}
    more = {"system": ((0, 2),), "owner": "1" * 32, "salt": "s", "adapter": ("b", str(tmp_path)), "stored": [(1, 2)]}
    before = conversation.Conversation([5, 6, 7, 8, 9], **parts, **more)
    said = json.loads(json.dumps(conversation.metadata_of(before)))
    assert vars(conversation.conversation_of(said)) == vars(before)
    for name in ("name", "salt", "owner"):
        with pytest.raises(ValueError, match="nobody's"):
            conversation.conversation_of({**said, name: []})
    adapter.touch()
    with pytest.raises(ValueError, match="adapter has changed"):
        conversation.conversation_of(said)


@pytest.mark.full
def test_a_server_lists_and_deletes_files(tmp_path: Path) -> None:
    """Also after it was started again; what is deleted is gone at once. Of contexts it knows nothing."""
    model, folder = save_model(tmp_path / "model"), tmp_path / "kept"
    folder.mkdir()
    limits = {"contexts": folder, "save_bytes": 10**8, "conversation_bytes": 10**8}

    def place(client: Any) -> dict[str, tuple[str, int]]:
        listed = client.get("/v1/conversations").json()["data"]
        return {one["id"]: (one["place"], one["bytes"]) for one in listed if one["id"]}

    def ask(client: Any, prompt: list[int], **options: Any) -> Any:
        body = {"model": "tiny", "prompt": prompt, "max_tokens": 4, **({"keepset": options} if options else {})}
        return client.post("/v1/completions", json=body)

    with served(model, RAGGED, **limits) as (_, client):
        assert ask(client, IDS[:100], conversation="a").status_code == 200
        where, nbytes = place(client)["a"]
        assert (where, nbytes % 2**14) == ("memory", 0) and nbytes > 0
        refused = ask(client, IDS[:100], save="b")
        assert refused.status_code == 400 and "keeps conversations, and no contexts" in refused.text
        for number in range(6):
            assert ask(client, IDS[200 + 50 * number :][:360]).status_code == 200
        (path,) = {path for path in files_in(folder) if b'\\"name\\": \\"a\\"' in path.read_bytes()}
        assert place(client)["a"] == ("disk", path.stat().st_size)
        assert "keepset:conversations_spilled_total" in client.get("/metrics").text
    with served(model, RAGGED, **limits) as (_, client):
        assert place(client)["a"] == ("disk", path.stat().st_size)
        assert client.delete("/v1/conversations/a").status_code == 200
        assert not path.exists() and "a" not in place(client)
