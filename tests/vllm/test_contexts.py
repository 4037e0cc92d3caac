"""Requests that begin with a saved context: answers are those of the file under transformers, and pages are shared.

Some are compressed further, each in pages of its own, and some contexts are saved by one engine for another.
"""

from __future__ import annotations

import copy
import random
from dataclasses import replace
from pathlib import Path
from typing import Any

import pytest
import torch
from safetensors import safe_open
from transformers import LlamaForCausalLM, PreTrainedModel

import keepset
from keepset.contexts.columns import dequantized
from keepset.hf.store import EntryStore
from tests.hf.damage import flipped
from tests.vllm.compared import IDS, NO_BINDING, answers_of, check_oracle, networks_file, result
from tests.vllm.conftest import TINY, save_tiny
from tests.vllm.contexts import JOINT, OPENING, TOKENS, ask, going_on, question, serving, write
from tests.vllm.engine import BLOCK, Ask, Result, Scenario, run
from tests.vllm.late import Late
from tests.vllm.oracle import Oracle

owned = Late("keepset.vllm.contexts")

CONTEXTS = {
    "uniform": ("snapkv(window=8, keep=40)", 150),
    "ragged": ("adakv(snapkv(window=8), keep=0.3)", 230),
    "pooled": ("pool(snapkv(window=8), keep=0.25)", 320),
    "read twice": ("reread(keep=0.2)", 333),
    "layers": ("pyramid(snapkv(window=8), keep=48)", 161),
    # Blocks that are full to the last entry, a context that is shorter than one, and one of a single token.
    "whole": ("streaming_llm(keep=1.0)", 192),
    "short": ("adakv(snapkv(window=8), keep=20)", 27),
    "token": ("knorm(keep=1.0)", 1),
    "values": ("match(adakv(snapkv(window=8)), biases=False, window=8, keep=64)", 200),
    "biases": ("match(adakv(snapkv(window=8)), window=8, keep=64)", 210),
    "eight bits": ("int8(match(pool(snapkv(window=8))), keep=0.3)", 190),
    "four bits": ("quantized(match(adakv(snapkv(window=8))), bits=4, keep=64)", 180),
}
LATER_KINDS = ("biases", "eight bits", "four bits")
"""Not drawn in the soak, which preempts at steps at which nothing may be loading. `test_soak` has biases, too."""
SIZES = (5, 33, 70, 1)

EACH = [ask(name, place, SIZES[place % 4]) for place, name in enumerate(CONTEXTS)] + [Ask(question(25, 120), TOKENS)]
BY_TEXT = ["a text", "and more"]
"""Contexts whose files know their tokens; the second goes on where the first ends."""
TEXT, MORE = IDS[3000:3200], IDS[3000:3260]
FOUND = [
    Ask(TEXT + question(1, 20), TOKENS),
    Ask(MORE + question(2, 20), TOKENS),
    Ask(TEXT[:-1] + question(3, 20), TOKENS),  # not all of it
    Ask(TEXT, TOKENS),  # no token is left to compute
    Ask(JOINT + question(4, 7), TOKENS, extra={"keepset": '{"context": "a text"}'}),
    Ask(OPENING + question(4, 7), TOKENS, extra={"keepset": {"context": "a text"}}),
]
MANY, LONG = 15, 1900
IN_TURN = [
    ask(f"many {place}", 2 * place + turn, 20, 8, add=15 * (MANY * turn + place))
    for turn in range(2)
    for place in range(MANY)
]
"""One after another, all of them twice."""
TURMOIL = [
    ask("pooled", 0, 40, 60),
    ask("pooled", 1, 20, 60),
    ask("ragged", 2, 33, 60, abort=20),
    ask("ragged", 3, 50, 50, add=1, abort=2),  # while it is loaded
    Ask(question(4, 150), 60),
    ask("ragged", 5, 64, 50, add=14),
    ask("pooled", 6, 5, 50, add=30),
]
LATER_TURMOIL = [replace(one, add=one.add + 60, abort=one.abort and one.abort + 60) for one in TURMOIL]
_DRAW = random.Random(0)
DRAWN = [name for name in CONTEXTS if name not in LATER_KINDS]
SOAK = [
    Ask(
        question(_DRAW.randrange(27), _DRAW.randint(1, 90)),
        _DRAW.randint(1, 40),
        add=_DRAW.randrange(400),
        abort=_DRAW.choice([None, None, None, _DRAW.randrange(450)]),
        extra=_DRAW.choice([None, *({"keepset": {"context": name}} for name in [*DRAWN, "flipped", "nowhere"])]),
    )
    for _ in range(150)
]
"""Requests to all contexts, to none and to wrong ones, in a pool that holds few of them."""
NAMES = ["nowhere", "../tiny", "damaged", "flipped", "foreign", "other weights", "cut off", "long", "goes on", "", 7]
WRONG = [*({"context": name} for name in NAMES), {}, "pooled", {"contexts": "pooled"}]
REFUSED = [Ask(question(index, 20), 5, extra={"keepset": wishes}) for index, wishes in enumerate(WRONG)]
ALL = [*REFUSED, *EACH, *FOUND]
"""All of them at once."""


