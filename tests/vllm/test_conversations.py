"""Conversations stay in their pages between turns: tokens and kept entries are those of a model that simply goes on."""

from __future__ import annotations

import random
from dataclasses import replace
from pathlib import Path
from typing import Any

import pytest
import torch
from transformers import AutoModelForCausalLM, AutoTokenizer, CwmConfig

from keepset import Cache
from keepset.vllm.questions import Question
from tests.hf.models import tokenizer
from tests.hf.test_turns import follow
from tests.tiers import FULL
from tests.vllm.chats import ChatTurn, replay
from tests.vllm.compared import IDS, NO_BINDING, answers_of, full, networks_file, result, rounding_model
from tests.vllm.conftest import SHAPE, TINY, oracle_of, save_tiny
from tests.vllm.engine import SIGNING, Ask, Result, Scenario, sealed
from tests.vllm.oracle import Oracle
from tests.vllm.test_quantised_caches import INT8, rounded

SAID = [IDS[0:150], IDS[200:240], IDS[300:423], IDS[500:516], IDS[600:640]]
"""What each turn adds."""
ANSWERS = 20
APART = 60
"""Steps from turn to turn, so that each has ended before the next begins."""
EQUAL = "snapkv(window=8, bytes=0.4, turns=True)"
RAGGED = "adakv(snapkv(window=8), keep=70, turns=True)"
POOLED = "pool(snapkv(window=8), bytes=0.3, turns=True)"
SHORT = "pool(snapkv(window=8), bytes=0.3, short=230, turns=True)"
NETWORKS = "pool(distilled(stats='FILE'), bytes=0.3, turns=True)"
WHOLE = "adakv(streaming_llm, keep=1.0, turns=True)"
ENGINE: dict[str, Any] = {"max_model_len": 1024, "num_gpu_blocks_override": 160, "max_num_batched_tokens": 128}


@pytest.fixture(scope="module")
def model(tmp_path_factory: pytest.TempPathFactory) -> Path:
    return save_tiny(tmp_path_factory.mktemp("chats"))


@pytest.fixture(scope="module")
def oracle(model: Path) -> Oracle:
    return oracle_of(model)


def with_networks(recipe: str, model: Path) -> str:
    if "FILE" not in recipe:
        return recipe
    return recipe.replace("FILE", str(networks_file(model.parent, TINY.num_hidden_layers)))


def asked(turns: list[ChatTurn]) -> list[Ask]:
    """The requests of a client that sends the whole conversation with every turn."""
    return [Ask(turn.prompt, len(turn.answer), add=APART * number) for number, turn in enumerate(turns)]


def scenario(recipe: str, model: Path, asks: list[Ask], **engine: Any) -> Scenario:
    from keepset.vllm.settings import CONVERSATION_CONNECTOR

    more = {"model": str(model), "kv_transfer_config": CONVERSATION_CONNECTOR}
    settings = {name: engine.pop(name) for name in ("own_process", "stub_streams", "preempt") if name in engine}
    return Scenario(recipe, asks, engine={**ENGINE, **more, **engine}, **settings)


def check(turns: list[ChatTurn], engine: Result, first: int = 0) -> None:
    """Check that an engine has computed only what is new, and has said and kept what the reference has."""
    for number, turn in enumerate(turns, start=first):
        assert engine.tokens[number] == turn.answer
        assert engine.cached[number] == turn.reused
        if any(engine.events) and turn.reused:
            assert [kept for at, kept, _ in engine.events_of(number) if kept] == [turn.begins_with]
    if engine.log:
        engine.check_nothing_left()


