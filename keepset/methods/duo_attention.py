"""DuoAttention: retrieval heads keep everything, streaming heads sinks and recent tokens."""

from __future__ import annotations

from dataclasses import dataclass

from keepset.core.budget import Budget, share_of
from keepset.core.feature import Needs
from keepset.core.features.runtime_features import ModelStatistics
from keepset.core.keep_set import Layout
from keepset.core.method import Method, parameter
from keepset.core.observation import Observation
from keepset.core.shapes import Quotas, Scores


@dataclass(frozen=True)
class DuoAttention(Method):
    """Retrieval heads keep all, streaming heads sinks and recent tokens (Xiao et al. 2024, arXiv:2410.10819).

    Which heads retrieve is measured beforehand by `keepset calibrate`: gates between full and streaming attention,
    trained as the authors do but in fewer steps and on shorter texts; `stats` names the file. `keep` says how many
    heads retrieve: of all KV heads of all layers those of the highest gates, as many as fit while the others keep
    their sinks and recent tokens. What is left makes the streaming heads' recent part longer, so that the total is
    exact; where it is no more than all heads' sinks and recent tokens, none retrieves.

    16 sinks and 64 recent tokens, as the gates were measured; the authors have 128 and 256 for longer texts, and a
    fixed share of retrieval heads instead of a budget. Every layer decides alone: gates and length say it all.
    With `every=` fewer heads retrieve as the text grows, and a head that holds less than it could keeps what it has.
    """

    name = "duo_attention"
    layout = Layout.HEAD_RAGGED
    paper = "arXiv:2410.10819"
    # The lengths say it all, but only together with the gates, which a paged runtime's scheduler does not have.
    counts_from_data = True
    # A layer keeps more where more of its heads retrieve.
    equal_layers = False
    foreseen = True
    # As the gates were measured.
    sinks, recent = 16, 64

    stats: str = parameter("")

    @property
    def needs(self) -> Needs:
        return Needs(ModelStatistics(self.stats))

    def score(self, observation: Observation) -> Scores:
        return observation.positions.float()

    def quotas(self, observation: Observation, budget: Budget) -> Quotas:
        gates = ModelStatistics(self.stats).retrieval(observation)
        existing, lengths, heads = observation.valid.sum(-1), observation.lengths, gates.numel()
        if budget.keep is None:
            return existing
        if isinstance(budget.keep, float):
            lengths = existing.amax(-1)
            always = budget.always(observation).clamp(min=1).minimum(lengths) * heads
            total = share_of(lengths * heads, budget.keep).maximum(always)
        else:
            total = budget.aim(observation).minimum(lengths) * heads
        least = budget.always(observation).minimum(lengths).minimum(total // heads)
        more, left = lengths - least, total - least * heads
        whole = (left // more.clamp(min=1)).clamp(max=heads)
        left = left - whole * more
        streaming = (heads - whole).clamp(min=1)
        # Of equal gates the earlier head.
        ranks = gates.flatten().argsort(descending=True, stable=True).argsort().view_as(gates)[observation.depths]
        whole, least, left, streaming, more = (part[:, None] for part in (whole, least, left, streaming, more))
        counts = least + left // streaming + (ranks - whole < left % streaming).long()
        return counts.where(ranks >= whole, least + more).minimum(existing)
