"""Cells of one example, held against the harness's own model, `generate`, and caches fed by hand."""

import copy
import json
from collections.abc import Sequence
from dataclasses import replace
from typing import Any
from weakref import WeakSet

import pytest
import torch
from transformers import DynamicCache

import keepset
from keepset import Budget, KeepsetError, Recipe
from keepset.lab.analysis.events import EventFigures, repetition_rate
from keepset.lab.candidate import Candidate, candidates
from keepset.lab.generation import Answer
from keepset.lab.record import FULL, Record
from keepset.lab.sweep.engine import Engine, Portion, Skipped
from keepset.lab.sweep.prompts import Asking
from keepset.lab.tasks.task import Example, Question
from tests.hf.models import hooks_on, tiny
from tests.lab.sweep.asked import CHAT, Exact, letters, scripted, timeless, watched
from tests.tiers import FULL as ALL

TOKENIZER = letters(CHAT)
CONTEXT = "Some text about cats and dogs, of which nobody knows anything at all; it goes on for a while."
EXAMPLE = Example(
    "one",
    CONTEXT,
    (Question(" Who?", "x"), Question("\nWhat is said?", "y", prefix=" It"), Question(" A", 0, choices=(" b", "cd"))),
    {"depth": 0.5},
)
GENERATED = replace(EXAMPLE, questions=EXAMPLE.questions[:2])
ONE = replace(EXAMPLE, questions=EXAMPLE.questions[:1])
RECIPES = Recipe.parse_list("snapkv(window=8), adakv(expected_attention), kvcompose")
full_tier = pytest.mark.full


def run(
    todo: Sequence[Candidate],
    *,
    task: Exact | None = None,
    example: Example = EXAMPLE,
    model: Any = None,
    seed: int = 0,
    **options: Any,
) -> list[Record]:
    asking = Asking(**{"mode": "agnostic", "chat": False, **options})
    cells = list(
        Engine(model or tiny("llama"), TOKENIZER, asking).answer(Portion(task or Exact(), [(seed, example)], todo))
    )
    assert not any(isinstance(cell, Skipped) for cell in cells)
    return [cell for cell in cells if isinstance(cell, Record)]


def replies(cell: Record) -> list[Any]:
    assert cell.error is None, cell.error
    return cell.replies


def parsed(*texts: str) -> list[Candidate]:
    return candidates([Recipe.parse(text) for text in texts], [])


def ids_of(text: str) -> torch.Tensor:
    return TOKENIZER(text, add_special_tokens=False, return_tensors="pt").input_ids


def answered(model: Any, cache: Any, prompt: str, question: str, tokens: int = 8) -> str:
    """The long way: a cache of one's own, and transformers' `generate`."""
    ids, after = ids_of(prompt), ids_of(question)
    options: dict[str, Any] = dict(max_new_tokens=tokens, do_sample=False, pad_token_id=0)
    with torch.no_grad():
        if not question:
            said = model.generate(ids, past_key_values=cache, **options)[0, ids.shape[1] :]
        else:
            model(ids, past_key_values=cache)
            said = model.generate(**cache.ask(after), **options)[0, after.shape[1] :]
    return TOKENIZER.decode(said, skip_special_tokens=True)


# --- against lm-evaluation-harness, and `generate`


