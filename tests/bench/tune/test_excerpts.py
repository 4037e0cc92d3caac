"""Pieces of texts: how long they are, where they lie, and what is hidden in them."""

from __future__ import annotations

import copy
from itertools import pairwise
from typing import Any

import pytest
from hypothesis import given
from hypothesis import strategies as st
from tokenizers.processors import TemplateProcessing

from keepset import texts
from keepset.bench.tune import excerpts
from keepset.bench.tune.excerpts import FACTS, PIECES, SHARE, SIZES, TextPiece, cut
from keepset.errors import KeepsetError


@pytest.fixture
def tokenizer(embedded: Any) -> Any:
    return embedded[1]


@pytest.fixture(scope="module")
def essay(embedded: Any) -> list[int]:
    return embedded[1](texts.essay(), verbose=False)["input_ids"]


def of(
    tokenizer: Any, ids: list[int], *, retrieval: bool = False, longest: int | None = None, seed: int = 0
) -> list[TextPiece]:
    return cut(tokenizer, [str(tokenizer.decode(ids))], retrieval=retrieval, longest=longest, seed=seed)


SIZE = {496: 256, 700: 256, 991: 256, 992: 512, 2047: 1024, 2048: 1024, 3967: 1024, 3968: 2048, 12000: 2048}


@pytest.mark.few(4)
@pytest.mark.parametrize(("tokens", "size"), SIZE.items())
def test_pieces_are_as_long_as_the_text_allows(tokenizer: Any, essay: list[int], tokens: int, size: int) -> None:
    starts = []
    for piece in of(tokenizer, essay[:tokens]):
        ids = [*piece.prompt[0].tolist(), *piece.continuation[0].tolist()]
        assert len(ids) == size and piece.continuation.shape[1] == size // SHARE
        assert piece.facts == piece.questions == ()
        starts.append(next(at for at in range(tokens - size + 1) if essay[at : at + size] == ids))
    assert len(starts) == PIECES == 16
    starts.sort()
    assert min(b - a for a, b in pairwise(starts)) >= size // SHARE  # continuations never overlap


def test_a_long_text_gives_pieces_that_do_not_overlap(tokenizer: Any, essay: list[int]) -> None:
    whole = essay * 2
    found = of(tokenizer, whole, longest=1025)
    assert {piece.prompt.shape[1] + piece.continuation.shape[1] for piece in found} == {1024}
    assert len({tuple(piece.prompt[0].tolist()[:20]) for piece in found}) == PIECES
    for piece in found:
        at = next(at for at in range(0, len(whole), 1024) if whole[at : at + 960] == piece.prompt[0].tolist())
        assert at % 1024 == 0


@given(st.lists(st.integers(0, 5000), min_size=1, max_size=6), st.sampled_from(SIZES))
def test_places_are_in_their_texts_and_no_nearer_than_they_must(lengths: list[int], size: int) -> None:
    places = excerpts._places(lengths, size)
    assert len(set(places)) == len(places)
    assert all(at in range(lengths[text] - size + 1) for text, at in places)
    near = min((b - a for (s, a), (t, b) in pairwise(places) if s == t), default=size)
    assert near >= size // SHARE
    if near < size:
        # With twice the distance there would have been too few.
        assert sum(1 + (length - size) // (2 * near) for length in lengths if length >= size) < PIECES


def test_the_seed_decides_order_and_choice_among_all_texts(tokenizer: Any, essay: list[int]) -> None:
    first, again, other = ([p.prompt[0].tolist() for p in of(tokenizer, essay[:3000], seed=s)] for s in (0, 0, 1))
    assert first == again != other
    sources = [str(tokenizer.decode(essay[at : at + 300])) for at in range(0, 3000, 300)]
    found = cut(tokenizer, sources, retrieval=False, longest=None, seed=0)
    used = {text for piece in found for text in sources if tokenizer.decode(piece.continuation[0]) in text}
    assert len(found) == PIECES and len(used) > 5


@pytest.mark.parametrize("template", [True, False])
def test_facts_are_hidden_at_all_depths_and_asked_for(tokenizer: Any, essay: list[int], template: bool) -> None:
    if not template:
        tokenizer = copy.deepcopy(tokenizer)
        tokenizer.chat_template = None
        begin = TemplateProcessing(single="<|im_start|> $A", special_tokens=[("<|im_start|>", 1)])
        tokenizer.backend_tokenizer.post_processor = begin
    answers = set()
    for piece in of(tokenizer, essay[:2048], retrieval=True, longest=8192):
        prompt = str(tokenizer.decode(piece.prompt[0]))
        assert piece.prompt[0, 0] == 1
        assert len(piece.facts) == len(piece.questions) == FACTS == 4
        for number, (fact, question) in enumerate(zip(piece.facts, piece.questions, strict=True)):
            assert prompt.count(fact.sentence) == 1 and fact.answer in fact.sentence
            assert prompt.index(fact.sentence) / len(prompt) == pytest.approx((number + 0.5) / 4, abs=0.1)
            assert fact.question in question and fact.answer not in question
            assert fact.sentence.startswith(question[question.index("The secret") :])
            answers.add(fact.answer)
        assert len({fact.question for fact in piece.facts}) == FACTS
        assert piece.continuation.shape == (1, 64)
    assert len(answers) > 50


@pytest.mark.full
@pytest.mark.parametrize("retrieval", [False, True])
def test_pieces_fit_the_models_context(tokenizer: Any, essay: list[int], retrieval: bool) -> None:
    for longest in (768, 1024, 1536, 2048, 2049):
        for piece in of(tokenizer, essay, retrieval=retrieval, longest=longest):
            asked = max((len(tokenizer(text)["input_ids"]) for text in piece.questions), default=0)
            after = max(asked + excerpts.ANSWER_TOKENS, piece.continuation.shape[1])
            assert piece.prompt.shape[1] + after <= longest


def test_too_little_text_and_too_short_a_context_are_refused(tokenizer: Any, essay: list[int]) -> None:
    with pytest.raises(KeepsetError, match="has 495 tokens, too few for 16 pieces of 256: give one of 496 tokens"):
        of(tokenizer, essay[:495])
    with pytest.raises(KeepsetError, match="context of 300 tokens is too short for pieces of 256 tokens"):
        of(tokenizer, essay, retrieval=True, longest=300)
    assert len(of(tokenizer, essay, longest=300)) == PIECES
