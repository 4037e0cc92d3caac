"""Files of texts, contexts cut from them, how an evaluation knows them again, and what is said of tables."""

import dataclasses
import json
from pathlib import Path
from typing import Any

import pytest
import torch
from hypothesis import given
from hypothesis import strategies as st

from keepset import KeepsetError, Recipe
from keepset.core.tables import save
from keepset.lab.cli.compile import coverage, describe_tables
from keepset.lab.compile.corpus import (
    ContextPool,
    is_contaminated,
    passage_hashes,
    read_texts,
    refuse_contaminated,
)
from tests.core.test_tables import PROVENANCE, random_tables
from tests.lab.calibrate.test_corpus import Tokenizer
from tests.tiers import examples

TOKENS, CONTINUATION = 8, 3


def words(count: int, name: str = "w") -> str:
    return " ".join(f"{name}{i}" for i in range(count))


def drawn(tokenizer: Any, texts: list[str], count: int = 99, seed: int = 0) -> ContextPool:
    return ContextPool.draw(tokenizer, texts, tokens=TOKENS, continuation=CONTINUATION, count=count, seed=seed)


@pytest.mark.parametrize("bos", [None, 999])
def test_contexts_are_pieces_of_texts_that_do_not_overlap(bos: int | None) -> None:
    tokenizer, begin = Tokenizer(bos), [] if bos is None else [bos]
    numbers = [list(range(100 * n, 100 * n + count)) for n, count in enumerate((50, 10, 24))]
    texts = [" ".join(map(str, text)) for text in numbers]
    corpus, size = drawn(tokenizer, texts), TOKENS + CONTINUATION - len(begin)
    assert all(context.tokens == TOKENS for context in corpus.contexts)
    parts = [text[at : at + size] for text in numbers for at in range(0, len(text), size)]
    expected = [[*begin, *part] for part in parts if len(part) == size]
    assert sorted(context.ids.tolist() for context in corpus.contexts) == expected
    again = drawn(tokenizer, texts, count=3)
    assert [a.name for a in again.contexts] == [a.name for a in corpus.contexts][:3]
    assert [a.name for a in drawn(tokenizer, texts, seed=1).contexts] != [a.name for a in corpus.contexts]


def test_the_same_text_twice_is_one_context_a_short_one_none_and_files_may_be_lines(tmp_path: Path) -> None:
    assert len(drawn(Tokenizer(), [words(11, "")] * 3).contexts) == 1
    with pytest.raises(KeepsetError, match="No text has 11 tokens, a context of 8 and the 3 that follow it"):
        drawn(Tokenizer(), [words(10, ""), words(3, "")])
    assert passage_hashes(" \n") == ()
    assert len(passage_hashes("one")) == 1 and passage_hashes("one  two") == passage_hashes(
        "one\ntwo"
    ) != passage_hashes("one")
    plain, lines = tmp_path / "a.txt", tmp_path / "b.jsonl"
    plain.write_text('{"text": "not a line"}', encoding="utf-8")
    lines.write_text(
        json.dumps({"text": "one\ntwo", "more": 1}) + "\n\n" + json.dumps({"text": "drei €"}), encoding="utf-8"
    )
    assert read_texts([lines, plain]) == ["one\ntwo", "drei €", '{"text": "not a line"}']


@pytest.mark.parametrize(
    ("content", "because"),
    [
        (b"\xff", "is not UTF-8"),
        (b"\n \n", "is empty"),
        (b'{"text": "a"}\n{"text": ', "Line 2 of"),
        (b'{"text": 3}', "Line 1 of"),
        (b'["text"]', "Line 1 of"),
        (b'{"texts": "a"}', "Line 1 of"),
        (b"[" * 99999, "Line 1 of"),
    ],
)
def test_bad_files_in_one_sentence(tmp_path: Path, content: bytes, because: str) -> None:
    """`test_texts.py` has those of plain texts."""
    (tmp_path / "a.jsonl").write_bytes(content)
    with pytest.raises(KeepsetError) as caught:
        read_texts([tmp_path / "a.jsonl"])
    assert because in str(caught.value) and str(caught.value).endswith(".") and "\n" not in str(caught.value)


@examples(30)
@given(first=st.integers(0, 600), length=st.integers(300, 400), seed=st.integers(0, 99))
def test_a_shared_passage_is_known_wherever_it_was_cut(first: int, length: int, seed: int) -> None:
    text = words(1000, f"s{seed}.").split()
    tables = random_tables()
    tables.provenance["marks"] = [passage_hashes(" ".join(text))]  # type: ignore[index]
    passage = " ".join(text[first : first + length])
    assert is_contaminated(tables, f"{words(200, 'x')}\n\n{passage}  {words(99, 'y')}")
    assert not is_contaminated(tables, words(1000, f"other{seed}."))


def test_recipes_are_not_judged_by_what_their_tables_have_seen(tmp_path: Path) -> None:
    tables, text, compiled = random_tables(), words(500), tmp_path / "compiled"
    save(dataclasses.replace(tables, provenance={**PROVENANCE, "marks": [list(passage_hashes(text))]}), compiled)
    save(tables, tmp_path / "silent")
    with pytest.raises(KeepsetError, match="were compiled from this context"):
        refuse_contaminated(Recipe.parse(f"compilerkv(tables={str(compiled)!r}, keep=70)"), f"Read this. {text}")
    refuse_contaminated(Recipe.parse(f"compilerkv(tables={str(compiled)!r}, keep=70)"), words(500, "other"))
    for recipe in (f"compilerkv(tables={str(tmp_path / 'silent')!r}, keep=70)", "compilerkv(keep=70)", "adakv(snapkv)"):
        refuse_contaminated(Recipe.parse(recipe), text)
    assert torch.equal(tables.weights, random_tables().weights)


def test_thin_bins_are_named_weights_and_thresholds_counted() -> None:
    counts = torch.full((20, 4), 2)
    full = dataclasses.replace(random_tables(), counts=counts.clone())
    assert len(coverage(full)) == 5
    counts[3:6, 0] = 1
    counts[19, 0] = counts[:, 2] = counts[0, 3] = 0
    *lines, named = coverage(dataclasses.replace(full, counts=counts))
    assert named.startswith("25 of 80 bins have fewer than 2 contexts")
    assert named.endswith("(perplexity: entropy): 0: 3-5, 19; 2: 0-19; 3: 0")
    assert [int(x) for x in lines[1].partition(":")[2].split()] == counts[:, 0].tolist()
    tables = random_tables()
    tables.weights.fill_(1.0)
    tables.weights[0, 2, 3] = tables.weights[1, 0, 1] = 2.0
    tables.gate[0] = 0.9
    lines = describe_tables(tables)
    first, second = (lines.index(f"keep={keep}") for keep in (8, 64))
    assert lines[first + 1] == "  head weights: 1 in 11, 2 in 1"
    assert lines[first + 2].endswith("layer.head: 2.3 (2), 0.0 (1), 0.1 (1), 0.2 (1), 0.3 (1)")
    assert lines[first + 3] == "  thresholds: 0.9 in 240"
    assert lines[second + 2].endswith("layer.head: 0.1 (2), 0.0 (1), 0.2 (1), 0.3 (1), 1.0 (1)")
    assert lines[second + 3].startswith("  thresholds: 0.8") and "mean" in lines[second + 3]