def test_with_everything_kept_cells_say_what_the_harness_says_of_its_own_model() -> None:
    pytest.importorskip("lm_eval", reason='pip install ".[eval]"')
    from lm_eval.api.instance import Instance
    from lm_eval.models.huggingface import HFLM

    model, until = tiny("llama"), ("a", " ")
    harness = HFLM(model, tokenizer=TOKENIZER, batch_size=1)
    todo = parsed("snapkv(keep=1.0)", "adakv(expected_attention, keep=1.0)")
    found = set()
    for text, prefix, choices in [
        ("What is kept of a long text?", "", (" it", " a longer answer", "?")),
        ("What is kept of a long text?", " So", (" it", " a longer answer", "?")),
        ("Some entries; ", "", ("x", "yes", "no, none of them")),
        ("", " So", ("A", "abc")),
        ("", "", ("A", "abc")),
    ]:
        said = text + prefix
        requests = [Instance("loglikelihood", {}, (said, choice), 0) for choice in choices]
        scores = harness.loglikelihood(requests, disable_tqdm=True)
        best = max(range(len(scores)), key=lambda index: scores[index][0])
        question = Question(text[4:], best, prefix=prefix, choices=choices)
        for cell in run(todo, example=Example("one", text[:4], (question,)), mode="prompt"):
            [reply] = replies(cell)
            assert [greedy for _, greedy in reply] == [greedy for _, greedy in scores]
            assert [score for score, _ in reply] == pytest.approx([score for score, _ in scores], abs=1e-4)
            assert cell.score == 1.0
        if said:
            options = {"until": list(until), "max_gen_toks": 12, "do_sample": False}
            [answer] = harness.generate_until([Instance("generate_until", {}, (said, options), 0)], disable_tqdm=True)
            question = Question(text[4:], answer, prefix=prefix)
            for cell in run(todo, example=Example("one", text[:4], (question,)), task=Exact(12, until), mode="prompt"):
                assert replies(cell) == [answer] and cell.score == 1.0
            found.add(answer)
    assert len(found) > 2


TEXTS = ["snapkv(window=8, keep=0.3)", "adakv(expected_attention, keep=12)", "kvcompose(keep=0.3)", "gvote"]


@pytest.mark.parametrize(
    "architecture", ["llama", *(pytest.param(name, marks=full_tier) for name in ("gemma3", "llama_odd_head", "lfm2"))]
)
def test_answers_are_those_of_generate(architecture: str) -> None:
    model = tiny(architecture)
    texts = [*TEXTS, "snapkv(window=8, keep=20, every=4)", "knorm(keep=16, prefill=False, every=3)"]
    different = set()
    for mode in ("agnostic", "prompt"):
        some = texts if ALL else texts[mode == "prompt" :: 2]
        full, *cells = run(parsed(*some), mode=mode, model=model)
        assert [cell.recipe for cell in cells] == some
        for cell in cells:
            for question, said in zip(GENERATED.questions, replies(cell), strict=False):
                parts = CONTEXT, question.text + question.prefix
                cache = keepset.Cache(model, cell.recipe)
                expected = answered(model, cache, *(parts if mode == "agnostic" else ("".join(parts), "")))
                assert said == expected, (cell.recipe, mode)
                different.add(said)
        model.set_attn_implementation("sdpa")
        for question, said in zip(GENERATED.questions, replies(full), strict=False):
            whole = CONTEXT + question.text + question.prefix
            assert said == answered(model, DynamicCache(config=model.config), whole, "")
    assert len(different) > 6


def test_a_recipe_is_told_the_questions_where_it_can_be_and_sees_them_where_it_cannot() -> None:
    model = tiny("llama")
    texts = ["kvcompose(keep=0.3)", "snapkv(window=8, keep=0.3)", "second_pass(keep=0.2)", "knorm(keep=0.3)"]
    full, *cells = run(parsed(*texts), mode="task", model=model, example=GENERATED)
    assert [cell.recipe for cell in cells] == texts
    asked = [ids_of(question.text) for question in GENERATED.questions]
    for cell in cells:
        told = cell.method.startswith(("kvcompose", "second_pass"))
        for question, said in zip(GENERATED.questions, replies(cell), strict=True):
            cache = keepset.Cache(model, cell.recipe, task_tokens=asked if told else None)
            parts = ("", question.text + question.prefix) if told else (question.text, question.prefix)
            assert said == answered(model, cache, CONTEXT + parts[0], parts[1]), cell.recipe
    agnostic = run(parsed(*texts), mode="agnostic", model=model, example=GENERATED)
    assert replies(full) == replies(agnostic[0])
    assert all(replies(one) != replies(other) for one, other in zip(cells, agnostic[1:], strict=True))


