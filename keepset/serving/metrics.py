"""A server's metrics from `/metrics`, and the libraries that only `keepset[serve]` installs."""

from __future__ import annotations

import importlib
import time
from dataclasses import dataclass, field
from typing import Any

from keepset.errors import KeepsetError

_KEEPSET, _USAGE, _POOL = "keepset:", "vllm:kv_cache_usage_perc", "vllm:cache_config_info"
_SUMMED = {
    "running": "vllm:num_requests_running",
    "waiting": "vllm:num_requests_waiting",
    "preemptions": "vllm:num_preemptions_total",
    "finished": "vllm:request_success_total",
}
_NAMES = (_KEEPSET, _USAGE, *_SUMMED.values())


@dataclass(frozen=True)
class Sample:
    """The metrics at one moment; None for those that the server lacks.

    Attributes:
        time: in seconds.
        running: number of running requests.
        waiting: number of waiting requests.
        preemptions: number of preemptions so far.
        finished: number of requests that have ended so far.
        kv_usage: the share of the pool's blocks in use, averaged over engines.
        counters: keepset's own counters.
    """

    time: float
    running: float | None = None
    waiting: float | None = None
    preemptions: float | None = None
    finished: float | None = None
    kv_usage: float | None = None
    counters: dict[str, float] = field(default_factory=dict)


@dataclass(frozen=True)
class BlockPool:
    """The size of a server's pool: number of blocks, and tokens of each."""

    blocks: int
    block_size: int


def parse_sample(text: str, time: float) -> Sample:
    """Return the sample of a metrics text that was read at `time` seconds.

    Raises:
        ValueError: the text is not in Prometheus' format.
    """
    values: dict[str, list[float]] = {}
    for metric in _metrics(text, *_NAMES):
        values.setdefault(metric.name, []).append(float(metric.value))
    sums = {name: sum(each) for name, each in values.items()}
    usage = values.get(_USAGE)
    return Sample(
        time,
        **{name: sums.get(metric) for name, metric in _SUMMED.items()},
        kv_usage=sum(usage) / len(usage) if usage else None,
        counters={
            name.removeprefix(_KEEPSET).removesuffix("_total"): value
            for name, value in sums.items()
            if name.startswith(_KEEPSET) and name.endswith("_total")
        },
    )


def _metrics(text: str, *names: str) -> list[Any]:
    """Return the metrics whose lines begin with one of the names; a server has hundreds of others."""
    lines = [line for line in text.splitlines() if line.startswith(names)]
    return [metric for family in import_parser()("\n".join(lines) + "\n") for metric in family.samples]


def take_sample(url: str) -> Sample | None:
    """Return a server's metrics, with the time of `time.perf_counter`; None if it does not show them."""
    library = import_http()
    try:
        response = library.get(f"{url}/metrics", timeout=10.0, trust_env=False)
        return parse_sample(response.text, time.perf_counter()) if response.status_code == 200 else None
    except (library.HTTPError, ValueError):
        return None


def block_pool(url: str) -> BlockPool | None:
    """Return the size of a server's pool; None if it does not say."""
    library = import_http()
    try:
        (pool,) = _metrics(library.get(f"{url}/metrics", timeout=10.0, trust_env=False).text, _POOL)
        return BlockPool(int(pool.labels["num_gpu_blocks"]), int(pool.labels["block_size"]))
    except (library.HTTPError, ValueError, KeyError):
        return None


def import_http() -> Any:
    """Return the HTTP library; raise `KeepsetError` if it is not installed."""
    return _import("httpx2", "HTTP client")


def import_parser() -> Any:
    """Return the parser of Prometheus' text format; raise `KeepsetError` if it is not installed."""
    return _import("prometheus_client.parser", "reader of metrics").text_string_to_metric_families


def check_bench() -> None:
    """Raise `KeepsetError` if a library that `vllm bench serve` reads prompts with is not installed."""
    _import("pandas", "reader of prompts")


def _import(module: str, name: str) -> Any:
    try:
        return importlib.import_module(module)
    except ImportError as error:
        raise KeepsetError(f'The {name} is not installed: run `pip install "keepset[serve]"`.') from error