WAYS: dict[str, dict[str, Any]] = {"": {}, "ahead": {"stub_streams": True}, "own process": {"own_process": True}}
AGAIN = (0, 2, 3)
"""Turns that are asked for again."""
LEFT_OUT = {1: [(150, 163)], 3: [(40, 81), (170, 200)], 4: [(81, 100)]}
"""Spans that the client leaves out from a turn on: part of an answer, older ones, and what is next to such a one."""
NESTED = {2: [(170, 190)], 3: [(160, 205)]}
"""A span that is left out around one that was left out before."""
CHATS: dict[str, dict[str, Any]] = {
    "goes on": {},
    "again": {"again": AGAIN},
    "left out": {"left_out": LEFT_OUT},
    "nested": {"left_out": NESTED},
    "reworded": {"reworded": {1: 0, 2: 9, 4: 3}},
}
CASES = [
    *((recipe, "goes on", "") for recipe in (POOLED, WHOLE, NETWORKS)),
    *((POOLED, chat, "") for chat in ("again", "left out", "reworded")),
]
MORE = [
    *((recipe, "goes on", "") for recipe in (EQUAL, RAGGED, SHORT, "pyramid(snapkv(window=8), keep=80, turns=True)")),
    *((recipe, "goes on", way) for recipe in (EQUAL, POOLED) for way in ("ahead", "own process")),
    *((recipe, chat, "") for recipe in (EQUAL, RAGGED, NETWORKS, WHOLE) for chat in ("again", "left out")),
    (POOLED, "nested", ""),
    *((recipe, "reworded", "") for recipe in (RAGGED, NETWORKS, WHOLE)),
]
"""A recipe, what a client does, and where the scheduler runs."""


@pytest.fixture(scope="module")
def chats(model: Path, oracle: Oracle) -> dict[tuple[str, str], list[ChatTurn]]:
    cases = dict.fromkeys((recipe, chat) for recipe, chat, _ in [*CASES, *(MORE if FULL else [])])
    return {
        (recipe, chat): replay(oracle, with_networks(recipe, model), SAID, ANSWERS, **CHATS[chat])
        for recipe, chat in cases
    }


@pytest.fixture(scope="module")
def answers(model: Path, chats: dict[tuple[str, str], list[ChatTurn]]) -> dict[Any, Any]:
    return answers_of(
        {
            (recipe, chat, way): scenario(with_networks(recipe, model), model, asked(chats[recipe, chat]), **WAYS[way])
            for recipe, chat, way in [*CASES, *(MORE if FULL else [])]
        }
    )


@pytest.mark.parametrize("case", [*CASES, *full(MORE)], ids=" ".join)
def test_goes_on_as_a_model_would(
    case: tuple[str, str, str], answers: dict[Any, Any], chats: dict[tuple[str, str], list[ChatTurn]]
) -> None:
    """Also if a turn is asked for again, of which nothing but the last token is computed, or something is left out."""
    recipe, chat, _ = case
    turns = chats[recipe, chat]
    if chat == "again":
        assert turns[1].answer == turns[0].answer and turns[1].reused == len(turns[1].prompt) - 1
    if chat == "left out":
        assert turns[-1].reused < len(turns[-1].prompt) == sum(map(len, SAID)) + 4 * ANSWERS - 103
    engine = result(answers, case)
    check(turns, engine)
    counted = {name: engine.stats[name] for name in ("turns", "tokens_reused", "conversations_lost")}
    reused = [turn.reused for turn in turns if turn.reused]
    assert counted == {"turns": len(reused), "tokens_reused": sum(reused), "conversations_lost": 0}


FITTED = "match(pool(snapkv(window=8)), window=8, bytes=0.3, turns=True)"
FITTED_CASES = [
    *((FITTED, chat, "") for chat in ("goes on", "again")),
    *full([(FITTED, chat, "") for chat in ("left out", "reworded")]),
    *full([(FITTED, "goes on", way) for way in ("ahead", "own process")]),
    *full([("match(adakv(snapkv(window=8)), biases=False, window=20, keep=70, turns=True)", "again", "")]),
]


