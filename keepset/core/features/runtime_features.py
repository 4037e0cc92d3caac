"""Features that a runtime provides without an accumulator."""

from __future__ import annotations

from collections.abc import Hashable
from dataclasses import dataclass, field, replace

import torch
from jaxtyping import Float
from torch import Tensor

from keepset.core import statistics
from keepset.core.feature import Feature
from keepset.core.observation import Observation
from keepset.core.sizes import Sizes
from keepset.core.statistics import RowStatistics, Statistics
from keepset.core.tables import Tables
from keepset.errors import KeepsetError
from keepset.kernels.dispatch import CACHE_BLOCK, block_size, upload
from keepset.kernels.predictor import Networks


@dataclass(frozen=True)
class RecentQueries(Feature[Tensor]):
    """The newest `window` queries, after rotation: `observation.queries`, `window_attention` and `window_usage`.

    They exist at every event; every runtime records them itself.

    Attributes:
        window: how many queries.
    """

    window: int = field()

    @property
    def name(self) -> str:
        return f"window of {self.window} queries"

    @property
    def key(self) -> Hashable:
        """Return one key for all windows: a longer one contains a shorter one."""
        return RecentQueries

    def merged(self, other: RecentQueries) -> RecentQueries:
        return max(self, other, key=lambda feature: feature.window)


@dataclass(frozen=True)
class EntryBiases(Feature[Tensor]):
    """Attention that adds a bias by the method to the logits of every entry: `observation.bias`."""

    name = "biases of entries"


@dataclass(frozen=True)
class QuantizedEntries(Feature[Tensor]):
    """Attention over keys and values whose numbers are stored in few `bits`, each key and value with its own scale."""

    bits: int

    @property
    def name(self) -> str:
        return f"entries in {self.bits} bits"


@dataclass(frozen=True)
class Perplexity(Feature[Float[Tensor, " batch"]]):
    """Perplexity of the prompt's newest tokens by the model's own logits, `[batch]`; infinite if none is predicted.

    Attributes:
        tokens: how many tokens.
    """

    name = "perplexity of the newest tokens"
    prompt_only = "looks at the prompt's perplexity, which only exists at the prompt's end"
    transformers_only = (
        "looks at the prompt's perplexity, which attention layers do not see: leave what depends on it out (gate=False)"
    )

    tokens: int


@dataclass(frozen=True)
class OutputProjection(Feature[Float[Tensor, "query_heads value_dim hidden"]]):
    """The weights from every query head's value to the layer's output, `[query_heads, value_dim, hidden]`."""

    name = "output projection"
    transformers_only = "looks at the output projection, which attention layers do not see"

    def norms(self, observation: Observation, order: int) -> Float[Tensor, "batch query_heads entries"]:
        """Return the L1 or L2 norm (`order`) of each entry's projected value, `|W_O v|`, in float32.

        The projected values are computed in blocks.

        Args:
            observation: the layer or layers.
            order: 1 or 2.
        """
        batch, kv_heads = observation.values.shape[:2]
        most = block_size(observation.values.device, CACHE_BLOCK)
        norms = []
        for head, group in enumerate(observation[self].unflatten(0, (kv_heads, -1)).unbind(0)):
            rows = max(1, most // (batch * group.shape[0] * group.shape[2]))
            blocks = [
                torch.linalg.vector_norm(values.float()[:, None] @ group.float(), ord=order, dim=-1)
                for values in observation.values[:, head].split(rows, 1)
            ]
            norms.append(torch.cat(blocks, -1))
        return torch.cat(norms, 1)


@dataclass(frozen=True)
class ModelStatistics(Feature[Statistics]):
    """Statistics of the model, measured by `keepset calibrate`.

    Attributes:
        file: the file that holds them; "" for the statistics that are offered for the model.
        predictors: whether the networks of `distilled` are asked for.
        covariances: whether the method reads covariances. They take memory: paged runtimes then show fewer layers at
            once.
        rotates: whether the method rotates by the measured frequencies, for which a token needs a single position.
    """

    name = "statistics of the model"

    file: str
    predictors: bool = field(default=False, repr=False)
    covariances: bool = field(default=False, compare=False, repr=False)
    rotates: bool = field(default=False, compare=False, repr=False)

    def merged(self, other: ModelStatistics) -> ModelStatistics:
        covariances, rotates = self.covariances or other.covariances, self.rotates or other.rotates
        return replace(self, covariances=covariances, rotates=rotates)

    def load(self, model: str = "") -> Statistics:
        """Return the statistics in the file, or those that are offered for a model.

        Raises:
            KeepsetError: if there are none, or they lack what is asked for.
        """
        measured = statistics.load(self.file, model)
        if self.predictors and not measured.predictors:
            raise KeepsetError(
                f"The statistics {measured.name!r} hold no networks for distilled: make them again with keepset "
                "calibrate --teacher reread --teacher prompt_queries."
            )
        return measured

    def repeat_per_request(self, observation: Observation) -> RowStatistics:
        """Return the statistics of each row's layer, on the keys' device.

        Raises:
            KeepsetError: if nobody gave the statistics, or they are of a model of another shape.
        """
        measured, device = self.checked(observation), observation.valid.device
        return RowStatistics(
            lambda name: observation.repeat_per_request(measured.on(device, name)[observation.observed])
        )

    def networks(self, observation: Observation) -> Networks:
        """Return the networks that score entries in the observed layers, on the keys' device.

        Raises:
            KeepsetError: if nobody gave the statistics, they are of another model, or no networks were fitted.
        """
        return self.checked(observation).networks(observation.valid.device).of_layers(observation.observed)

    def checked(self, observation: Observation) -> Statistics:
        """Return the statistics of one or several observed layers.

        Raises:
            KeepsetError: if nobody gave the statistics, or they are of a model of another shape.
        """
        measured = observation[self]
        measured.check(observation.layers, observation.valid.shape[1], observation.head_dim)
        return measured

    def retrieval(self, sizes: Sizes) -> Float[Tensor, "layers kv_heads"]:
        """Return how much the KV heads of all compressed layers retrieve, from 0 to 1 (DuoAttention, arXiv:2410.10819).

        Raises:
            KeepsetError: if nobody gave the statistics, they are of another model, or retrieval was not measured.
        """
        measured = sizes[self]
        measured.check(sizes.layers, sizes.entries.shape[1])
        return upload(measured.gates(), sizes.entries.device)


@dataclass(frozen=True)
class ModelTables(Feature[Tables]):
    """Tables that `keepset compile` has made for a model, in a file."""

    name = "compiled tables"

    file: str
