import pytest

from keepset import Budget, Recipe
from keepset.methods.streaming_llm import StreamingLLM
from tests.methods.naive import SHAPES, Shape, check_scores, kept, length_of, observe


@pytest.mark.parametrize("shape", SHAPES)
def test_scores_grow_with_the_position(shape: Shape) -> None:
    observation = observe(shape)
    heads = range(shape.kv_heads)
    expected = [[[float(t) for t in range(length)] for _ in heads] for length in shape.lengths]
    check_scores(StreamingLLM(), observation, expected, rtol=0, atol=0)


@pytest.mark.parametrize("shape", SHAPES)
@pytest.mark.parametrize("keep", [4, 7, 8])
def test_keeps_the_first_four_and_the_newest(shape: Shape, keep: int) -> None:
    observation = observe(shape)
    keep_set = Recipe.of(StreamingLLM(), keep=keep).select(observation)
    for request in range(shape.batch):
        length = length_of(observation, request)
        expected = [t for t in range(length) if t < 4 or t >= length - (keep - 4)]
        for head in range(shape.kv_heads):
            assert kept(keep_set, observation, request, head) == expected


def test_sinks_can_be_changed() -> None:
    observation = observe(Shape((30,), 1, 1, 4, 4))
    keep_set = StreamingLLM().select(observation, Budget(6, sinks=1))
    assert kept(keep_set, observation, 0, 0) == [0, 25, 26, 27, 28, 29]