@pytest.fixture(scope="module")
def folder(tiny_model: PreTrainedModel, tmp_path_factory: pytest.TempPathFactory) -> Path:
    folder = tmp_path_factory.mktemp("contexts")
    for name, (recipe, tokens) in CONTEXTS.items():
        write(folder, tiny_model, name, recipe, tokens)
    for name, text in zip(BY_TEXT, (TEXT, MORE), strict=True):
        write(folder, tiny_model, name, "pool(snapkv(window=8), keep=0.3)", len(text), text)
    bad = write(folder, tiny_model, "flipped", *CONTEXTS["ragged"])
    content = flipped(bad.read_bytes(), "layers.1.columns.values")
    bad.write_bytes(content)
    (folder / "damaged.safetensors").write_bytes(b"nothing of the kind")
    (folder / "cut off.safetensors").write_bytes(content[:-50])
    write(folder, tiny_model, "long", "knorm(keep=0.1)", 500)
    write(folder, tiny_model, "goes on", "snapkv(window=8, keep=40, every=8)", 100)
    torch.manual_seed(1)
    write(folder, LlamaForCausalLM(TINY).bfloat16().eval(), "foreign", "knorm(keep=0.1)", 100)
    write(folder, LlamaForCausalLM(TINY).eval(), "other weights", "knorm(keep=0.1)", 100)
    return folder


@pytest.fixture(scope="module")
def engines(tiny: Path, folder: Path) -> dict[str, Any]:
    return answers_of({"all": serving(tiny, folder, ALL)})


@pytest.fixture(scope="module")
def many(tiny_model: PreTrainedModel, folder: Path) -> None:
    ids = torch.randint(3, 512, (MANY, LONG), generator=torch.Generator().manual_seed(2)).tolist()
    for place, text in enumerate(ids):
        write(folder, tiny_model, f"many {place}", "pool(snapkv(window=8), keep=0.1)", LONG, text)


