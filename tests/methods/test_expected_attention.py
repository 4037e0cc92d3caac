import dataclasses
import math
import weakref
from collections import Counter
from typing import Any

import pytest
import torch
from torch.utils._python_dispatch import TorchDispatchMode

from keepset import Budget, KeepsetError
from keepset.core.feature import Needs
from keepset.core.features.moments import QueryDistribution, QueryMoments
from keepset.core.features.runtime_features import ModelStatistics
from keepset.methods import expected_attention
from keepset.methods.expected_attention import ExpectedAttention
from tests.methods.formulas import FORMULAS, matmul, mean_rotation, naive_scores, transposed
from tests.methods.naive import SHAPES, Rope, Shape, check_scores, dot, kept, observe, random_statistics

CLOSE = FORMULAS["expected_attention"].exact


def test_what_nothing_looks_at_counts_by_a_hundredth_of_its_values_norm() -> None:
    observation = observe(Shape((9,), 1, 1, 4, 4), skips=(0,))
    moments = observation[QueryMoments(0)]
    # One key along the mean query draws all attention; the others look away from it, where exp is 0 in float32.
    ahead = matmul([moments.mean[0, 0].double().tolist()], transposed(mean_rotation(4, 9, 1)))[0]
    keys = torch.tensor([[1e4 * (1 if entry == 2 else -entry - 1) * x for x in ahead] for entry in range(9)])
    observation = dataclasses.replace(observation, keys=keys[None, None])
    values = observation.values[0, 0].double().tolist()
    norms = [math.sqrt(dot(value, value)) for value in values]
    expected = [(1.01 if entry == 2 else 0.01) * norms[entry] for entry in range(9)]
    scores = ExpectedAttention(future=1, skip=0, covariance=False).score(observation)[0, 0]
    assert scores.tolist() == pytest.approx(expected, rel=1e-5)


@pytest.mark.parametrize("skip", [0, 4])
@pytest.mark.parametrize("shape", SHAPES)
def test_statistics_of_a_file_take_the_place_of_the_texts_own(shape: Shape, skip: int) -> None:
    measured = random_statistics(shape, (0,), gain=1.0)
    observation = observe(shape, skips=(), features={ModelStatistics("file"): measured})
    layer, batch = measured.layers[0], (shape.batch, -1, -1)
    lengths = tuple(observation.lengths.tolist())
    moments = QueryDistribution(layer.mean.expand(*batch), layer.covariance.expand(*batch, -1), Rope(lengths))
    method = ExpectedAttention(future=7, skip=skip)
    own = observe(shape, skips=(), features={QueryMoments(skip): moments})
    expected = [naive_scores(method, own, request) for request in range(shape.batch)]
    check_scores(ExpectedAttention(future=7, skip=skip, stats="file"), observation, expected, **CLOSE)


def test_a_file_saves_the_collecting() -> None:
    assert ExpectedAttention(stats="file").traits.needs == Needs(ModelStatistics("file"))


def test_the_models_own_scaling_is_used() -> None:
    method = ExpectedAttention(future=5)
    observation = observe(Shape((15,), 1, 2, 6, 6), scaling=0.9)
    check_scores(method, observation, [naive_scores(method, observation, 0)], **CLOSE)


def test_expected_attention_is_what_sampled_queries_pay_on_average() -> None:
    size, draws = 4, 200_000
    observation = observe(Shape((12,), 1, 1, size, size), scaling=0.4, skips=(0,))
    moments = observation[QueryMoments(0)]
    rotation = torch.tensor(mean_rotation(size, 12, 3), dtype=torch.float64)
    factor = torch.linalg.cholesky(moments.covariance[0, 0].double())
    noise = torch.randn(draws, size, generator=torch.Generator().manual_seed(2), dtype=torch.float64)
    queries = (moments.mean[0, 0].double() + noise @ factor.T) @ rotation.T
    paid = (queries @ observation.keys[0, 0].double().T * 0.4).exp().mean(0)
    scores = ExpectedAttention(future=3, skip=0, value_norm=False).score(observation)[0, 0]
    torch.testing.assert_close(scores.double(), paid / paid.sum(), rtol=0.02, atol=0)


