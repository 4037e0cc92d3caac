import pytest
import torch

from keepset import Budget, KeepsetError, Observation
from keepset.core.features.runtime_features import ModelStatistics
from keepset.methods.qfilter import QFilter
from tests.methods.naive import DTYPES, EXACT, SHAPES, Shape, check_scores, dot, kept, length_of, observe


@pytest.mark.parametrize("dtype", DTYPES)
@pytest.mark.parametrize("shape", SHAPES)
def test_scores_are_projections_on_the_direction_of_the_layer_and_head(shape: Shape, dtype: torch.dtype) -> None:
    observation = observe(shape, dtype=dtype, layer=5, layers=(2, 5, 7))
    directions = observation[ModelStatistics("")].layers[5].direction.tolist()
    expected = [
        [
            [dot(key, directions[head]) for key in observation.keys[request, head, :length].tolist()]
            for head in range(shape.kv_heads)
        ]
        for request in range(shape.batch)
        for length in [length_of(observation, request)]
    ]
    check_scores(QFilter(), observation, expected, **EXACT)


def test_the_key_that_reaches_farthest_stays() -> None:
    observation = observe(Shape((9,), 2, 1, 4, 4))
    observation.keys[0, 1, 6] = 100 * observation[ModelStatistics("")].layers[0].direction[1]
    assert kept(QFilter().select(observation, Budget(1)), observation, 0, 1) == [6]


def test_each_file_has_its_own_statistics() -> None:
    observation = observe(Shape((6,), 1, 1, 4, 4))
    with pytest.raises(KeepsetError, match=r"Observation\(features=\{ModelStatistics\(file='other'\): \.\.\.\}\)"):
        QFilter(stats="other").score(observation)


@pytest.mark.parametrize(
    ("shape", "layers"),
    [
        (Shape((6,), 1, 4, 4, 4), (0, 1)),
        (Shape((6,), 2, 2, 6, 4), (0, 1)),
        (Shape((6,), 2, 2, 4, 4), (0, 1, 2)),
        (Shape((6,), 2, 2, 4, 4), (0, 3)),
    ],
    ids=["kv_heads", "head_dim", "fewer_layers", "other_layers"],
)
def test_statistics_of_another_model_are_refused(shape: Shape, layers: tuple[int, ...]) -> None:
    theirs = observe(Shape((6,), 2, 2, 4, 4), layers=(0, 1)).features
    keys = torch.zeros(1, shape.kv_heads, 6, shape.head_dim)
    observation = Observation(keys=keys, values=keys, layers=layers, features=theirs)
    with pytest.raises(KeepsetError, match="are of another model: theirs has 2 layers with 2 KV heads of size 4"):
        QFilter().score(observation)
