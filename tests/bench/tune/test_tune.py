"""What the race is about: which recipes are tried, figures of pieces against runs of their own, the outcome."""

from __future__ import annotations

import gc
from collections.abc import Iterator, Sequence
from statistics import fmean
from typing import Any

import pytest
import torch
from torch import Tensor
from transformers import DynamicCache

import keepset
from keepset.bench.candidate import text_of
from keepset.bench.record import Record
from keepset.bench.tune import space
from keepset.bench.tune.excerpts import ANSWER_TOKENS, TextPiece
from keepset.bench.tune.space import composed_at_most, compositions, scorers, with_budget
from keepset.bench.tune.tune import Measurer, Tuner
from keepset.core.budget import Budget
from keepset.core.features.attention import SecondPass
from keepset.core.method import Allocator
from keepset.errors import KeepsetError
from keepset.hf.prompt_session import Recorder
from keepset.recipe import Recipe
from keepset.registry import METHODS
from keepset.texts import Needle
from tests.bench.compare.test_prompt import best, continued, divergence, greedy
from tests.hf.models import hooks_on, prompt, tiny

LENGTH, AFTER, MOST = 50, 9, Budget(45)
RECIPES = Recipe.parse_list(
    "tova(keep=0.3), adakv(h2o, keep=15), kvcompose(keep=0.3), expected_attention(future=16, keep=15), gvote(p_nuc=0.1)"
)

# --- which recipes are tried


def test_catalogue_has_every_scorer_once_and_no_recipe_twice() -> None:
    recipes = scorers()
    assert len(set(map(str, recipes))) == len(recipes)
    names = [name for name, kind in METHODS.items() if not issubclass(kind, Allocator)]
    assert len(names) > 10 and all(Recipe.parse(name) in recipes for name in names)
    assert not any(recipe.budget.is_given for recipe in recipes)
    assert any(recipe.method.name == "pool" for recipe in recipes)


@pytest.mark.parametrize("budget", [Budget(bytes=0.25), Budget(40), Budget(4096)], ids=text_of)
def test_one_budget_for_all_but_those_that_take_none(budget: Budget) -> None:
    recipes = scorers()
    fitting, unfit = with_budget(recipes, budget)
    assert len(fitting) + len(unfit) == len(recipes)
    own = [recipe.budget for recipe in fitting if recipe.method.traits.needs_budget]
    assert {(each.keep, each.bytes) for each in own} == {(budget.keep, budget.bytes)}
    assert {recipe.method.name for recipe in fitting if not recipe.budget.is_given} == {"gvote"}
    for recipe, why in unfit.items():
        with pytest.raises(KeepsetError) as caught:
            recipe.with_budget(keep=40)
        assert why == str(caught.value)
    assert bool(unfit) == (budget.keep == 40)


def composed(text: str) -> list[str]:
    return list(map(str, compositions(Recipe.parse_list(text))))


def test_compositions_are_of_the_best_scorers_alone_or_inside_a_recipe() -> None:
    text = (
        "gvote, streaming_llm(keep=0.25), random(keep=0.25), duo_attention(keep=0.25), "
        "pool(second_pass(statistic='rms'), keep=0.25, sinks=4, recent=32), second_pass(keep=0.25), "
        "kvcompose(structured=False, keep=0.25), adakv(chunkkv(h2o), keep=0.25), tova(keep=0.25), snapkv(keep=0.25)"
    )
    found = compositions(Recipe.parse_list(text))
    assert len(set(found)) == len(found) == composed_at_most()
    inner = {recipe.method.scorer for recipe in found if isinstance(recipe.method, Allocator)}
    assert inner == {Recipe.parse(each).method for each in ("second_pass(statistic='rms')", "h2o", "tova")}
    own = "dynamic(second_pass(statistic='rms'), keep=0.25, sinks=4, recent=32)"
    assert {own, "ams(tova, keep=0.25)"} <= set(map(str, found))
    assert not any(recipe.method.name == "uniform" for recipe in found)
    assert [Recipe.parse(str(each)) for each in found] == found


