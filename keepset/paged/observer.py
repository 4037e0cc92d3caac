"""`Observer`: what one layer's events look at besides entries. Collects it, and says it as an Observation does."""

from __future__ import annotations

from typing import Any

import torch
import torch.nn.functional as F
from jaxtyping import Float
from torch import Tensor

from keepset.core.observation import HiddenMoments, QueryMoments, Rotate
from keepset.core.rope import RotaryTable
from keepset.core.statistics import load
from keepset.kernels.moments import Moments
from keepset.paged.pages import Pages
from keepset.paged.planner import Chunk, Event, Planner
from keepset.paged.prompt import Prompt
from keepset.vllm.hidden_states import LayerInput


class Observer:
    """One layer's.

    Args:
        planner: of the layer's group.
        place: the layer's in it.
        scaling: what the model multiplies query-key products with.
        rotation: of the model, where the recipe looks at queries before rotation.
        source: the layer's input, where the recipe looks at hidden states.
    """

    def __init__(
        self, planner: Planner, place: int, scaling: float, rotation: RotaryTable | None, source: LayerInput | None
    ) -> None:
        self._place, self._windows, self._needs = place, planner.windows, planner.needs
        self._scaling, self._rotation, self._source = scaling, rotation, source
        self._statistics = {file: load(file) for file in planner.needs.statistics}

    def collect(self, chunk: Chunk, queries: Float[Tensor, "n query_heads head_dim"], pages: Pages) -> None:
        """Takes in what one step brings of a prompt."""
        prompt = chunk.prompt.layers[self._place]
        own = queries[chunk.first : chunk.last]
        positions = torch.arange(chunk.position, chunk.position + len(own), device=own.device)[None]
        rows = own.transpose(0, 1)
        if self._needs.columns:
            keys, _ = pages.read(chunk.subpages)
            prompt.columns.add(rows, keys[:, : chunk.position + len(own)], self._scaling)
        if self._needs.query_moments:
            assert self._rotation is not None
            prompt.add_queries(self._rotation.undo(rows[None], positions), positions)
        if self._needs.hidden_moments:
            assert self._rotation is not None and self._source is not None and self._source.hidden is not None
            hidden = self._source.hidden[chunk.first : chunk.last]
            few = slice(-4, None)
            self._source.check(self._rotation.undo(rows[None, :, few], positions[:, few]), hidden[None, few])
            prompt.add_hidden(hidden, positions)

    def parts(self, event: Event, width: int, unbroken: bool) -> dict[str, Any]:
        """All of it at an event.

        Args:
            event: what is compressed.
            width: places for entries, those that hold none included.
            unbroken: whether each holds one.
        """
        needs = self._needs
        prompts = [record.prompt.layers[self._place] for record in event.records if record.prompt is not None]
        parts: dict[str, Any] = {"statistics": self._statistics, "scaling": self._scaling}
        if needs.window:
            assert event.slots is not None and event.window is not None
            window = event.window[:, -needs.window :]
            parts["queries"] = self._windows.read(self._place, event.slots, window)
            if not unbroken or event.short:  # the default says that nothing is missing, which is cheaper
                parts["query_positions"] = window
        for name in needs.columns:
            columns = [prompt.columns.statistics[name] for prompt in prompts]
            parts[f"column_{name}"] = torch.stack([F.pad(column, (0, width - column.shape[1])) for column in columns])
        if needs.query_moments:
            parts["query_moments"] = {
                skip: QueryMoments(*self._query_moments(event, prompts, skip), self._rotate(event))
                for skip in needs.query_moments
            }
        if needs.hidden_moments:
            parts["hidden_moments"] = {
                skip: HiddenMoments(
                    torch.cat([prompt.hidden[skip].mean[:, 0] for prompt in prompts]),
                    torch.cat([prompt.hidden[skip].covariance[:, 0] for prompt in prompts]),
                )
                for skip in needs.hidden_moments
            }
            parts["future_queries"] = self._future_queries(event)
        return parts

    def _query_moments(
        self, event: Event, prompts: list[Prompt], skip: int
    ) -> tuple[Float[Tensor, "rows query_heads dim"], Float[Tensor, "rows query_heads dim dim"]]:
        """Mean and covariance over the whole prompt, or over the newest queries of an event while decoding."""
        if event.ends_prompt:
            moments = [prompt.queries[skip] for prompt in prompts]
            return torch.cat([m.mean for m in moments]), torch.cat([m.covariance for m in moments])
        assert event.slots is not None and event.window is not None and self._rotation is not None
        positions = event.window[:, -self._needs.buffer :]
        rows = self._rotation.undo(self._windows.read(self._place, event.slots, positions), positions.clamp(min=0))
        newest = Moments()
        newest.add(rows, (positions >= skip) & (positions >= 0), full=True)
        return newest.mean, newest.covariance

    def _rotate(self, event: Event) -> Rotate:
        rotation = self._rotation
        assert rotation is not None
        return lambda rows, future: rotation.rotate_ahead(rows, event.at, future)

    def _future_queries(self, event: Event) -> Rotate:
        source, rotate = self._source, self._rotate(event)
        assert source is not None
        return lambda hidden, future: rotate(source.queries(hidden).float(), future)
