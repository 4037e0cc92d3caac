"""Pieces of texts, figures of pieces against runs of their own, and the outcome of a race."""

import copy
import gc
from collections.abc import Iterator, Sequence
from itertools import pairwise
from statistics import fmean
from typing import Any

import pytest
import torch
from hypothesis import given
from hypothesis import strategies as st
from tokenizers.processors import TemplateProcessing
from torch import Tensor
from transformers import DynamicCache

import keepset
from keepset.core.budget import Budget
from keepset.core.features.attention import SecondPass
from keepset.errors import KeepsetError
from keepset.hf.prompt_session import Recorder
from keepset.lab import texts
from keepset.lab import tune as module
from keepset.lab.record import Record
from keepset.lab.tune import SHARE as PARTS
from keepset.lab.tune import SIZES, Measurer, TextPiece, Tuner, cut
from keepset.recipe import Recipe
from tests.hf.models import hooks_on, prompt, tiny
from tests.lab.compare.test_prompt import best, continued, divergence

LENGTH, AFTER, MOST = 50, 9, Budget(45)
RECIPES = Recipe.parse_list(
    "tova(keep=0.3), adakv(h2o, keep=15), kvcompose(keep=0.3), expected_attention(future=16, keep=15), gvote(p_nuc=0.1)"
)

# --- pieces


@pytest.fixture
def tokenizer(embedded: Any) -> Any:
    return embedded[1]


@pytest.fixture(scope="module")
def essay(embedded: Any) -> list[int]:
    return embedded[1](texts.essay(), verbose=False)["input_ids"]


def of(tokenizer: Any, ids: list[int], *, longest: int | None = None, seed: int = 0) -> list[TextPiece]:
    return cut(tokenizer, [str(tokenizer.decode(ids))], longest=longest, seed=seed)


SIZE = {496: 256, 700: 256, 991: 256, 992: 512, 2047: 1024, 2048: 1024, 3967: 1024, 3968: 2048, 12000: 2048}


@pytest.mark.few(4)
@pytest.mark.parametrize(("tokens", "size"), SIZE.items())
def test_pieces_are_as_long_as_the_text_allows(tokenizer: Any, essay: list[int], tokens: int, size: int) -> None:
    starts = []
    for piece in of(tokenizer, essay[:tokens]):
        ids = [*piece.prompt[0].tolist(), *piece.continuation[0].tolist()]
        assert len(ids) == size and piece.continuation.shape[1] == size // PARTS
        starts.append(next(at for at in range(tokens - size + 1) if essay[at : at + size] == ids))
    assert len(starts) == module.PIECES == 16
    starts.sort()
    assert min(b - a for a, b in pairwise(starts)) >= size // PARTS  # continuations never overlap


