"""`Observation`: what a method may look at, one layer at one compression event."""

from __future__ import annotations

from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass, field

import torch
import torch.nn.functional as F
from jaxtyping import Bool, Float, Int
from torch import Tensor

from keepset.core.keep_set import KeepSet, LayerKeepSet
from keepset.core.statistics import LayerStatistics, Statistics
from keepset.errors import KeepsetError

Rotate = Callable[[Tensor, int], Tensor]
"""`(rows [batch, query_heads, n, head_dim] before rotation, future) -> rows` at the mean rotation of the
`future` positions that follow the request's last token."""


@dataclass(frozen=True)
class SecondPass:
    """Tokens that run once more on top of the prompt's whole cache, for the attention that they pay to it.

    They are the task's tokens where some were given to the cache, else the prompt's own. Nothing of them stays.

    Attributes:
        statistics: of the columns of that attention: `"sum"`, `"max"`, `"square"` (the sum of squares).
        chunk: how many tokens of the prompt run together; those of a chunk see the whole prompt and one another, and
            each chunk follows the prompt anew. 0: all of them.
        repeat: every chunk comes after words that ask to repeat it, and the statistics are of a softmax over nothing
            but itself, these words, the first few entries and the chunk's, each of which is looked at once (KVzip).
    """

    statistics: frozenset[str]
    chunk: int = 0
    repeat: bool = False


@dataclass(frozen=True, eq=False)
class SecondPassColumns:
    """What every entry of the prompt received in a second pass.

    Attributes:
        statistics: by their names, one number per query head and entry; zero where an entry received nothing.
        tokens: how many tokens have looked at the entries.
        opening: how many of the first entries were not asked about, because they are the chat template's; none, where
            nothing is said.
    """

    statistics: Mapping[str, Float[Tensor, "batch query_heads entries"]]
    tokens: Int[Tensor, " batch"]
    opening: Int[Tensor, " batch"] | None = None


@dataclass(frozen=True)
class Needs:
    """What a method declares that it looks at, beyond keys, values and positions.

    A runtime collects exactly this. `a | b` is what serves both.

    Attributes:
        window: how many of the newest queries.
        columns: statistics of each column of the prompt's causal attention: `"sum"`, `"max"`; not for events after
            the prompt.
        query_moments: moments of the queries before rotation; each number says how many of the first
            tokens to leave out.
        hidden_moments: the same for the hidden states that enter the layer's attention.
        buffer: over how many of the newest queries their moments are taken at an event after the prompt;
            at the prompt's end it is the whole prompt.
        statistics: of the model, measured beforehand: the files that hold them; "" for those offered for it.
        second_passes: tokens to run on top of the prompt's whole cache before anything is dropped.
        output_projection: the weights that each query head's values go through after attention.
        perplexity: of the prompt's newest tokens, by the model's own logits; each number says of how many.
        echoes: what entries would receive if the prompt's own queries came once more, right after it; each number says
            of how many tokens one is asked. Not for events after the prompt.
    """

    window: int = 0
    columns: frozenset[str] = field(default_factory=frozenset)
    query_moments: frozenset[int] = field(default_factory=frozenset)
    hidden_moments: frozenset[int] = field(default_factory=frozenset)
    buffer: int = 0
    statistics: frozenset[str] = field(default_factory=frozenset)
    second_passes: frozenset[SecondPass] = field(default_factory=frozenset)
    output_projection: bool = False
    perplexity: frozenset[int] = field(default_factory=frozenset)
    echoes: frozenset[int] = field(default_factory=frozenset)

    def __or__(self, other: Needs) -> Needs:
        return Needs(
            max(self.window, other.window),
            self.columns | other.columns,
            self.query_moments | other.query_moments,
            self.hidden_moments | other.hidden_moments,
            max(self.buffer, other.buffer),
            self.statistics | other.statistics,
            self.second_passes | other.second_passes,
            self.output_projection or other.output_projection,
            self.perplexity | other.perplexity,
            self.echoes | other.echoes,
        )

    @property
    def hidden_states(self) -> bool:
        """Whether the runtime must see the layer's input, not only its queries, keys and values."""
        return bool(self.query_moments or self.hidden_moments or self.echoes)

    def names(self) -> list[str]:
        """For the catalogue: what is needed, in words."""
        words = [f"window of {self.window} queries"] if self.window else []
        words += [f"column {name}" for name in sorted(self.columns)]
        words += ["query moments"] if self.query_moments else []
        words += ["hidden-state moments"] if self.hidden_moments else []
        words += ["statistics of the model"] if self.statistics else []
        words += ["a second pass"] if self.second_passes else []
        words += ["output projection"] if self.output_projection else []
        words += ["perplexity of the newest tokens"] if self.perplexity else []
        words += ["the prompt's queries once more"] if self.echoes else []
        return words


