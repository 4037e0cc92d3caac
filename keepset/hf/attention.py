"""The attention and the mask function that keepset registers with transformers, and their inputs.

Every architecture that uses transformers' attention interface calls these two. Neither is given the cache, so both
find it by their arguments:

- A cache returns keys from `update`, with the function that attends to them attached (`set_pending_attention`). The
  attention module passes the same keys on to the attention function, which calls that function. A module that first
  makes keys from cached latents passes on others: then the thread remembers the function until the module's call
  (`set_pending_latents`).
- transformers makes one mask for all layers, but layers that dropped different entries need different ones. So the
  mask function returns a rule (`MaskRule`), and each layer applies it to its entries.
"""

from __future__ import annotations

import copy
import threading
from collections.abc import Callable, Sequence
from contextlib import AbstractContextManager, nullcontext
from dataclasses import dataclass, field, replace
from functools import cached_property, partial
from typing import Any, NamedTuple, Never, TypeVar, cast

import torch
from jaxtyping import Bool, Float, Int
from torch import Tensor, nn
from transformers import AttentionInterface
from transformers.integrations.sdpa_attention import sdpa_attention_forward
from transformers.masking_utils import AttentionMaskInterface, causal_mask_function, sdpa_mask

from keepset.errors import KeepsetError, UnsupportedModelError
from keepset.hf.autocast import KINDS, Autocast
from keepset.hf.layer_input import LayerInput, QueryProbe, Rotation
from keepset.kernels.dispatch import upload
from keepset.kernels.softmax import Softmax, softmax_attention

NAME = "keepset"
"""Name of the attention implementation in transformers."""
OTHER_PROMPT = "for another prompt make a new cache, because one serves one conversation"
"""The advice against feeding a second prompt to a cache; part of several errors."""
SWITCHING = threading.Lock()
"""Held while a model's implementation is set, because transformers changes the model's configurations meanwhile."""
_NOTE = "_keepset_attention"
"""Attribute of a tensor of keys: the function that attends to them, and their values."""


Function = TypeVar("Function", bound=Callable[..., Any])


def uncompiled(function: Function) -> Function:
    """Return the function so that PyTorch's compiler leaves it alone.

    A cache changes with every token, so a compiled graph would serve one token. And the attention function finds its
    layer by an attribute of the tensor that the cache returned, which a graph would lose.
    """
    return cast(Function, torch.compiler.disable(function))


@dataclass(frozen=True, eq=False)
class RealTokens:
    """Which of some tokens are real, and not padding. The host reads it once for all layers.

    Attributes:
        mask: true for real tokens, on the device.
        host_mask: the same on the host.
        positions: positions counted from each request's first token, on the host; negative for padding.
    """

    mask: Bool[Tensor, "batch n"]
    host_mask: Bool[Tensor, "batch n"]
    positions: Int[Tensor, "batch n"]

    def part(self, tokens: slice) -> RealTokens:
        """Return the same for some of the tokens."""
        return RealTokens(self.mask[:, tokens], self.host_mask[:, tokens], self.positions[:, tokens])

    @cached_property
    def counts(self) -> list[int]:
        """Number of real tokens in each request."""
        return self.host_mask.sum(-1).tolist()

    @cached_property
    def indices(self) -> list[Int[Tensor, " _"]]:
        """Indices of each request's real tokens, on the device."""
        return [upload(row.nonzero()[:, 0], self.mask.device) for row in self.host_mask]


class BatchedAttention(NamedTuple):
    """The result of storing new tokens in several caches and attending to them at once.

    Attributes:
        output: attention's output, `[batch, n, query_heads, value_dim]`.
        positions: positions of the tokens, `[batch, n]`.
        lengths: tokens of each request, these included, `[batch]`.
    """

    output: Tensor
    positions: Tensor
    lengths: Tensor


