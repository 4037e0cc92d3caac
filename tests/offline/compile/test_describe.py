from __future__ import annotations

import dataclasses

import torch

from keepset.offline.compile.describe import coverage, describe_tables
from tests.core.test_tables import random_tables


def test_thin_bins_are_named_and_full_ones_are_not() -> None:
    counts = torch.full((20, 4), 2)
    full = dataclasses.replace(random_tables(), counts=counts.clone())
    assert len(coverage(full)) == 5
    counts[3:6, 0] = 1
    counts[19, 0] = counts[:, 2] = counts[0, 3] = 0
    *lines, named = coverage(dataclasses.replace(full, counts=counts))
    assert named.startswith("25 of 80 bins have fewer than 2 contexts")
    assert named.endswith("(perplexity: entropy): 0: 3-5, 19; 2: 0-19; 3: 0")
    assert [int(x) for x in lines[1].partition(":")[2].split()] == counts[:, 0].tolist()


def test_weights_and_thresholds_are_counted_and_the_most_trusted_heads_named() -> None:
    tables = random_tables()
    tables.weights.fill_(1.0)
    tables.weights[0, 2, 3] = tables.weights[1, 0, 1] = 2.0
    tables.gate[0] = 0.9
    lines = describe_tables(tables)
    first, second = (lines.index(f"keep={keep}") for keep in (8, 64))
    assert lines[first + 1] == "  head weights: 1 in 11, 2 in 1"
    assert lines[first + 2].endswith("layer.head: 2.3 (2), 0.0 (1), 0.1 (1), 0.2 (1), 0.3 (1)")
    assert lines[first + 3] == "  thresholds: 0.9 in 240"
    assert lines[second + 2].endswith("layer.head: 0.1 (2), 0.0 (1), 0.2 (1), 0.3 (1), 1.0 (1)")
    assert lines[second + 3].startswith("  thresholds: 0.8") and "mean" in lines[second + 3]
