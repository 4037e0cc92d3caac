"""Conversations compute what is new: their tokens and entries are those of a model that simply goes on."""

from __future__ import annotations

import copy
import random
import struct
from collections.abc import Mapping, Sequence
from dataclasses import replace
from pathlib import Path
from typing import Any

import pytest
import torch

from keepset import Cache, Conversation, KeepsetError
from keepset.core.edits import continuation_of, edit_of, positions_without
from tests.hf.damage import File, damaged
from tests.hf.models import full, prompt, refusal, tiny
from tests.hf.models import tokenizer as letters
from tests.hf.test_turns import ANSWERS, EVERY, LEFT_OUT, RECIPES, REWORDED, SAID, follow, positions, reference
from tests.vllm.chats import Positions, replay

WHOLE = "adakv(streaming_llm, keep=1.0, turns=True)"
GREEDY: dict[str, Any] = dict(max_new_tokens=ANSWERS, do_sample=False, eos_token_id=None, pad_token_id=0)
Message = dict[str, str]


class Numbers:
    """A tokenizer whose texts are token ids in digits, and a template that only joins messages."""

    chat_template = "joined"
    bos_token_id = None

    def apply_chat_template(self, messages: Sequence[Mapping[str, str]], **options: Any) -> list[int]:
        assert options["tokenize"] and not options["return_dict"]
        return [int(number) for message in messages for number in message["content"].split()]

    def decode(self, ids: Sequence[int], **options: Any) -> str:
        return " ".join(map(str, ids))


FITTED = "match(pool(snapkv(window=8)), window=8, bytes=0.3, turns=True)"
"""What stays gets other values and biases, of which the reference knows nothing: a cache that goes on does."""


def conversation(recipe: str) -> Conversation:
    return Conversation(tiny("llama"), Numbers(), recipe)  # type: ignore[arg-type]


def message(ids: Sequence[int]) -> Message:
    return {"role": "user", "content": " ".join(map(str, ids))}


def ids_of(text: str) -> list[int]:
    return [int(number) for number in text.split()]


def check(recipe: str, answers: int = ANSWERS, file: Path | None = None, **options: Any) -> None:
    """Compare with the reference, which goes on head by head, what is said, computed and kept.

    If there is a file, each turn is saved to it, and the next one is that of the conversation that was loaded.
    """
    if recipe == FITTED:
        turns = follow(Cache(tiny("llama"), recipe), SAID, answers, **options)
    else:
        turns = replay(reference(), recipe, SAID, answers, **options)
    chat, begin = conversation(recipe), list[Positions]()
    hook = chat._model.register_forward_pre_hook(
        lambda *_: begin.append({} if chat.cache.progress is None else positions(chat.cache))
    )
    try:
        for turn in turns:
            begin.clear()
            answer = chat.say([message(turn.prompt)], **{**GREEDY, "max_new_tokens": answers})
            assert ids_of(answer) == turn.answer
            assert (chat.reused, chat.computed) == (turn.reused, len(turn.prompt) - turn.reused)
            assert begin[0] == turn.begins_with
            if file is not None:
                chat.save(file, force=True)
                chat = Conversation.load(file, chat._model, Numbers())  # type: ignore[arg-type]
    finally:
        hook.remove()


@pytest.mark.few(2)
@pytest.mark.parametrize("recipe", [*RECIPES, FITTED])
def test_goes_on_as_a_model_would(recipe: str) -> None:
    check(recipe)


@pytest.mark.few(1)
@pytest.mark.parametrize("recipe", RECIPES[1:])
def test_a_turn_that_is_asked_for_again_is_answered_alike(recipe: str) -> None:
    check(recipe, again=(0, 2, 3))


NESTED = {2: [(70, 80)], 3: [(64, 90)]}
"""A span around one that was left out before."""


@pytest.mark.parametrize("left_out", [LEFT_OUT, NESTED], ids=["apart", "nested"])
@pytest.mark.parametrize("recipe", [RECIPES[2], *(pytest.param(text, marks=pytest.mark.full) for text in RECIPES[3:])])
def test_what_the_history_does_not_contain_is_dropped(recipe: str, left_out: Any) -> None:
    check(recipe, left_out=left_out)


@pytest.mark.few(2)
@pytest.mark.parametrize("recipe", RECIPES)
def test_a_client_may_send_another_answer_than_it_got(recipe: str) -> None:
    """All that was said is compressed, as if it had sent the same; only the tokens that differ are dropped."""
    check(recipe, reworded=REWORDED)


