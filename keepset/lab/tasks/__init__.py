"""Benchmarks: questions for a model, and how its answers are judged."""

TASK_MODULES = ("reasoning", "ruler", "needle", "longbench", "longbench2", "chat")
"""Modules of keepset's own tasks. Each has `NAMES`, as users write them, and `make(name, settings)` for its tasks."""
