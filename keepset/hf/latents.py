"""Models that cache latents (DeepSeek V2 and V3): entries are stored as the model caches them, one for all heads.

Such a model caches for each token a latent and a rotated part, from which it makes the keys and values of all heads.
Keys and values are linear in them, so a query can be projected to the latents instead (`absorbed`): its product with
`[latent, rotated part]` is its product with the key. So there is one KV head, whose group is all query heads. An
entry's key is `[latent, rotated part]`, its value is the latent, and attention's output is projected back to each head
(`finished`). Methods see these keys, values and queries, and need not know about it.
"""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import dataclass, replace
from functools import cached_property
from typing import Any
from weakref import WeakSet

import torch
from jaxtyping import Float
from torch import Tensor, nn

from keepset.errors import UnsupportedModelError
from keepset.hf.attention import Attend, AttentionInput, set_pending_latents
from keepset.hf.linear import matrix_of
from keepset.hf.store import EntryStore
from keepset.kernels.packed import PackedHeads

_checked: WeakSet[nn.Module] = WeakSet()
"""Attention modules whose keys and values were seen to be linear in what they cache."""


@dataclass(frozen=True, eq=False)
class Latents:
    """The weights by which an attention module makes keys and values from latents.

    Attributes:
        to_keys: for each head, the weights of the first part of its key.
        to_values: for each head, the weights of its value.
    """

    to_keys: Float[Tensor, "query_heads nope latent"]
    to_values: Float[Tensor, "query_heads value_dim latent"]

    @classmethod
    @torch.no_grad()
    def of(cls, new: AttentionInput, latent: Tensor, rotated: Tensor) -> Latents:
        """Return the weights of a module that has just made keys and values.

        Args:
            new: tokens with the queries, keys and values that the module has made.
            latent: what it has made them of, `[batch, 1, n, latent]`.
            rotated: the rotated part that all heads' keys share, `[batch, 1, n, rotated]`.

        Raises:
            UnsupportedModelError: the module does not make its keys and values in this way.
        """
        module, key, value = new.module, new.key, new.value
        heads, nope, size = key.shape[1], key.shape[-1] - rotated.shape[-1], value.shape[-1]
        unknown = UnsupportedModelError(
            f"{type(module).__name__} makes keys and values of what it caches in a way that keepset does not know."
        )
        weight = matrix_of(getattr(module, "kv_b_proj", None), latent, latent.shape[-1])
        if weight is None or weight.shape[1] != heads * (nope + size):
            raise unknown
        projections = cls(*weight.t().unflatten(0, (heads, nope + size)).split([nope, size], 1))
        if module not in _checked:
            newest = latent[:, :, -1:].float()
            for whole, part in ((key[..., :nope], projections.to_keys), (value, projections.to_values)):
                expected = newest @ part.float().mT
                bound = 0.02 if key.dtype != torch.float32 else 1e-3
                if not torch.allclose(whole[:, :, -1:].float(), expected, bound, bound * float(expected.abs().max())):
                    raise unknown
            if not torch.equal(key[:, :, -1:, nope:], rotated[:, :, -1:].expand(-1, heads, -1, -1)):
                raise unknown
            _checked.add(module)
        return projections

    def absorbed(self, queries: Float[Tensor, "batch query_heads n head_dim"]) -> Tensor:
        """Return queries for latents and rotated parts, `[batch, query_heads, n, latent + rotated]`."""
        nope = self.to_keys.shape[1]
        return torch.cat([queries[..., :nope] @ self.to_keys.to(queries.dtype), queries[..., nope:]], -1)


