"""The small server in threads of this process, and a small `vllm bench serve`."""

from __future__ import annotations

import threading
from collections.abc import Iterator
from pathlib import Path

import pytest

from keepset.serving import vllm_bench
from tests.serving.fake_vllm import Fake, Quiet, handler

BENCH = Path(__file__).with_name("fake_bench.py")


@pytest.fixture
def bench(monkeypatch: pytest.MonkeyPatch) -> None:
    """`vllm bench serve` is a small program of the same shape, because vLLM takes long to import."""
    monkeypatch.setattr(vllm_bench, "_PROGRAM", BENCH.read_text("utf-8"))
    monkeypatch.setattr(vllm_bench, "SAMPLE_SECONDS", 0.05)


@pytest.fixture
def fake() -> Iterator[Fake]:
    """The server, in threads of this process."""
    made = Fake()
    with Quiet(("127.0.0.1", 0), handler(made)) as server:
        made.url = f"http://127.0.0.1:{server.server_address[1]}"
        thread = threading.Thread(target=server.serve_forever, kwargs={"poll_interval": 0.01})
        thread.start()
        yield made
        server.shutdown()
        thread.join()