@dataclass(eq=False)
class AttentionInput:
    """`n` new tokens of some requests, as they come to one layer's attention.

    The attention function fills in the arguments from transformers. The cache adds its positions and lengths.

    Attributes:
        module: the model's attention module.
        query, key, value: those of the tokens, after rotation.
        softmax: how the model makes attention of query-key products.
        autocast: the mixed precision in which the model runs; None without.
        mask: the rule of the mask; None if the model makes none.
        position_ids: the model's own positions, if it passes them on.
        rows: the indices of these requests in the model's batch.
        batched: the result if the tokens were processed together with those of other caches, else None.
        positions: positions counted from each request's first token; padding has that of the token before.
        real: which tokens are not padding; None if all are real.
        start, end: logical lengths of the cache before and after the tokens.
        cache_valid: which tokens of the cache, up to these, are no padding; None if all are.
        layer_input: input of the attention module, if a feature needs it.
        rotation: rotation of the queries, if a feature needs it.
        lse: log-sum-exp of every query's logits, request by request, if attention has computed it.
        modules: the attention modules whose query heads these are, if there are several. In every KV head's group those
            of the first module come first.
    """

    module: nn.Module
    query: Float[Tensor, "batch query_heads n head_dim"]
    key: Float[Tensor, "batch kv_heads n head_dim"]
    value: Float[Tensor, "batch kv_heads n value_dim"]
    softmax: Softmax
    autocast: Autocast | None
    mask: MaskRule | None = None
    position_ids: Tensor | None = None
    rows: slice = field(default_factory=partial(slice, None))
    batched: BatchedAttention | None = None
    positions: Int[Tensor, "batch n"] = field(init=False)
    real: RealTokens | None = None
    start: int = 0
    end: int = 0
    cache_valid: Bool[Tensor, "batch logical"] | None = None
    layer_input: LayerInput | None = None
    rotation: Rotation | None = None
    lse: list[Tensor] | None = None
    modules: Sequence[nn.Module] = ()

    @property
    def as_made(self) -> tuple[Tensor, Tensor, Tensor]:
        """Queries, keys and values as the model has made them."""
        return self.query, self.key, self.value

    @property
    def absorb(self) -> Callable[[Tensor], Tensor] | None:
        """Return the function that makes `query` from the model's queries; None if they are the same."""
        return None

    def finished(self, attended: Float[Tensor, "batch n query_heads value_dim"]) -> Tensor:
        """Return attention's output in the form that the model takes, from the output over stored values."""
        return attended

    def projected(self, weight: Float[Tensor, "query_heads own_dim hidden"]) -> Tensor:
        """Return the output projection of each query head's stored values, from that of the model's own values."""
        return weight

    @property
    def valid(self) -> Bool[Tensor, "batch n"] | None:
        """Mask of the tokens that are not padding; None if all are real."""
        return None if self.real is None else self.real.mask

    @property
    def real_indices(self) -> list[Int[Tensor, " _"]] | None:
        """Indices of each request's tokens that are not padding; None if all are real."""
        return None if self.real is None else self.real.indices

    @property
    def padded(self) -> bool:
        """Return whether the cache has any padding, that of these tokens included."""
        return self.cache_valid is not None

    @property
    def length(self) -> int:
        """Number of tokens, padding included."""
        return self.key.shape[2]

    @property
    def lengths(self) -> Int[Tensor, " batch"]:
        """Tokens of each request after these, padding left out."""
        return self.positions[:, -1] + 1

    @property
    def counts(self) -> list[int]:
        """Number of these tokens in each request, padding left out."""
        return [self.length] * len(self.key) if self.real is None else self.real.counts

    def convert(self, dtype: torch.dtype) -> None:
        """Convert queries, keys and values to the type of stored entries, which may come from another precision."""
        self.query, self.key, self.value = (part.to(dtype) for part in (self.query, self.key, self.value))

    def row(self, index: int, batched: BatchedAttention) -> AttentionInput:
        """Return one request's part, before any cache has added to it.

        Args:
            index: the request, by its row of the batch.
            batched: what was done for the tokens of all requests.
        """
        request_input, rows = copy.copy(self), slice(index, index + 1)
        request_input.query, request_input.key, request_input.value = self.query[rows], self.key[rows], self.value[rows]
        request_input.position_ids = None if self.position_ids is None else self.position_ids[rows]
        request_input.rows, request_input.batched = rows, BatchedAttention(*(part[rows] for part in batched))
        return request_input

    def read_by(self, reader: AttentionInput) -> AttentionInput:
        """Return these tokens with the queries of another layer, which attends to the same entries."""
        reader_input = copy.copy(self)
        reader_input.module, reader_input.softmax, reader_input.lse = reader.module, reader.softmax, None
        reader_input.query = reader.query.to(self.query.dtype)
        return reader_input

    def tokens(self, part: slice) -> AttentionInput:
        """Return some of the tokens, neighbours of one another."""
        token_input = copy.copy(self)
        token_input._cut(part)
        token_input.positions, token_input.start = self.positions[:, part], self.start + (part.start or 0)
        token_input.end = token_input.start + token_input.length
        token_input.real = None if self.real is None else self.real.part(part)
        token_input.rotation = None if self.rotation is None else (self.rotation[0][:, part], self.rotation[1][:, part])
        return token_input

    @property
    def newest(self) -> AttentionInput:
        """The last of the tokens alone, in memory of its own."""
        if self.length == 1:
            return self
        last = copy.copy(self)
        last._cut([self.length - 1])
        last.positions, last.start = self.positions[:, -1:].clone(), self.end - 1
        last.mask = last.position_ids = last.real = last.rotation = last.lse = last.batched = None
        last.layer_input = None if self.layer_input is None else self.layer_input.newest()
        return last

    def _cut(self, part: slice | list[int]) -> None:
        """Reduce queries, keys and values to some tokens: views of a slice, copies of a list."""
        self.query, self.key, self.value = self.query[:, :, part], self.key[:, :, part], self.value[:, :, part]

    def split(self, end: int) -> tuple[AttentionInput, AttentionInput | None]:
        """Return the tokens up to a logical length of the cache, and the later ones if there are any."""
        if end >= self.end:
            return self, None
        return self.tokens(slice(0, end - self.start)), self.tokens(slice(end - self.start, None))