def test_a_chat_has_the_templates_words_unless_the_task_is_asked_verbatim() -> None:
    model, question, text = tiny("llama"), EXAMPLE.questions[1], "snapkv(window=8, keep=0.3)"
    verbatim = Exact()
    verbatim.chat = False
    said = [
        [replies(cell) for cell in run(parsed(text), example=GENERATED, task=task, chat=chat)]
        for task in (Exact(), verbatim)
        for chat in (False, True)
    ]
    assert said[0] == said[2] == said[3] != said[1]
    parts = f"<bos>U:{CONTEXT}", f"{question.text}.\nA:{question.prefix}"
    assert said[1][1][1] == answered(model, keepset.Cache(model, text), *parts)


def test_choices_are_scored_on_what_was_kept_of_the_context() -> None:
    model, question = tiny("llama"), EXAMPLE.questions[2]
    for text in ("snapkv(window=8, keep=0.3)", "knorm(keep=16, every=2)"):
        [_, cell] = run(parsed(text))
        for choice, (score, greedy) in zip(question.choices, replies(cell)[2], strict=True):
            cache, total, best, said = keepset.Cache(model, text), 0.0, True, ids_of(question.text)
            with torch.no_grad():
                model(ids_of(CONTEXT), past_key_values=cache)
                for token in TOKENIZER(choice).input_ids:
                    logits = model(said, past_key_values=cache).logits[0, -1].double()
                    total, best = total + float(logits.log_softmax(0)[token]), best and int(logits.argmax()) == token
                    said = torch.tensor([[token]])
            assert (score, greedy) == (pytest.approx(total, abs=1e-4), best)


# --- one prefill, and answers side by side


def test_one_prefill_serves_all_candidates_and_questions_but_those_that_compress_while_decoding() -> None:
    model, length = tiny("llama"), len(CONTEXT)
    todo = candidates(
        Recipe.parse_list("snapkv(window=8), adakv(expected_attention), h2o"), [Budget(0.5), Budget(0.25)]
    )
    every = parsed("knorm(keep=16, every=4)", "tova(keep=16, every=4)")[1:]
    prompts = sorted(length + len(question.text + question.prefix) for question in EXAMPLE.questions)
    for asked, mode, expected in [
        (todo, "agnostic", [length]),
        (todo, "prompt", prompts),
        ([*todo, *every], "agnostic", [length] * 3),
        (every[:1], "agnostic", [length]),
    ]:
        with watched(model) as calls:
            assert len(run(asked, mode=mode)) == len(asked)
        assert sorted(tokens for _, tokens in calls if tokens >= length) == expected


# Not knorm: the same letter has the same norm again, and which of two equals stays is up to rounding.
MIXED = [*RECIPES, *Recipe.parse_list("gvote, snapkv(window=4, keep=16, every=4)")]


@pytest.mark.few(1)
@pytest.mark.spread
@pytest.mark.parametrize(
    "options", [{"mode": "agnostic"}, {"mode": "prompt"}, {"mode": "agnostic", "temperature": 1.5}]
)
@pytest.mark.parametrize("architecture", ["llama", "llama_mqa", pytest.param("gemma3", marks=full_tier)])
def test_answers_of_a_batch_are_those_of_each_alone(architecture: str, options: dict[str, Any]) -> None:
    model, batched = tiny(architecture), architecture != "gemma3"
    todo = candidates(MIXED, [Budget(0.5), *([Budget(12)] if ALL and batched else [])])
    options = {"model": model, "example": GENERATED, "task": Exact(20 if ALL else 12, ("a",)), **options}
    with watched(model) as calls:
        together = run(todo, **options)
    assert any(rows > 1 and tokens == 1 for rows, tokens in calls) == batched
    assert [timeless(cell) for cell in together] == [timeless(run([one], **options)[0]) for one in todo]
    assert len({reply for cell in together for reply in replies(cell)}) > 4


FEW = candidates(Recipe.parse_list("snapkv(window=8), knorm, random"), [Budget(1.0), Budget(0.9)])


@pytest.fixture(scope="module")
def few_alone() -> list[Record]:
    return [timeless(run([one], example=GENERATED, task=Exact(9))[0]) for one in FEW]


