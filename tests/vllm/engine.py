"""Engines for tests: what one is asked, and what it answered."""

from __future__ import annotations

import json
import os
from collections.abc import Sequence
from dataclasses import dataclass, field
from pathlib import Path
from tempfile import TemporaryDirectory
from typing import Any

import pytest

from keepset.lab.embedded import embedded_folder
from keepset.recipe import Recipe
from tests.paged.methods import registered
from tests.vllm import processes
from tests.vllm.processes import SPARING

BLOCK = 32
SIGNING = {"KEEPSET_SIGNING_KEY": "5" * 64}
"""What engines have whose requests are signed."""


def sealed(**options: Any) -> dict[str, Any]:
    """Extra arguments of a request, as a server's front end signs them for an engine with that key."""
    from keepset.vllm.request_options import RequestOptions

    with pytest.MonkeyPatch.context() as patch:
        for name, value in SIGNING.items():
            patch.setenv(name, value)
        return {"keepset": RequestOptions(**options).to_signed()}


@dataclass(frozen=True)
class Ask:
    """A request; `add` and `abort` are steps of the engine, a lower `priority` goes first; `extra` arguments; files of
    its `images`.
    """

    ids: list[int]
    max_tokens: int
    add: int = 0
    abort: int | None = None
    priority: int = 0
    extra: dict[str, Any] | None = None
    images: Sequence[str] = ()


@dataclass(frozen=True)
class Scenario:
    """One engine and what happens to it.

    Attributes:
        recipe, requests, engine: it, what it is asked, and further arguments of it.
        preempt: steps before which all running requests are preempted.
        layer_groups: how many groups of layers there may be.
        own_process: whether its scheduler and its worker are in another process, where nobody watches.
        stub_streams: whether its scheduler runs ahead, with stand-ins for a device's streams.
        backend: one for GPUs, with stand-ins for its kernels; the same for all scenarios of a process.
        runner_v2: whether vLLM's model runner V2 runs it; the same for all scenarios of a process.
        graphs: whether decoding is captured and replayed, see `tests.vllm.graphs`; the same for all scenarios of a job.
        triton: whether keepset's kernels are those in Triton, in its interpreter.
        files: steps, before which a file is put at a place; None for the file deletes what is there.
        resets: steps before which prefixes and the connector are reset, each with a factor for weights.
        read_at_once: whether a step waits for the contexts that it starts to read, so that steps are always the same.
        count_calls: whether calls of keepset's Python functions are counted.
    """

    recipe: str | None
    requests: Sequence[Ask]
    preempt: Sequence[int] = ()
    engine: dict[str, Any] = field(default_factory=dict)
    layer_groups: int | None = None
    own_process: bool = False
    stub_streams: bool = False
    backend: str | None = None
    runner_v2: bool = False
    graphs: bool = False
    triton: bool = False
    files: Sequence[tuple[int, Path | None, Path]] = ()
    resets: Sequence[tuple[int, float]] = ()
    read_at_once: bool = False
    count_calls: bool = False

    def as_json(self) -> dict[str, Any]:
        """The scenario as `tests.vllm.job` reads it."""
        engine: dict[str, Any] = {
            "model": str(embedded_folder()),
            "dtype": "float32",
            "max_model_len": 2048,
            "enforce_eager": True,
            "block_size": BLOCK,
            "enable_prefix_caching": False,
            "skip_tokenizer_init": True,
            "num_gpu_blocks_override": 512,
        }
        if self.recipe is not None:
            engine["additional_config"] = {"keepset": self.recipe}
            from keepset.vllm.settings import CONNECTOR

            with registered():
                if not Recipe.parse(self.recipe).method.traits.fixed_total:
                    engine["kv_transfer_config"] = CONNECTOR
        files = [(step, source and str(source), str(place)) for step, source, place in self.files]
        own = {"engine": engine | self.engine, "requests": [vars(ask) for ask in self.requests], "files": files}
        return {**vars(self), **own}


@dataclass(frozen=True)
class Result:
    """Everything that an engine did, request after request; watched parts are empty if nobody could watch it.

    `log` has (step, first token, tokens) as scheduled. `events` have `step`, `at`, `layers` (positions that heads of
    layers keep) and `left` (layers for whose answer there were not enough pages). `steps` have free blocks, and numbers
    of running and waiting requests. `tables` and `footprints` are the requests that the managers of the groups
    of layers still knew at the end, `references` those to blocks. `loads` says by name how often a context's pages were
    filled, `replays` and `calls` how many steps were replayed from a graph, and how many called the model. `made` says
    how many of keepset's functions each step has called.
    """

    tokens: list[list[int] | None]
    reasons: list[str | None]
    cached: list[int | None]
    stats: dict[str, float]
    classes: list[str]
    loads: dict[str, int] = field(default_factory=dict)
    log: list[list[tuple[int, int, int]]] = field(default_factory=list)
    events: list[list[dict[str, Any]]] = field(default_factory=list)
    preemptions: list[int] = field(default_factory=list)
    steps: list[dict[str, int]] = field(default_factory=list)
    free_before: int = 0
    free_after: int = 0
    references: int = 0
    tables: list[list[str]] = field(default_factory=list)
    footprints: list[list[str]] = field(default_factory=list)
    groups: int = 0
    replays: int = 0
    calls: int = 0
    made: list[int] = field(default_factory=list)

    def steps_of(self, index: int) -> list[tuple[int, int]]:
        """First token and number of tokens of each step of a request."""
        return [(start, tokens) for _, start, tokens in self.log[index]]

    def events_of(self, index: int) -> list[tuple[int, dict[int, list[list[int]]], list[int]]]:
        """A request's compressions, as the oracle tells them."""
        return [(event["at"], layers_of(event), event["left"]) for event in self.events[index]]

    def check_nothing_left(self) -> None:
        """All pages are back and nothing is remembered of any request."""
        assert self.free_after == self.free_before
        assert self.references == 0
        assert not any(self.tables) and not any(self.footprints)


def layers_of(event: dict[str, Any]) -> dict[int, list[list[int]]]:
    """The positions that each layer of an event keeps."""
    return {int(layer): heads for layer, heads in event["layers"].items()}


def run(*scenarios: Scenario, env: dict[str, str] | None = None) -> list[Result]:
    """Run engines, one after another in one process, with further variables in its environment."""
    answers = raw(*scenarios, env=env)
    for answer in answers:
        assert isinstance(answer, dict), answer
    return [Result(**answer) for answer in answers]


def raw(*scenarios: Scenario, env: dict[str, str] | None = None) -> list[Any]:
    """Run engines, and return their answers, or the text of an error."""
    with TemporaryDirectory() as folder:
        log, answered = Path(folder) / "log", Path(folder) / "answer.json"
        job = {
            "scenarios": [scenario.as_json() for scenario in scenarios],
            "env": env or {},
            "log": str(log),
            "answer": str(answered),
        }
        (runner_v2,) = {scenario.runner_v2 for scenario in scenarios}
        plain = {name: value for name, value in os.environ.items() if name != "KEEPSET_STATS_DIR"}
        told = plain | SPARING | SIGNING | processes.own_environment(runner_v2)
        code = processes.run(work, job, log=job["log"], env=told, runner_v2=runner_v2)
        assert code == 0 and answered.is_file(), log.read_text()[-12000:]
        return json.loads(answered.read_text())


def work(job: dict[str, Any]) -> None:
    """Run a job, in its process."""
    from tests.vllm.job import answer

    answer(job)