def joined(layers: Sequence[AttentionInput]) -> AttentionInput:
    """Return the same tokens with the query heads of several layers, beginning with the layer that stores entries.

    Raises:
        UnsupportedModelError: the layers attend in different ways.
    """
    first = layers[0]
    ways = {(type(layer.module), layer.softmax.scaling, layer.softmax.softcap) for layer in layers}
    if len(ways) > 1 or len({layer.softmax.sinks is None for layer in layers}) > 1:
        raise UnsupportedModelError(
            "Layers of this model attend to the same keys in different ways, which keepset does not support."
        )
    kv_heads, whole = first.key.shape[1], copy.copy(first)
    whole.query = by_group([layer.query for layer in layers], kv_heads, 1)
    whole.modules = [layer.module for layer in layers]
    if first.softmax.sinks is not None:
        sinks = [layer.softmax.sinks for layer in layers if layer.softmax.sinks is not None]
        whole.softmax = replace(first.softmax, sinks=by_group(sinks, kv_heads, 0))
    if first.lse is not None:
        rows = zip(*(layer.lse for layer in layers if layer.lse is not None), strict=True)
        whole.lse = [by_group(row, kv_heads, 0) for row in rows]
    return whole


def by_group(parts: Sequence[Tensor], kv_heads: int, axis: int) -> Tensor:
    """Return tensors of several layers' query heads as one, under the KV heads that they share.

    Args:
        parts: of each layer, with as many query heads along one axis as any other.
        kv_heads: KV heads that they share.
        axis: the axis of query heads.
    """
    return torch.cat([part.unflatten(axis, (kv_heads, -1)) for part in parts], axis + 1).flatten(axis, axis + 1)


Attend = Callable[[AttentionInput], Tensor]
"""Stores new tokens and returns attention's output, `[batch, n, query_heads, value_dim]`."""