def test_what_is_not_composed() -> None:
    assert composed("random(keep=9), gvote") == []
    one = composed_at_most() / 3
    assert len(composed("tova(keep=99)")) == one
    assert "ams(tova, keep=9)" not in composed("tova(keep=9)")  # its own sinks alone are more
    # `kvcompose` is `composite(second_pass(mean_term=True, chunk=0))`, which is not composed again.
    assert all("(second_pass(mean_term=True, chunk=0)" in text for text in composed("kvcompose(keep=0.25)"))
    found = composed("second_pass(mean_term=True, chunk=0, keep=0.3)")
    assert "composite(second_pass(mean_term=True, chunk=0), keep=0.3)" not in found
    assert "pool(second_pass(mean_term=True, chunk=0), keep=0.3)" in found and len(found) == one - 1
    others = composed("second_pass(mean_term=True, chunk=0, keep=0.3, sinks=4)")
    assert "composite(second_pass(mean_term=True, chunk=0), keep=0.3, sinks=4)" in others


# --- figures


class Numbers:
    """A tokenizer whose texts are the tokens' numbers."""

    def __call__(self, text: str, add_special_tokens: bool, verbose: bool) -> dict[str, list[int]]:
        return {"input_ids": list(map(int, text.split()))}

    def batch_decode(self, rows: Tensor, skip_special_tokens: bool) -> list[str]:
        return [" ".join(str(token) for token in row if token != 2) for row in rows.tolist()]


def piece(number: int = 0, answers: Sequence[str] = ()) -> TextPiece:
    ids = prompt(1, LENGTH + AFTER, seed=number)
    facts = tuple(Needle("", "", answer) for answer in answers)
    questions = tuple(" ".join(map(str, prompt(1, 3 + i, seed=90 + i)[0].tolist())) for i in range(len(facts)))
    return TextPiece(ids[:, :LENGTH], ids[:, LENGTH:], facts, questions)


def measurer(*pieces: TextPiece, budget: Budget = MOST, architecture: str = "llama") -> Measurer:
    return Measurer(tiny(architecture), Numbers(), pieces, budget)  # type: ignore[arg-type]


@torch.no_grad()
def followed(model: Any, cache: Any, one: TextPiece) -> list[list[float]]:
    """Log-probabilities of the continuation, after a prefill of its own."""
    model(one.prompt, past_key_values=cache)
    return continued(model, cache, one.continuation)


@pytest.mark.few(1)
@pytest.mark.parametrize("architecture", ["llama", "qwen3", "llama_mqa"])
def test_figures_are_those_of_a_run_of_its_own(architecture: str) -> None:
    model, one = tiny(architecture), piece()
    model.set_attn_implementation("sdpa")
    expected = followed(model, DynamicCache(config=model.config), one)
    found = list(measurer(piece(1), one, architecture=architecture)(1, RECIPES))
    for recipe, record in zip(RECIPES, found, strict=True):
        assert record.error is None
        figures, cache = record.figures, keepset.Cache(model, recipe)
        with torch.no_grad():
            model(one.prompt, past_key_values=cache)
        (event,) = cache.events
        pairs = list(zip(expected, followed(model, keepset.Cache(model, recipe), one), strict=True))
        assert figures["kl"] == pytest.approx(fmean(divergence(a, b) for a, b in pairs), rel=1e-3, abs=1e-6)
        assert figures["top1"] == pytest.approx(fmean(best(a) == best(b) for a, b in pairs))
        assert (figures["keep"], figures["kv_bytes"]) == (event.kept / event.entries, cache.nbytes)
        assert figures["kv_bytes_full"] == event.nbytes_before and "facts_found" not in figures
        assert figures["prefill_seconds"] > figures["prefill_seconds_full"] > 0


