import hashlib
from typing import Any

import pytest
from hypothesis import given
from hypothesis import strategies as st

from keepset import KeepsetError
from keepset.lab.calibrate.corpus import SHORTEST, Corpus
from keepset.lab.corpus import default_texts
from keepset.lab.texts import essay
from tests.tiers import examples


class Tokenizer:
    """A token per number, and one that begins every text where there is such a one."""

    def __init__(self, bos: int | None = None) -> None:
        self.bos_token_id, self.bos_token = bos, None if bos is None else "<s>"

    def __call__(self, text: str, add_special_tokens: bool = True, **_: Any) -> dict[str, list[int]]:
        begin = [self.bos_token_id] if add_special_tokens and self.bos_token_id is not None else []
        return {"input_ids": [*begin, *(int(word) for word in text.split())]}

    def decode(self, ids: list[int]) -> str:
        return " ".join(str(int(number)) for number in ids)


def words(first: int, count: int) -> str:
    return " ".join(str(word) for word in range(first, first + count))


def draw(texts: list[str], bos: int | None = None, tokens: int = 10**6, length: int = 20, seed: int = 0) -> Corpus:
    return Corpus.draw(Tokenizer(bos), texts, tokens=tokens, length=length, seed=seed)  # type: ignore[arg-type]


@examples(60, derandomize=False)
@given(
    counts=st.lists(st.integers(0, 90), min_size=1, max_size=4),
    bos=st.sampled_from([None, 999]),
    tokens=st.integers(16, 200),
    length=st.integers(16, 40),
    seed=st.integers(0, 2**63 - 1),
)
def test_passages_are_parts_of_texts(counts: list[int], bos: int | None, tokens: int, length: int, seed: int) -> None:
    begin = 0 if bos is None else 1
    texts = [words(1000 * (n + 1), count) for n, count in enumerate(counts)]
    sizes = [min(length - begin, c - at) + begin for c in counts for at in range(0, c, length - begin)]
    if all(size < SHORTEST for size in sizes):
        with pytest.raises(KeepsetError, match="fewer than 16 tokens"):
            draw(texts, bos, tokens, length, seed)
        return
    corpus = draw(texts, bos, tokens, length, seed)
    whole = sum(size for size in sizes if size >= SHORTEST)
    assert corpus.tokens <= min(tokens, whole)
    assert corpus.tokens > min(tokens, whole) - length
    drawn: set[int] = set()
    for passage in corpus.passages:
        first, *rest = passage.tolist()[begin:]
        assert bos is None or passage[0] == bos
        assert rest == list(range(first + 1, first + 1 + len(rest)))
        assert SHORTEST <= len(passage) <= length
        assert drawn.isdisjoint({first, *rest})
        drawn |= {first, *rest}


def test_the_seed_decides_the_order_and_the_hash_is_that_of_all_texts() -> None:
    def order(seed: int) -> list[int]:
        return [int(passage[0]) for passage in draw([words(0, 400)], seed=seed).passages]

    assert order(3) == order(3) != order(4)
    assert sorted(order(3)) == sorted(order(4)) == list(range(0, 400, 20))
    texts = [words(0, 30), words(50, 30)]
    expected = hashlib.sha256(f"{texts[0]}\0{texts[1]}".encode()).hexdigest()
    assert draw(texts, tokens=16).sha256 == draw(texts).sha256 == expected
    assert draw(texts[::-1]).sha256 != expected
    assert len(default_texts()) > 10
    assert essay() not in default_texts()