@pytest.mark.parametrize("free", [0, *(pytest.param(free, marks=full_tier) for free in (30, None))])
def test_batches_fit_memory(monkeypatch: pytest.MonkeyPatch, free: int | None, few_alone: list[Record]) -> None:
    model, full = tiny("llama"), 2 * 2 * (2 * 16 * 4 + 4) * (len(CONTEXT) + 9)
    monkeypatch.setattr("keepset.lab.memory.available", lambda device: None if free is None else free * full)
    with watched(model) as calls:
        cells = run(FEW, example=GENERATED, task=Exact(9), model=model)
    assert max(rows for rows, _ in calls) == {0: 1, 30: 7, None: 7}[free]
    assert [timeless(cell) for cell in cells] == few_alone


TODO = candidates(RECIPES, [Budget(0.5), Budget(0.25)])


@pytest.fixture(scope="module")
def expected() -> list[Record]:
    return [timeless(cell) for cell in run(TODO, example=GENERATED)]


@pytest.mark.full
@pytest.mark.parametrize(
    "error", [torch.OutOfMemoryError("CUDA"), RuntimeError("can't allocate memory"), KeepsetError("Not these.")]
)
def test_where_a_batch_cannot_be_had_they_are_asked_one_after_another(error: Exception, expected: list[Record]) -> None:
    def refuse(calls: list[tuple[int, int]]) -> None:
        if calls[-1][0] > 1 and len(calls) > 12:
            raise error

    with watched(tiny("llama"), refuse) as calls:
        assert [timeless(cell) for cell in run(TODO, example=GENERATED)] == expected
    assert max(rows for rows, _ in calls) > 1


@pytest.mark.few(1)
@pytest.mark.parametrize("starts", [3, 1, 4])
def test_what_has_no_room_waits(monkeypatch: pytest.MonkeyPatch, starts: int, expected: list[Record]) -> None:
    original, calls = keepset.Cache.from_prompt.__func__, []  # type: ignore[attr-defined]

    def from_prompt(cls: Any, *args: Any) -> Any:
        calls.append(None)
        if len(calls) == starts + 1:
            raise MemoryError
        return original(cls, *args)

    monkeypatch.setattr(keepset.Cache, "from_prompt", classmethod(from_prompt))
    assert [timeless(cell) for cell in run(TODO, example=GENERATED)] == expected
    assert len(calls) == len(TODO) + 1
    calls.clear()
    starts = 0
    engine = Engine(tiny("llama"), TOKENIZER, Asking("agnostic", chat=False))
    first, *others = engine.answer(Portion(Exact(), [(0, GENERATED)], TODO))
    assert first == Skipped("exact", FULL, "memory was not enough")
    assert [timeless(cell) for cell in others if isinstance(cell, Record)] == expected[1:]


# --- one recipe on many examples

WORDS = ["A", "Who?", "What is said of them all?", CONTEXT, CONTEXT[:24], CONTEXT[3:40], "Some text", CONTEXT[5:80]]
DECODING = [
    "snapkv(window=4, keep=11, every=5)",
    "adakv(snapkv(window=4), keep=12, every=4)",
    "pyramid(snapkv(window=4), keep=8, every=6)",
    "ams(tova, window=6, kernel=3, segment_mass=0.2, min_segment=2, max_segment=6, keep=14, recent=3, every=4)",
    "r_kv(window=3, kernel=3, keep=24, every=5)",
    "expected_attention(future=8, skip=2, buffer=7, keep=8, every=5)",
    "tova(keep=7, every=1, prefill=False)",
    "gvote",
    "kvcompose(keep=0.4)",
]


def asked(text: str, task: Exact) -> Portion:
    """The words, of which every second is asked two questions."""
    candidate = parsed()[0] if text == FULL else parsed(text)[1]
    examples = [
        (3, Example(str(at), "", questions[: 1 + at % 2], {"at": float(at)}))
        for at, word in enumerate(WORDS)
        for questions in [(Question(word, "x"), Question(f"{word} And then?", "y"))]
    ]
    return Portion(task, examples, [candidate])


