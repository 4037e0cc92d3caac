"""Which tasks are averaged: those of one benchmark, at one length."""

from __future__ import annotations

from keepset.bench.tasks import longbench, ruler

_BENCHMARKS = {"ruler": ruler.NAMES, "longbench": longbench.NAMES}


def group_of(task: str) -> str | None:
    """The name of the group that a task's figures are averaged in, its length included; None without one."""
    name, at, length = task.partition("@")
    return next((f"{group}{at}{length}" for group, names in _BENCHMARKS.items() if name in names), None)
