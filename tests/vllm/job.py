"""Runs a job: a list of scenarios (`tests.vllm.engine.Scenario`), one engine after another.

Whatever a scenario ends with, its result or the text of its error, is at its place in the job's answer.
"""

from __future__ import annotations

import contextlib
import gc
import json
import os
import shutil
import sys
import time
import traceback
from collections import defaultdict
from collections.abc import Callable
from pathlib import Path
from typing import Any

import torch
from PIL import Image

from tests.calls import called
from tests.vllm import graphs


class Watch:
    """Watches an engine whose scheduler is in this process."""

    def __init__(self, scheduler: Any) -> None:
        self.scheduler = scheduler
        self.pool = scheduler.kv_cache_manager.block_pool
        self.free = self.pool.get_num_free_blocks()
        self.steps: list[dict[str, int]] = []
        self.log: defaultdict[int, list[tuple[int, int, int]]] = defaultdict(list)
        self.preemptions: defaultdict[int, int] = defaultdict(int)
        self.events: defaultdict[int, list[dict[str, Any]]] = defaultdict(list)
        self._wrap("update_from_output", self._scheduled)
        self._wrap("_preempt_request", lambda request, *_, **__: self._preempted(request))

    @property
    def managers(self) -> Any:
        return self.scheduler.kv_cache_manager.coordinator.single_type_managers

    def _wrap(self, name: str, before: Any) -> None:
        method = getattr(self.scheduler, name)

        def wrapped(*args: Any, **kwargs: Any) -> Any:
            before(*args, **kwargs)
            return method(*args, **kwargs)

        setattr(self.scheduler, name, wrapped)

    def _scheduled(self, output: Any, _: Any) -> None:
        """One step: which tokens of which request it took, and what was free meanwhile."""
        starts = {new.req_id: new.num_computed_tokens for new in output.scheduled_new_reqs}
        cached = output.scheduled_cached_reqs
        starts |= dict(zip(cached.req_ids, cached.num_computed_tokens, strict=True))
        for name, tokens in output.num_scheduled_tokens.items():
            self.log[number(name)].append((len(self.steps), starts[name], tokens))
        self.steps.append(
            {
                "free": self.pool.get_num_free_blocks(),
                "running": len(self.scheduler.running),
                "waiting": len(self.scheduler.waiting),
            }
        )

    def _preempted(self, request: Any) -> None:
        self.preemptions[number(request.request_id)] += 1

    def watch_events(self, runner: Any) -> Any:
        """Notes what every compression keeps, and whether it was executed; returns what undoes it."""
        from keepset.paged import event_execution
        from keepset.paged.layer_group import LayerGroup
        from keepset.paged.planner import Planner

        plan, execute, names = Planner.plan, event_execution.execute, names_of_rows(runner)
        planned: dict[int, tuple[Any, int, list[int]]] = {}

        def watched_plan(planner: Planner, batch: Any) -> Any:
            """Notes whose an event is: it is executed a step later, when rows are others'."""
            step = plan(planner, batch)
            for event in step.events:
                planned[id(event)] = event, len(self.steps), [number(names()[row]) for row in event.rows]
            return step

        def watched_execute(group: LayerGroup, event: Any, entries: Any, kept: Any, pages: Any, start: float) -> None:
            _, step, requests = planned[id(event)]
            for row, (request, at) in enumerate(zip(requests, event.at.tolist(), strict=True)):
                mine = self.events[request]
                if not mine or (mine[-1]["step"], mine[-1]["at"]) != (step, at):
                    mine.append({"step": step, "at": at, "layers": {}, "left": []})
                for index, place in enumerate(entries.places):
                    own, heads = index * len(requests) + row, range(kept.counts.shape[1])
                    mine[-1]["layers"][group.layers[place]] = [kept.positions(own, head).tolist() for head in heads]
                    if pages.fits is not None and not pages.fits.host_values[own]:
                        mine[-1]["left"].append(group.layers[place])
            execute(group, event, entries, kept, pages, start)

        Planner.plan, event_execution.execute = watched_plan, watched_execute
        stop_watching_turns = self._watch_turns()

        def undo() -> None:
            Planner.plan, event_execution.execute = plan, execute
            stop_watching_turns()

        return undo

    def _watch_turns(self) -> Callable[[], None]:
        """Notes what requests go on with that are turns of conversations, as events; returns what undoes it."""
        from keepset.paged import turns
        from keepset.vllm import conversation_connector as connector

        begin, execute = turns.begin_turn, turns.execute
        coming: list[Any] = []

        def watched_begin(groups: Any, turn: Any) -> Any:
            coming[:] = [turn]
            self.events[number(turn.name)].append(
                {"step": len(self.steps), "at": turn.tokens, "layers": {}, "left": []}
            )
            return begin(groups, turn)

        def watched_execute(group: Any, event: Any, entries: Any, kept: Any, pages: Any, start: float) -> None:
            assert pages.fits is not None and all(pages.fits.host_values)
            layers, heads = self.events[number(coming[0].name)][-1]["layers"], range(kept.counts.shape[1])
            for index, place in enumerate(entries.places):
                layers[group.layers[place]] = [kept.positions(index, head).tolist() for head in heads]
            execute(group, event, entries, kept, pages, start)

        connector.begin_turn, turns.execute = watched_begin, watched_execute

        def undo() -> None:
            connector.begin_turn, turns.execute = begin, execute

        return undo

    def result(self, requests: int) -> dict[str, Any]:
        held = [block.ref_cnt for block in self.pool.blocks if not block.is_null]
        return {
            "log": [self.log[index] for index in range(requests)],
            "events": [self.events[index] for index in range(requests)],
            "preemptions": [self.preemptions[index] for index in range(requests)],
            "steps": self.steps,
            "free_before": self.free,
            "free_after": self.pool.get_num_free_blocks(),
            "references": sum(held),
            "tables": [list(manager.req_to_blocks) for manager in self.managers],
            "footprints": [list(getattr(manager, "_requests", {})) for manager in self.managers],
            "groups": len(self.managers),
        }