def test_a_long_answer_is_compressed_while_it_is_decoded(tmp_path: Path) -> None:
    """Also from file to file. A turn that has lost entries since is computed anew if it is asked for again."""
    check(EVERY[2], file=tmp_path / "chat")
    chat, history = conversation(EVERY[2]), [message(SAID[0])]
    assert chat.say(history, **GREEDY) == chat.say(history, **GREEDY) and chat.reused == 0


def test_answers_of_one_token() -> None:
    check(RECIPES[1], answers=1)


def test_the_past_may_change() -> None:
    """Answers are the model's own where all is kept: after a turn in other words, and another past."""
    chat, model = conversation(WHOLE), copy.deepcopy(tiny("llama"))

    def ask(history: list[Message]) -> tuple[int, int, int]:
        ids = torch.tensor([ids_of(" ".join(part["content"] for part in history))])
        answer = ids_of(chat.say(history, **GREEDY))
        model_answer = full(model, ids, max_new_tokens=ANSWERS).sequences[0, ids.shape[1] :].tolist()
        assert answer == model_answer
        history.append(message(answer))
        return chat.reused, chat.computed, chat.dropped

    history = [message(SAID[0])]
    assert ask(history) == (0, 60, 0)
    history.append(message(SAID[1]))
    assert ask(history) == (71, 26, 0)
    other = [*history[:2], message(SAID[1][:20] + SAID[3])]  # the turn once more, in other words
    assert ask(other) == (92, 9, 16)
    assert ask([*other, message(SAID[2])]) == (112, 41, 0)
    changed = [message(SAID[4]), *other, message(SAID[2])]
    assert ask(changed) == (0, 183, 164)
    assert ask([*changed, message(SAID[3])]) == (194, 10, 0)