def followed(recipe: str, model: Path, **chat: Any) -> list[ChatTurn]:
    """What a cache under transformers says and keeps: the oracle cannot fit what stays."""
    loaded = AutoModelForCausalLM.from_pretrained(model)
    return follow(Cache(loaded, recipe), SAID, ANSWERS, model=loaded, **chat)


@pytest.mark.parametrize("case", FITTED_CASES, ids=" ".join)
def test_what_stays_is_fitted_as_by_a_cache_under_transformers(case: tuple[str, str, str], model: Path) -> None:
    """Entries that stay get other values and biases once the next turn begins."""
    recipe, chat, way = case
    turns = followed(recipe, model, **CHATS[chat])
    unfitted = followed(recipe.replace("turns", "ridge=1e9, turns"), model)
    assert [turn.answer for turn in turns] != [turn.answer for turn in unfitted]
    check(turns, result(answers_of({"": scenario(recipe, model, asked(turns), **WAYS[way])}), ""))


def test_other_owners_and_names_are_other_conversations(model: Path, oracle: Oracle) -> None:
    """Whoever sends the same text under another key goes on with nothing; under another name, with full blocks."""
    turns = replay(oracle, RAGGED, SAID[:2], ANSWERS)
    first, second = turns
    options = [{"owner": "1" * 32}, {"owner": "2" * 32}, {"conversation": "a"}, {"conversation": "b"}, {}]
    asks = [Ask(first.prompt, ANSWERS, extra=sealed(**options[number])) for number in (0, 2)]
    asks += [Ask(second.prompt, ANSWERS, add=APART, extra=sealed(**more)) for more in options]
    signed = {"additional_config": {"keepset": RAGGED, "keepset_signed": True}}
    engine = result(answers_of({"": scenario(RAGGED, model, asks, **signed)}), "")
    assert engine.cached[:5] == [0, 0, second.reused, 0, second.reused]
    assert all(cached < len(first.prompt) for cached in engine.cached[5:])
    assert [engine.tokens[number] for number in (0, 1, 2, 4)] == [first.answer] * 2 + [second.answer] * 2


BRANCHES = [SAID[2], IDS[700:725], SAID[2], IDS[800:900]]
"""What several requests add to one conversation at once."""
LATER = (0, 0, 1, 9)
"""Steps that these requests come later: together, while the layers prepare the first, and while that runs."""


@pytest.mark.parametrize(
    "case",
    [(POOLED, ""), *full([(EQUAL, ""), (NETWORKS, ""), (POOLED, "ahead"), (POOLED, "own process")])],
    ids=" ".join,
)
def test_several_turns_at_once(case: tuple[str, str], model: Path, oracle: Oracle) -> None:
    """Each goes on with what the first has begun with, and the next turn with the right one of them."""
    recipe, way = with_networks(case[0], model), case[1]
    branches = [replay(oracle, recipe, [*SAID[:2], added, SAID[3]], ANSWERS) for added in BRANCHES]
    asks = asked(branches[0][:2])
    asks += [Ask(turns[2].prompt, ANSWERS, add=2 * APART + later) for turns, later in zip(branches, LATER, strict=True)]
    asks += [Ask(turns[3].prompt, ANSWERS, add=4 * APART) for turns in (branches[1], branches[3])]
    engine = result(answers_of({"": scenario(recipe, model, asks, **WAYS[way])}), "")
    check(branches[0][:2], engine)
    check([turns[2] for turns in branches], engine, first=2)
    check([branches[1][3], branches[3][3]], engine, first=6)