def names_of_rows(runner: Any) -> Callable[[], list[str]]:
    """The requests of the batch that runs."""
    if hasattr(runner, "input_batch"):
        return lambda: runner.input_batch.req_ids
    names: list[str] = []
    prepare = runner.prepare_attn

    def prepared(batch: Any) -> Any:
        names[:] = batch.req_ids
        return prepare(batch)

    runner.prepare_attn = prepared
    return lambda: names


def move_files(files: list[tuple[int, str | None, str]], step: int) -> None:
    """Puts the files of this step at their places, whole or not at all, and deletes others."""
    for when, source, place in files:
        if when == step and source is None:
            Path(place).unlink(missing_ok=True)
        elif when == step:
            shutil.copyfile(source, f"{place}.coming")
            os.replace(f"{place}.coming", place)


def number(name: str) -> int:
    """A request's place in its scenario, from the id that the engine made of it."""
    return int(name.split("-", maxsplit=1)[0])


def prompt_of(request: dict[str, Any]) -> dict[str, Any]:
    """A request's tokens and its images."""
    images = [Image.open(file).convert("RGB") for file in request["images"]]
    return {"prompt_token_ids": request["ids"], **({"multi_modal_data": {"image": images}} if images else {})}


def run(scenario: dict[str, Any]) -> dict[str, Any]:
    """One engine."""
    from vllm import LLM, SamplingParams, envs
    from vllm.distributed import cleanup_dist_env_and_memory

    from keepset.kernels import dispatch
    from keepset.paged import eviction
    from keepset.vllm import stats

    dispatch.INTERPRETED = scenario["triton"]
    os.environ["VLLM_ENABLE_V1_MULTIPROCESSING"] = str(int(scenario["own_process"]))
    default_groups = eviction.GROUPS
    eviction.GROUPS = scenario["layer_groups"] or default_groups
    stop_waiting = wait_for_reads(scenario["read_at_once"])
    llm = LLM(**scenario["engine"])
    engine = llm.llm_engine
    core = getattr(engine.engine_core, "engine_core", None)
    watch, undo, captured = None, None, None
    if core is not None:
        watch = Watch(core.scheduler)
        worker = getattr(core.model_executor, "driver_worker", None)
        if scenario["runner_v2"] and worker is not None:  # else it is in other processes
            warm_up(worker.worker)
            run_events()
        if scenario["graphs"]:
            captured = graphs.Graphs(worker.worker.model_runner, scenario["runner_v2"])
        if worker is not None and not {"tensor_parallel_size", "pipeline_parallel_size"} & scenario["engine"].keys():
            undo = watch.watch_events(worker.worker.model_runner)
    eviction.GROUPS = default_groups
    layers = engine.vllm_config.compilation_config.static_forward_context.values()
    counted, loaded = stats.totals(), loads_of(stats.contexts())
    requests = scenario["requests"]
    outputs: list[Any] = [None] * len(requests)
    waiting, step, made = set(range(len(requests))), 0, []

    def take_step() -> None:
        for output in step_of(engine, core is not None):
            outputs[number(output.request_id)] = output

    while waiting or engine.has_unfinished_requests() or (core is not None and core.scheduler.requests):
        for index in sorted(waiting):
            if requests[index]["add"] <= step:
                waiting.remove(index)
                tokens, extra = requests[index]["max_tokens"], requests[index]["extra"]
                parameters = SamplingParams(temperature=0, max_tokens=tokens, ignore_eos=True, extra_args=extra)
                prompt = prompt_of(requests[index])
                engine.add_request(str(index), prompt, parameters, priority=requests[index]["priority"])
        move_files(scenario["files"], step)
        engine.abort_request([str(index) for index, one in enumerate(requests) if one["abort"] == step])
        if step in scenario["preempt"]:
            assert watch is not None and watch.scheduler.reset_prefix_cache(reset_running_requests=True)
        reset(core, [factor for when, factor in scenario["resets"] if when == step])
        made += calls_of(take_step, scenario["count_calls"])
        step += 1
    if watch is not None:
        run_events()
    assert not scenario["triton"] or "keepset.kernels.triton.paged" in sys.modules
    result = watch.result(len(requests)) if watch is not None else {}
    if captured is not None:
        result["replays"], result["calls"] = captured.replays, captured.calls
    result["made"] = made
    result["classes"] = sorted({type(layer.impl).__name__ for layer in layers if hasattr(layer, "impl")})
    result["tokens"] = [None if one is None else list(one.outputs[0].token_ids) for one in outputs]
    result["reasons"] = [None if one is None else one.outputs[0].finish_reason for one in outputs]
    result["cached"] = [None if one is None else one.num_cached_tokens for one in outputs]
    result["stats"] = {name: total - counted[name] for name, total in stats.totals().items()}
    result["loads"] = {name: loads - loaded.get(name, 0) for name, loads in loads_of(stats.contexts()).items()}
    if undo is not None:
        undo()
    stop_waiting()
    engine.engine_core.shutdown()
    del llm, engine, core, watch, layers, captured
    cleanup_dist_env_and_memory()
    envs.disable_envs_cache()
    gc.collect()
    return result