def said(cache: Any, one: TextPiece, question: str) -> str:
    """Greedy tokens after prompt and question, of this question alone."""
    asked = torch.tensor([list(map(int, question.split()))])
    return " ".join(map(str, greedy(cache, one.prompt, asked, ANSWER_TOKENS)))


def test_facts_are_asked_of_what_each_recipe_kept() -> None:
    asked = piece(answers=["", "", "", ""])
    whole = [said(None, asked, question) for question in asked.questions]
    one = piece(answers=[*whole[:3], "never"])  # the first three are what the full cache says; nobody says the last
    measure = measurer(one)
    heard: list[tuple[bool, ...]] = []
    ask = measure._ask
    measure._ask = lambda *words: heard.append(ask(*words)) or heard[-1]  # type: ignore[method-assign, func-returns-value]
    figures = list(measure(0, RECIPES))
    assert measure.full_found == {0: (True, True, True, False)}
    for recipe, told, found in zip(RECIPES, figures, heard[1:], strict=True):
        assert told.error is None and told.figures["facts"] == 4 and told.figures["facts_found"] == sum(found)
        answers = [said(keepset.Cache(tiny("llama"), recipe), one, text) for text in one.questions]
        assert list(found) == [fact.answer in answer for fact, answer in zip(one.facts, answers, strict=True)]
    assert any(sum(found) < 3 for found in heard)


def test_nothing_of_a_piece_stays() -> None:
    """Neither tensors nor hooks, without waiting for the collection of what is unreachable."""
    gc.collect()
    gc.disable()
    try:
        before, hooked = held(), hooks_on(tiny("llama"))
        assert len(list(measurer(piece(answers=["x"]))(0, RECIPES))) == len(RECIPES)
        assert held() <= before + 20 * LENGTH
    finally:
        gc.enable()
    assert hooks_on(tiny("llama")) == hooked


def held() -> int:
    """Numbers in all tensors that there are, reachable or not."""
    found = [thing for thing in gc.get_objects() if type(thing) is Tensor]
    return sum({tensor.untyped_storage().data_ptr(): tensor.numel() for tensor in found}.values())


def test_what_chooses_its_own_number_must_stay_within_the_budget() -> None:
    recipes = Recipe.parse_list("gvote(p_nuc=0.1), gvote(p_nuc=0.99), tova(keep=0.3)")
    # Of 16 numbers a key: 68 bytes an entry with its position, 64 without.
    for budget, said in ((Budget(bytes=0.9), "106% of the bytes"), (Budget(45), "100% of the entries")):
        few, many, tova = measurer(piece(), budget=budget)(0, recipes)
        assert few.error is None and few.figures["share"] < 0.9 and tova.error is None
        assert many.error == (
            f"gvote(p_nuc=0.99) chooses itself how much it keeps, and kept {said}: that is more than 90%."
        )


def test_a_prefill_that_one_recipe_spoils_serves_the_others(monkeypatch: pytest.MonkeyPatch) -> None:
    prefill = Recorder.prefill

    def picky(self: Recorder, *prompt: Any) -> Any:
        if self.needs.of(SecondPass):
            raise KeepsetError("No second pass here.")
        return prefill(self, *prompt)

    monkeypatch.setattr(Recorder, "prefill", picky)
    errors = [told.error for told in measurer(piece())(0, RECIPES)]
    assert errors == [None, None, "No second pass here.", None, None]


# --- the outcome

PIECES, SHARE = [piece(number) for number in range(8)], Budget(bytes=0.3)