@given(st.lists(st.integers(0, 5000), min_size=1, max_size=6), st.sampled_from(SIZES))
def test_places_are_in_their_texts_and_no_nearer_than_they_must(lengths: list[int], size: int) -> None:
    places = module._places(lengths, size)
    assert len(set(places)) == len(places)
    assert all(at in range(lengths[text] - size + 1) for text, at in places)
    near = min((b - a for (s, a), (t, b) in pairwise(places) if s == t), default=size)
    assert near >= size // PARTS
    if near < size:
        # With twice the distance there would have been too few.
        assert sum(1 + (length - size) // (2 * near) for length in lengths if length >= size) < module.PIECES


def test_the_seed_decides_order_and_choice_among_texts_that_are_long_enough(tokenizer: Any, essay: list[int]) -> None:
    first, again, other = ([p.prompt[0].tolist() for p in of(tokenizer, essay[:3000], seed=s)] for s in (0, 0, 1))
    assert first == again != other
    sources = [str(tokenizer.decode(essay[at : at + 300])) for at in range(0, 3000, 300)]
    found = cut(tokenizer, sources, longest=None, seed=0)
    used = {text for piece in found for text in sources if tokenizer.decode(piece.continuation[0]) in text}
    assert len(found) == module.PIECES and len(used) > 5
    with pytest.raises(KeepsetError, match="has 495 tokens, too few for 16 pieces of 256: give one of 496 tokens"):
        of(tokenizer, essay[:495])
    with pytest.raises(KeepsetError, match="context of 256 tokens is too short for pieces of 256 tokens"):
        of(tokenizer, essay, longest=256)
    assert len(of(tokenizer, essay, longest=257)) == module.PIECES


def test_pieces_fit_the_models_context(tokenizer: Any, essay: list[int]) -> None:
    tokenizer = copy.deepcopy(tokenizer)
    begin = TemplateProcessing(single="<|im_start|> $A", special_tokens=[("<|im_start|>", 1)])
    tokenizer.backend_tokenizer.post_processor = begin
    for longest in (257, 513, 1024, 2048, 2049):
        for piece in of(tokenizer, essay, longest=longest):
            assert piece.prompt[0, 0] == 1 and piece.prompt.shape[1] + piece.continuation.shape[1] <= longest


# --- figures


def piece(number: int = 0) -> TextPiece:
    ids = prompt(1, LENGTH + AFTER, seed=number)
    return TextPiece(ids[:, :LENGTH], ids[:, LENGTH:])


def measurer(*pieces: TextPiece, budget: Budget = MOST, architecture: str = "llama") -> Measurer:
    return Measurer(tiny(architecture), pieces, budget)


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
        assert figures["kv_bytes_full"] == event.nbytes_before
        assert figures["prefill_seconds"] > figures["prefill_seconds_full"] > 0


def test_nothing_of_a_piece_stays() -> None:
    """Neither tensors nor hooks, without waiting for the collection of what is unreachable."""
    gc.collect()
    gc.disable()
    try:
        before, hooked = held(), hooks_on(tiny("llama"))
        assert len(list(measurer(piece())(0, RECIPES))) == len(RECIPES)
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
TRIED = "tova, adakv(tova), knorm, keydiff"


@pytest.fixture
def made(monkeypatch: pytest.MonkeyPatch) -> dict[str, Any]:
    """Figures by a recipe's text: KL and, where given, prefill seconds; others fail."""
    table: dict[str, Any] = {}

    def measure(self: Measurer, number: int, recipes: Sequence[Recipe]) -> Iterator[Record]:
        self.full_bytes[number] = 100
        for recipe in recipes:
            if (row := table.get(str(recipe))) is None:
                yield Record(str(recipe), "", error=f"{recipe} is not wanted.")
                continue
            kl, seconds = (*row, 1.0)[:2]
            figures = {
                "kl": kl * (1 + number),
                "top1": 0.5,
                "keep": 0.3,
                "kv_bytes": 30,
                "kv_bytes_full": 100,
                "counted_bytes": 15,
            }
            figures |= {"share": 0.3, "prefill_seconds": seconds, "prefill_seconds_full": 1.0}
            yield Record(str(recipe), "", figures=figures)

    monkeypatch.setattr(Measurer, "__call__", measure)
    return table


def tuner(recipes: str = TRIED, pieces: Sequence[TextPiece] = PIECES, budget: Budget = SHARE, *more: Any) -> Tuner:
    return Tuner(tiny("llama"), pieces, Recipe.parse_list(recipes), budget, "tiny", *more)


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
    assert told["dropped"] == [{"recipe": "keydiff(bytes=0.3)", "reason": "keydiff(bytes=0.3) is not wanted."}]


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
    told = outcome(TRIED, PIECES[:5])
    assert (told["recipe"], told["recipe_in_full"], told["tied"], len(told["rows"])) == (None, None, [], 2)
    assert (
        "(measured on 5 pieces)" in told["verdict"][0] and told["verdict"][1] == "The best so far is tova(bytes=0.3)."
    )


def test_nothing_can_run(made: dict[str, Any]) -> None:
    with pytest.raises(KeepsetError, match=r"^No recipe can run: .*is not wanted"):
        tuner().run()


def test_what_the_model_lacks_is_never_tried_and_recipes_have_no_budgets_of_their_own() -> None:
    one = tuner("tova, qfilter(stats='absent.safetensors'), snapkv", PIECES, Budget(9))
    assert [str(entry.recipe) for entry in one.race.entries] == ["tova(keep=9)"]
    assert {*one.unfit} == {"snapkv(keep=9)", "qfilter(stats='absent.safetensors', keep=9)"}
    assert "There is no file 'absent.safetensors'" in one.unfit["qfilter(stats='absent.safetensors', keep=9)"]
    assert "below the 64 entries that always stay" in one.unfit["snapkv(keep=9)"]
    assert "there is nothing to choose" in tuner("snapkv").unfit["snapkv(bytes=0.3)"]
    assert not tiny("llama")._forward_pre_hooks
    with pytest.raises(KeepsetError, match=r"^knorm\(keep=9\) names a budget, .* leave it out"):
        tuner("tova, knorm(keep=9)")


def test_a_race_for_real() -> None:
    steps: list[None] = []
    recipes = "random, h2o, second_pass(statistic='rms'), tova, knorm, keydiff, pool(tova), adakv(h2o), gvote"
    one = tuner(recipes, PIECES[:4], SHARE, lambda: steps.append(None))
    one.run()
    told = one.to_json()
    assert one.race.done == one.race.planned
    assert len(steps) == sum(row["pieces"] for row in told["rows"]) + 1  # gvote keeps too much of the first piece
    assert [each["recipe"] for each in told["dropped"]] == ["gvote"]
    assert told["measured"] == told["pieces"] == 4 and told["full"]["kv_bytes"] == 50 * 2 * 2 * 2 * 16 * 4
    kls = [row["kl"]["mean"] for row in told["rows"] if row["finalist"]]
    assert kls == sorted(kls) and len(kls) == 4  # half of 8
    assert all(row["pieces"] == (4 if row["finalist"] else 2) and row["share"] <= 0.3 for row in told["rows"])