def set_pending_attention(attend: Attend, key: Tensor, value: Tensor) -> None:
    """Attach the function that attends to keys to these keys, so that `keepset_attention` finds it.

    Args:
        attend: the function, which gets the tokens with these keys and values.
        key: `[batch, kv_heads, n, head_dim]`; the very tensor that the attention module passes on.
        value: `[batch, kv_heads, n, value_dim]`; another one is refused.
    """
    vars(key)[_NOTE] = attend, value


class _Pending(threading.local):
    """The function that attends to a thread's newest latents, from which the model first makes keys and values."""

    latents: tuple[int, tuple[int, ...], Attend] | None = None


_pending = _Pending()


def set_pending_latents(attend: Attend, layer: int, latent: Tensor) -> None:
    """Leave the function that attends to latents for `keepset_attention`, which cannot find it by the module's keys.

    Args:
        attend: the function, which gets the tokens with the keys and values that the module makes.
        layer: the layer's index in the model.
        latent: what the layer caches of the tokens, `[batch, 1, n, latent]`.
    """
    _pending.latents = layer, (len(latent), latent.shape[2]), attend


def _latent_attention(module: nn.Module, key: Tensor) -> Attend | None:
    left, _pending.latents = _pending.latents, None
    if left is None or (getattr(module, "layer_idx", None), (len(key), key.shape[2])) != left[:2]:
        return None
    return left[2]


@uncompiled
def keepset_attention(
    module: nn.Module,
    query: Tensor,
    key: Tensor,
    value: Tensor,
    attention_mask: MaskRule | QueryProbe | Tensor | None,
    scaling: float | None = None,
    dropout: float = 0.0,
    **kwargs: Any,
) -> tuple[Tensor, None]:
    """Attend to the entries of a keepset cache's layer; for any other cache, or none, run transformers' SDPA.

    SDPA has neither soft caps nor sinks: for models with these keepset computes attention in both cases.

    Args:
        module: the model's attention module.
        query: queries after rotation, `[batch, query_heads, n, head_dim]`.
        key: what `cache.update` returned, `[batch, kv_heads, n, head_dim]`.
        value: what `cache.update` returned, `[batch, kv_heads, n, value_dim]`.
        attention_mask: what `keepset_mask` returned, or the model's own.
        scaling: factor of the products of queries and keys; None for `head_dim ** -0.5`.
        dropout: for caches that are not keepset's.
        kwargs: further arguments of transformers' attention functions.

    Returns:
        Attention's output `[batch, n, query_heads, value_dim]`, and None in place of the weights.

    Raises:
        KeepsetError: the call asks for attention weights.
        UnsupportedModelError: the model's attention is of a kind that keepset does not compute.
    """
    if isinstance(attention_mask, QueryProbe):
        attention_mask.queries = query
        return query.new_zeros(query.shape[0], query.shape[2], query.shape[1], value.shape[-1]), None
    for feature, name in _UNSUPPORTED.items():
        if kwargs.get(feature) is not None:
            raise UnsupportedModelError(f"keepset's attention does not support {name}, which this model uses.")
    noted = vars(key).pop(_NOTE, None)
    if noted is None and (of_latents := _latent_attention(module, key)) is not None:
        noted = of_latents, value
    softmax = Softmax(
        query.shape[-1] ** -0.5 if scaling is None else scaling, kwargs.pop("softcap", None), kwargs.pop("s_aux", None)
    )
    kind, autocast = query.device.type, None
    if kind in KINDS and torch.is_autocast_enabled(kind):
        autocast = Autocast(kind, torch.get_autocast_dtype(kind))
    if noted is None:
        mask = attention_mask.matrix if isinstance(attention_mask, MaskRule) else attention_mask
        if softmax.plain:
            return sdpa_attention_forward(module, query, key, value, mask, dropout, scaling, **kwargs)
        return _attention_without_cache(module, query, key, value, mask, softmax, autocast, dropout), None
    attend, cached = noted
    # A mask's own rule says whether it is causal.
    if attention_mask is None and getattr(module, "is_causal", True) is False:
        raise UnsupportedModelError(
            f"{type(module).__name__} lets tokens see later ones, and keepset compresses causal attention alone: a "
            "model that can be a decoder needs is_decoder=True in its config."
        )
    if cached is not value:
        raise UnsupportedModelError(
            f"{type(module).__name__} attends over other values than it caches, which keepset does not support."
        )
    if isinstance(attention_mask, Tensor):
        raise UnsupportedModelError(
            "keepset.Cache takes a two-dimensional attention mask [batch, tokens]; this call brought a finished matrix."
        )
    if kwargs.get("output_attentions"):
        raise KeepsetError(
            "output_attentions=True asks for weights that keepset's attention never holds: leave it out, or run the "
            "model without a keepset.Cache and with the attention implementation 'eager'."
        )
    new = AttentionInput(module, query, key, value, softmax, autocast, attention_mask, kwargs.get("position_ids"))
    if autocast is None:
        return attend(new).to(query.dtype), None
    new.query, new.key, new.value = autocast.cast(query, key, value)
    expected = new.query.dtype
    with autocast.off():
        return attend(new).to(expected), None


