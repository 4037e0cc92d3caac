"""ChunkKV: chunks of consecutive entries stay or go together."""

from __future__ import annotations

from dataclasses import dataclass

import torch.nn.functional as F

from keepset.core.keep_set import LayerKeepSet
from keepset.core.method import Allocator, parameter
from keepset.core.select import RECENT_RANK, Ranking, top_mask


@dataclass(frozen=True)
class ChunkKV(Allocator):
    """Keeps whole chunks, those with the best mean score first (Liu et al. 2025, arXiv:2502.00299).

    The existing entries are cut into chunks of `chunk` consecutive ones. From the chunk that would exceed the quota
    only the best entries of each head stay, so that the number is exact. What always stays is taken first and counts in
    no chunk's mean. KV heads rank chunks together, by the mean over heads, as in the authors' program (which sums).
    Heads that hold different entries, as inside `adakv` after an event, rank chunks by themselves. The paper's reuse
    of chosen chunks in neighbouring layers is left out: it saves time and no memory.
    """

    name = "chunkkv"
    paper = "arXiv:2502.00299"
    chooses_alone = True

    chunk: int = parameter(20, minimum=1)

    def choose(self, ranking: Ranking) -> LayerKeepSet:
        entries = ranking.scores.shape[-1]
        padded = F.pad(ranking.scores.double(), (0, -entries % self.chunk), value=float("-inf"))
        chunks = padded.unflatten(-1, (-1, self.chunk))
        counted = (chunks < RECENT_RANK) & ~chunks.isneginf()
        mean = ranking.observation.mean_over_heads(chunks.masked_fill(~counted, 0.0).sum(-1)) / counted.sum(-1)
        # In both orders the later of equal ones is better, as everywhere. Chunks without entries do not count.
        best = mean.argsort(dim=-1, stable=True).argsort(dim=-1)
        within = chunks.argsort(dim=-1, stable=True).argsort(dim=-1)
        order = (best[..., None] * self.chunk + within).double().where(counted, chunks)
        return ranking.keep(top_mask(order.flatten(-2)[..., :entries], ranking.quotas))
