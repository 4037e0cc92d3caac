"""DuoAttention: retrieval heads keep everything, streaming heads sinks and recent tokens."""

from __future__ import annotations

from dataclasses import dataclass
from functools import cached_property

from keepset.core.budget import Budget, share_of
from keepset.core.feature import Needs
from keepset.core.features.runtime_features import ModelStatistics
from keepset.core.method import Method, parameter
from keepset.core.observation import Observation
from keepset.core.shapes import Quotas, Scores
from keepset.core.sizes import Sizes
from keepset.core.traits import Traits


@dataclass(frozen=True)
class DuoAttention(Method):
    """Retrieval heads keep all, streaming heads sinks and recent tokens (Xiao et al. 2024, arXiv:2410.10819).

    `keepset calibrate` measures beforehand which heads retrieve: it trains gates between full and streaming attention
    as the authors do, but in fewer steps and on shorter texts; `stats` names the file. `keep` decides how many heads
    retrieve: the KV heads with the highest gates, over all layers, as many as fit while the others keep their sinks
    and recent tokens. The remaining entries make the streaming heads' recent part longer, so that the total is exact.
    If the budget is no more than all heads' sinks and recent tokens, no head retrieves.

    There are 16 sinks and 64 recent tokens, as when the gates were measured; the authors have 128 and 256 for longer
    texts, and a fixed share of retrieval heads instead of a budget. Only gates and lengths decide, so each layer can
    be compressed by itself. With `every=` fewer heads retrieve as the text grows, and a head that holds less than it
    could keeps what it has.

    Attributes:
        stats: a file of `keepset calibrate`; "" for the embedded model's own.
    """

    name = "duo_attention"
    paper = "arXiv:2410.10819"

    stats: str = parameter("")

    @cached_property
    def traits(self) -> Traits:
        return Traits(
            needs=Needs(ModelStatistics(self.stats)),
            sinks=16,  # as the gates were measured, and so are the recent tokens
            recent=64,
            equal_heads=False,
            equal_layers=False,  # a layer keeps more if more of its heads retrieve
            counts_from_files=True,
        )

    def score(self, observation: Observation) -> Scores:
        ModelStatistics(self.stats).checked(observation)
        return observation.positions.float()

    def quotas(self, sizes: Sizes, budget: Budget) -> Quotas:
        gates = ModelStatistics(self.stats).retrieval(sizes)
        existing, lengths, heads = sizes.entries, sizes.lengths, gates.numel()
        if budget.keep is None:
            return budget.quotas(sizes)
        if isinstance(budget.keep, float):
            lengths = existing.amax(-1)
            always = budget.always(sizes).clamp(min=1).minimum(lengths) * heads
            total = (share_of(lengths * heads, budget.keep) + budget.extra(sizes) * heads).maximum(always)
        else:
            total = budget.aim(sizes).minimum(lengths) * heads
        least = budget.always(sizes).minimum(lengths).minimum(total // heads)
        more, left = lengths - least, total - least * heads
        whole = (left // more.clamp(min=1)).clamp(max=heads)
        left = left - whole * more
        streaming = (heads - whole).clamp(min=1)
        # With equal gates the earlier head retrieves.
        ranks = gates.flatten().argsort(descending=True, stable=True).argsort().view_as(gates)[sizes.depths]
        whole, least, left, streaming, more = (part[:, None] for part in (whole, least, left, streaming, more))
        counts = least + left // streaming + (ranks - whole < left % streaming).long()
        return counts.where(ranks >= whole, least + more).minimum(existing)