def decoded(portion: Portion, model: Any = None, **options: Any) -> dict[str, Record]:
    """The cells by example; one is missing if memory was not enough for it."""
    engine = Engine(model or tiny("llama"), TOKENIZER, Asking(chat=False, **options))
    cells = list(engine.answer(portion))
    assert len(cells) == len(portion)
    return {cell.example: cell for cell in cells if isinstance(cell, Record)}


def one_by_one(portion: Portion, model: Any = None, **options: Any) -> dict[str, Record]:
    options = {"model": model, "mode": "prompt", "task": portion.task, **options}
    alone = (run(portion.candidates, example=example, seed=seed, **options) for seed, example in portion.examples)
    return {cell.example: cell for [cell] in alone}


def all_timeless(cells: dict[str, Record]) -> dict[str, Record]:
    return {name: timeless(cell) for name, cell in cells.items()}


@pytest.mark.few(2)
@pytest.mark.spread
@pytest.mark.parametrize("temperature", [0.0, 1.5])
@pytest.mark.parametrize("architecture", ["llama", "llama_mqa"])
@pytest.mark.parametrize(
    "text", [*DECODING[:2], *(pytest.param(text, marks=full_tier) for text in (FULL, *DECODING[2:]))]
)
def test_of_many_examples_side_by_side_cells_are_those_of_each_alone(
    monkeypatch: pytest.MonkeyPatch, text: str, architecture: str, temperature: float
) -> None:
    model, portion = tiny(architecture), asked(text, Exact(12, tuple("abcdef"), decodes=True))
    expected = one_by_one(portion, model, temperature=temperature)
    monkeypatch.setattr("keepset.lab.sweep.engine.MOST", 3)  # so that some begin while others go on
    with watched(model) as calls:
        found = decoded(portion, model, temperature=temperature)
    assert max(rows for rows, _ in calls) == 3
    assert all_timeless(found) == all_timeless(expected)
    assert all(cell.error is None for cell in found.values()), [cell.error for cell in found.values()]
    assert len({cell.figures["tokens"] for cell in found.values()}) > 1
    assert max(cell.figures["batch"] for cell in found.values()) > 2
    assert all(cell.figures["batch"] == 1 for cell in expected.values())


def test_a_cache_is_freed_with_its_answer(monkeypatch: pytest.MonkeyPatch) -> None:
    """Before the next one begins, though cells of an example wait for those before them."""
    live, left = WeakSet[Answer](), list[int]()

    class Noted(Answer):
        def __init__(self, *args: Any) -> None:
            super().__init__(*args)
            left.append(len(live))
            live.add(self)

    monkeypatch.setattr("keepset.lab.sweep.engine.Answer", Noted)
    engine = Engine(tiny("llama"), TOKENIZER, Asking(chat=False, alone=True))
    shared = Portion(Exact(), [(0, ONE)], parsed("snapkv(window=8, keep=0.5)", "knorm(keep=0.5)"))
    decoding = asked(DECODING[0], Exact(3, decodes=True))
    decoding = replace(decoding, examples=decoding.examples[::2])  # of one question each
    for portion in (shared, decoding):
        assert all(isinstance(cell, Record) for cell in engine.answer(portion))
    assert left == [0] * (len(shared) + len(decoding))


def test_an_answer_may_end_at_its_first_token() -> None:
    model = tiny("llama")
    with watched(model) as calls:
        cells = decoded(asked(DECODING[0], Exact(1, decodes=True)), model)
    assert all(tokens > 1 or at == 0 for at, (_, tokens) in enumerate(calls))  # prompts alone, one of a single token
    assert all(cell.error is None and cell.figures["tokens"] == 1 for cell in cells.values())


@pytest.fixture(scope="module")
def one_by_one_decoded() -> dict[str, Record]:
    return all_timeless(one_by_one(asked(DECODING[0], Exact(12, decodes=True))))


