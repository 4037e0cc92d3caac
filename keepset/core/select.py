"""Selection of the entries that stay, by scores and quotas: exact, ordered, and the same for every runtime."""

from __future__ import annotations

from collections.abc import Iterator, Mapping
from contextlib import contextmanager
from contextvars import ContextVar
from dataclasses import dataclass

import numpy as np
import torch
from jaxtyping import Bool, Float, Int
from torch import Tensor

from keepset.core.budget import Budget
from keepset.core.keep_set import NAN_NOTICED, LayerKeepSet, LazyHostInts
from keepset.core.observation import Observation
from keepset.core.shapes import Mask, Quotas, Scores
from keepset.errors import KeepsetError

_LARGEST = torch.finfo(torch.float32).max
RECENT_RANK = _LARGEST / 2
"""The score that `ranked_scores` gives the recent suffix: above every score, below the sinks."""
LARGEST_SCORE = _LARGEST / 4
"""The largest score; larger ones of either sign are cut to it."""
_NAN_RANK = -2 * LARGEST_SCORE
"""What a score of NaN is replaced by: below every score, above holes."""
NAN_MODEL = (
    "The model predicts NaN: its weights are damaged, or too large for their precision; load it anew, or in float32 or "
    "bfloat16."
)
_nan_refused: ContextVar[bool] = ContextVar("_nan_refused", default=False)


@contextmanager
def nan_scores_refused() -> Iterator[None]:
    """Refuse scores of NaN inside this context, because measured figures would not be those of the method's choice.

    The check costs a wait for the device per layer.
    """
    before = _nan_refused.set(True)
    try:
        yield
    finally:
        _nan_refused.reset(before)


def finite(scores: Scores) -> Scores:
    """Return scores in float32 that can be ordered: NaN is below all others, and too large ones are cut."""
    return scores.float().clamp(-LARGEST_SCORE, LARGEST_SCORE).nan_to_num_(_NAN_RANK)


def ranked_scores(scores: Scores, observation: Observation, budget: Budget) -> Scores:
    """Return scores in float32 with a total order.

    From best to worst: sinks and protected tokens (the first token first of all), the recent suffix, the other scores,
    entries that score NaN, and holes (-inf).

    Args:
        scores: what the method returned.
        budget: says what always stays.

    Raises:
        KeepsetError: if a score that is compared with others is NaN and that is refused (`nan_scores_refused`).
    """
    ranked = finite(scores)
    ranked.masked_fill_(budget.is_recent(observation), RECENT_RANK)
    lengths = observation.lengths.clamp(min=1)[:, None, None]
    rank = _LARGEST * (1 - observation.positions.float() / (4 * lengths.float()))
    ranked = rank.where(budget.is_protected(observation), ranked).masked_fill_(~observation.valid, float("-inf"))
    if (noticed := NAN_NOTICED.get()) is not None:
        noticed.append(LazyHostInts((ranked == _NAN_RANK).any().int()))
    if _nan_refused.get():
        _refuse_nan(ranked, observation)
    return ranked


def _refuse_nan(ranked: Scores, observation: Observation) -> None:
    if bool((ranked == _NAN_RANK).any()):
        if any(
            bool((rows.isnan().any(-1) & observation.valid).any()) for rows in (observation.keys, observation.values)
        ):
            raise KeepsetError(NAN_MODEL)
        first, *later_ids = observation.layer_ids
        named = f"the layers {first} to {later_ids[-1]}" if later_ids else f"layer {first}"
        raise KeepsetError(
            f"Scores of {named} are NaN, so nothing says what to keep: the method's formula "
            "fails on these numbers; try another recipe, or the model in float32 or bfloat16."
        )


def top_mask(ranked: Float[Tensor, "*rows entries"], quotas: Int[Tensor, "*rows"]) -> Bool[Tensor, "*rows entries"]:
    """Return which entries are the best of every row; among equal ones the later win.

    The order is total, so that the same scores choose the same entries on every device and in every batch.

    Args:
        ranked: numbers to compare; none is NaN.
        quotas: how many entries of each row are chosen; all of them if the row has fewer.
    """
    return (_best_by_value if ranked.device.type == "cpu" else _best_by_order)(ranked, quotas)


def _best_by_value(
    ranked: Float[Tensor, "*rows entries"], quotas: Int[Tensor, "*rows"]
) -> Bool[Tensor, "*rows entries"]:
    ascending, last = torch.from_numpy(np.sort(ranked.detach().numpy(), axis=-1)), ranked.shape[-1] - 1
    worst = ascending.gather(-1, (last + 1 - quotas).clamp(0, last)[..., None])
    chosen, equal = ranked >= worst, ranked == worst
    too_many = chosen.sum(-1, keepdim=True) - quotas[..., None]
    return chosen ^ (equal & (equal.cumsum(-1, dtype=torch.int32) <= too_many))


def _best_by_order(
    ranked: Float[Tensor, "*rows entries"], quotas: Int[Tensor, "*rows"]
) -> Bool[Tensor, "*rows entries"]:
    last = ranked.shape[-1] - 1
    best_first = last - ranked.flip(-1).sort(dim=-1, descending=True, stable=True).indices
    chosen = torch.arange(last + 1, device=ranked.device) < quotas[..., None]
    return torch.zeros_like(ranked, dtype=torch.bool).scatter(-1, best_first, chosen)


def round_to_total(shares: Float[Tensor, "*rows parts"], total: Int[Tensor, "*rows"]) -> Int[Tensor, "*rows parts"]:
    """Round shares that sum to a total, up to rounding errors, to whole numbers that sum to it exactly.

    The largest remainders are rounded up; of equal ones the earlier.

    Args:
        shares: numbers from 0 on.
        total: whole numbers, the sums of the shares.
    """
    floors = shares.floor()
    missing = total - floors.sum(-1).long()
    order = (floors - shares).argsort(dim=-1, stable=True)
    raised = torch.arange(shares.shape[-1], device=shares.device) < missing[..., None]
    return floors.long() + torch.zeros_like(floors, dtype=torch.long).scatter(-1, order, raised.long())


@dataclass(frozen=True, eq=False)
class Ranking:
    """A layer's entries in order, ready to choose from.

    Attributes:
        observation: the layer.
        budget: the recipe's budget.
        scores: the score of every entry, with what always stays above the rest and -inf at holes; see
            `ranked_scores`.
        raw: scores as the scorer returned them.
        quotas: how many entries every KV head keeps.
        state: what `Method.remember` returned: numbers per entry, `[batch, kv_heads, entries]`.
    """

    observation: Observation
    budget: Budget
    scores: Scores
    raw: Scores
    quotas: Quotas
    state: Mapping[str, Tensor]

    def best(self) -> LayerKeepSet:
        """Return the best entries of every head, as many as its quota; among equal ones the later win."""
        return self.keep(top_mask(self.scores, self.quotas))

    def keep(self, mask: Mask, **state: Tensor) -> LayerKeepSet:
        """Return the keep set of entries where a mask is true, without holes; `state` replaces numbers per entry."""
        return self.observation.kept(mask, {**self.state, **state})
