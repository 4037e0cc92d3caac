"""Expected attention: what future queries will look at, from the distribution of the past ones."""

from __future__ import annotations

from dataclasses import dataclass
from typing import ClassVar

import torch
from jaxtyping import Float
from torch import Tensor

from keepset.method import Method, parameter
from keepset.observation import Needs, Observation, QueryMoments


@dataclass(frozen=True)
class ExpectedAttention(Method):
    """Keeps what the next queries are expected to attend to (Devoto et al. 2025, arXiv:2510.00636).

    Queries before rotation are taken as Gaussian, N(m, C) per query head; R is the mean rotation of the next
    `future` positions. An entry's expected unnormalised attention is exp(k·Rm/√d + k·RCR'·k/2d);
    normalised over the entries, averaged over the query group, and weighted with the value's norm:
    (attention + epsilon) · ‖v‖.

    Attributes:
        future: how many coming positions the rotation is averaged over.
        skip: first tokens, attention sinks, that are left out of the statistics and always stay.
        covariance: use the second-order term.
        value_norm: weight with the norm of the values.
        epsilon: added before the weighting.
        stats: a file of `keepset calibrate`: its mean and covariance are used instead of the text's own, whatever
            `skip` (the file leaves out the first four tokens of its texts). The authors' "with statistics".
        buffer: over how many of the newest queries the statistics are taken where decoded tokens are compressed
            too (`every=`); the authors' program keeps so many hidden states. A prompt is looked at as a whole.
    """

    name: ClassVar[str] = "expected_attention"
    paper: ClassVar[str] = "arXiv:2510.00636"

    future: int = parameter(512, minimum=1)
    skip: int = parameter(4, minimum=0)
    covariance: bool = parameter(True)
    value_norm: bool = parameter(True)
    epsilon: float = parameter(0.0, minimum=0.0)
    buffer: int = parameter(256, minimum=1)
    stats: str = parameter("")

    @property
    def needs(self) -> Needs:
        """Moments of the queries before rotation: the text's own, or those of a file."""
        if self.stats:
            return Needs(statistics=frozenset({self.stats}))
        return Needs(query_moments=frozenset({self.skip}), buffer=self.buffer)

    @property
    def sinks(self) -> int:
        """The tokens that the statistics leave out."""
        return self.skip

    def score(self, observation: Observation) -> Float[Tensor, "batch kv_heads entries"]:
        """Expected attention times the norm of the value."""
        moments = self._measured(observation) if self.stats else observation.moments(self.skip)
        mean, covariance = moments.ahead(self.future)
        keys = observation.keys.float()
        scaling = observation.scaling
        logits = keys @ observation.by_query_group(mean * scaling).transpose(-1, -2)
        if self.covariance:
            # One query head after another: k C k' needs a product as large as the keys.
            grouped = observation.by_query_group(covariance * (0.5 * scaling**2))
            for member in range(grouped.shape[2]):
                logits[..., member] += ((keys @ grouped[:, :, member]) * keys).sum(-1)
        counted = observation.valid & (observation.positions >= self.skip)
        logits = logits.masked_fill(~counted[..., None], float("-inf"))
        attention = logits.softmax(-2).nan_to_num(nan=0.0).mean(-1)
        if not self.value_norm:
            return attention + self.epsilon
        return (attention + self.epsilon) * observation.values.float().norm(dim=-1)

    def _measured(self, observation: Observation) -> QueryMoments:
        measured, lengths = observation.measured(self.stats), observation.lengths

        def rotate(rows: Tensor, future: int) -> Tensor:
            return measured.rotate(rows, lengths[:, None] + torch.arange(future, device=rows.device))

        batch = (len(lengths), -1, -1)
        return QueryMoments(measured.mean.expand(*batch), measured.covariance.expand(*batch, -1), rotate)
