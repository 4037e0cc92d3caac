"""Statistics of the queries of a model's layers, and of their rotation, measured over passages."""

from __future__ import annotations

import hashlib
import json
from collections.abc import Callable
from pathlib import PureWindowsPath
from typing import Any

import torch
from jaxtyping import Float, Int
from torch import Tensor
from transformers import PreTrainedModel

import keepset
from keepset.contexts.fingerprint import sample
from keepset.core.feature import Needs
from keepset.core.features.moments import QueryMoments, Rotate
from keepset.core.features.runtime_features import RecentQueries
from keepset.core.observation import Observation
from keepset.core.statistics import LayerStatistics, Statistics
from keepset.errors import UnsupportedModelError
from keepset.hf.observed_cache import ObservedCache
from keepset.lab.calibrate.corpus import Corpus

SKIP = 4
"""The first tokens of a passage, which are left out: as attention sinks they have unusual queries."""


class _Layer:
    """Sums over the queries of one layer, in float64, so that their order and number hardly change the result."""

    def __init__(self, rotation: tuple[Tensor, Tensor, Tensor], kv_heads: int) -> None:
        self._rotation, self._kv_heads, self._count = rotation, kv_heads, 0
        self._sums: dict[str, Tensor] = {}

    def add(self, observation: Observation) -> None:
        assert observation.queries is not None
        moments = observation[QueryMoments(SKIP)]
        mean, covariance = moments.mean[0].cpu().double(), moments.covariance[0].cpu().double()
        queries = observation.queries[0, :, SKIP:].cpu().double()
        count, (partner, _, gain) = queries.shape[1], self._rotation
        planes = torch.hypot(queries, queries[..., partner] * (partner != torch.arange(len(partner))))
        new = {
            "queries": mean * count,
            "products": (covariance + mean[:, :, None] * mean[:, None]) * count,
            "norms": planes.sum(1) / gain,
            "rotated": queries.sum(1),
            "scatter": queries.transpose(-1, -2) @ queries,
        }
        self._sums = {name: self._sums.get(name, 0) + part for name, part in new.items()}
        self._count += count

    def statistics(self) -> LayerStatistics:
        sums = self._sums
        if not all(part.isfinite().all() for part in sums.values()):
            raise UnsupportedModelError(
                "Some of the model's queries are not finite numbers: nothing can be measured of them."
            )
        mean = sums["queries"] / self._count
        covariance = sums["products"] / self._count - mean[:, :, None] * mean[:, None]
        # The first right singular vector of the queries is the first eigenvector of their products.
        direction = torch.linalg.eigh(sums["scatter"]).eigenvectors[..., -1]
        direction = direction.where((direction * sums["rotated"]).sum(-1, keepdim=True) >= 0, -direction)
        direction, norm = direction.unflatten(0, (self._kv_heads, -1)).mean(1), sums["norms"] / self._count
        return LayerStatistics(direction.float(), mean.float(), covariance.float(), norm.float(), *self._rotation)


class _ObservingCache(ObservedCache):
    """A cache that passes every layer's observation to a function."""

    def __init__(self, model: PreTrainedModel, needs: Needs, observe: Callable[[Observation], None]) -> None:
        super().__init__(model, needs)
        self._on_observation = observe

    def _choose(self, observations: list[Observation]) -> None:
        for observation in observations:
            self._on_observation(observation)


@torch.no_grad()
def measure(model: PreTrainedModel, corpus: Corpus, on_passage: Callable[[], None] = lambda: None) -> Statistics:
    """Return statistics of all layers that keepset compresses, measured over a corpus, one passage at a time.

    Args:
        model: the model.
        corpus: the passages.
        on_passage: called after each passage.

    Raises:
        UnsupportedModelError: there is no such layer, or queries are not finite.
    """
    layers: dict[int, _Layer] = {}

    def start_layer(observation: Observation) -> None:
        _, kv_heads, _, head_dim = observation.keys.shape
        unit = torch.eye(head_dim, dtype=torch.float32, device=observation.keys.device)
        layers[observation.layer] = _Layer(measure_rotation(observation[QueryMoments(0)].rotate, unit), kv_heads)

    def run(ids: Tensor, needs: Needs, observe: Callable[[Observation], None]) -> None:
        cache = _ObservingCache(model, needs, observe)
        model(ids.to(model.device)[None], past_key_values=cache, use_cache=True, logits_to_keep=1)
        cache.stop_watching()

    run(corpus.passages[0][:PROBE], Needs(QueryMoments(0)), start_layer)
    if not layers:
        raise UnsupportedModelError(
            f"{type(model).__name__} has no layer that keepset compresses: there is nothing to measure."
        )
    for passage in corpus.passages:
        needs = Needs(RecentQueries(len(passage)), QueryMoments(SKIP))
        run(passage, needs, lambda observation: layers[observation.layer].add(observation))
        on_passage()
    measured = {index: layer.statistics() for index, layer in sorted(layers.items())}
    return Statistics(measured, _provenance(model, corpus, measured))


def _provenance(model: PreTrainedModel, corpus: Corpus, layers: dict[int, LayerStatistics]) -> dict[str, Any]:
    config = model.config.get_text_config(decoder=True)
    # Without its path and its transformers version, so that the same model has the same hash.
    left_out = ("_name_or_path", "transformers_version", "dtype", "torch_dtype")
    described = {name: value for name, value in config.to_dict().items() if name not in left_out}
    first = next(iter(layers.values()))
    kv_heads, head_dim = first.direction.shape
    return {
        "keepset": keepset.__version__,
        "model": {
            "name": PureWindowsPath(model.config.name_or_path or "").name,
            "architecture": type(model).__name__,
            "config_sha256": hashlib.sha256(json.dumps(described, sort_keys=True, default=str).encode()).hexdigest(),
            "layers": list(layers),
            "query_heads": first.mean.shape[0],
            "kv_heads": kv_heads,
            "head_dim": head_dim,
            "rope": described.get("rope_parameters"),
            "sample": sample(model),
        },
        "corpus": {
            "sha256": corpus.sha256,
            "passages": len(corpus.passages),
            "tokens": corpus.tokens,
            "left_out": SKIP * len(corpus.passages),
        },
        "seed": corpus.seed,
    }


PROBE = 2
"""The number of tokens after which unit vectors are rotated. The fastest plane, with one radian per position, has made
less than half a turn by then, and a layer that rotates differs from one that does not."""


def measure_rotation(
    rotate: Rotate, unit: Float[Tensor, "head_dim head_dim"]
) -> tuple[Int[Tensor, " head_dim"], Float[Tensor, " head_dim"], Float[Tensor, " head_dim"]]:
    """Return partner, frequency and gain of every number of a head, measured with the rows of the identity matrix.

    Args:
        rotate: the layer's rotation.
        unit: the identity matrix.

    Raises:
        UnsupportedModelError: the layer does not rotate planes.
    """
    turned = rotate(unit[None, None], 1)[0, 0].float().cpu()
    straight = turned.diagonal()
    off_diagonal = turned - straight.diag()
    crossed, partner = off_diagonal.abs().max(0)
    itself = torch.arange(len(unit))
    partner = partner.where(crossed > 0, itself)
    sine = off_diagonal[partner, itself]
    if not torch.equal(partner[partner], itself) or not torch.allclose(sine, -sine[partner]):
        raise UnsupportedModelError(
            "This model rotates queries in a way that keepset cannot describe: it has no statistics for methods that "
            "need them."
        )
    return partner, torch.atan2(sine, straight) / PROBE, torch.hypot(sine, straight)