@pytest.mark.few(2)
@pytest.mark.parametrize(
    ("error", "where"),
    [
        *((MemoryError(), where) for where in ("call", "one prompt", "prefill")),
        (RuntimeError("can't allocate memory"), "row"),
        *((KeepsetError("Not these."), where) for where in ("row", "call")),
    ],
)
def test_no_cell_is_lost_but_what_memory_is_not_enough_for_alone(
    monkeypatch: pytest.MonkeyPatch, error: Exception, where: str, one_by_one_decoded: dict[str, Record]
) -> None:
    model, portion = tiny("llama"), asked(DECODING[0], Exact(12, decodes=True))
    others = hooks_on(model)  # of caches that other tests still hold
    original, failed = keepset.Cache.attend, list[int]()

    def refuse(calls: list[tuple[int, int]]) -> None:
        rows, tokens = calls[-1]
        if (where == "call" and rows > 2 and len(calls) > 15) or (
            where == "prefill" and tokens > 1 and len(calls) == 4
        ):
            raise error

    def attend(self: Any, layer: Any, new: Any) -> Any:
        rows = calls[-1][0]
        in_row = new.rows.start == 2 and rows > 4 and layer.index == 1 and not failed
        if (where == "row" and in_row) or (where == "one prompt" and new.key.shape[2] == len(WORDS[4])):
            failed.append(rows)
            raise error
        return original(self, layer, new)

    monkeypatch.setattr(keepset.Cache, "attend", attend)
    with watched(model, refuse) as calls:
        found = decoded(portion, model)
    wrong = {name for name, cell in found.items() if cell.error is not None}
    assert wrong == ({"2"} if isinstance(error, KeepsetError) and where == "row" else set())
    assert one_by_one_decoded.keys() - found.keys() == ({"4"} if where == "one prompt" else set())
    assert all(timeless(found[name]) == one_by_one_decoded[name] for name in found.keys() - wrong)
    assert max(rows for rows, _ in calls) > 2
    assert hooks_on(model) == others


def test_of_a_model_whose_caches_cannot_each_is_asked_alone() -> None:
    model, portion = tiny("gemma3"), asked(DECODING[0], Exact(6, decodes=True))
    portion = replace(portion, examples=portion.examples[:4])
    with watched(model) as calls:
        found = decoded(portion, model)
    assert {rows for rows, _ in calls} == {1}
    assert all_timeless(found) == all_timeless(one_by_one(portion, model))


def test_what_cannot_be_asked_is_an_error_and_the_others_go_on() -> None:
    portion = asked(DECODING[0], Exact(6, decodes=True))
    examples, [candidate] = list(portion.examples), portion.candidates
    examples[1] = (3, replace(examples[1][1], questions=(Question("x" * 600, "y"),)))
    cells = decoded(replace(portion, examples=examples))
    assert "does not fit the model's context" in (cells["1"].error or "")
    assert all(cells[name].error is None for name in cells.keys() - {"1"})
    cells = decoded(replace(portion, candidates=[replace(candidate, recipe=None, error="It does not go.")]))
    assert len(cells) == len(WORDS) and {cell.error for cell in cells.values()} == {"It does not go."}


# --- the same for the same seed


def test_a_draw_is_by_the_seed_and_all_candidates_have_the_same_luck() -> None:
    todo = parsed("snapkv(keep=1.0)", "snapkv(window=8, keep=0.2)")
    first, second = (run(todo, temperature=2.0, seed=seed) for seed in (0, 1))
    assert replies(first[0])[:2] == replies(first[1])[:2] != replies(first[2])[:2]
    assert replies(first[0])[:2] != replies(second[0])[:2]
    assert replies(first[0])[:2] == replies(run(todo[:1], temperature=2.0)[0])[:2]
    assert replies(run(todo[:1])[0])[:2] != replies(first[0])[:2]


# --- figures