def warm_up(worker: Any) -> None:
    """Do what the worker for GPUs does before the first request: a run without requests, and some with made-up ones."""
    from vllm.v1.worker.gpu.warmup import run_mixed_prefill_decode_warmup

    runner = worker.model_runner
    runner._dummy_run(runner.max_num_tokens)
    run_mixed_prefill_decode_warmup(runner, worker.execute_model, worker.sample_tokens, runner.max_num_tokens)


@torch.no_grad()
def reset(core: Any, factors: list[float]) -> None:
    """Multiply the weights of the norms before attention, in place, and reset what was cached with them."""
    for factor in factors:
        for layer in core.model_executor.driver_worker.worker.model_runner.model.model.layers:
            layer.input_layernorm.weight.mul_(factor)
        assert core.scheduler.reset_prefix_cache(reset_connector=True)


def calls_of(run: Callable[[], None], wanted: bool) -> list[int]:
    """Run something; return how many of keepset's functions it called, if that is wanted."""
    if wanted:
        return [called(run).total()]
    run()
    return []


def loads_of(contexts: dict[str, dict[str, int]]) -> dict[str, int]:
    """How often each was loaded whole."""
    return {name: each["loads"] for name, each in contexts.items()}


def wait_for_reads(wanted: bool) -> Callable[[], None]:
    """Make every step wait for the contexts that it starts to read, if wanted; returns what undoes it."""
    from keepset.vllm import context_transfer
    from keepset.vllm.context_transfer import ContextLoader

    start, patience = ContextLoader.start, context_transfer._PATIENCE
    context_transfer._PATIENCE = 60 if wanted else patience

    def waiting(loader: ContextLoader, jobs: Any, idle: bool, ended: Any) -> None:
        start(loader, jobs, idle or wanted, ended)

    ContextLoader.start = waiting  # type: ignore[method-assign]

    def undo() -> None:
        ContextLoader.start, context_transfer._PATIENCE = start, patience  # type: ignore[method-assign]

    return undo