@pytest.fixture
def made(monkeypatch: pytest.MonkeyPatch) -> dict[str, Any]:
    """Figures by a recipe's text: KL and, where given, prefill seconds and facts found; others fail."""
    table: dict[str, Any] = {}

    def measure(self: Measurer, number: int, recipes: Sequence[Recipe]) -> Iterator[Record]:
        self.full_bytes[number] = 100
        self.full_found[number] = tuple(table.get("full", ()))
        for recipe in recipes:
            if (row := table.get(str(recipe))) is None:
                yield Record(str(recipe), "", error=f"{recipe} is not wanted.")
                continue
            kl, seconds, found = (*row, *(1.0, ())[len(row) - 1 :])
            figures = {"kl": kl * (1 + number), "top1": 0.5, "keep": 0.3, "kv_bytes": 30, "kv_bytes_full": 100}
            figures["share"] = 0.3
            figures |= {"prefill_seconds": seconds, "prefill_seconds_full": 1.0}
            facts = {"facts": len(found), "facts_found": sum(found)} if found else {}
            yield Record(str(recipe), "", figures={**figures, **facts})

    monkeypatch.setattr(Measurer, "__call__", measure)
    return table


def tuner(pieces: Sequence[TextPiece] = PIECES, budget: Budget = SHARE, *more: Any) -> Tuner:
    return Tuner(tiny("llama"), Numbers(), pieces, budget, "tiny", *more)  # type: ignore[arg-type]


def outcome(*arguments: Any) -> dict[str, Any]:
    one = tuner(*arguments)
    one.run()
    return one.to_json()


def test_a_winner_is_named(made: dict[str, Any]) -> None:
    made.update({"tova(bytes=0.3)": (0.2,), "adakv(tova, bytes=0.3)": (0.1,), "knorm(bytes=0.3)": (0.3,)})
    told = outcome()
    assert told["recipe"] == "adakv(tova, bytes=0.3)" and told["tied"] == [told["recipe"]]
    assert told["recipe_in_full"] == (
        "adakv(tova, floor=0.2, safeguard='mix', bytes=0.3, sinks=0, recent=1, protect_prompt=False, prefill=True)"
    )
    assert told["verdict"] == ["Use adakv(tova, bytes=0.3): the best of 3 recipes on 8 pieces."]
    assert [row["recipe"] for row in told["rows"]] == ["adakv(tova, bytes=0.3)", "tova(bytes=0.3)", "knorm(bytes=0.3)"]
    assert told["rows"][0]["kl"]["mean"] == pytest.approx(0.45)
    assert all(each["reason"].endswith(("is not wanted.", "a larger budget.")) for each in told["dropped"])
    tried = {*(row["recipe"] for row in told["rows"]), *(each["recipe"] for each in told["dropped"])}
    assert set(map(str, with_budget(scorers(), SHARE)[0])) <= tried


def test_of_what_is_tied_the_cheapest_is_used(made: dict[str, Any]) -> None:
    made.update({"tova(bytes=0.3)": (0.2, 2.0), "knorm(bytes=0.3)": (0.2, 1.5), "keydiff(bytes=0.3)": (0.9, 1.0)})
    told = outcome()
    assert told["recipe"] == "knorm(bytes=0.3)"
    assert set(told["tied"]) == {"tova(bytes=0.3)", "knorm(bytes=0.3)"}
    (sentence,) = told["verdict"]
    assert sentence.startswith(
        "There is no winner: 8 pieces cannot tell knorm(bytes=0.3) from tova(bytes=0.3). Use knorm"
    )


def test_few_pieces_name_nothing(made: dict[str, Any]) -> None:
    made.update({"tova(bytes=0.3)": (0.2,), "knorm(bytes=0.3)": (0.9,)})
    told = outcome(PIECES[:5])
    assert (told["recipe"], told["recipe_in_full"], told["tied"], len(told["rows"])) == (None, None, [], 2)
    assert (
        "(measured on 5 pieces)" in told["verdict"][0] and told["verdict"][1] == "The best so far is tova(bytes=0.3)."
    )