@pytest.mark.few(1)
@pytest.mark.parametrize(
    "text",
    [
        "ams(tova, window=4, min_segment=2, max_segment=8, sinks=1, recent=3, keep=40, every=8, prefill=False)",
        "tova(keep=24, every=5)",
        "adakv(knorm, keep=20, prefill=False, every=4)",
    ],
)
@pytest.mark.parametrize("architecture", ["llama", "llama_mqa"])
def test_events_are_watched_after_every_token(architecture: str, text: str) -> None:
    """As of a cache of its own, fed token by token; `analysis/test_events.py` has what the figures are."""
    model, tokens, recipe = tiny(architecture), 23, Recipe.parse(text)
    full, cell = run(parsed(text), example=ONE, task=Exact(tokens, decodes=True), mode="prompt", model=model)
    watcher = EventFigures(recipe.method)
    cache = keepset.Cache(model, recipe, history=True, observer=watcher.observe)
    said = ids_of(CONTEXT + " Who?")
    with torch.no_grad():
        for _ in range(tokens):
            said = model(said, past_key_values=cache).logits[:, -1:].argmax(-1)
            watcher.look(cache)
    assert cell.error is full.error is None and len(watcher.events) > 1
    assert {name: cell.figures.get(name) for name in watcher.means} == pytest.approx(watcher.means)
    assert {"wipeout", "iou", "survived", "segments"} <= watcher.means.keys()
    assert not {"wipeout", "segments"} & full.figures.keys()


def full_bytes(model: Any, tokens: int) -> int:
    """Of transformers' own cache after so many tokens."""
    cache = DynamicCache(config=model.config)
    model.set_attn_implementation("sdpa")
    with torch.no_grad():
        model(torch.full((1, tokens), 5), past_key_values=cache)
    return sum(layer.keys.nbytes + layer.values.nbytes for layer in cache.layers)


@pytest.mark.few(1)
@pytest.mark.parametrize("architecture", ["llama_mqa", "llama", "llama_odd_head"])
def test_bytes_are_those_right_after_the_compression(architecture: str) -> None:
    model, text = tiny(architecture), "adakv(snapkv(window=4), keep=0.3)"
    full, cell = run(parsed(text), model=model)
    cache = keepset.Cache(model, text)
    with torch.no_grad():
        model(ids_of(CONTEXT), past_key_values=cache)
    kept, expected = cache.events[0].kept / cache.events[0].entries, full_bytes(model, len(CONTEXT))
    names = ("kv_bytes", "kv_bytes_full", "share", "keep")
    assert [cell.figures[name] for name in names] == [cache.nbytes, expected, cache.share, kept]
    assert [full.figures[name] for name in names] == [expected, expected, 1.0, 1.0] and full.requested is None


@pytest.mark.few(2)
@pytest.mark.parametrize("text", ["knorm(keep=24, every=5)", "snapkv(window=4, keep=0.4)", "tova(keep=40, every=64)"])
def test_while_decoding_bytes_are_the_most_after_any_token(text: str) -> None:
    model, tokens = tiny("llama"), 14
    full, cell = run(parsed(text), example=ONE, task=Exact(tokens, decodes=True), mode="prompt")
    assert full.error is cell.error is None and cell.figures["tokens"] == full.figures["tokens"] == tokens
    cache, held, said = keepset.Cache(model, text), list[tuple[int, int, float]](), ids_of(CONTEXT + " Who?")
    with torch.no_grad():
        for _ in range(tokens):
            logits = model(said, past_key_values=cache).logits
            held.append((cache.nbytes, cache.get_seq_length(), cache.share))
            said = logits[:, -1:].argmax(-1)
    nbytes, length, share = max(held, key=lambda each: each[0])
    entries = sum(layer.store.entries for layer in cache.managed_layers.values())  # type: ignore[union-attr]
    assert (cell.figures["kv_bytes"], cell.figures["share"]) == (nbytes, share)
    assert cell.figures["kv_bytes_full"] == full_bytes(model, length)
    assert cell.figures["keep"] == pytest.approx(entries / (2 * 2 * held[-1][1]))
    assert full.figures["kv_bytes"] == full_bytes(model, held[-1][1])


