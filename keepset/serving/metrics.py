"""What a server says about itself at `/metrics`."""

from dataclasses import dataclass, field

from keepset.serving.optional_imports import AsyncClient, import_http, import_parser

_KEEPSET, _USAGE, _POOL = "keepset:", "vllm:kv_cache_usage_perc", "vllm:cache_config_info"
_SUMMED = {
    "running": "vllm:num_requests_running",
    "waiting": "vllm:num_requests_waiting",
    "preemptions": "vllm:num_preemptions_total",
}
_NAMES = (_KEEPSET, _USAGE, *_SUMMED.values())


@dataclass
class Sample:
    """One look at the metrics; None for what the server does not have.

    Attributes:
        time: seconds since the round's start.
        running, waiting: requests that are computed, and that wait to be.
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


def parse_sample(text: str, time: float) -> Sample:
    """A sample from the text format of Prometheus; a `ValueError` where it is not in that format."""
    families = import_parser()
    # A server has hundreds of lines, and whoever measures it should not keep it from working.
    lines = [line for line in text.splitlines() if line.startswith(_NAMES)]
    values: dict[str, list[float]] = {}
    for family in families("\n".join(lines) + "\n"):
        for sample in family.samples:
            values.setdefault(sample.name, []).append(float(sample.value))
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


@dataclass(frozen=True)
class BlockPool:
    """A server's pool: so many blocks, of so many tokens each."""

    blocks: int
    block_size: int


def pool(url: str) -> BlockPool | None:
    """The pool of the server there; None if it does not say."""
    library, families = import_http(), import_parser()
    try:
        text = library.get(f"{url}/metrics", timeout=10.0, trust_env=False).text
        lines = [line for line in text.splitlines() if line.startswith(_POOL)]
        (sample,) = [sample for family in families("\n".join(lines) + "\n") for sample in family.samples]
        return BlockPool(int(sample.labels["num_gpu_blocks"]), int(sample.labels["block_size"]))
    except (library.HTTPError, ValueError, KeyError):
        return None


async def take_sample(client: AsyncClient, time: float) -> Sample | None:
    """The server's metrics now; None if it does not show them."""
    try:
        response = await client.get("/metrics", timeout=10.0)
        return parse_sample(response.text, time) if response.status_code == 200 else None
    except (import_http().HTTPError, ValueError):
        return None