@dataclass(frozen=True, eq=False)
class QueryMoments:
    """Mean and covariance of a layer's queries before rotation, and the way to rotate them ahead."""

    mean: Float[Tensor, "batch query_heads head_dim"]
    covariance: Float[Tensor, "batch query_heads head_dim head_dim"]
    rotate: Rotate

    def ahead(
        self, future: int
    ) -> tuple[Float[Tensor, "batch query_heads head_dim"], Float[Tensor, "batch query_heads head_dim head_dim"]]:
        """Both moments under the mean rotation R of the next `future` positions: R m and R C R'."""
        mean = self.rotate(self.mean[:, :, None], future)[:, :, 0]
        half = self.rotate(self.covariance, future)
        return mean, self.rotate(half.transpose(-1, -2), future).transpose(-1, -2)


@dataclass(frozen=True, eq=False)
class HiddenMoments:
    """Mean and variance (diagonal) of the hidden states that enter a layer's attention."""

    mean: Float[Tensor, "batch hidden"]
    variance: Float[Tensor, "batch hidden"]


class Observation:
    """One layer at one compression event, for all requests of a batch.

    Entries are in the order of their positions; entries where `valid` is false are holes (shorter requests
    of a batch) and are never kept. Positions count from each request's own first token: padding does not
    exist here.

    Attributes:
        keys, values: after rotation, as cached.
        queries: the newest `W` queries, after rotation, right-aligned; None when nobody needs them.
        positions: original position of every entry.
        valid: whether the entry exists.
        lengths: tokens that each request has had so far, dropped ones included.
        prompts: tokens of each request's prompt; all that it has had, unless said otherwise.
        query_positions: position of every window query; negative where the request is shorter than W.
        column_sum, column_max: of each query head's causal attention, one number per entry.
        query_moments, hidden_moments: keyed by the number of first tokens left out.
        future_queries: `(hidden [batch, n, hidden], future) -> [batch, query_heads, n, head_dim]`: queries
            that these hidden states would make at the mean rotation of the next `future` positions.
        statistics: of the model, measured beforehand, keyed by the file that holds them.
        second_passes: what each of them told.
        output_projection: of every query head, from its value to the layer's output.
        perplexities: of each request's newest tokens, keyed by how many of them.
        echoes: mean square of the attention that each entry would receive of the prompt's own queries right after it,
            keyed by of how many tokens one was asked.
        scaling: what the model multiplies query-key products with.
        layer: this layer's index in the model.
        layers: indices of all layers that are compressed; for methods that depend on depth.
        state: the method's own numbers per entry, `[batch, kv_heads, entries]`, from the event before;
            what a method writes here moves with the entries.
    """

    def __init__(
        self,
        *,
        keys: Float[Tensor, "batch kv_heads entries head_dim"],
        values: Float[Tensor, "batch kv_heads entries value_dim"],
        queries: Float[Tensor, "batch query_heads window head_dim"] | None = None,
        positions: Int[Tensor, "batch kv_heads entries"] | None = None,
        valid: Bool[Tensor, "batch kv_heads entries"] | None = None,
        lengths: Int[Tensor, " batch"] | None = None,
        prompts: Int[Tensor, " batch"] | None = None,
        query_positions: Int[Tensor, "batch window"] | None = None,
        column_sum: Float[Tensor, "batch query_heads entries"] | None = None,
        column_max: Float[Tensor, "batch query_heads entries"] | None = None,
        query_moments: Mapping[int, QueryMoments] | None = None,
        hidden_moments: Mapping[int, HiddenMoments] | None = None,
        future_queries: Rotate | None = None,
        statistics: Mapping[str, Statistics] | None = None,
        second_passes: Mapping[SecondPass, SecondPassColumns] | None = None,
        output_projection: Float[Tensor, "query_heads value_dim hidden"] | None = None,
        perplexities: Mapping[int, Float[Tensor, " batch"]] | None = None,
        echoes: Mapping[int, Float[Tensor, "batch query_heads entries"]] | None = None,
        scaling: float | None = None,
        layer: int = 0,
        layers: Sequence[int] | None = None,
        state: dict[str, Tensor] | None = None,
    ) -> None:
        shape, device = keys.shape[:3], keys.device
        self.keys, self.values, self.queries = keys, values, queries
        self.valid = torch.ones(shape, dtype=torch.bool, device=device) if valid is None else valid
        self.positions = torch.arange(shape[2], device=device).expand(shape) if positions is None else positions
        if lengths is None:
            lengths = self.positions.masked_fill(~self.valid, -1).amax((1, 2)) + 1
        self.lengths = lengths
        self.prompts = lengths if prompts is None else prompts
        if queries is not None and query_positions is None:
            window = queries.shape[2]
            query_positions = lengths[:, None] - window + torch.arange(window, device=device)
        self.query_positions = query_positions
        self.column_sum, self.column_max = column_sum, column_max
        self.query_moments = query_moments or {}
        self.hidden_moments = hidden_moments or {}
        self.future_queries = future_queries
        self.statistics = statistics or {}
        self.second_passes = dict(second_passes or {})
        self.output_projection = output_projection
        self.perplexities = dict(perplexities or {})
        self.echoes = dict(echoes or {})
        self.scaling = keys.shape[-1] ** -0.5 if scaling is None else scaling
        self.layer = layer
        self.layers = tuple(layers) if layers is not None else (layer,)
        self.state = state if state is not None else {}
        if self.layer not in self.layers:
            raise KeepsetError(f"Layer {layer} is not among the observed layers {self.layers}.")

    @property
    def depth(self) -> int:
        """How many compressed layers come before this one."""
        return self.layers.index(self.layer)

    @property
    def entry_bytes(self) -> int:
        """Bytes of one entry's key and value in one KV head."""
        return self.keys.shape[-1] * self.keys.element_size() + self.values.shape[-1] * self.values.element_size()

    def newest_queries(
        self, window: int
    ) -> tuple[Float[Tensor, "batch query_heads window head_dim"], Int[Tensor, "batch window"]]:
        """The newest `window` queries, or as many as there are, and their positions; negative ones do not exist."""
        if self.queries is None or self.query_positions is None:
            raise KeepsetError("This method looks at the newest queries: give Observation(queries=...).")
        return self.queries[:, :, -window:], self.query_positions[:, -window:]

    def window_attention(self, window: int) -> Float[Tensor, "batch query_heads window entries"]:
        """Causal attention of the newest `window` queries over all entries, in float32.

        Rows of queries that do not exist (requests shorter than the window) are all zero. Fewer queries
        than `window` are returned when the observation holds fewer.
        """
        queries, at = self.newest_queries(window)
        first = self._first_unseen(at)
        batch, kv_heads, entries, head_dim = self.keys.shape
        folded = (queries * self.scaling).reshape(batch, kv_heads, -1, head_dim)
        logits = (folded @ self.keys.transpose(-1, -2)).float().view(batch, kv_heads, -1, queries.shape[2], entries)
        visible = self.valid[:, :, None, first:] & (self.positions[:, :, None, first:] <= at[:, None, :, None])
        attention = _softmax(logits, visible[:, :, None])
        return attention.view(batch, -1, queries.shape[2], entries)

    def window_usage(self, window: int) -> Float[Tensor, "batch query_heads entries"]:
        """What every entry receives of the newest `window` queries: their attention, summed over them, in float32.

        The attention is made and summed in blocks that stay in a core's cache; it is never there as a whole.
        """
        newest, at = self.newest_queries(window)
        first = self._first_unseen(at)
        grouped = self.by_query_group(newest)
        batch, kv_heads, group, window, size = grouped.shape
        entries = self.keys.shape[2]
        usage = torch.zeros(batch * kv_heads, group, entries, device=self.keys.device)
        most = _BLOCK if self.keys.device.type == "cpu" else _DEVICE_BLOCK
        # A block is several heads or, of one head, several queries.
        heads = max(1, most // (entries * max(group * window, size)))
        rows = max(1, most // (entries * group))
        at = at[:, None].expand(-1, kv_heads, -1).flatten(0, 1)
        everything = self.keys, self.valid, self.positions, grouped
        keys, valid, positions, grouped = (part.flatten(0, 1) for part in everything)
        for head in range(0, batch * kv_heads, heads):
            part = slice(head, head + heads)
            visible = valid[part, None, first:] & (positions[part, None, first:] <= at[part, :, None])
            few = grouped[part].float() * self.scaling
            facing = keys[part].float().transpose(1, 2)
            for queries, seen in zip(few.split(rows, 2), visible.split(rows, 1), strict=True):
                logits = (queries.flatten(1, 2) @ facing).unflatten(1, (group, -1))
                usage[part] += _softmax(logits, seen[:, None]).sum(2)
        return usage.view(batch, kv_heads * group, entries)

    def columns(self, name: str) -> Float[Tensor, "batch query_heads entries"]:
        """The streamed column statistic `sum` or `max` of the prompt's attention."""
        statistic = {"sum": self.column_sum, "max": self.column_max}[name]
        if statistic is None:
            raise KeepsetError(
                f"This method looks at the prompt's whole attention: give Observation(column_{name}=...)."
            )
        return statistic

    def moments(self, skip: int) -> QueryMoments:
        """Moments of the queries before rotation, the first `skip` tokens left out."""
        if skip not in self.query_moments:
            raise KeepsetError(
                f"This method looks at the queries' moments: give Observation(query_moments={{{skip}: ...}})."
            )
        return self.query_moments[skip]

    def measured(self, file: str) -> LayerStatistics:
        """This layer's statistics in that file, on the keys' device."""
        if file not in self.statistics:
            raise KeepsetError(
                f"This method looks at statistics of the model: give Observation(statistics={{{file!r}: ...}})."
            )
        _, kv_heads, _, head_dim = self.keys.shape
        return self.statistics[file].layer(self.layer, self.layers, kv_heads, head_dim).to(self.keys.device)

    def retrieval(self, file: str) -> Float[Tensor, "layers kv_heads"]:
        """How much the KV heads of all compressed layers retrieve, as measured in that file."""
        self.measured(file)  # or its own sentence
        return self.statistics[file].gates().to(self.keys.device)

    def second_pass(self, needed: SecondPass) -> SecondPassColumns:
        """What this second pass told."""
        if needed not in self.second_passes:
            raise KeepsetError(
                "This method looks at a second pass over the prompt: give Observation(second_passes={...: ...})."
            )
        return self.second_passes[needed]

    def perplexity(self, window: int) -> Float[Tensor, " batch"]:
        """Perplexity of the newest `window` tokens; infinite where nothing foretold any of them."""
        if window not in self.perplexities:
            raise KeepsetError(
                "This method looks at the perplexity of the newest tokens: give "
                f"Observation(perplexities={{{window}: ...}})."
            )
        return self.perplexities[window]

    def echo(self, stride: int) -> Float[Tensor, "batch query_heads entries"]:
        """Mean square of what entries would receive of one of so many of the prompt's queries, right after it."""
        if stride not in self.echoes:
            raise KeepsetError(
                f"This method asks the prompt's queries once more: give Observation(echoes={{{stride}: ...}})."
            )
        return self.echoes[stride]

    def projected_norms(self, order: int) -> Float[Tensor, "batch query_heads entries"]:
        """Norm of what each query head's output projection makes of each entry's value, `|W_O v|`, in float32.

        `order` 1 adds up the sizes of its numbers, 2 is its length. The projected values are made in blocks.
        """
        if self.output_projection is None:
            raise KeepsetError("This method looks at the output projection: give Observation(output_projection=...).")
        batch, kv_heads = self.values.shape[:2]
        most = _BLOCK if self.values.device.type == "cpu" else _DEVICE_BLOCK
        norms = []
        for head, group in enumerate(self.output_projection.unflatten(0, (kv_heads, -1)).unbind(0)):
            rows = max(1, most // (batch * group.shape[0] * group.shape[2]))
            blocks = [
                torch.linalg.vector_norm(values.float()[:, None] @ group.float(), ord=order, dim=-1)
                for values in self.values[:, head].split(rows, 1)
            ]
            norms.append(torch.cat(blocks, -1))
        return torch.cat(norms, 1)

    def by_query_group(
        self, statistic: Float[Tensor, "batch query_heads *rest"]
    ) -> Float[Tensor, "batch kv_heads group *rest"]:
        """Query heads sorted under the KV head that they share."""
        return statistic.unflatten(1, (self.keys.shape[1], -1))

    @property
    def heads_alike(self) -> Bool[Tensor, " batch"]:
        """Whether all heads of a request hold the same entries."""
        alike = ((self.positions == self.positions[:, :1]) | ~self.valid) & (self.valid == self.valid[:, :1])
        return alike.flatten(1).all(1)

    def mean_over_heads(
        self, statistic: Float[Tensor, "batch kv_heads entries"]
    ) -> Float[Tensor, "batch kv_heads entries"]:
        """A layer's mean for every KV head; each head's own where heads of a request hold different entries."""
        return statistic.mean(1, keepdim=True).where(self.heads_alike[:, None, None], statistic)

    def keep(self, mask: Bool[Tensor, "batch kv_heads entries"]) -> KeepSet:
        """The KeepSet of the entries where `mask` is true; holes are left out."""
        kept = LayerKeepSet.from_mask(self.layer, mask & self.valid, self.positions, self.entry_bytes, self.state)
        return KeepSet([kept])

    def _first_unseen(self, at: Int[Tensor, "batch window"]) -> int:
        """The first entry that a query at one of these positions does not see."""
        if self.keys.device.type != "cpu":
            return 0  # to look for it would wait for the device
        hidden = ~self.valid | (self.positions > at[:, None, :1])
        return int(F.pad(hidden.flatten(0, 1).any(0), (0, 1), value=True).int().argmax())


_BLOCK = 2**18
"""Numbers of attention at a time: half of what a core's cache holds, or less."""

_DEVICE_BLOCK = 2**27
"""The same where operations are launched: few of them, in half a gigabyte."""


def _softmax(logits: Tensor, visible: Tensor) -> Tensor:
    """Attention from logits, of which `visible` says for the last entries which count; none counts: zero."""
    if visible.shape[-1]:
        # Masking what all queries see would cost as much as the softmax.
        logits[..., -visible.shape[-1] :].masked_fill_(~visible, float("-inf"))
    attention = logits.softmax(-1)
    if visible.shape[-1] == logits.shape[-1]:
        attention.masked_fill_(~visible.any(-1, keepdim=True), 0.0)
    return attention
