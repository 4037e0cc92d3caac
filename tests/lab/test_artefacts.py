"""A file of each format, made by hand as its authors' programs write it, and what keepset takes from it."""

import json
import os
import pickle
from collections.abc import Callable
from pathlib import Path
from typing import Any

import numpy as np
import pytest
import torch
from safetensors.torch import save_file
from torch import Tensor

from keepset.core.statistics import Statistics, load, save
from keepset.errors import KeepsetError
from keepset.lab.artefacts import Artefact, read_artefact, with_artefact
from tests.hf.models import statistics, tiny

LAYERS, HEADS, KV_HEADS, DIM = 2, 4, 2, 16
"""The sizes of the tiny model `llama`."""


def rand(*sizes: int) -> Tensor:
    return torch.randn(*sizes, generator=torch.Generator().manual_seed(sum(sizes)))


def folder(path: Path, config: dict[str, Any], tensors: dict[str, Tensor]) -> Path:
    """Write a folder as `save_pretrained` does."""
    path.mkdir()
    (path / "config.json").write_text(json.dumps(config))
    save_file(tensors, path / "model.safetensors", {"format": "pt"})
    return path


def measured() -> Statistics:
    return load(str(statistics("llama")))


def imported(path: Path) -> tuple[Artefact, Statistics]:
    """Read a file for the tiny model, put it into the model's statistics, and these through a file."""
    artefact = read_artefact(path, tiny("llama"))
    written = path.with_name("stats.safetensors")
    save(with_artefact(measured(), artefact, path.name), written)
    return artefact, load(str(written))


def same_but(changed: Statistics, *fields: str) -> bool:
    """Return whether everything but these fields of the layers is as measured."""
    return all(
        name in fields or torch.equal(number, vars(measured().layers[index])[name])
        for index, layer in changed.layers.items()
        for name, number in vars(layer).items()
    )


def duo_attention(path: Path, gates: Any = None) -> Path:
    path.mkdir()
    numbers = np.array([[0.25, 1.0004], [-0.125, 0.5]]) if gates is None else gates
    np.savetxt(path / "full_attention_heads.tsv", numbers, delimiter="\t")
    (path / "config.json").write_text(json.dumps(dict(model_name="m", sink_size=128, recent_size=256, lr=0.02)))
    return path


def q_filters(path: Path) -> Path:
    config = dict(num_layers=LAYERS, num_kv_heads=KV_HEADS, kv_head_dim=DIM)
    return folder(path, config, {"q_filters": rand(LAYERS, KV_HEADS, DIM)})


def expected_attention(path: Path) -> Path:
    config = dict(num_layers=LAYERS, dataset_name="kmfoda/booksum", num_samples=100, sample_seq_len=1000, n_sink=4)
    root = rand(LAYERS, HEADS, DIM, DIM)
    tensors = {"query_mean": rand(LAYERS, HEADS, DIM).bfloat16(), "query_cov": (root @ root.mT).bfloat16()}
    return folder(path, config, tensors)


def triattention(path: Path, style: str = "half", heads: int = HEADS) -> Path:
    """Statistics of queries `[tokens, DIM]` of each head, in complex numbers as the authors' program has them."""
    stats = {}
    for layer in range(LAYERS):
        for head in range(heads):
            queries = rand(5 + 10 * layer + head, DIM)
            planes = queries.unflatten(-1, (-1, 2)).unbind(-1) if style == "interleaved" else queries.chunk(2, -1)
            numbers = torch.complex(*planes)
            mean = numbers.mean(0)
            stats[f"layer{layer:02d}_head{head:02d}"] = {
                "q_mean_real": mean.real.clone(),
                "q_mean_imag": mean.imag.clone(),
                "q_abs_mean": numbers.abs().mean(0),
            }
    metadata = {"head_dim": DIM, "rope_style": style, "model_name": "m", "sampled_heads": [[0, 0]]}
    torch.save({"metadata": metadata, "stats": stats}, path)
    return path


