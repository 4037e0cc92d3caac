"""What a server says about itself at `/metrics`."""

from __future__ import annotations

from dataclasses import dataclass, field
from typing import TYPE_CHECKING, Any

from keepset.errors import KeepsetError

if TYPE_CHECKING:
    import httpx2

_OURS = "keepset:"
_RUNNING = "vllm:num_requests_running"
_WAITING = "vllm:num_requests_waiting"
_PREEMPTIONS = "vllm:num_preemptions_total"
_USAGE = "vllm:kv_cache_usage_perc"
_WANTED = (_OURS, _RUNNING, _WAITING, _PREEMPTIONS, _USAGE)


@dataclass
class Sample:
    """One look at the metrics; None for what the server does not have.

    Attributes:
        time: seconds since the round's start.
        running: requests that are computed.
        waiting: requests that wait.
        preemptions: so far.
        kv_usage: the share of the pool's blocks that are taken; the mean over engines.
        counters: keepset's own, so far.
    """

    time: float
    running: float | None = None
    waiting: float | None = None
    preemptions: float | None = None
    kv_usage: float | None = None
    counters: dict[str, float] = field(default_factory=dict)


def parser() -> Any:
    """What takes apart the text format of Prometheus.

    Raises:
        KeepsetError: it is not installed.
    """
    try:
        from prometheus_client.parser import text_string_to_metric_families
    except ImportError as error:
        raise KeepsetError('The reader of metrics is not installed: run `pip install "keepset[serve]"`.') from error
    return text_string_to_metric_families


def read(text: str, time: float) -> Sample:
    """A sample from the text format of Prometheus.

    Raises:
        ValueError: it is not in that format.
    """
    families = parser()
    # A server has hundreds of lines, and whoever measures it should not keep it from working.
    lines = [line for line in text.splitlines() if line.startswith(_WANTED)]
    values: dict[str, list[float]] = {}
    for family in families("\n".join(lines) + "\n"):
        for sample in family.samples:
            values.setdefault(sample.name, []).append(float(sample.value))
    sums = {name: sum(each) for name, each in values.items()}
    usage = values.get(_USAGE)
    return Sample(
        time=time,
        running=sums.get(_RUNNING),
        waiting=sums.get(_WAITING),
        preemptions=sums.get(_PREEMPTIONS),
        kv_usage=sum(usage) / len(usage) if usage else None,
        counters={
            name.removeprefix(_OURS).removesuffix("_total"): value
            for name, value in sums.items()
            if name.startswith(_OURS) and name.endswith("_total")
        },
    )


async def look(client: httpx2.AsyncClient, time: float) -> Sample | None:
    """The server's metrics now; None if it does not show them."""
    from keepset.serving.client import http

    try:
        response = await client.get("/metrics", timeout=10.0)
        return read(response.text, time) if response.status_code == 200 else None
    except (http().HTTPError, ValueError):
        return None
