"""Measurements that are no sweeps, against means in loops."""

from dataclasses import replace
from pathlib import Path
from statistics import fmean
from typing import Any

import pytest
import torch

from keepset import KeepsetError
from keepset.core.tables import ENTROPY_BINS, PERPLEXITY_BINS, neutral, save
from keepset.lab.papers import measurements
from keepset.lab.papers.catalogue import entry_of
from keepset.lab.papers.entry import MeasuredFigure, PaperOptions
from tests.lab.cli.conftest import tiny_model


def measure(name: str, *arguments: Any) -> list[MeasuredFigure]:
    function = entry_of(name).measure
    assert function is not None
    return list(function(*arguments))


@pytest.mark.filterwarnings("ignore:compilerkv has no tables")
def test_costs_have_the_papers_rows_and_columns(embedded: Any, monkeypatch: pytest.MonkeyPatch) -> None:
    name, pair = "compilerkv-table-a1", (tiny_model(), embedded[1])
    rows = measure(name, *pair, PaperOptions(limit=1, lengths=(70,), answer_tokens=3))
    (figures,) = entry_of(name).published.values()
    places = {key[1:] for key in figures}
    assert places < {row.key[1:] for row in rows} and {row.key.task for row in rows} == {"70 + 3"}
    assert all(row.failed == 0 and row.examples == 1 for row in rows)
    assert all(row.figure is not None and row.figure.value > 0 for row in rows)
    monkeypatch.setattr(measurements, "default_texts", lambda: ["Too short."])
    with pytest.raises(KeepsetError, match="fewer than 70: give fewer --prompt-tokens"):
        measure(name, *pair, PaperOptions(lengths=(70,)))


def test_maps_are_means_of_the_tables(tmp_path: Path, embedded: Any) -> None:
    draw = torch.Generator().manual_seed(3)
    weights = torch.tensor([0.5, 1.0, 2.0])[torch.randint(3, (2, 3, 4), generator=draw)]
    gate = 0.8 + 0.2 * torch.rand(2, 3, ENTROPY_BINS, PERPLEXITY_BINS, generator=draw)
    budgets, provenance = torch.tensor([64, 128]), {"layers": 3, "query_heads": 4}
    tables = replace(neutral(3, 4, 0.9), weights=weights, gate=gate, budgets=budgets, provenance=provenance)
    path = tmp_path / "tables.safetensors"
    save(tables, path)
    options = PaperOptions(files={"tables": path})
    rows = {row.key: row.figure for row in measure("compilerkv-figure-a2", *embedded, options)}
    for number, keep in enumerate((64, 128)):
        for layer in range(3):
            heads = weights[number, layer].tolist()
            for metric, value in (("weight", fmean(heads)), ("heads below 1", sum(each < 1 for each in heads) / 4)):
                figure = rows[f"layer {layer + 1}", "CompilerKV", keep, metric]  # type: ignore[index]
                assert figure is not None and figure.value == pytest.approx(value)
    rows = {row.key: row.figure for row in measure("compilerkv-figure-a3", *embedded, options)}
    assert len(rows) == 2 * (ENTROPY_BINS + PERPLEXITY_BINS)
    for number, keep in enumerate((64, 128)):
        bins = {
            "perplexity, bin 3 of 4": gate[number, :, :, 2].flatten().tolist(),
            "entropy, bin 7 of 20": gate[number, :, 6].flatten().tolist(),
        }
        for place, of_bin in bins.items():
            figure = rows[place, "CompilerKV", keep, "threshold"]  # type: ignore[index]
            assert figure is not None and figure.value == pytest.approx(fmean(of_bin))
    with pytest.raises(KeepsetError, match="give a file with --tables"):
        measure("compilerkv-figure-a3", *embedded, PaperOptions())