def test_what_is_published_replaces_what_was_measured(tmp_path: Path) -> None:
    artefact, changed = imported(duo_attention(tmp_path / "pattern"))
    assert [gates.tolist() for gates in changed.retrieval.values()] == [[0.25, 1.0], [0.0, 0.5]]
    assert same_but(changed) and "duo_attention(sinks=128, recent=256)" in artefact.advice
    # Directions of Q-Filters point the other way.
    _, changed = imported(q_filters(tmp_path / "qfilt"))
    published = rand(LAYERS, KV_HEADS, DIM)
    assert all(torch.equal(layer.direction, -published[index]) for index, layer in changed.layers.items())
    assert same_but(changed, "direction")
    artefact, changed = imported(expected_attention(tmp_path / "stats"))
    published = rand(LAYERS, HEADS, DIM).bfloat16().float()
    assert all(torch.equal(layer.mean, published[index]) for index, layer in changed.layers.items())
    assert all(layer.covariance.shape == (HEADS, DIM, DIM) for layer in changed.layers.values())
    assert same_but(changed, "mean", "covariance") and artefact.made["n_sink"] == 4
    # Mean and mean norm in each plane are those of the queries that the file was made of.
    _, changed = imported(triattention(tmp_path / "stats.pt"))
    for index, layer in changed.layers.items():
        for head in range(HEADS):
            queries = rand(5 + 10 * index + head, DIM)
            torch.testing.assert_close(layer.mean[head], queries.mean(0))
            for number in range(DIM):
                other = int(layer.partner[number])
                norms = [float(torch.hypot(row[number], row[other])) for row in queries]
                assert float(layer.norm[head, number]) == pytest.approx(sum(norms) / len(norms), rel=1e-5)
    assert same_but(changed, "mean", "norm")


def test_neighbours_that_rotate_together_are_not_halves(tmp_path: Path) -> None:
    """The pairs of the file have to be those of the model: cohere rotates neighbours, llama halves of a head."""
    path = triattention(tmp_path / "stats.pt", "interleaved")
    with pytest.raises(KeepsetError, match="pairs the numbers of a head differently"):
        imported(path)
    cohere = load(str(statistics("cohere")))
    changed = with_artefact(cohere, read_artefact(path, tiny("cohere")), "stats.pt")
    torch.testing.assert_close(changed.layers[1].mean[3], rand(5 + 10 + 3, DIM).mean(0))
    with pytest.raises(KeepsetError, match="pairs the numbers of a head"):
        with_artefact(cohere, read_artefact(triattention(tmp_path / "half.pt"), tiny("cohere")), "half.pt")


MAKERS = [duo_attention, q_filters, expected_attention, triattention]
every_format = pytest.mark.parametrize("make", MAKERS, ids=[make.__name__ for make in MAKERS])


def made(make: Callable[[Path], Path], path: Path) -> Path:
    return make(path / ("a.pt" if make is triattention else "a"))


@every_format
def test_what_is_of_another_model_is_refused(make: Callable[[Path], Path], tmp_path: Path) -> None:
    path = made(make, tmp_path)
    for other in ("llama_deep", "llama_mha" if make not in (expected_attention, triattention) else "llama_odd_head"):
        with pytest.raises(KeepsetError, match=r"is of another model: this one has \d layers"):
            read_artefact(path, tiny(other))


@every_format
def test_damaged_files_are_refused(make: Callable[[Path], Path], tmp_path: Path) -> None:
    path = made(make, tmp_path)
    names = ("model.safetensors", "full_attention_heads.tsv")
    file = next((path / name for name in names if (path / name).is_file()), path)
    whole = file.read_bytes()
    for damaged in (whole[: len(whole) // 2 - 3], b"", b"nonsense\t\x80"):
        file.write_bytes(damaged)
        with pytest.raises(KeepsetError, match=r"is damaged|holds nothing|is of another model"):
            read_artefact(path, tiny("llama"))


def test_other_files_and_numbers_that_are_not_finite_are_refused(tmp_path: Path) -> None:
    path = duo_attention(tmp_path / "a", np.array([[0.1, np.nan], [0.2, 0.3]]))
    with pytest.raises(KeepsetError, match="is damaged"):
        read_artefact(path, tiny("llama"))
    (tmp_path / "a.txt").write_text("text")
    save_file({"weight": torch.ones(2)}, tmp_path / "a.safetensors")
    torch.save({"weight": torch.ones(2)}, tmp_path / "a.pt")
    for path in (tmp_path, *(tmp_path / f"a.{end}" for end in ("txt", "safetensors", "pt"))):
        with pytest.raises(KeepsetError, match="holds nothing that keepset can import"):
            read_artefact(path, tiny("llama"))
    with pytest.raises(KeepsetError, match="cannot be read"):
        read_artefact(tmp_path / "none.pt", tiny("llama"))


class _Runs:
    """Makes a folder when it is unpickled."""

    def __init__(self, path: Path) -> None:
        self.path = path

    def __reduce__(self) -> Any:
        return os.mkdir, (str(self.path),)


def test_a_file_that_asks_to_run_code_is_refused(tmp_path: Path) -> None:
    torch.save({"metadata": {}, "stats": {}, "more": _Runs(tmp_path / "ran")}, tmp_path / "a.pt")
    (tmp_path / "b.pt").write_bytes(pickle.dumps(_Runs(tmp_path / "ran"), protocol=2))
    for name in ("a.pt", "b.pt"):
        with pytest.raises(KeepsetError, match="contains code, which keepset does not run"):
            read_artefact(tmp_path / name, tiny("llama"))
    assert not (tmp_path / "ran").exists()