def _attention_without_cache(
    module: nn.Module,
    query: Tensor,
    key: Tensor,
    value: Tensor,
    mask: Tensor | None,
    softmax: Softmax,
    autocast: Autocast | None,
    dropout: float,
) -> Tensor:
    if dropout:
        raise UnsupportedModelError(
            "keepset's attention has no dropout for a model with soft caps or sinks: call model.eval() first."
        )
    causal = mask is None and query.shape[2] > 1 and getattr(module, "is_causal", True)
    if autocast is None:
        return softmax_attention(query, key, value, softmax, mask, causal)[0]
    query, key, value = autocast.cast(query, key, value)
    with autocast.off():
        return softmax_attention(query, key, value, softmax, mask, causal)[0]


def without_autocast(device: torch.device) -> AbstractContextManager[Any]:
    """Return a context for keepset's arithmetic outside of attention."""
    enabled = device.type in KINDS and torch.is_autocast_enabled(device.type)
    return torch.autocast(device.type, enabled=False) if enabled else nullcontext()


class KeepsetLength(int):
    """Length of a keepset layer: the only thing that the mask function learns about the cache."""


class CachedTokens(NamedTuple):
    """Tokens that a cache holds.

    Attributes:
        valid: which of them are no padding; None if all are.
    """

    valid: Bool[Tensor, "batch logical"] | None

    def differ(self, shown: Bool[Tensor, "batch logical"]) -> Bool[Tensor, ""]:
        """Return whether a mask hides some of them, or shows padding."""
        return (~shown if self.valid is None else shown != self.valid.to(shown.device)).any()