class LatentInput(AttentionInput):
    """New tokens as those of one KV head, whose entries are latents.

    Attributes:
        latents: the weights that make the layer's keys and values.
        own: queries, keys and values as the model has made them.
    """

    latents: Latents
    own: tuple[Tensor, Tensor, Tensor]

    @classmethod
    def of(cls, new: AttentionInput, latent: Tensor, rotated: Tensor) -> LatentInput:
        """Return the tokens of a call of the attention function.

        Args:
            new: the tokens, with the queries, keys and values that the module has made.
            latent, rotated: what the layer caches of them, as for `Latents.of`.
        """
        latent_input = cls.__new__(cls)
        vars(latent_input).update(vars(new))
        latent, rotated = (part.to(new.key.dtype) for part in (latent, rotated))
        latent_input.latents, latent_input.own = Latents.of(new, latent, rotated), (new.query, new.key, new.value)
        latent_input.key, latent_input.value = torch.cat([latent, rotated], -1), latent
        del vars(latent_input)["query"]
        return latent_input

    @cached_property
    def query(self) -> Tensor:  # type: ignore[override]
        """Queries for latents. Those of a long prompt are much larger than its own, so they are made only if needed."""
        return self.latents.absorbed(self.own[0])

    @property
    def as_made(self) -> tuple[Tensor, Tensor, Tensor]:
        return self.own

    @property
    def absorb(self) -> Callable[[Tensor], Tensor]:
        return self.latents.absorbed

    def finished(self, attended: Tensor) -> Tensor:
        to_values = self.latents.to_values.to(attended.dtype)
        return torch.einsum("bnhl,hvl->bnhv", attended, to_values).contiguous()

    def projected(self, weight: Tensor) -> Tensor:
        return self.latents.to_values.mT.to(weight.dtype) @ weight

    def convert(self, dtype: torch.dtype) -> None:
        query, key, value = (part.to(dtype) for part in self.own)
        self.own, self.key, self.value = (query, key, value), self.key.to(dtype), self.value.to(dtype)
        vars(self).pop("query", None)

    def _cut(self, part: slice | list[int]) -> None:
        query, key, value = (states[:, :, part] for states in self.own)
        self.own, self.key, self.value = (query, key, value), self.key[:, :, part], self.value[:, :, part]
        vars(self).pop("query", None)


def set_pending(attend: Attend, layer: int, latent: Tensor, rotated: Tensor) -> None:
    """Leave the attention function of a layer whose module first makes keys and values from these latents.

    Args:
        attend: the layer's attention, which gets the tokens as a `LatentInput`.
        layer: the layer's index in the model.
        latent, rotated: what the layer caches of the tokens, as for `Latents.of`.
    """
    set_pending_latents(lambda new: attend(LatentInput.of(new, latent, rotated)), layer, latent)


class LatentStore(EntryStore):
    """A store whose `keys` column has latents and whose `values` column their rotated parts, as the model caches them.

    Reading it gives `[latent, rotated part]` as keys, and latents as values.
    """

    @classmethod
    def stored(cls, keys: Tensor, values: Tensor) -> tuple[Tensor, Tensor]:
        size = values.shape[-1]
        return keys[..., :size], keys[..., size:]

    @classmethod
    def read(cls, keys: Tensor, values: Tensor) -> tuple[Tensor, Tensor]:
        return torch.cat([keys, values], -1), keys

    @property
    def sizes(self) -> tuple[int, int]:
        latent, rotated = self.heads.sizes
        return latent + rotated, latent

    @property
    def keys(self) -> Tensor:
        return self.read(super().keys, super().values)[0]

    @property
    def values(self) -> Tensor:
        return super().keys

    @property
    def attended(self) -> PackedHeads:
        heads = self.heads.whole()
        keys, values = self.read(heads.keys, heads.values)
        return replace(heads, keys=keys, values=values)

    def append(self, keys: Tensor, values: Tensor, *args: Any, **kwargs: Any) -> None:
        super().append(*self.stored(keys, values), *args, **kwargs)

    def replace_values(self, values: Tensor) -> None:
        raise UnsupportedModelError(
            "This model caches latents, of which keys and values are both made, so no value can be replaced by itself: "
            "leave match out of the recipe."
        )
