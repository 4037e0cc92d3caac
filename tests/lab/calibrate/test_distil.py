"""Networks fitted to a teacher's scores: what they learn, that it repeats, and that an interrupted run goes on."""

import math
from dataclasses import dataclass, replace
from pathlib import Path
from typing import Any

import pytest
import torch
from torch import Tensor

from keepset import KeepsetError, Method, Observation
from keepset.core.statistics import Predictor, Statistics, load, save, scores_at
from keepset.kernels.entry_format import encode
from keepset.lab.calibrate import distil
from keepset.lab.calibrate.corpus import Corpus
from keepset.lab.calibrate.distil import with_predictors
from keepset.lab.calibrate.measure import measure
from tests.hf.models import prompt, tiny

MODEL = "llama"
CORPUS = Corpus(list(prompt(8, 60, seed=1)), "0", 0)


@pytest.fixture(scope="module")
def measured() -> Statistics:
    return measure(tiny(MODEL), CORPUS)


@pytest.fixture
def few_steps(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(distil, "STEPS", 10)


@dataclass(frozen=True)
class Linear(Method):
    """A teacher whose logarithm is linear in values and in that of the distance from the end.

    The distance counts more in long texts, and for some values more than for others.
    """

    name = "linear"

    def score(self, observation: Observation) -> Tensor:
        weights = torch.linspace(-0.2, 0.2, observation.values.shape[-1])
        distances = observation.lengths[:, None, None] - observation.positions
        power = (
            0.3 + 0.1 * (observation.lengths / 16).log2()[:, None, None] + observation.values.float() @ weights.flip(0)
        )
        return (observation.values.float() @ weights).exp() / distances**power


def equal(left: Statistics, right: Statistics) -> bool:
    pairs = [(left.predictors[index], right.predictors[index]) for index in left.layers]
    return all(torch.equal(getattr(a, name), getattr(b, name)) for a, b in pairs for name in Predictor._fields)


def test_a_linear_teacher_is_recovered(measured: Statistics, monkeypatch: pytest.MonkeyPatch) -> None:
    """On passages that it was not fitted to; a small floor, so that its logarithm is linear indeed."""
    monkeypatch.setattr(distil, "parse_teachers", lambda texts: [Linear()])
    monkeypatch.setattr(distil, "_FLOOR", 1e-6)
    many = Corpus(list(prompt(60, 60, seed=1)), "0", 0)
    held = with_predictors(measured, tiny(MODEL), many, ["linear"]).provenance["predictors"]["held_out"]
    assert min(held["by_layer"][distil.CORRELATION].values()) > 0.99
    assert min(held["by_layer"][distil.SHARE].values()) > 0.93


@pytest.mark.usefixtures("few_steps")
def test_a_seed_repeats_and_an_interrupted_run_goes_on(measured: Statistics, tmp_path: Path) -> None:
    whole = with_predictors(measured, tiny(MODEL), CORPUS, ["prompt_queries", "knorm"], width=3)
    calls = 0

    def interrupt() -> None:
        nonlocal calls
        calls += 1
        if calls == 3:
            raise KeyboardInterrupt

    options: dict[str, Any] = {"folder": tmp_path / "kept", "width": 3}
    with pytest.raises(KeyboardInterrupt):
        with_predictors(measured, tiny(MODEL), CORPUS, ["prompt_queries", "knorm"], on_passage=interrupt, **options)
    kept = {path: path.stat().st_mtime_ns for path in (tmp_path / "kept").iterdir()}
    assert len(kept) == 3
    again = with_predictors(measured, tiny(MODEL), CORPUS, ["prompt_queries", "knorm"], **options)
    assert equal(again, whole)
    assert all(path.stat().st_mtime_ns == when for path, when in kept.items())
    other = with_predictors(measured, tiny(MODEL), CORPUS, ["knorm"], **options)  # takes nothing of another teacher's
    assert not equal(other, whole)


@pytest.mark.usefixtures("few_steps")
def test_a_file_holds_what_was_fitted(measured: Statistics, tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    fitted = with_predictors(measured, tiny(MODEL), CORPUS, ["knorm"], width=3)
    save(fitted, tmp_path / "stats.safetensors")
    read = load(str(tmp_path / "stats.safetensors"))
    assert equal(read, fitted)
    assert read.provenance["predictors"]["teachers"] == ["knorm"]
    # Seven of eight passages, one of them by half, without the first four tokens.
    assert read.provenance["predictors"]["entries"] == 6 * 56 + 26
    # A third of each passage, however long it is.
    monkeypatch.setattr(distil, "ROWS", 130)  # of 390 tokens that are fitted to
    fitted = with_predictors(measured, tiny(MODEL), CORPUS, ["knorm"], width=3)
    assert fitted.provenance["predictors"]["entries"] == 6 * 19 + 9


def test_folding_scales_changes_nothing() -> None:
    """The network of inputs that have neither mean 0 nor variance 1."""
    torch.manual_seed(0)
    inputs, wanted, ages = torch.randn(2, 40, 5) * 3 + 1, torch.randn(2, 40), torch.arange(40) + 1
    predictor = distil._fitted(distil.Samples(inputs, wanted, ages, torch.full([40], 40)), 4, 0, lambda _: None)
    codes = encode(predictor.outputs_of(inputs))
    told = scores_at(codes[None], predictor.age[None], ages.view(1, 1, -1), torch.tensor([40]))[0].log()
    error = (told - wanted).square().mean()
    assert error < 0.9 * wanted.var()  # it has learnt something of forty points by heart
    assert torch.allclose(predictor.of_heads(slice(1, 2)).outputs_of(inputs[1:]), predictor.outputs_of(inputs)[1:])


@pytest.mark.usefixtures("few_steps")
def test_heads_that_retrieve_are_favoured(measured: Statistics) -> None:
    """By the root of their gates, while the mean of all heads stays; slopes and all else stay as well."""
    plain = with_predictors(measured, tiny(MODEL), CORPUS, ["knorm"], width=3)
    gates = {index: torch.tensor([0.01, 1.0]) for index in measured.layers}
    told = with_predictors(replace(measured, retrieval=gates), tiny(MODEL), CORPUS, ["knorm"], width=3)
    for index, predictor in told.predictors.items():
        more = predictor.output_bias - plain.predictors[index].output_bias
        half = math.log(1 / 0.05) / 4  # a gate counts as 0.05 at least
        torch.testing.assert_close(more, torch.tensor([[-half, 0], [half, 0]]))
        assert torch.equal(predictor.output, plain.predictors[index].output)


def test_lengths_differ_and_no_network_teaches_itself() -> None:
    with pytest.raises(KeepsetError, match="needs what it would teach"):
        distil.parse_teachers(["pool(distilled)"])
    lengths = [len(passage) for passage in distil.cut_passages(CORPUS)]
    assert lengths == [60, 60, 60, 30, 60, 60, 60, 16], "a quarter would be fewer than 16"