def test_edits_forks_and_failures() -> None:
    """An edit frees at once, a fork is independent, and after a failure everything is computed anew."""
    chat, history = conversation(RECIPES[1]), [message(SAID[0]), message(SAID[1])]
    history.append(message(ids_of(chat.say(history, **GREEDY))))
    fork, before = chat.fork(), chat.nbytes
    chat.edit([history[1], history[2]])
    assert (chat.reused, chat.computed, chat.dropped) == (36, 0, 60)
    fork.edit([history[0], history[2]])
    assert (fork.reused, fork.dropped) == (60 + 11, 25) and fork.nbytes < before
    assert not any(60 <= at < 85 for heads in positions(fork.cache).values() for head in heads for at in head)
    kept = positions(fork.cache)
    again = fork.fork()
    answers = [past.say([history[0], history[2], message(SAID[3])], **GREEDY) for past in (fork, again)]
    assert answers[0] == answers[1] and kept == {
        index: [[position for position in head if position < 96] for head in heads]
        for index, heads in positions(again.cache).items()
    }
    with pytest.raises(ZeroDivisionError):
        again.say([history[0], message(SAID[4])], **GREEDY, logits_processor=[lambda ids, scores: scores * (1 // 0)])
    again.say([history[0]], **GREEDY)
    assert (again.reused, again.computed) == (0, 60)
    again.cache.observer = lambda *_: 1 // 0
    with pytest.raises(ZeroDivisionError):
        again.edit([history[0], message(SAID[3])])
    again.say([history[0]], **GREEDY)
    assert (again.reused, again.computed) == (0, 60)


@pytest.mark.parametrize("case", [{}, {"left_out": NESTED}, {"reworded": REWORDED}], ids=str)
@pytest.mark.parametrize(
    "recipe", [RECIPES[2], FITTED, *(pytest.param(text, marks=pytest.mark.full) for text in RECIPES[3:])]
)
def test_a_saved_conversation_goes_on(recipe: str, case: Any, tmp_path: Path) -> None:
    """From turn to turn, and whatever its client does, as one that was not saved."""
    check(recipe, file=tmp_path / "chat", **case)


def test_what_a_file_of_a_conversation_has_and_lacks(tmp_path: Path) -> None:
    """In the file the newest turn is over, and asked for again it is computed anew. Here it is not."""
    chat, path = conversation("quantized(snapkv(window=8), bits=4, bytes=0.25, turns=True)"), tmp_path / "chat"
    with refusal("Nothing was said yet"):
        chat.save(path)
    history = [message(SAID[0] + SAID[2])]
    answer = chat.say(history, **GREEDY)
    before = positions(chat.cache)
    chat.save(path)
    with refusal("replace it with force=True"):
        chat.save(path)
    assert positions(chat.cache) == before
    loaded = Conversation.load(path, chat._model, Numbers())  # type: ignore[arg-type]
    assert loaded.nbytes < chat.nbytes / 2 and loaded.cache.share <= 0.3
    assert positions(Cache.load(path, chat._model)) == positions(loaded.cache)  # it is a context like any other
    assert chat.say(history, **GREEDY) == loaded.say(history, **GREEDY) == answer
    assert (chat.reused, loaded.reused) == (99, 0)
    chat.edit([message(SAID[0])])  # part of a turn, which has no end
    chat.save(path, force=True)
    assert len(Conversation.load(path, chat._model, Numbers())._ids) == 60  # type: ignore[arg-type]


def test_files_that_are_no_conversations(tmp_path: Path) -> None:
    chat, path = conversation(RECIPES[1]), tmp_path / "chat"

    def load(model: str = "llama") -> Conversation:
        return Conversation.load(path, tiny(model), Numbers())  # type: ignore[arg-type]

    history = [message(SAID[0])]
    history.append(message(ids_of(chat.say(history, **GREEDY))))
    chat.edit([message(SAID[0][:20] + SAID[0][30:]), history[1]])
    chat.cache.save(path)
    with refusal("a saved context and no conversation"):
        load()
    chat.save(path, force=True)
    with refusal("of another model"):
        load("qwen2")
    content, expected = path.read_bytes(), (chat._ids, chat._left_out, chat._newest)
    file, unnoticed = File.of(content), 0
    for name, numbers in {
        "said.ids": [[-1] * 71, [10**6] * 71],
        "said.left_out": [[20, 20], [30, 20], [-1, 9], [20, 72]],
        "said.newest": [[-1], [62]],
    }.items():
        kind, shape, _ = file.tensors[name]
        for wrong in numbers:
            part = struct.pack(f"<{len(wrong)}q", *wrong)
            path.write_bytes(replace(file, tensors={**file.tensors, name: (kind, shape, part)}, sealed=True).content)
            with refusal("is damaged"):
                load()
    for seed in range(60):
        path.write_bytes(damaged(content, random.Random(seed))[1])
        try:
            found = load()
        except KeepsetError as error:
            assert "\n" not in str(error) and str(error).endswith(".")
        else:
            unnoticed += 1
            assert len(found._ids) == len(expected[0])
            found.say([message(SAID[0])], **{**GREEDY, "max_new_tokens": 1})
    path.write_bytes(content)
    assert (load()._ids, load()._left_out, load()._newest) == expected and unnoticed < 30


def test_positions_that_are_used_up() -> None:
    """What was left out still takes positions, until the text alone has more room."""
    chat, said = conversation(WHOLE), [prompt(1, 200, seed)[0].tolist() for seed in range(3)]
    answer = message(ids_of(chat.say([message(said[0] + said[1])], **GREEDY)))
    history = [message(said[0]), answer, message(said[2][:70])]
    history.append(message(ids_of(chat.say(history, **GREEDY))))
    assert (chat.reused, chat.computed) == (211, 71)
    history.append(message(SAID[3]))
    chat.say(history, **GREEDY)
    assert (chat.reused, chat.computed) == (0, 303)
    chat.say([*history, message(SAID[3])], **GREEDY)
    assert chat.reused == 303


def test_models_with_windows() -> None:
    """What their windows have read cannot be left out, so it is computed anew."""
    chat = Conversation(tiny("gemma3"), Numbers(), RECIPES[0])  # type: ignore[arg-type]
    history = [message(SAID[0]), message(SAID[1])]
    history.append(message(ids_of(chat.say(history, **GREEDY))))
    history.append(message(ids_of(chat.say([*history, message(SAID[3])], **GREEDY))))
    assert chat.reused == 96
    chat.say([history[0], *history[2:], message(SAID[3])], **GREEDY)
    assert chat.reused == 0


@pytest.mark.parametrize("bits", [8, 4])
def test_quantised_entries(bits: int) -> None:
    chat, history = conversation(f"quantized(snapkv(window=8), bits={bits}, bytes=0.25, turns=True)"), list[Message]()
    for said in SAID:
        history.append(message(said))
        history.append(message(ids_of(chat.say(history, **GREEDY))))
    assert chat.computed == len(SAID[-1]) + 1
    chat.edit([*history, message([5])])
    assert chat.cache.share <= 0.27


def test_texts(tmp_path: Path) -> None:
    """A real tokenizer, whose template ends a message with what the answer did not have."""
    from transformers import AutoTokenizer

    tokenizer = AutoTokenizer.from_pretrained(
        letters(
            "tiny-chat",
            "{% for m in messages %}{{ m.content }}.{% endfor %}{% if add_generation_prompt %}A:{% endif %}",
        )
    )
    chat = Conversation(tiny("llama"), tokenizer, RECIPES[0])
    history = [{"role": "user", "content": "when the rain has gone, who comes home"}]
    history.append({"role": "assistant", "content": chat.say(history, **GREEDY)})
    said = len(chat._ids)
    chat.say([*history, {"role": "user", "content": "and then"}], **GREEDY)
    assert chat.reused + chat.dropped == said


def test_refusals() -> None:
    with refusal("add turns=True"):
        conversation("snapkv(keep=99)")
    with pytest.warns(UserWarning, match="compresses nothing"), refusal("no conversation to go on with"):
        Conversation(tiny("mistral_window"), Numbers(), RECIPES[0])  # type: ignore[arg-type]
    with refusal("no chat template"):
        tokenizer = Numbers()
        tokenizer.chat_template = ""
        Conversation(tiny("llama"), tokenizer, RECIPES[0])  # type: ignore[arg-type]
    for name in ("num_beams", "num_return_sequences"):
        with refusal(f"leave {name} out"):
            conversation(RECIPES[0]).say([message(SAID[0])], **{name: 2})


def test_spans_that_were_left_out() -> None:
    assert edit_of(range(100), [*range(30), *range(50, 100), 7], 0) == (100, ((30, 50),), 80)
    assert positions_without([(2, 4), (6, 9)], 8) == [0, 1, 4, 5]


class Marked(Numbers):
    """A template that puts one token before every message of a user."""

    def apply_chat_template(self, messages: Sequence[Mapping[str, str]], **options: Any) -> list[int]:
        words = {"one": "7 8", "two": "9", "seven": "10 11", "Paris": "12"}
        messages = [{**message, "content": words.get(message["content"], message["content"])} for message in messages]
        marked = [{"content": ("5 " if message["role"] == "user" else "") + message["content"]} for message in messages]
        return super().apply_chat_template(marked, **options)


@pytest.mark.parametrize("recipe", [RECIPES[2], *(pytest.param(text, marks=pytest.mark.full) for text in RECIPES[:2])])
def test_what_comes_before_the_first_user_stays(recipe: str) -> None:
    """Its tokens are found by the template, and are those of the reference that keeps so many first tokens."""
    said = [[*(9 if token == 5 else token for token in SAID[0][:20]), 5, *SAID[0][21:]], *SAID[1:]]
    turns = replay(reference(), recipe, said, ANSWERS, left_out={3: [(30, 50)]}, system=20)
    protects = recipe.replace("turns=True", "turns=True, protect='system'")
    chat, begin = Conversation(tiny("llama"), Marked(), protects), list[Positions]()  # type: ignore[arg-type]
    hook = chat._model.register_forward_pre_hook(
        lambda *_: begin.append({} if chat.cache.progress is None else positions(chat.cache))
    )
    try:
        for turn in turns:
            begin.clear()
            answer = chat.say([{"role": "system", "content": message(turn.prompt)["content"]}], **GREEDY)
            assert ids_of(answer) == turn.answer and begin[0] == turn.begins_with
    finally:
        hook.remove()
    first = set(range(20))
    assert all(first <= set(head) for turn in turns[1:] for heads in turn.begins_with.values() for head in heads)
    cache = chat.cache.fork()
    with refusal("give system= its tokens"):
        cache.compact()


def test_when_a_turn_is_over() -> None:
    """If the next one comes: whole, in other words, or behind a prompt that its template ends otherwise now."""
    begin, question, asks, answer = list(range(10, 40)), [50, 51, 52, 53, 54], [60, 61], [70, 71, 72, 73]
    prompt = [*begin, *question, *asks]
    said, later = [*prompt, *answer], [80, 81, 82]

    def is_over(new: Sequence[int]) -> bool:
        return continuation_of(said, (), len(prompt), new, 0).is_over

    assert is_over([*said, *later, *asks])
    assert is_over([*prompt, 90, *later, *asks])
    assert is_over([*begin, *question, 65, *answer, *later, *asks])
    assert not is_over(prompt)
    assert not is_over([*begin, *question[:3], 91, 92, *asks])
