"""`Tables`: head weights and thresholds that were compiled offline for CompilerKV, and the file that holds them."""

from __future__ import annotations

import dataclasses
import warnings
from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from functools import lru_cache
from pathlib import Path
from typing import Any

import torch
from jaxtyping import Float, Int
from torch import Tensor

from keepset.core.files import TensorFile
from keepset.errors import KeepsetError
from keepset.kernels.dispatch import upload

FORMAT = 1
"""The version of the file format; raise it with every change to what is written."""
ENTROPY_BINS, PERPLEXITY_BINS = 20, 4
_FILE = TensorFile(
    "keepset_tables",
    FORMAT,
    foreign="{path} is no file of CompilerKV's tables: name one that keepset has written.",
    other="{path} has format {found} of tables, and this keepset reads format {version}: compile them again with this "
    "version.",
    damaged="{path} is damaged: compile its tables again.",
)

_TYPES = dict.fromkeys(("weights", "gate", "entropy_edges", "perplexity_edges"), torch.float32)
_TYPES |= dict.fromkeys(("budgets", "counts"), torch.int64)


@dataclass(frozen=True, eq=False)
class Tables:
    """The decision tables of one model, for one budget or several.

    Attributes:
        weights: the factor of every query head's utility.
        gate: the threshold of every layer and bin of risk, from 0 to 1.
        entropy_edges: where the bins of entropy meet, in nats; an edge belongs to the bin above it.
        perplexity_edges: where the bins of perplexity meet.
        budgets: entries per KV head that the tables were compiled for, rising.
        counts: how many texts of the corpus fell into each bin.
        provenance: model, corpus, seed and version of keepset; plain JSON.
        name: the recipe's name for them, for messages.
    """

    weights: Float[Tensor, "budgets layers query_heads"]
    gate: Float[Tensor, "budgets layers 20 4"]
    entropy_edges: Float[Tensor, " _"]
    perplexity_edges: Float[Tensor, " _"]
    budgets: Int[Tensor, " budgets"]
    counts: Int[Tensor, "20 4"]
    provenance: Mapping[str, Any] = dataclasses.field(default_factory=dict)
    name: str = ""

    def check(self, layers: int, query_heads: int) -> None:
        """Raise KeepsetError if a model has another number of layers or query heads.

        Args:
            layers, query_heads: of the model.
        """
        compiled = self.weights.shape[1:]
        if compiled != (layers, query_heads):
            raise KeepsetError(
                f"The tables {self.name!r} are of another model: theirs has {compiled[0]} layers of {compiled[1]} "
                f"query heads, this one {layers} of {query_heads}. Make them for this model with keepset compile."
            )

    def fitted(self, layers: int, query_heads: int) -> Tables:
        """Return the tables mapped to another model by relative place (CompilerKV, appendix B.1).

        Their provenance names another model, because they are saved as that model's tables.

        Args:
            layers: how many layers the other model has.
            query_heads: how many query heads each of its layers has.
        """
        compiled = self.weights.shape[1:]
        rows, heads = _relative(layers, compiled[0]), _relative(query_heads, compiled[1])
        provenance = {**self.provenance, "model": "another model, mapped by relative place"}
        weights, gate = self.weights[:, rows][:, :, heads], self.gate[:, rows]
        return dataclasses.replace(self, weights=weights, gate=gate, provenance=provenance)

    def nearest(self, budget: Int[Tensor, " batch"]) -> Int[Tensor, " batch"]:
        """Return which of the tables' budgets is nearest to each given one; of equally near ones the smaller."""
        return (budget[:, None].double() - upload(self.budgets, budget.device)).abs().argmin(-1)

    def bins(
        self, entropy: Float[Tensor, " batch"], perplexity: Float[Tensor, " batch"]
    ) -> tuple[Int[Tensor, " batch"], Int[Tensor, " batch"]]:
        """Return the bins of both risks, of entropy in nats and perplexity; NaN counts as the highest risk.

        Args:
            entropy: of each request, in nats.
            perplexity: of each request.
        """
        pairs = (entropy, self.entropy_edges), (perplexity, self.perplexity_edges)
        of_entropy, of_perplexity = (
            (upload(edges, risk.device) <= risk.nan_to_num(torch.inf)[:, None]).sum(-1) for risk, edges in pairs
        )
        return of_entropy, of_perplexity