@dataclass(eq=False)
class MaskRule:
    """The arguments of one mask, which is evaluated when it is needed.

    Attributes:
        arguments: those of transformers' mask functions.
        cached: what a cache knows of its tokens, for `real` to compare the mask with; None to compare with nothing.
    """

    arguments: dict[str, Any]
    cached: CachedTokens | None = None
    ndim = 4
    """Four, as for a finished mask: a model may pass its mask to a decoder that would convert a two-dimensional one."""

    @property
    def dtype(self) -> Never:
        """Refuse to return a type, because no layer may compute with a mask.

        Raises:
            UnsupportedModelError: always.
        """
        raise UnsupportedModelError(
            "This model changes its attention mask in every layer, by what it looks at, which keepset does not support."
        )

    def __radd__(self, logits: Any) -> Never:
        """Refuse to be added to logits, which attention that a model computes itself would do.

        Raises:
            UnsupportedModelError: always.
        """
        raise UnsupportedModelError(
            "This model adds its attention mask to logits by itself, past transformers' attention interface, which "
            "keepset needs."
        )

    @cached_property
    def matrix(self) -> Bool[Tensor, "batch 1 q kv"] | None:
        """The ordinary mask, for layers that hold everything; None if plain causality is enough."""
        return sdpa_mask(**self.arguments)

    @cached_property
    def shows_later(self) -> bool:
        """Return whether some tokens of a prompt see later ones, as those of an image see each other.

        Raises:
            UnsupportedModelError: the mask is neither causal with padding, nor that with more shown within a prompt.
        """
        if self.arguments["mask_function"] is causal_mask_function:
            return False
        in_full = {**self.arguments, "allow_is_causal_skip": False}
        whole, causal = sdpa_mask(**in_full), sdpa_mask(**{**in_full, "mask_function": causal_mask_function})
        assert whole is not None and causal is not None
        if torch.equal(whole, causal):
            return False
        if int(self.arguments["q_offset"]) or not bool((whole | ~causal).all()):
            raise UnsupportedModelError(
                "keepset.Cache supports causal attention with padding, and in the first call tokens that see later "
                "ones, as those of an image do; this model or call asks for another mask."
            )
        return True

    @cached_property
    def real(self) -> RealTokens | None:
        """The new tokens that are not padding; None if all are real.

        Raises:
            UnsupportedModelError: layers that dropped entries cannot apply the mask.
            KeepsetError: the mask hides cached tokens, or shows cached padding.
        """
        if self.arguments["mask_function"] is not causal_mask_function:
            _ = self.shows_later  # which refuses other masks
        padding: Tensor | None = self.arguments.get("attention_mask")
        if padding is None:
            return None
        offset = int(self.arguments["q_offset"])
        end = offset + int(self.arguments["q_length"])
        # The host reads it once. For a single token the positions before it are not needed; they would be many.
        first = offset if offset + 1 == end else 0
        read = padding[:, first:end].bool()
        if self.cached is not None:  # read together with the mask, so that the host waits once
            read = torch.cat([self.cached.differ(padding[:, :offset].bool()).expand(len(read), 1), read], 1)
        host_mask = read.cpu()
        if self.cached is not None:
            if bool(host_mask[0, 0]):
                raise KeepsetError(
                    "The attention mask hides tokens that the cache holds, or shows padding that it does not: give the "
                    "mask that these tokens came with, followed by that of the new ones, or make a new cache."
                )
            host_mask = host_mask[:, 1:]
        positions = (host_mask.cumsum(-1) - 1).masked_fill(~host_mask, -1)[:, offset - first :]
        new = host_mask[:, offset - first :]
        return None if new.all() else RealTokens(padding[:, offset:end], new, positions)


@uncompiled
def keepset_mask(**arguments: Any) -> MaskRule | Tensor | None:
    """Return the rule of a mask for keepset's own layers, and transformers' SDPA mask for all others."""
    if isinstance(finished := arguments.get("attention_mask"), MaskRule):
        return finished  # which a model made and hands to its decoder
    cached, new = arguments["q_offset"], int(arguments["q_length"])
    if not isinstance(cached, KeepsetLength):
        return sdpa_mask(**arguments)
    if not new:
        raise KeepsetError(f"The cache holds {int(cached)} tokens and the input has no more: {OTHER_PROMPT}.")
    padding, end = arguments.get("attention_mask"), int(cached) + new
    if padding is not None and padding.shape[-1] < end:  # before any layer has stored a token
        raise narrow_mask(padding, end)
    return MaskRule(arguments)


def narrow_mask(mask: Tensor, end: int) -> KeepsetError:
    """Return the error for a mask of fewer tokens than the `end` of cache and input.

    Args:
        mask: `[batch, tokens]`.
        end: tokens of the cache and of the input.
    """
    return KeepsetError(
        f"The attention mask covers {mask.shape[-1]} tokens but the cache and the input are {end}: "
        f"give a mask for all tokens, cached ones included, and {OTHER_PROMPT}; chunked prefill onto a cache "
        "that is not empty is not supported."
    )


_UNSUPPORTED = {"position_bias": "additive position biases", "block_indices": "selection of blocks of keys"}
"""Arguments of transformers' interface that change attention in ways that keepset does not support."""

AttentionInterface.register(NAME, keepset_attention)
AttentionMaskInterface.register(NAME, keepset_mask)
