"""Moments of queries before rotation: of a whole prompt, or of the newest queries of an event while decoding."""

from __future__ import annotations

import torch
from jaxtyping import Float
from torch import Tensor

from keepset.kernels.moments import Moments
from keepset.vllm.rotation import Rotation
from keepset.vllm.step import Event, Planner, Statistics
from keepset.vllm.windows import Windows


def collect(
    statistics: Statistics, place: int, planner: Planner, queries: Float[Tensor, "n heads dim"], rotation: Rotation
) -> None:
    """Takes in what one step brings of a prompt to one layer."""
    rows = queries[statistics.first : statistics.last].transpose(0, 1)[None]
    positions = statistics.position + torch.arange(rows.shape[2], device=rows.device)[None]
    rows = rotation.undo(rows, positions)
    moments = statistics.record.moments
    if not moments:
        moments.extend({skip: Moments() for skip in planner.skips} for _ in planner.layers)
    for skip in planner.skips:
        moments[place][skip].add(rows, positions >= skip, full=True)


def event_moments(
    windows: Windows, place: int, event: Event, rotation: Rotation, skip: int, buffer: int
) -> tuple[Float[Tensor, "rows heads dim"], Float[Tensor, "rows heads dim dim"]]:
    """Mean and covariance that an event looks at."""
    if event.ends_prompt:
        prompts = [record.moments[place][skip] for record in event.records]
        return torch.cat([p.mean for p in prompts]), torch.cat([p.covariance for p in prompts])
    assert event.slots is not None and event.window is not None
    positions = event.window[:, -buffer:]
    rows = rotation.undo(windows.read(place, event.slots, positions), positions.clamp(min=0))
    newest = Moments()
    newest.add(rows, (positions >= skip) & (positions >= 0), full=True)
    return newest.mean, newest.covariance