@pytest.fixture(scope="module")
def others(tiny: Path, folder: Path, many: None) -> dict[str, Any]:
    few = {"num_gpu_blocks_override": 40}
    two_prompts = {"max_model_len": 2048, "num_gpu_blocks_override": 1 + 2 * (2048 // BLOCK)}
    scenarios = {
        "soak": serving(tiny, folder, SOAK, preempt=(90, 200), engine=few, read_at_once=True),
        "in turn": serving(tiny, folder, IN_TURN, engine=two_prompts),
        "apart": serving(tiny, folder, EACH, own_process=True),
    }
    ahead = serving(tiny, folder, TURMOIL, engine={"async_scheduling": True}, stub_streams=True)
    return answers_of(scenarios, env=NO_BINDING) | answers_of({"ahead": ahead})


@torch.no_grad()
def expected(model: PreTrainedModel, folder: Path, one: Ask, widened_entries: bool = True) -> list[int]:
    """The answer under transformers. Pages of whole numbers hold what few bits stand for, and go on whole."""
    if one.extra is None:
        inputs: dict[str, Any] = {"input_ids": torch.tensor([one.ids])}
    else:
        path = folder / f"{one.extra['keepset']['context']}.safetensors"
        cache = keepset.Cache.load(path, model)
        for layer in cache.managed_layers.values() if widened_entries else ():
            store = layer.store
            counts = torch.tensor(store.counts).view(store.batch, store.kv_heads)
            layer.store = EntryStore.of(dequantized(store.packed, counts), counts)
        inputs = cache.ask(torch.tensor([one.ids]))
    output = model.generate(**inputs, max_new_tokens=one.max_tokens, do_sample=False, eos_token_id=None)
    return output[0, len(one.ids) :].tolist()


def part(engine: Result, some: list[Ask]) -> Result:
    """The part of the result that is of these requests."""
    places = [next(place for place, one in enumerate(ALL) if one is each) for each in some]
    names = ("tokens", "cached", "reasons", "log")
    lists = {name: [getattr(engine, name)[place] for place in places] for name in names}
    return replace(engine, **lists)


def check(model: PreTrainedModel, folder: Path, asks: list[Ask], engine: Result, widened_entries: bool = True) -> None:
    for one, tokens in zip(asks, engine.tokens, strict=True):
        if one.extra is not None and one.extra["keepset"]["context"] in NAMES:
            assert not tokens
            continue
        answer = expected(model, folder, one, widened_entries)
        assert tokens == answer or (one.abort is not None and (tokens or []) == answer[: len(tokens or [])])
    if engine.tables:
        engine.check_nothing_left()


@pytest.mark.full
def test_every_answer_is_that_of_the_file(engines: dict[str, Any], tiny_model: PreTrainedModel, folder: Path) -> None:
    engine = part(result(engines, "all"), EACH)
    check(tiny_model, folder, EACH, engine)
    # Not one token of a context was computed.
    assert [sum(tokens for _, _, tokens in log) - TOKENS + 1 for log in engine.log] == [len(one.ids) for one in EACH]


@pytest.mark.full
def test_pages_of_eight_bits_take_entries_of_eight_bits_as_they_are(
    tiny: Path, tiny_model: PreTrainedModel, folder: Path
) -> None:
    """Later tokens are rounded as well, under transformers, too. One request finds what the first one has loaded."""
    asks = [ask("eight bits", 1, 33), ask("eight bits", 2, 5, add=12)]
    answers = answers_of({0: serving(tiny, folder, asks, engine={"kv_cache_dtype": "int8_per_token_head"})})
    engine = result(answers, 0)
    assert engine.classes == ["CPURowsKeepImpl"]
    check(tiny_model, folder, asks, engine, widened_entries=False)


def test_pages_are_held_once(tiny: Path, tiny_model: PreTrainedModel, tmp_path: Path) -> None:
    """Four requests hold what is shared once, and each its own last blocks; those who come later find it."""
    path = write(tmp_path, tiny_model, "pooled", *CONTEXTS["pooled"])
    some = [ask("pooled", index, 9, add=4 * index) for index in range(4)]
    engine = result(answers_of({0: serving(tiny, tmp_path, some)}), 0)
    check(tiny_model, tmp_path, some, engine)
    assert max(step["running"] for step in engine.steps) == 4
    counts = keepset.Cache.load(path, tiny_model).keep_set
    assert counts is not None
    heads = [[len(counts.positions(layer, 0, head)) for head in range(2)] for layer in range(3)]
    shared = -(-sum(-(-count // BLOCK) - 1 for layer in heads for count in layer) // 6)
    own = -(-(320 + 9 + TOKENS) // BLOCK) - (320 // BLOCK - 1)
    held = [engine.free_before - step["free"] for step in engine.steps]
    assert shared > 1 and shared + 4 * (own - 1) <= max(held) <= shared + 4 * own
    assert engine.cached == [320] * 4


@pytest.mark.full
def test_a_prompt_that_begins_with_a_text_gets_it(
    engines: dict[str, Any], tiny_model: PreTrainedModel, folder: Path
) -> None:
    engine = part(result(engines, "all"), FOUND)
    assert engine.cached[:3] == [200, 260, 0] and engine.cached[4:] == [200, 200]
    meant = [
        ask("a text", 1, 20),
        ask("and more", 2, 20),
        *FOUND[2:4],
        *[replace(FOUND[4], extra={"keepset": {"context": "a text"}})] * 2,
    ]
    check(tiny_model, folder, meant, engine)


@pytest.mark.full
def test_a_pool_for_two_documents_holds_fifteen(
    others: dict[str, Any], tiny_model: PreTrainedModel, folder: Path
) -> None:
    """A tenth is kept, and layers hold different numbers. Each is loaded once, and found when its turn comes again."""
    engine = result(others, "in turn")
    check(tiny_model, folder, IN_TURN, engine)
    assert [engine.loads[f"many {place}"] for place in range(MANY)] == [1] * MANY


@pytest.mark.full
def test_what_cannot_be_served_ends_with_an_error(engines: dict[str, Any]) -> None:
    engine = part(result(engines, "all"), REFUSED)
    assert set(engine.reasons) == {"error"} and not any(engine.tokens)
    engine.check_nothing_left()


@pytest.mark.full
@pytest.mark.parametrize(
    ("name", "asks"), [("soak", SOAK), ("apart", EACH), ("ahead", TURMOIL)], ids=["soak", "apart", "ahead"]
)
def test_preemption_eviction_and_processes(
    name: str, asks: list[Ask], others: dict[str, Any], tiny_model: PreTrainedModel, folder: Path
) -> None:
    engine = result(others, name)
    check(tiny_model, folder, asks, engine)
    if name == "ahead":
        assert engine.tokens[2] and len(engine.tokens[2]) < 60 and not engine.tokens[3]
    if name == "soak":
        assert max(engine.loads.values()) > 1, "some were evicted and loaded again"
        assert min(step["free"] for step in engine.steps) < 5 and any(step["waiting"] for step in engine.steps)


@pytest.mark.full
def test_ranks_that_share_the_heads(tmp_path: Path) -> None:
    """Each of three has one head, of every kind of context at once, with preemption and with reloads."""
    folder = tmp_path / "contexts"
    folder.mkdir()
    shape = {"num_attention_heads": 6, "num_key_value_heads": 3, "hidden_size": 96, "vocab_size": 576}
    tiny = save_tiny(tmp_path / "tiny", **shape)
    model = LlamaForCausalLM.from_pretrained(tiny).eval()
    for name, (recipe, tokens) in CONTEXTS.items():
        write(folder, model, name, recipe, tokens)
    some, engine = [*EACH, *LATER_TURMOIL], {"tensor_parallel_size": 3, "num_gpu_blocks_override": 40}
    (answer,) = run(serving(tiny, folder, some, preempt=(72,), engine=engine), env=NO_BINDING)
    check(model, folder, some, answer)
    assert sum(answer.preemptions) > 0


GOING = {
    "equal": "snapkv(window=8, keep=40, every=16)",
    "segments": "ams(tova, window=16, keep=48, every=16)",
    "no queries": "distilled(stats='FILE', keep=50, every=7)",  # and no ties, as knorm has where words repeat
    "turmoil": "adakv(snapkv(window=8), keep=48, every=12)",
}
GOING_FILES = {"long": (230, ""), "short": (70, ""), "wide": (200, "keep=64"), "still": (150, "still")}
"""Tokens, and what is other in the recipe; the last goes on without any compression."""
_SOME = [("long", 5, 60), ("long", 40, 60), ("short", 70, 60), ("wide", 1, 60), ("still", 20, 40)]
GOING_ASKS = [ask(name, place, size, tokens) for place, (name, size, tokens) in enumerate(_SOME)]
GOING_ASKS.append(ask("long", 5, 9, 40, add=30))
PLAIN = Ask(question(6, 150), 50)
GOING_TURMOIL = [*GOING_ASKS, ask("long", 7, 30, 60, add=4, abort=25), ask("wide", 8, 30, 60, add=9, abort=11)]


@pytest.fixture(scope="module")
def going(
    tiny: Path, tiny_model: PreTrainedModel, tmp_path_factory: pytest.TempPathFactory
) -> dict[str, tuple[Scenario, Path]]:
    """Engines, and the folders of their files."""
    scenarios, whole = {}, tmp_path_factory.mktemp("goes on")
    networks = networks_file(whole, TINY.num_hidden_layers)
    for name, text in GOING.items():
        folder, recipe = whole / name, text.replace("FILE", str(networks))
        folder.mkdir()
        keep = recipe[recipe.index("keep=") : recipe.index(", every")]
        for file, (tokens, other) in GOING_FILES.items():
            of_file = "snapkv(window=8, keep=33)" if other == "still" else recipe.replace(keep, other or keep)
            write(folder, tiny_model, file, of_file, tokens)
        some, preempt = (GOING_TURMOIL, (13, 40)) if name == "turmoil" else ([PLAIN, *GOING_ASKS], ())
        scenarios[name] = serving(tiny, folder, some, recipe, save=10**7, preempt=preempt, read_at_once=True), folder
    return scenarios


@pytest.fixture(scope="module")
def went_on(going: dict[str, tuple[Scenario, Path]]) -> dict[str, Any]:
    return answers_of({name: scenario for name, (scenario, _) in going.items()})


@pytest.mark.full
@pytest.mark.parametrize("name", GOING)
def test_questions_are_compressed_as_their_files_say(
    name: str, going: dict[str, Any], went_on: dict[str, Any], tiny_model: PreTrainedModel, tiny_oracle: Oracle
) -> None:
    (scenario, folder), engine = going[name], result(went_on, name)
    for index, one in enumerate(scenario.requests):
        tokens = engine.tokens[index] or []
        assert one.abort is not None or len(tokens) == one.max_tokens
        if one.extra is not None:
            context = one.extra["keepset"]["context"]
            path = folder / f"{context}.safetensors"
            assert going_on(tiny_model, path, one.ids, tokens, engine.steps_of(index)) == tokens
            # Events came, and gave pages back.
            assert bool(engine.events[index]) is (context != "still" and bool(tokens))
    if name == "turmoil":
        assert min(engine.preemptions[:4]) == 2
        engine.check_nothing_left()
    else:
        check_oracle(tiny_oracle, scenario.engine["additional_config"]["keepset"], [PLAIN], engine)


SPLIT = {
    "every": "snapkv(window=8, keep=40, every=16)",
    "protected": "snapkv(window=8, keep=40, every=16, protect_prompt=True)",
    "ragged": "adakv(snapkv(window=8), keep=48, every=24)",
    "remembered": "ams(snapkv(window=8), keep=48, every=16)",
}
PROMPTS, ANSWER = [IDS[:150], IDS[300:340], IDS[500:733]], 40


@pytest.mark.full
def test_two_engines_answer_as_one(tiny: Path, tmp_path: Path) -> None:
    """The first computes prompts, and the second the answers; between them travels a file with the kept entries."""
    folders = {name: tmp_path / name for name in SPLIT}
    for folder in folders.values():
        folder.mkdir()
    saves = [Ask(prompt, 1, extra={"keepset": {"save": f"handover-{index}"}}) for index, prompt in enumerate(PROMPTS)]
    first = answers_of({name: serving(tiny, folders[name], saves, recipe, 10**7) for name, recipe in SPLIT.items()})
    scenarios: dict[Any, Scenario] = {}
    for name, recipe in SPLIT.items():
        asks = [
            Ask(prompt + (tokens or []), ANSWER - 1, extra={"keepset": {"context": f"handover-{index}"}})
            for index, (prompt, tokens) in enumerate(zip(PROMPTS, result(first, name).tokens, strict=True))
        ]
        scenarios[name, "split"] = serving(tiny, folders[name], asks, recipe)
        whole = {"model": str(tiny), "max_model_len": 512, "num_gpu_blocks_override": 160, "max_num_batched_tokens": 64}
        scenarios[name, "one"] = Scenario(recipe, [Ask(prompt, ANSWER) for prompt in PROMPTS], engine=whole)
    second = answers_of(scenarios)
    for name in SPLIT:
        before, after, one = result(first, name), result(second, (name, "split")), result(second, (name, "one"))
        before.check_nothing_left()
        after.check_nothing_left()
        for index, prompt in enumerate(PROMPTS):
            assert after.cached[index] == len(prompt)
            if name == "ragged" and len(prompt) < 48:
                continue  # one engine waits until an event drops a block
            assert [*(before.tokens[index] or []), *(after.tokens[index] or [])] == one.tokens[index]
            events = [(event["at"], event["layers"]) for event in [*before.events[index], *after.events[index]]]
            assert events == [(event["at"], event["layers"]) for event in one.events[index]]
    # A key, a value and a position each, in 32 bits; beside them counts and a header.
    files = owned.OwnedContexts(folders["every"], owned.EVERYBODY).newest()
    for index, prompt in enumerate(PROMPTS):
        kept, file = min(len(prompt), 40) * TINY.num_hidden_layers * 2, files[f"handover-{index}"]
        with safe_open(file, "pt") as tensors:
            columns = [tensors.get_tensor(name).nbytes for name in tensors.keys() if ".columns." in name]  # noqa: SIM118
        assert sum(columns) == kept * (2 * TINY.head_dim + 1) * 4
        assert file.stat().st_size - sum(columns) < 4096


SAME, CHANGED = 40, 120
"""Steps before which the connector is reset: with weights as they were, and after they were changed in place."""


@pytest.mark.full
def test_a_reset_forgets_contexts_of_weights_that_were_changed(
    tiny: Path, tiny_model: PreTrainedModel, tmp_path: Path
) -> None:
    """A reset looks again: contexts are served as before, or only those that were saved after weights were changed."""
    write(tmp_path, tiny_model, "shared", "pool(snapkv(window=8), keep=0.3)", len(TEXT), TEXT)
    prompt, more, recipe = IDS[:150], question(2, 9), "snapkv(window=8, keep=40)"

    def asks(step: int, chat: str) -> list[Ask]:
        return [
            ask("shared", 0, 20, 8, add=step),
            Ask(TEXT + question(1, 20), 8, add=step),
            Ask(prompt, 1, add=step, extra={"keepset": {"save": chat}}),
        ]

    late = [ask("shared", 0, 20, 8, add=CHANGED), *asks(CHANGED + 1, "after")]
    named = [
        Ask(prompt + more, 8, add=CHANGED + 60, extra={"keepset": {"context": chat}}) for chat in ("first", "after")
    ]
    requests = [*asks(0, "first"), *asks(SAME + 1, "again"), *late, *named]
    scenario = serving(tiny, tmp_path, requests, recipe, 10**7, resets=[(SAME, 1.0), (CHANGED, 1.5)])
    engine = result(answers_of({"reset": scenario}), "reset")
    assert engine.cached[:5] == [200, 200, 0, 200, 200] and engine.loads["shared"] == 2  # once more after a reset
    assert engine.tokens[3:5] == engine.tokens[:2]
    # Those that name a context of the old weights; the last has one of the new.
    assert [index for index, reason in enumerate(engine.reasons) if reason == "error"] == [6, 7, 10]
    assert engine.cached[8:] == [0, 0, 0, len(prompt)]
    changed = copy.deepcopy(tiny_model)
    with torch.no_grad():
        for layer in changed.model.layers:
            layer.input_layernorm.weight.mul_(1.5)
    cache, text = keepset.Cache(changed, recipe), torch.tensor([TEXT + question(1, 20)])
    answer = changed.generate(text, past_key_values=cache, max_new_tokens=8, min_new_tokens=8, do_sample=False)
    assert engine.tokens[8] == answer[0, text.shape[1] :].tolist()