def test_the_first_tokens_that_the_statistics_leave_out_stay() -> None:
    observation = observe(Shape((20,), 2, 2, 4, 4))
    method = ExpectedAttention()
    keep_set = method.select(observation, Budget(6, sinks=method.traits.sinks))
    assert kept(keep_set, observation, 0, 1)[:4] == [0, 1, 2, 3]


def test_moments_are_asked_for() -> None:
    observation = observe(
        Shape((6,), 1, 1, 4, 4), features={QueryMoments(4): QueryDistribution(*_zeros(), lambda rows, _: rows)}
    )
    with pytest.raises(
        KeepsetError, match=r"looks at query moments: give Observation\(features=\{QueryMoments\(skip=3"
    ):
        ExpectedAttention(skip=3).score(observation)


def _zeros() -> tuple[torch.Tensor, torch.Tensor]:
    return torch.zeros(1, 1, 4), torch.zeros(1, 1, 4, 4)


@pytest.mark.parametrize("device", ["cpu", "make-believe"])
@pytest.mark.parametrize("block", [1, 50, 2**18])
@pytest.mark.parametrize("size", [1, 3, 6, 17])
def test_expected_logits_are_those_of_each_key(
    size: int, block: int, device: str, monkeypatch: pytest.MonkeyPatch
) -> None:
    """The matrices need not be symmetric: rounding leaves none that is."""
    monkeypatch.setattr(expected_attention, "CACHE_BLOCK" if device == "cpu" else "DEVICE_BLOCK", block)
    draw = torch.Generator().manual_seed(size)
    keys, matrices = torch.randn(2, 3, 11, size, generator=draw), torch.randn(2, 3, 2, size, size, generator=draw)
    vectors = torch.randn(2, 3, 2, size, generator=draw)
    if device == "cpu":
        logits = expected_attention._expected_logits(keys, vectors, matrices)
    else:
        pytest.importorskip("triton")
        from tests.posing import Gpu, Posing

        with Gpu(monkeypatch):
            logits = expected_attention._expected_logits(*(Posing(each) for each in (keys, vectors, matrices)))
        assert isinstance(logits, Posing)
        logits = logits.held
    for batch in range(2):
        for head in range(3):
            for entry, key in enumerate(keys[batch, head].tolist()):
                for member in range(2):
                    rows = matrices[batch, head, member].tolist()
                    expected = dot(key, [dot(row, key) for row in rows]) + dot(
                        key, vectors[batch, head, member].tolist()
                    )
                    assert logits[batch, head, entry, member] == pytest.approx(expected, rel=1e-4, abs=1e-5)


class Spent(TorchDispatchMode):
    """Counts operations that are not views, and the bytes that are held at a time."""

    def __init__(self) -> None:
        super().__init__()
        self.launches = self.held = self.peak = 0
        self._sharing: Counter[int] = Counter()

    def __torch_dispatch__(self, function: Any, types: Any, args: Any = (), kwargs: Any = None) -> Any:
        output = function(*args, **(kwargs or {}))
        self.launches += not function.is_view
        for tensor in output if isinstance(output, (list, tuple)) else [output]:
            storage = tensor.untyped_storage()
            if not self._sharing[storage._cdata]:
                self.held += storage.nbytes()
            self._sharing[storage._cdata] += 1
            weakref.finalize(tensor, self._gone, storage._cdata, storage.nbytes())
        self.peak = max(self.peak, self.held)
        return output

    def _gone(self, storage: int, nbytes: int) -> None:
        self._sharing[storage] -= 1
        if not self._sharing[storage]:
            self.held -= nbytes


def test_on_a_device_a_long_context_takes_few_launches_and_little_memory() -> None:
    """128k entries in the shape of an 8B model, whose keys alone are 256 MiB; nothing is computed."""
    counted = {}
    for entries in (2**17, 2**18):
        keys = torch.empty(1, 8, entries, 128, device="meta", dtype=torch.bfloat16)
        vectors, matrices = (torch.empty(1, 8, 4, *sizes, device="meta") for sizes in ((128,), (128, 128)))
        with Spent() as spent:
            logits = expected_attention._expected_logits(keys, vectors, matrices)
        counted[entries] = spent.launches, spent.peak - logits.nbytes - keys.nbytes  # a view's counts, too
    (launches, peak), (_, later_peak) = counted.values()
    assert launches <= 64 and later_peak == peak <= 530 * 2**20, counted
