from __future__ import annotations

from pathlib import Path

import pytest

from keepset.serving.metrics import parse_sample
from keepset.vllm import stats
from tests.serving.conftest import METRICS


def test_sums_over_engines_and_the_mean_use_of_their_pools() -> None:
    sample = parse_sample(METRICS.format(running=4, looks=9), 1.5)
    assert (sample.time, sample.running, sample.waiting, sample.preemptions) == (1.5, 4, 3, 9)
    assert sample.kv_usage == 0.5
    assert sample.counters == {"events": 9, "entries_kept": 109}


def test_what_is_not_there_is_none() -> None:
    sample = parse_sample("# nothing\nother_total 3\n", 0.0)
    assert (sample.running, sample.waiting, sample.preemptions, sample.kv_usage) == (None,) * 4
    assert sample.counters == {}


def test_the_recipe_that_is_served_is_a_metric(monkeypatch: pytest.MonkeyPatch, tmp_path: Path) -> None:
    monkeypatch.setenv(stats.FOLDER, str(tmp_path))
    assert not list(stats.PrometheusCollector().collect())
    stats.serving("snapkv(keep=0.25)")
    (family,) = stats.PrometheusCollector().collect()
    assert family.name == "keepset:recipe"
    assert [(sample.labels, sample.value) for sample in family.samples] == [({"recipe": "snapkv(keep=0.25)"}, 1.0)]
