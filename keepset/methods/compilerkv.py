"""CompilerKV: keep what all layers attend to, weighted by tables that were compiled offline."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass
from functools import cached_property

import torch
from jaxtyping import Float, Int
from torch import Tensor

from keepset.core.budget import Budget
from keepset.core.feature import Needs
from keepset.core.features.queries import WindowAttention
from keepset.core.features.runtime_features import ModelTables, Perplexity, RecentQueries
from keepset.core.keep_set import KeepSet
from keepset.core.method import Method, parameter
from keepset.core.observation import Observation
from keepset.core.select import ranked_scores, top_mask
from keepset.core.shapes import Quotas, Scores
from keepset.core.tables import Tables, neutral, say_neutral
from keepset.core.traits import Traits
from keepset.kernels.dispatch import upload
from keepset.kernels.softmax import GroupReduction

PositionAttention = Float[Tensor, "requests positions"]
"""The attention that every position receives from the window, over all layers and heads (equation 6)."""

THRESHOLD = 0.9
"""The threshold without a table: the middle of the paper's range, and the default of its authors' first program."""


@dataclass(frozen=True)
class CompilerKV(Method):
    """Keeps what the whole model attends to, with heads weighted by a table (Yang et al. 2026, CompilerKV).

    The utility of an entry is a product of three numbers: the attention of the `window` newest queries, summed over
    them and averaged over all heads of all layers; the norm of the entry's value relative to its head's mean; and the
    head's weight in the table. The largest over the heads counts (equations 6 to 10). All heads of a layer keep one
    set. `tables` is a file that `keepset compile` makes for a model. Without one all weights are 1 and all thresholds
    0.9.

    Every layer keeps exactly `keep`, the best by utility: "the final retention is always enforced by Top-B" (appendix
    B.1). Then **the threshold changes nothing**, because the same utility selects candidates and fills them up or cuts
    them. So neither the threshold nor the perplexity is looked up.

    With `elastic=True` a layer's candidates are the entries that reach its threshold, which the table has for the
    entropy of that attention and the perplexity of the window (equations 11 to 15). If there are no more than `keep`,
    all of them stay; else the best `keep` stay (equation 16). So **`keep` is a cap**, even if it is as long as the
    text. `threshold` says which number is compared with the threshold:

    - `"mean"`: the utility with attention relative to its mean over the text (its sum times the text's length over the
      window's). It is then around 1, as appendix B.1 says, and the number of entries that reach 0.8 grows with the
      text. The authors' newer program does so.
    - `"utility"`, as in equation 15: the utility itself, in which equation 7 normalises only the norms of values. All
      utilities of a layer sum to about `window`, so at most about `window / 0.8` entries can reach 0.8, however long
      the text is. Few outside the window do, and the budget hardly ever cuts.

    The paper's ablations are `head_table=False` (all weights 1), `gate=False` (one threshold) and, for raw attention,
    `global_mean=False` (each head's own) with `relative_norm=False` (no values). Under the global mean all heads of a
    layer see the same attention and differ only in the norms of their values, so weights change little. With
    `global_mean=False` they change much more. "All layers" are the compressed ones, without sliding windows.

    Where the paper is silent: `window` is 64, and always stays, as in the authors' first program; it counts towards
    `keep`, and no threshold applies to it. Their newer program does not always keep it (`recent=0`). A layer of which
    nothing would stay keeps its best entry. Attention and weights are per query head, values per KV head. Entropy is in
    nats, and NaN counts as the highest risk. If the file has several budgets, the one nearest to the request's counts.
    Tables of another model are refused; `Tables.fitted` maps them to a model of another depth by relative place
    (appendix B.1). If heads hold different entries, attention is summed by position, and every KV head uses only its
    own query heads.
    """

    name = "compilerkv"
    paper = "CompilerKV, 2026"

    tables: str = parameter("")
    window: int = parameter(64, minimum=1)
    elastic: bool = parameter(False)
    threshold: str = parameter("mean", choices=("mean", "utility"))
    head_table: bool = parameter(True)
    gate: bool = parameter(True)
    global_mean: bool = parameter(True)
    relative_norm: bool = parameter(True)

    @cached_property
    def traits(self) -> Traits:
        tables = [ModelTables(self.tables)] if self._reads and self.tables else []
        perplexity = [Perplexity(self.window)] if self.gated else []
        # A query says how many query heads there are.
        return Traits(
            needs=Needs(self._attention, RecentQueries(1), *tables, *perplexity),
            recent=self.window,
            across_layers=True,
            counts_from_data=self.elastic,
        )

    def score(self, observation: Observation) -> Scores:
        """Return equation 10 for a layer by itself, under the tables' smallest budget."""
        tables = self.tables_for(observation)
        first = tables.budgets.new_zeros(len(observation.valid), device=observation.valid.device)
        return self._utility(observation, self.received_attention([observation]), tables, first)

    def select_all(self, observations: Sequence[Observation], budget: Budget) -> KeepSet:
        tables, received = self.tables_for(observations[0]), self.received_attention(observations)
        parts = []
        for observation in observations:
            quotas = budget.quotas(observation.sizes)
            row = tables.nearest(quotas.amax(-1))
            utility = self._utility(observation, received, tables, row)
            ranked = ranked_scores(utility, observation, budget)
            if self.elastic:
                threshold = self._threshold(observation, received, tables, row)
                quotas = quotas.minimum(self._candidates(utility, observation, budget, threshold))
            parts.append(observation.kept(top_mask(ranked, quotas)))
        return KeepSet(parts)

    @property
    def _attention(self) -> WindowAttention:
        return WindowAttention(self.window, sums_of=GroupReduction.MEAN if self.global_mean else GroupReduction.EACH)

    @property
    def _reads(self) -> bool:
        return self.head_table or (self.elastic and self.gate)

    @property
    def gated(self) -> bool:
        """Return whether thresholds depend on the text; without tables all are equal."""
        return self.elastic and self.gate and bool(self.tables)

    def tables_for(self, observation: Observation) -> Tables:
        """Return the tables in the file, or neutral ones if none are named or read.

        Args:
            observation: any layer; it says how many layers and query heads there are.

        Raises:
            KeepsetError: if the tables are of another model.
        """
        shape = len(observation.layers), observation.newest_queries(1)[0].shape[1]
        if self._reads and self.tables:
            tables = observation[ModelTables(self.tables)]
            tables.check(*shape)
            return tables
        if self._reads:
            say_neutral()
        return neutral(*shape, THRESHOLD)

    def received_attention(self, observations: Sequence[Observation]) -> PositionAttention:
        """Return equation 6 summed over the window: each position's mean attention over all layers and heads."""
        first, heads = observations[0], 0
        longest = max(1, first.longest)
        total = first.valid.new_zeros(len(first.valid) // len(first.layer_ids), longest, dtype=torch.float32)
        for observation in observations:
            usage = observation[self._attention].attention_sums
            if not self.global_mean:
                usage = usage.mean(-1)
            token_indices, usage = (
                observation.split_layers(part).flatten(1) for part in (_places(observation, longest), usage)
            )
            total.scatter_add_(1, token_indices, usage.nan_to_num(0.0))
            heads += observation.valid.shape[1] * len(observation.layer_ids)
        return total / heads

    def _utility(
        self, observation: Observation, received: PositionAttention, tables: Tables, row: Int[Tensor, " batch"]
    ) -> Scores:
        weights = upload(tables.weights, row.device)[row, observation.depths]
        if not self.head_table:
            weights = torch.ones_like(weights)
        utility = self.signal(observation, received) * observation.by_query_group(weights)[..., None]
        # A head whose numbers have overflowed does not count; the others do.
        best = utility.nan_to_num(-torch.inf, torch.inf, -torch.inf).amax(2)
        return best.amax(1, keepdim=True).where(observation.heads_alike[:, None, None], best)

    def signal(
        self, observation: Observation, received: PositionAttention
    ) -> Float[Tensor, "batch kv_heads _ entries"]:
        """Return equations 7 and 8 for every query head, or once for all that share a KV head.

        Args:
            observation: the layer.
            received: mean attention of each position, over all layers.
        """
        if self.global_mean:
            shared = observation.repeat_per_layer(received).gather(
                1, _places(observation, received.shape[1]).flatten(1)
            )
            attention = shared.view(observation.valid.shape)[:, :, None]
        else:
            attention = observation[self._attention].attention_sums.transpose(2, 3)
        if self.relative_norm:
            attention = attention * _relative_norms(observation)[:, :, None]
        return attention

    def _threshold(
        self, observation: Observation, received: PositionAttention, tables: Tables, row: Int[Tensor, " batch"]
    ) -> Float[Tensor, " batch"]:
        if not self.gated:
            return torch.full_like(row, THRESHOLD, dtype=torch.float32)
        bins = tables.bins(*self.risk(observation, observation.repeat_per_layer(received)))
        return upload(tables.gate, row.device)[row, observation.depths, *bins]

    def _candidates(
        self, utility: Scores, observation: Observation, budget: Budget, threshold: Float[Tensor, " batch"]
    ) -> Quotas:
        """Return how many entries equation 15 admits, together with what always stays; at least one.

        Args:
            utility: of each entry.
            observation: the layer.
            budget: says what always stays.
            threshold: of each request.
        """
        existing = observation.valid
        if self.threshold == "mean":
            # A query's attention sums to 1, so the window's sums to the number of its queries.
            queries = observation.lengths.clamp(max=self.window)[:, None, None]
            utility = utility * (existing.sum(-1, keepdim=True).float() / queries)
        always = budget.is_protected(observation) | budget.is_recent(observation)
        return ((utility >= threshold[:, None, None]) | always).logical_and(existing).sum(-1).clamp(min=1)

    def risk(
        self, observation: Observation, received: Float[Tensor, "batch positions"]
    ) -> tuple[Float[Tensor, " batch"], Float[Tensor, " batch"]]:
        """Return equations 11 to 13: the entropy of the received attention in nats, and the window's perplexity.

        Args:
            observation: the layer.
            received: mean attention of each position.

        Returns:
            Both of each request.
        """
        share = received / received.sum(-1, keepdim=True)
        entropy = -torch.xlogy(share, share).sum(-1)
        return entropy, observation[Perplexity(self.window)].to(entropy.device)


def _places(observation: Observation, longest: int) -> Int[Tensor, "batch kv_heads entries"]:
    return observation.positions.long().clamp(0, longest - 1)


def _relative_norms(observation: Observation) -> Scores:
    """Return equation 7: norms of values, relative to their mean in the head."""
    norms = observation.over_heads(
        lambda heads: torch.linalg.vector_norm(observation.values_of(heads).float(), dim=-1)
    ).masked_fill(~observation.valid, 0.0)
    mean = norms.sum(-1, keepdim=True) / observation.valid.sum(-1, keepdim=True)
    # If all values are zero, none is longer than another.
    return torch.where(mean == 0, 1.0, norms / mean)
