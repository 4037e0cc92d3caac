"""Uniform: every head of every layer gets the same."""

from __future__ import annotations

from dataclasses import dataclass

from keepset.core.method import Allocator


@dataclass(frozen=True)
class Uniform(Allocator):
    """The same number for every layer and head: what a scorer does by itself, under its own name."""

    name = "uniform"