def neutral(layers: int, query_heads: int, threshold: float, budgets: Sequence[int] = (1,)) -> Tables:
    """Return tables that prefer no head and no text: all weights are 1, and there is one threshold.

    Args:
        layers, query_heads: of the model.
        threshold: the one threshold.
        budgets: the budgets for which tables are made, in entries.
    """
    return Tables(
        weights=torch.ones(len(budgets), layers, query_heads, dtype=torch.float32),
        gate=torch.full((len(budgets), layers, ENTROPY_BINS, PERPLEXITY_BINS), threshold, dtype=torch.float32),
        entropy_edges=torch.arange(1.0, ENTROPY_BINS, dtype=torch.float32),
        perplexity_edges=torch.arange(1.0, PERPLEXITY_BINS, dtype=torch.float32),
        budgets=torch.tensor(budgets, dtype=torch.long),
        counts=torch.zeros(ENTROPY_BINS, PERPLEXITY_BINS, dtype=torch.long),
    )


def load(file: str) -> Tables:
    """Return the tables in a file; raise KeepsetError if it holds none that this version can read."""
    try:
        state = Path(file).stat()
    except (OSError, ValueError):
        raise KeepsetError(f"There is no file {file!r} with tables: name one, or leave tables= out.") from None
    return _read(Path(file), state.st_mtime_ns, state.st_size)


def save(tables: Tables, path: Path) -> None:
    """Write tables to a file, whole or not at all; raise KeepsetError if it cannot be written.

    Args:
        tables: what to write.
        path: the file.
    """
    layers, heads = tables.weights.shape[1:]
    shape = {"format": FORMAT, "layers": layers, "query_heads": heads}
    tensors = {name: getattr(tables, name).contiguous() for name in _TYPES}
    _FILE.write(path, tensors, {**tables.provenance, **shape})


@lru_cache(maxsize=4)
def _read(path: Path, modified: int, size: int) -> Tables:
    with _FILE.opened(path) as (file, provenance):
        tables = Tables(**{name: file[name] for name in _TYPES}, provenance=provenance, name=str(path))
        _check(tables)
    return tables


def _check(tables: Tables) -> None:
    budgets, layers, heads = len(tables.budgets), tables.provenance["layers"], tables.provenance["query_heads"]
    shapes = {
        "weights": (budgets, layers, heads),
        "gate": (budgets, layers, ENTROPY_BINS, PERPLEXITY_BINS),
        "entropy_edges": (ENTROPY_BINS - 1,),
        "perplexity_edges": (PERPLEXITY_BINS - 1,),
        "budgets": (budgets,),
        "counts": (ENTROPY_BINS, PERPLEXITY_BINS),
    }
    tensors = {name: getattr(tables, name) for name in _TYPES}
    rising = [tensors[name].diff() for name in ("entropy_edges", "perplexity_edges", "budgets")]
    if (
        any(tensor.shape != shapes[name] or tensor.dtype != _TYPES[name] for name, tensor in tensors.items())
        or not all(tensor.numel() and tensor.isfinite().all() for tensor in tensors.values())
        or not all((steps > 0).all() for steps in rising)
        or not ((tables.gate >= 0) & (tables.gate <= 1)).all()
        or tables.budgets[0] < 1
        or (tables.counts < 0).any()
    ):
        raise ValueError


def _relative(length: int, existing: int) -> Int[Tensor, " length"]:
    """Return for each of `length` places the one at the same relative place among `existing` ones.

    Args:
        length: how many places are asked for.
        existing: how many there are.
    """
    sample_points = torch.arange(length, dtype=torch.float64) * (existing - 1) / max(length - 1, 1)
    return (sample_points + 0.5).floor().long()


@lru_cache(maxsize=1)
def say_neutral() -> None:
    """Warn, once, that there are no compiled tables."""
    sentence = (
        "compilerkv has no tables: all heads count the same and the threshold is fixed; make a file with `keepset "
        "compile --out tables.safetensors` and name it as tables='tables.safetensors'."
    )
    # The place in the code that warns would tell the reader nothing.
    warnings.warn_explicit(sentence, UserWarning, "keepset", 0)
