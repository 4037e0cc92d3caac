"""`Observer`: what one layer's events look at besides entries. Collects it, and says it as an Observation does."""

from __future__ import annotations

from typing import Any

import torch
import torch.nn.functional as F
from jaxtyping import Float
from torch import Tensor

from keepset.core.observation import HiddenMoments, Needs, QueryMoments, Rotate
from keepset.core.rope import RotaryTable, undone_right
from keepset.core.statistics import load
from keepset.errors import UnsupportedModelError
from keepset.kernels.moments import Moments
from keepset.paged.engine import Pages, QueryProjection
from keepset.paged.prompt import Prompt
from keepset.paged.query_windows import QueryWindows
from keepset.paged.step import EvictionEvent, PromptChunk


class Observer:
    """One layer's.

    Args:
        needs: what the recipe looks at.
        windows: recorded queries of the layer's group.
        place: the layer's in the group.
        scaling: what the model multiplies query-key products with.
        rotary: of the model, where the recipe looks at queries before rotation.
        projection: of the layer, where the recipe looks at hidden states.
    """

    def __init__(
        self,
        needs: Needs,
        windows: QueryWindows,
        place: int,
        scaling: float,
        rotary: RotaryTable | None,
        projection: QueryProjection | None,
    ) -> None:
        self._needs, self._windows, self._place = needs, windows, place
        self._scaling, self._rotary, self._projection = scaling, rotary, projection
        self._checked = False
        self._statistics = {file: load(file) for file in needs.statistics}

    def collect(self, chunk: PromptChunk, queries: Float[Tensor, "n query_heads head_dim"], pages: Pages) -> None:
        """Takes in what one step brings of a prompt."""
        prompt = chunk.prompt.layers[self._place]
        own = queries[chunk.first_query : chunk.end_query]
        positions = torch.arange(chunk.position, chunk.position + len(own), device=own.device)[None]
        rows = own.transpose(0, 1)
        if self._needs.columns:
            keys, _ = pages.read(chunk.subpages)
            prompt.columns.add(rows, keys[:, : chunk.position + len(own)], self._scaling)
        if self._needs.query_moments:
            assert self._rotary is not None
            prompt.add_queries(self._rotary.undo(rows[None], positions), positions)
        if self._needs.hidden_moments:
            assert self._rotary is not None and self._projection is not None and self._projection.hidden is not None
            hidden = self._projection.hidden[chunk.first_query : chunk.end_query]
            few = slice(-4, None)
            self.check(self._rotary.undo(rows[None, :, few], positions[:, few]), hidden[None, few])
            prompt.add_hidden(hidden, positions)

    def parts(self, event: EvictionEvent, width: int, unbroken: bool) -> dict[str, Any]:
        """All of it at an event.

        Args:
            event: what is compressed.
            width: places for entries, those that hold none included.
            unbroken: whether each holds one.
        """
        needs = self._needs
        records = [] if event.queries is None else event.queries.records
        prompts = [record.prompt.layers[self._place] for record in records if record.prompt is not None]
        parts: dict[str, Any] = {"statistics": self._statistics, "scaling": self._scaling}
        if needs.window:
            assert event.queries is not None
            window = event.queries.positions[:, -needs.window :]
            parts["queries"] = self._windows.read(self._place, event.queries.slots, window)
            if not unbroken or bool(
                (event.queries.positions < 0).any()
            ):  # the default says that nothing is missing, which is cheaper
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
        self, event: EvictionEvent, prompts: list[Prompt], skip: int
    ) -> tuple[Float[Tensor, "rows query_heads dim"], Float[Tensor, "rows query_heads dim dim"]]:
        """Mean and covariance over the whole prompt, or over the newest queries of an event while decoding."""
        if event.ends_prompt:
            moments = [prompt.queries[skip] for prompt in prompts]
            return torch.cat([m.mean for m in moments]), torch.cat([m.covariance for m in moments])
        assert event.queries is not None and self._rotary is not None
        positions = event.queries.positions[:, -self._needs.buffer :]
        queries = self._windows.read(self._place, event.queries.slots, positions)
        rows = self._rotary.undo(queries, positions.clamp(min=0))
        newest = Moments()
        newest.add(rows, (positions >= skip) & (positions >= 0), full=True)
        return newest.mean, newest.covariance

    def _rotate(self, event: EvictionEvent) -> Rotate:
        rotary = self._rotary
        assert rotary is not None
        return lambda rows, future: rotary.rotate_ahead(rows, event.at, future)

    def _future_queries(self, event: EvictionEvent) -> Rotate:
        projection, rotate = self._projection, self._rotate(event)
        assert projection is not None
        return lambda hidden, future: rotate(projection.queries(hidden).float(), future)

    def check(
        self, queries: Float[Tensor, "batch query_heads n head_dim"], hidden: Float[Tensor, "batch n hidden"]
    ) -> None:
        """Compares, once, queries before rotation with what comes of their hidden states.

        Raises:
            UnsupportedModelError: the model makes its queries in another way than is known here.
        """
        assert self._projection is not None
        if self._checked:
            return
        if not undone_right(queries, self._projection.queries(hidden).float(), hidden.dtype):
            raise UnsupportedModelError(
                "This model makes queries of hidden states in a way that keepset does not know under vLLM: choose "
                "a method that does not look at hidden states, such as snapkv."
            )
        self._checked = True