@pytest.mark.parametrize("finds", [True, False])
def test_facts_decide_only_where_the_full_cache_finds_any(made: dict[str, Any], finds: bool) -> None:
    made["full"] = [finds, False]
    made.update({"tova(bytes=0.3)": (0.2, 1.0, [True, True]), "knorm(bytes=0.3)": (0.1, 1.0, [False, False])})
    told = outcome([piece(number, ["a", "b"]) for number in range(8)])
    assert told["recipe"] == ("tova(bytes=0.3)" if finds else "knorm(bytes=0.3)")
    assert ("retrieval says nothing" in told["verdict"][-1]) != finds
    assert told["full"]["found"]["mean"] == (0.5 if finds else 0.0)
    assert {row["recipe"]: row["found"]["mean"] for row in told["rows"]} == {
        "tova(bytes=0.3)": 1,
        "knorm(bytes=0.3)": 0,
    }


def test_nothing_can_run(made: dict[str, Any]) -> None:
    with pytest.raises(KeepsetError, match=r"^No recipe can run: .*(is not wanted|a larger budget)"):
        tuner().run()


def test_what_the_model_lacks_is_never_tried(monkeypatch: pytest.MonkeyPatch) -> None:
    recipes = "tova, qfilter(stats='absent.safetensors'), snapkv"
    monkeypatch.setattr(space, "scorers", lambda: Recipe.parse_list(recipes))
    one = tuner(budget=Budget(9))
    assert [str(entry.recipe) for entry in one.race.entries] == ["tova(keep=9)"]
    assert list(one.unfit) == ["snapkv(keep=9)", "qfilter(stats='absent.safetensors', keep=9)"]
    assert "There is no file 'absent.safetensors'" in one.unfit["qfilter(stats='absent.safetensors', keep=9)"]
    assert "below the 64 entries that always stay" in one.unfit["snapkv(keep=9)"]
    assert not tiny("llama")._forward_pre_hooks


@pytest.mark.parametrize("budget", [Budget(bytes=1.0), Budget(50), Budget(9999)], ids=text_of)
def test_a_budget_that_drops_nothing_is_refused(budget: Budget) -> None:
    said = rf"^{text_of(budget)} leaves nothing to choose of pieces of 50 tokens: ask for less"
    with pytest.raises(KeepsetError, match=said):
        tuner(budget=budget)


@pytest.mark.full
def test_a_race_for_real(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(space, "scorers", lambda: Recipe.parse_list("random, h2o, second_pass(statistic='rms'), gvote"))
    steps: list[None] = []
    one = tuner(PIECES[:4], SHARE, lambda: steps.append(None))
    one.run()
    told = one.to_json()
    assert one.race.done == one.race.planned
    assert len(steps) == sum(row["pieces"] for row in told["rows"]) + 1  # gvote keeps too much of the first piece
    nothing = [each["recipe"] for each in told["dropped"] if "there is nothing to choose" in each["reason"]]
    assert all(name.startswith("ams(") for name in nothing)  # 36 of 50 entries always stay
    assert [each["recipe"] for each in told["dropped"] if each["recipe"] not in nothing] == ["gvote"]
    assert told["measured"] == told["pieces"] == 4 and told["full"]["kv_bytes"] == 50 * 2 * 2 * 2 * 16 * 4
    kls = [row["kl"]["mean"] for row in told["rows"] if row["finalist"]]
    assert kls == sorted(kls) and len(kls) == 10  # Half of 3 scorers and 8 compositions of all but random
    assert all(row["pieces"] == (4 if row["finalist"] else 2) and row["share"] <= 0.3 for row in told["rows"])


def test_all_that_is_tried_runs_or_says_why() -> None:
    one = tuner(PIECES[:1])
    one.run()
    told = one.to_json()
    ran, reasons = {row["recipe"] for row in told["rows"]}, {each["recipe"]: each["reason"] for each in told["dropped"]}
    assert ran | reasons.keys() == {*one.unfit, *(str(entry.recipe) for entry in one.race.entries)}
    able = {recipe for recipe, reason in reasons.items() if "there is nothing to choose" not in reason}
    assert len(ran) > 40 and {recipe.split("(")[0] for recipe in able} <= {"gvote"}
    assert "snapkv(bytes=0.3)" in reasons.keys() - able
