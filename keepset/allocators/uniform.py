"""Uniform: every head of every layer gets the same number of entries."""

from __future__ import annotations

from dataclasses import dataclass

from keepset.core.method import Allocator


@dataclass(frozen=True)
class Uniform(Allocator):
    """Gives every layer and head the same number of entries, as a scorer alone does."""

    name = "uniform"
