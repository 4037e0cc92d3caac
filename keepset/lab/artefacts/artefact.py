"""`Artefact`: the contents of a published file for a model. `Found`: a file's contents before its format is known."""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from dataclasses import dataclass, field
from typing import Any, Self

from jaxtyping import Float, Int
from torch import Tensor
from transformers import PreTrainedModel

from keepset.hf.model_support import head_dim_of


@dataclass(frozen=True)
class ModelShape:
    """The sizes of a model that an artefact has to fit.

    Attributes:
        layers: all layers, also those that keepset does not compress.
        query_heads: query heads of a layer.
        kv_heads: KV heads of a layer.
        head_dim: numbers per key.
    """

    layers: int
    query_heads: int
    kv_heads: int
    head_dim: int

    @classmethod
    def of(cls, model: PreTrainedModel) -> Self:
        """Return the sizes in a model's configuration."""
        config = model.config.get_text_config(decoder=True)
        heads = config.num_attention_heads
        kv_heads = getattr(config, "num_key_value_heads", None) or heads
        return cls(config.num_hidden_layers, heads, kv_heads, head_dim_of(model))

    def __str__(self) -> str:
        return f"{self.layers} layers, {self.query_heads} query and {self.kv_heads} KV heads of size {self.head_dim}"


@dataclass(frozen=True, eq=False)
class Found:
    """Contents of a file or folder.

    Attributes:
        tensors: tensors of a safetensors file, by their names; empty if there is none.
        config: the JSON object beside it; empty if there is none.
        unpickled: the contents of a `.pt` file; None if there is none.
        table: the numbers of a `.tsv` file, row by row; empty if there is none.
    """

    tensors: Mapping[str, Tensor] = field(default_factory=dict)
    config: Mapping[str, Any] = field(default_factory=dict)
    unpickled: Any = None
    table: Sequence[Sequence[float]] = ()


@dataclass(frozen=True, eq=False)
class Artefact:
    """Contents of an artefact, for all layers of a model.

    Attributes:
        format: the name of the format.
        fields: fields of `LayerStatistics` by their names, with an axis for the layers in front.
        retrieval: how much each KV head retrieves.
        partner: index of the number with which each number of a head is rotated, if the fields depend on it.
        made: the file's facts on how it was made or is used; plain JSON.
        advice: how a recipe must use it to follow its authors; "" if defaults do so.
    """

    format: str
    fields: Mapping[str, Float[Tensor, "layers heads *rest"]] = field(default_factory=dict)
    retrieval: Float[Tensor, "layers kv_heads"] | None = None
    partner: Int[Tensor, " head_dim"] | None = None
    made: Mapping[str, Any] = field(default_factory=dict)
    advice: str = ""

    @property
    def gives(self) -> list[str]:
        """Return the names of the statistics that it gives."""
        return [*self.fields, *([] if self.retrieval is None else ["retrieval"])]

    def fits(self, shape: ModelShape) -> bool:
        """Return whether it fits a model of this shape."""
        layers, heads, kv_heads, dim = shape.layers, shape.query_heads, shape.kv_heads, shape.head_dim
        wanted = {
            "direction": (layers, kv_heads, dim),
            "mean": (layers, heads, dim),
            "covariance": (layers, heads, dim, dim),
            "norm": (layers, heads, dim),
        }
        return all(each.shape == wanted[name] for name, each in self.fields.items()) and (
            self.retrieval is None or self.retrieval.shape == (layers, kv_heads)
        )

    @property
    def finite(self) -> bool:
        """Return whether all its numbers are finite."""
        numbers = [*self.fields.values(), *([] if self.retrieval is None else [self.retrieval])]
        return all(bool(each.isfinite().all()) for each in numbers)
