"""Texts made to a length: the sizes that are found, against all sizes."""

from typing import Any

from hypothesis import given
from hypothesis import strategies as st

from keepset.lab.tasks.fit import fit, measure, room
from keepset.lab.tasks.task import Example, Question


def example(text: str) -> Example:
    return Example("0", text, (Question("", None),))


@given(
    each=st.lists(st.integers(1, 9), min_size=1, max_size=60),
    start=st.integers(0, 50),
    smallest=st.integers(1, 5),
    space=st.integers(1, 400),
    guess=st.one_of(st.none(), st.integers(-3, 100)),
)
def test_the_size_fills_the_room(each: list[int], start: int, smallest: int, space: int, guess: int | None) -> None:
    tried = []

    def make(size: int) -> Example:
        assert smallest <= size <= max(smallest, len(each))
        tried.append(size)
        return example("x" * (start + sum(each[:size])))

    def count(made: Example) -> int:
        return len(made.context)

    found = fit(make, count, space, smallest=smallest, largest=max(smallest, len(each)), guess=guess)
    lengths = {size: start + sum(each[:size]) for size in range(smallest, max(smallest, len(each)) + 1)}
    fitting = [size for size, length in lengths.items() if length <= space]
    assert (found is None) == (not fitting)
    assert len(tried) == len(set(tried))
    if found is not None:
        size, made = found
        assert count(made) == lengths[size] <= space
        assert size == fitting[-1] or lengths[size] == lengths[fitting[-1]] or lengths[size] >= 0.97 * space


def test_parts_count_as_much_as_the_whole_or_more_and_so_does_a_chat_template(tokenizer: Any) -> None:
    made = Example("0", "One. Two", (Question(" words.", None, prefix=" And"), Question("?", None)))
    assert measure(tokenizer, made) >= len(tokenizer("One. Two words. And")["input_ids"])
    rendered = tokenizer.apply_chat_template(
        [{"role": "user", "content": ""}], tokenize=False, add_generation_prompt=True
    )
    assert room(tokenizer, 100, 8) == 92 - len(tokenizer(rendered)["input_ids"])
    found = fit(lambda size: example("ab" * size), lambda made: len(made.context), 10_001, smallest=1)
    assert found is not None and 0.97 * 10_001 <= len(found[1].context) <= 10_001