def step_of(engine: Any, is_here: bool) -> Any:
    """The outputs of an engine's step; one that is elsewhere answers only those who have asked."""
    if is_here or engine.has_unfinished_requests():
        return engine.step()
    time.sleep(0.01)
    return ()


@torch.inference_mode()
def run_events() -> None:
    """Execute the events of the last step, which no step follows."""
    from keepset.vllm import engine_context

    if (context := engine_context.active()) is not None:
        context.events.run()


def keep_async_scheduling() -> None:
    """The CPU platform turns asynchronous scheduling off; keeps it on, with stand-ins for the device's streams."""
    from vllm.platforms.cpu import CpuPlatform

    check = CpuPlatform.check_and_update_config.__func__

    def checked(cls: Any, config: Any) -> None:
        check(cls, config)
        config.scheduler_config.async_scheduling = True

    class Stream:
        device = torch.device("cpu")

        def __init__(self, *args: Any, **kwargs: Any) -> None: ...

        def wait_stream(self, *args: Any) -> None: ...

    class Event:
        def __init__(self, *args: Any, **kwargs: Any) -> None: ...

        def record(self, *args: Any) -> None: ...

        def synchronize(self) -> None: ...

        def wait(self, *args: Any) -> None: ...

    CpuPlatform.check_and_update_config = classmethod(checked)
    torch.cuda.Stream, torch.cuda.Event, torch.Event = Stream, Event, Event
    torch.cuda.current_stream = torch.accelerator.current_stream = lambda *_: Stream()
    torch.cuda.stream = lambda *_: contextlib.nullcontext()


def answer(job: dict[str, Any]) -> None:
    """Runs a job's scenarios."""
    os.environ.update(job["env"])
    scenarios = job["scenarios"]
    pretend_graphs = any(scenario["graphs"] for scenario in scenarios)
    if any(scenario["stub_streams"] for scenario in scenarios):
        keep_async_scheduling()
    if backends := {scenario["backend"] for scenario in scenarios} - {None}:
        from tests.vllm import kernels

        (backend,) = backends
        kernels.use(backend)
    if pretend_graphs:
        graphs.use(scenarios[0]["backend"], scenarios[0]["runner_v2"])
    results: list[Any] = []
    for scenario in scenarios:
        try:
            results.append(run(scenario))
        except Exception:
            results.append(traceback.format_exc() + Path(job["log"]).read_text()[-4000:])
    Path(job["answer"]).write_text(json.dumps(results))