@pytest.mark.parametrize("case", [(POOLED, ""), *full([(RAGGED, "ahead"), (NETWORKS, ""), (WHOLE, "own process")])])
def test_what_several_conversations_begin_with(case: tuple[str, str], model: Path, oracle: Oracle) -> None:
    """Its full blocks are copied from one in its first turn, and later from what a compression has left of it."""
    recipe, way = with_networks(case[0], model), case[1]
    said = [[SAID[0] + IDS[number : number + 40], SAID[1]] for number in (800, 850, 900)]
    chats = [replay(oracle, recipe, one, ANSWERS) for one in said]
    asks = [Ask(chats[0][0].prompt, ANSWERS), Ask(chats[1][0].prompt, ANSWERS, add=APART)]
    asks += [Ask(chats[number][1].prompt, ANSWERS, add=2 * APART) for number in (0, 1)]
    asks += [Ask(turn.prompt, ANSWERS, add=APART * number) for number, turn in enumerate(chats[2], start=3)]
    engine = result(answers_of({"": scenario(recipe, model, asks, **WAYS[way])}), "")
    order = [chats[0][0], chats[1][0], chats[0][1], chats[1][1], *chats[2]]
    assert engine.tokens == [turn.answer for turn in order]
    assert engine.cached[:4] == [0, 128, chats[0][1].reused, chats[1][1].reused]
    assert (0 if recipe == WHOLE else 64) <= engine.cached[4] <= 128 and engine.cached[5] == chats[2][1].reused
    if engine.log:
        for number, turn in [(2, chats[0][1]), (3, chats[1][1]), (5, chats[2][1])]:
            assert [kept for _, kept, _ in engine.events_of(number) if kept] == [turn.begins_with]
        engine.check_nothing_left()


def saved(folder: Path, config: CwmConfig) -> Path:
    """Save a random model."""
    torch.manual_seed(0)
    AutoModelForCausalLM.from_config(config).save_pretrained(folder)
    return folder


@pytest.fixture(scope="module")
def windows(tmp_path_factory: pytest.TempPathFactory) -> Path:
    """A model with three layers that attend to all tokens, and two with windows."""
    kinds = ["full_attention", "sliding_attention", "full_attention", "sliding_attention", "full_attention"]
    more = {"num_hidden_layers": len(kinds), "layer_types": kinds, "sliding_window": 48, "pad_token_id": None}
    rotation = {"rope_theta": 10000.0, "rope_type": "default"}
    return saved(tmp_path_factory.mktemp("windows"), CwmConfig(**SHAPE, **more, rope_parameters=rotation))


@pytest.mark.parametrize(
    "case", [(POOLED, ""), *full([(RAGGED, ""), (POOLED, "ahead"), (WHOLE, "own process")])], ids=str
)
def test_layers_with_windows(case: tuple[str, str], windows: Path) -> None:
    """What they see at a turn's end is there in the next one; the entries of others are those of the reference."""
    recipe, way = case
    turns = replay(oracle_of(windows), recipe, SAID, ANSWERS)
    engine = result(answers_of({"": scenario(recipe, windows, asked(turns), **WAYS[way])}), "")
    check(turns, engine)


@pytest.mark.parametrize("way", ["", *full(["ahead"])])
def test_turns_of_layers_with_windows_that_are_changed(way: str, windows: Path) -> None:
    """They go on if what the windows see is still there, else they are computed anew."""
    turns = [
        *replay(oracle_of(windows), WHOLE, SAID[:4], ANSWERS, again=(0, 2)),
        *replay(oracle_of(windows), WHOLE, [SAID[0], IDS[700:790], SAID[3]], ANSWERS, again=(1,))[1:],
    ]
    engine = result(answers_of({"": scenario(WHOLE, windows, asked(turns), **WAYS[way])}), "")
    assert engine.tokens == [turn.answer for turn in turns]
    assert sum(cached > 0 for cached in engine.cached) >= 5
    engine.check_nothing_left()


JOINED = "{% for m in messages %}{{ 'u:' if m.role == 'user' else 'a:' }}{{ m.content }}.{% endfor %}"


