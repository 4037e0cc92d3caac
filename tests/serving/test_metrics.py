from __future__ import annotations

import subprocess
import sys
from pathlib import Path

import pytest
from prometheus_client import CollectorRegistry, generate_latest
from prometheus_client.multiprocess import MultiProcessCollector

import keepset.vllm
from keepset.serving.metrics import BlockPool, block_pool, parse_sample, take_sample
from keepset.vllm import stats
from tests.serving.fake_vllm import METRICS, Fake


def test_sums_over_engines_and_the_mean_use_of_their_pools() -> None:
    sample = parse_sample(METRICS.format(running=4, looks=9, finished=5), 1.5)
    assert (sample.time, sample.running, sample.waiting, sample.preemptions, sample.finished) == (1.5, 4, 3, 9, 7)
    assert sample.kv_usage == 0.5
    assert sample.counters == {"events": 9, "entries_kept": 109}


def test_what_is_not_there_is_none() -> None:
    sample = parse_sample("# nothing\nother_total 3\n", 0.0)
    assert (sample.running, sample.waiting, sample.preemptions, sample.kv_usage) == (None,) * 4
    assert sample.counters == {}


def test_a_server_shows_its_metrics_or_does_not(fake: Fake) -> None:
    sample = take_sample(fake.url)
    assert sample is not None and sample.waiting == 3
    assert block_pool(fake.url) == BlockPool(41, 4)
    for text in ("{nonsense", "vllm:num_requests_running{} what", None):
        fake.metrics = None if text is None else text.replace("{", "{{").replace("}", "}}")
        assert text == "{nonsense" or take_sample(fake.url) is None
        assert block_pool(fake.url) is None
    assert take_sample("http://127.0.0.1:9") is None and block_pool("http://127.0.0.1:9") is None


def test_several_servers_show_what_all_processes_counted(monkeypatch: pytest.MonkeyPatch, tmp_path: Path) -> None:
    """By the files of Prometheus' client, which outlive who wrote them."""
    monkeypatch.setenv("PROMETHEUS_MULTIPROC_DIR", str(tmp_path))
    monkeypatch.delenv(stats.FOLDER, raising=False)
    program = (  # a package that would import torch, and of which nothing else is needed
        "import os, sys, types; package = types.ModuleType('keepset.vllm'); sys.modules['keepset.vllm'] = package\n"
        f"package.__path__ = {list(keepset.vllm.__path__)!r}; from keepset.vllm import stats; child = os.fork()\n"
        "stats.count(events=2, entries_kept=640.0) if child else stats.count(events=5, blocks_freed=3)\n"
        "child and os.waitpid(child, 0)"
    )
    subprocess.run([sys.executable, "-c", program], check=True)
    shown = CollectorRegistry()
    MultiProcessCollector(shown)
    lines = generate_latest(shown).decode().splitlines()
    values = dict(line.split() for line in lines if line.startswith("keepset:"))
    expected = {"events": 7.0, "entries_kept": 640.0, "blocks_freed": 3.0, "entries_dropped": 0.0, "seconds": 0.0}
    assert {name: float(value) for name, value in values.items()} == {
        f"keepset:{name}_total": value for name, value in expected.items()
    }


def test_the_recipe_that_is_served_is_a_metric(monkeypatch: pytest.MonkeyPatch, tmp_path: Path) -> None:
    monkeypatch.setenv(stats.FOLDER, str(tmp_path))
    assert not list(stats.PrometheusCollector().collect())
    stats.serving("snapkv(keep=0.25)")
    family, *counters = stats.PrometheusCollector().collect()
    # Alerts compare rates with 0, which a counter that is not there does not have.
    assert [sample.value for counter in counters for sample in counter.samples] == [0.0] * len(stats.COUNTERS)
    assert family.name == "keepset:recipe"
    assert [(sample.labels, sample.value) for sample in family.samples] == [({"recipe": "snapkv(keep=0.25)"}, 1.0)]