def test_figures_are_means_over_the_questions_and_a_cut_is_a_fact() -> None:
    model, length = tiny("llama"), len(CONTEXT)
    said = TOKENIZER("abcdabcdabcd", add_special_tokens=False)["input_ids"]
    example = replace(EXAMPLE, questions=(Question("", "abcd"), Question("", "no")))
    names = ("tokens", "finished", "repetition")
    for text, task, figures in [([*said[:4], 2], Exact(), (5, 1.0, 0.0)), (said, Exact(12), (12, 0.0, 5 / 9))]:
        with scripted(model, text, length):
            [cell] = run(parsed()[:1], example=example, task=task, mode="prompt")
        assert cell.error is None and tuple(cell.figures[name] for name in names) == figures
        if task.generation.tokens == 8:
            assert (cell.scores, cell.replies) == ({"right": 0.5, "length": 0.04}, ["abcd", "abcd"])
    assert repetition_rate(torch.tensor(said)) == 5 / 9
    for cell in run(parsed("knorm(keep=0.5)"), example=replace(EXAMPLE, context="x" * 600)):
        assert cell.error is None and cell.facts == {"depth": 0.5, "cut": 600 - (512 - 8 - len("\nWhat is said? It"))}
    assert all(cell.facts == {"depth": 0.5} for cell in run(parsed("knorm(keep=0.5)")))
    cells = run(candidates(RECIPES, [Budget(0.5)]), example=replace(EXAMPLE, context=""))
    assert len(cells) == 4
    assert all("Example one has no context" in (cell.error or "") for cell in cells)


# --- what goes wrong


def test_a_candidate_that_cannot_be_had_spoils_nothing_for_the_others() -> None:
    todo = parsed("qfilter(stats='nowhere.safetensors', keep=0.5)", "h2o(keep=64, every=4)", "snapkv(keep=0.5)")
    with watched(tiny("llama")) as calls:
        full, missing, late, good = run(todo)
    assert [call for call in calls if call[1] >= len(CONTEXT)] == [(1, len(CONTEXT))]
    assert full.error is None and good.error is None
    assert "nowhere.safetensors" in (missing.error or "") and "leave every= out" in (late.error or "")
    assert missing.score == 0.0
    assert timeless(full) == timeless(run(todo[:1])[0])


@pytest.mark.parametrize("temperature", [0.0, 1.0])
def test_a_model_that_predicts_no_numbers_fails_in_a_sentence_and_stops_no_sweep(temperature: float) -> None:
    model = copy.deepcopy(tiny("llama"))
    model.lm_head.weight.data[7] = float("nan")
    for cell in run(parsed("snapkv(window=8, keep=0.5)"), model=model, temperature=temperature):
        assert cell.error is not None and cell.error.startswith("The model predicts NaN: its weights are damaged")
        json.dumps(cell.to_json(), allow_nan=False)


@pytest.mark.few(1)
@pytest.mark.cross
@pytest.mark.parametrize("text", ["adakv(expected_attention, keep=0.5)", "expected_attention(keep=24, every=4)"])
@pytest.mark.parametrize("call", [0, 1, 4])
def test_whatever_happens_no_hook_stays_on_the_model(text: str, call: int) -> None:
    def stop(calls: list[tuple[int, int]]) -> None:
        if len(calls) > call:
            raise KeyboardInterrupt

    model = tiny("llama")
    before = hooks_on(model)
    run(parsed(text))
    assert hooks_on(model) == before
    with watched(model, stop), pytest.raises(KeyboardInterrupt):
        run(parsed(text)[1:])
    assert hooks_on(model) == before
    portion = Portion(Exact(), [(0, EXAMPLE)], parsed(text))
    running = Engine(model, TOKENIZER, Asking("agnostic", chat=False)).answer(portion)
    next(running)
    running.close()
    assert hooks_on(model) == before


def test_tables_are_not_judged_by_what_they_were_compiled_from(monkeypatch: pytest.MonkeyPatch) -> None:
    def refuse(recipe: Recipe, text: str) -> None:
        assert text == CONTEXT + " Who?" + "\nWhat is said?" + " A"
        if recipe.method.name == "knorm":
            raise KeepsetError("compiled from it")

    monkeypatch.setattr("keepset.lab.sweep.engine.refuse_contaminated", refuse)
    full, seen, other = run(candidates(Recipe.parse_list("knorm, tova"), [Budget(0.5)]))
    assert (full.error, seen.error, other.error) == (None, "compiled from it", None)