@pytest.mark.parametrize("recipe", [POOLED, *full([EQUAL, RAGGED])])
def test_what_comes_before_the_first_user_stays(recipe: str, model: Path, oracle: Oracle) -> None:
    """By the model's own chat template; also what was said before, if a client leaves out some of it."""
    folder = tokenizer("joined", JOINED)
    mark = AutoTokenizer.from_pretrained(folder)("u:", add_special_tokens=False)["input_ids"]
    said = [[*SAID[0][:70], *mark, *SAID[0][72:]], *SAID[1:]]
    turns = replay(oracle, recipe, said, ANSWERS, left_out={3: [(160, 170)]}, system=70)
    kept = {
        len(set(head) & set(range(70))) for turn in turns[1:] for heads in turn.begins_with.values() for head in heads
    }
    assert kept == {70}
    protects = recipe.replace("turns=True", "turns=True, protect='system'")
    own = {"tokenizer": str(folder), "skip_tokenizer_init": False}
    check(turns, result(answers_of({"": scenario(protects, model, asked(turns), **own)}), ""))


@pytest.mark.full
def test_ranks_that_share_the_heads(model: Path, chats: dict[tuple[str, str], list[ChatTurn]]) -> None:
    turns = chats[EQUAL, "goes on"]
    engine = scenario(EQUAL, model, asked(turns), tensor_parallel_size=2)
    check(turns, result(answers_of({"": engine}, env=NO_BINDING), ""))


@pytest.mark.full
def test_pages_of_8_bits(model: Path) -> None:
    """What lies in such pages is moved as it is: answers are those of an engine that computes everything anew."""
    texts = [IDS[:end] for end in (150, 230, 400, 416)]
    turns = [Ask(text, ANSWERS, add=APART * number) for number, text in enumerate(texts)]
    apart = [replace(ask, extra=sealed(owner=f"{ask.add:032}")) for ask in turns]
    signed = {"additional_config": {"keepset": WHOLE, "keepset_signed": True}}
    cases = {
        (kind, name): scenario(WHOLE, model, asks, kv_cache_dtype=kind, **signed)
        for kind in (INT8, "fp8")
        for name, asks in (("together", turns), ("apart", apart))
    }
    engines = answers_of(cases)
    for kind, _ in list(cases)[::2]:
        together, alone = (result(engines, (kind, name)) for name in ("together", "apart"))
        assert together.cached == [0, 150, 230, 400] and not any(alone.cached)
        assert together.tokens == alone.tokens


