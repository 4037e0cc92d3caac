"""Events lie between steps: each is executed once, in all layers, before the next step of any of them is planned."""

from __future__ import annotations

from dataclasses import replace

import pytest

from keepset.paged import event_execution
from keepset.paged.layer_group import LayerGroup
from tests.paged.engine import Engine, Request


def executed(engine: Engine, monkeypatch: pytest.MonkeyPatch) -> list[tuple[int, int]]:
    """Layers and points of events, as they are executed."""
    execute, done = event_execution.execute, list[tuple[int, int]]()

    def watched(group: LayerGroup, event: object, entries: object, *rest: object) -> None:
        points = event.at.tolist()  # type: ignore[attr-defined]
        done.extend((group.layers[place], at) for place in entries.places for at in points)  # type: ignore[attr-defined]
        execute(group, event, entries, *rest)  # type: ignore[arg-type]

    monkeypatch.setattr(event_execution, "execute", watched)
    return done


@pytest.mark.parametrize("recipe", ["knorm(keep=9)", "pyramid(knorm, keep=9)", "pool(snapkv(window=2), keep=9)"])
def test_they_wait_for_the_next_step(recipe: str, monkeypatch: pytest.MonkeyPatch) -> None:
    """There is one group of layers, or one for each layer. The step's own blocks are still there."""
    engine = Engine(recipe, 60)
    done, request = executed(engine, monkeypatch), Request(0, 30)
    engine.step({0: 30}, {0: request})
    assert not done
    engine.step({0: 1}, {0: request})
    assert sorted(done) == [(0, 30), (1, 30), (2, 30)]
    engine.step({0: 1}, {0: request})
    assert len(done) == 3


def test_an_event_is_executed_though_its_request_is_gone(monkeypatch: pytest.MonkeyPatch) -> None:
    """The pages belong to another request by then, which has not written to them yet."""
    engine = Engine("snapkv(window=3, kernel=1, keep=9)", 12)
    done, gone, next_one = executed(engine, monkeypatch), Request(0, 30), Request(1, 40)
    engine.step({0: 30}, {0: gone})
    engine.leave(gone)
    for tokens in (40, 1, 1):
        engine.step({1: tokens}, {1: next_one})
    assert sorted(done) == sorted((layer, at) for layer in range(3) for at in (30, 40))


@pytest.mark.parametrize(
    ("recipe", "events"),
    [("adakv(knorm, keep=9, every=8)", 1), ("adakv(knorm, keep=0.4)", 1), ("mass(window=4)", 1), ("knorm(keep=9)", 3)],
)
def test_requests_of_different_lengths_are_one_event_where_heads_differ(recipe: str, events: int) -> None:
    """Each keeps what it would keep alone, which the engine checks."""
    engine, requests = Engine(recipe, 200), {number: Request(number, 20 + 7 * number) for number in range(3)}
    engine.step({number: request.prompt for number, request in requests.items()}, requests)
    assert {len(plan.events) for plan in engine.events.steps.values()} == {events}
    for _ in range(9):
        engine.step(dict.fromkeys(requests, 1), requests)
    assert all(request.events for request in requests.values())


def test_a_request_is_not_looked_at_as_if_it_were_three_times_as_long() -> None:
    engine, requests = Engine("adakv(knorm, keep=9)", 200), {0: Request(0, 60), 1: Request(1, 20), 2: Request(2, 33)}
    engine.step({number: request.prompt for number, request in requests.items()}, requests)
    assert [[event.rows for event in plan.events] for plan in engine.events.steps.values()] == [[[0, 2], [1]]]
    engine.step(dict.fromkeys(requests, 1), requests)


def test_groups_must_mean_the_same_requests(monkeypatch: pytest.MonkeyPatch) -> None:
    engine = Engine("pool(snapkv(window=2), keep=9)", 60)
    engine.step({0: 30}, {0: Request(0, 30)})
    plan = list(engine.events.steps.values())[-1]
    plan.events[0] = replace(plan.events[0], rows=[row + 1 for row in plan.events[0].rows])
    with pytest.raises(RuntimeError, match="lost count of the requests"):
        engine.events.run()


def test_a_number_that_the_scheduler_does_not_expect() -> None:
    engine = Engine("pool(snapkv(window=2), keep=9)", 60)
    engine.step({0: 30}, {0: Request(0, 30)})
    for plan in engine.events.steps.values():
        plan.events[0] = replace(plan.events[0], keep=[1])
    with pytest.raises(RuntimeError, match="kept another number of entries than its quotas say"):
        engine.events.run()