@pytest.mark.full
@pytest.mark.parametrize("way", WAYS)
def test_the_default_recipe(way: str, model: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    """What stays is chosen across layers, fitted, and rounded once, as by a cache under transformers."""
    recipe = "int8(match(pool(snapkv(window=8)), window=8), bytes=0.2, turns=True)"
    loaded = rounding_model(model, lambda numbers: rounded(numbers, INT8), monkeypatch)
    turns = follow(Cache(loaded, recipe), SAID, ANSWERS, model=loaded)
    engine = scenario(recipe, model, asked(turns), kv_cache_dtype=INT8, **WAYS[way])
    check(turns, result(answers_of({"": engine}), ""))


def test_a_reset_forgets_conversations(model: Path, oracle: Oracle) -> None:
    """Between two turns nothing of them is in use, so vLLM can reset what it has cached."""
    first, second = replay(oracle, WHOLE, SAID[:2], ANSWERS)
    asks = [Ask(first.prompt, ANSWERS), Ask(second.prompt, ANSWERS, add=ANSWERS + 8)]
    engine = result(answers_of({"": replace(scenario(WHOLE, model, asks), resets=[(ANSWERS + 4, 1.0)])}), "")
    assert engine.tokens == [first.answer, second.answer] and engine.cached == [0, 0]
    engine.check_nothing_left()


def plain_chats(oracle: Oracle, number: int, turns: int, seed: int) -> list[list[ChatTurn]]:
    """Conversations of random lengths, of which two begin alike, without compression."""
    draw = random.Random(seed)
    chats = []
    for chat in range(number):
        said = [IDS[97 * chat + 331 * turn :][: draw.randint(3, 90)] for turn in range(turns)]
        said[0] = IDS[1000:1090] + said[0] if chat % 3 == 0 else said[0]
        chats.append(replay(oracle, WHOLE, said, ANSWERS))
    return chats


def disturbed(oracle: Oracle, seed: int) -> tuple[list[Ask], list[list[int]]]:
    """The turns of such conversations, some asked for again and some given up, and their answers."""
    draw, asks, expected = random.Random(seed), [], []
    for chat in plain_chats(oracle, 9, 4, seed):
        step = draw.randint(0, 60)
        for turn in chat:
            for _ in range(draw.choice([1, 1, 1, 2])):
                abort = step + draw.randint(1, 25) if draw.random() < 0.2 else None
                asks.append(Ask(turn.prompt, len(turn.answer), add=step, abort=abort))
                expected.append(turn.answer)
                step += draw.choice([1, 30, 45, 90])
    return asks, expected


def check_disturbed(asks: list[Ask], expected: list[list[int]], engine: Result) -> None:
    """Check that answers are whole, but for those that were given up, of which all that came is right."""
    for ask, answer, tokens in zip(asks, expected, engine.tokens, strict=True):
        assert tokens is not None or ask.abort is not None
        assert answer[: len(tokens or [])] == (tokens or [])
        assert ask.abort is not None or len(tokens or []) == len(answer)


@pytest.mark.parametrize("case", [("", 0), *full([("ahead", 1), ("own process", 3)])])
def test_nothing_is_mixed_up(case: tuple[str, int], model: Path, oracle: Oracle) -> None:
    """Many conversations at once in few pages, with turns that are asked for again, given up and preempted.

    Whatever is computed anew and whatever goes on, the answers are those of a model that keeps everything.
    """
    way, seed = case
    asks, expected = disturbed(oracle, seed)
    few = {"num_gpu_blocks_override": 40, "max_num_seqs": 6, "max_model_len": 600}
    engine = result(answers_of({"": scenario(WHOLE, model, asks, **few, **WAYS[way])}), "")
    check_disturbed(asks, expected, engine)
    went_on = [cached for cached in engine.cached if cached]
    assert len(went_on) > len(asks) // 5
    if engine.log:
        engine.check_nothing_left()


def question(**fields: Any) -> dict[str, Any]:
    """Extra arguments of a request that is a question of the front end, and is taken back at once."""
    with pytest.MonkeyPatch.context() as patch:
        for name, value in SIGNING.items():
            patch.setenv(name, value)
        return {"kv_transfer_params": Question(ticket="0" * 32, **fields).to_parameters()}


@pytest.mark.full
def test_what_is_deleted_or_forgotten_is_computed_anew(model: Path, oracle: Oracle) -> None:
    """Whether it waits or a turn of it runs, and nobody else's of the same name. What is forgotten is replaced."""
    mine, theirs = "1" * 32, "2" * 32
    chats = [(mine, "waits"), (theirs, "waits"), (mine, "runs"), (mine, "stays"), (mine, "forgets"), (mine, "comes")]
    chats.append((mine, "given up"))
    options = [sealed(owner=owner, conversation=name) for owner, name in chats]
    again = [*options[:4], sealed(owner=mine, conversation="forgets", forget=True), *options[5:]]
    # No two begin alike, or a part of one would be copied.
    said = [[[IDS[1100 + number], *SAID[0][1:]], SAID[1]] for number in range(len(chats))]
    first, second = zip(*(replay(oracle, RAGGED, one, ANSWERS) for one in said), strict=True)
    anew, after = zip(*(replay(oracle, RAGGED, [turn.prompt, SAID[2]], ANSWERS) for turn in second), strict=True)
    asks = [Ask(turn.prompt, ANSWERS, extra=extra) for turn, extra in zip(first, options, strict=True)]
    asks += [Ask(turn.prompt, ANSWERS, add=APART, extra=extra) for turn, extra in zip(second, again, strict=True)]
    alone = APART + 50  # when nothing else runs, so that a turn is prepared at once
    asks[-2:] = [replace(asks[-2], add=alone), replace(asks[-1], add=alone, abort=alone + 1)]
    asks += [Ask(after[number].prompt, ANSWERS, add=3 * APART, extra=options[number]) for number in (4, 5, 6)]
    deleted = [
        (8, mine, "runs"),
        (APART - 2, mine, "waits"),
        (APART - 2, theirs, "stays"),
        (alone + 1, mine, "comes"),
        (alone + 1, mine, "given up"),
    ]
    questions = [Ask([0], 1, step, step, extra=question(owner=owner, delete=name)) for step, owner, name in deleted]
    questions.append(Ask([0], 1, extra={"kv_transfer_params": {"keepset": "forged"}}, abort=0))
    signed = {"additional_config": {"keepset": RAGGED, "keepset_signed": True}, "num_gpu_blocks_override": 256}
    engine = result(answers_of({"": scenario(RAGGED, model, [*asks, *questions], **signed)}), "")
    reused = second[0].reused
    assert engine.cached[:13] == [0] * 8 + [reused, 0, reused, 0, reused]
    assert engine.cached[14:17] == [after[4].reused, 0, 0]
    goes_on = [second[number].answer if number in (1, 3, 5) else anew[number].answer for number in range(6)]
    assert engine.tokens[:13] == [*(turn.answer for turn in first), *goes_on]
    assert engine.tokens[14] == after[4].answer
    engine.check_nothing_left()


def test_the_same_conversation_is_had_twice(model: Path, oracle: Oracle) -> None:
    """By an agent that begins its task again, say: a turn goes on with its own, not with the one that went further."""
    turns = replay(oracle, RAGGED, SAID[:3], ANSWERS)
    asks = [*asked(turns), *(replace(ask, add=ask.add + 3 * APART) for ask in asked(turns))]
    engine = result(answers_of({"": scenario(RAGGED, model, asks)}), "")
    assert engine.tokens == [turn.answer for turn in turns] * 2
    assert engine.cached[:3] == [turn.reused for turn in turns]
    # The last one is the first's newest turn, asked for again.
    assert engine.cached[4:] == [turns[1].reused, len(turns[2].prompt) - 1]
    engine.check_nothing_left()


@pytest.mark.full
def test_short_questions_begin_their_own_conversations(model: Path, oracle: Oracle) -> None:
    """Though their prompts differ in a few tokens only, before what the template puts before answers."""
    end = IDS[900:904]
    said = [[IDS[0:100] + question + end, SAID[1] + end] for question in (IDS[200:211], IDS[300:311])]
    chats = [replay(oracle, RAGGED, one, ANSWERS) for one in said]
    order = [turn for turns in zip(*chats, strict=True) for turn in turns]
    asks = [Ask(turn.prompt, ANSWERS, add=APART * number) for number, turn in enumerate(order)]
    engine = result(answers_of({"": scenario(RAGGED, model, asks)}), "")
    assert engine.tokens == [turn.answer for turn in order]
    assert engine.cached == [0, 96, *(turn.reused for turn in order[2:])]


@pytest.mark.full
def test_a_template_ends_a_prompt_otherwise_than_it_continues_it(model: Path) -> None:
    """The turn's prompt goes on with all before that end, which is what the next prompt ends with, too."""
    end, other = IDS[900:904], IDS[950:952]
    first, second = IDS[0:100] + end, IDS[0:100] + other + IDS[300:340] + end
    engine = result(
        answers_of({"": scenario(WHOLE, model, [Ask(first, ANSWERS), Ask(second, ANSWERS, add=APART)])}), ""
    )
    assert engine.cached == [0, 100]
