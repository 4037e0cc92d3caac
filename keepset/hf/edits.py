"""`EditableCache`: edits of a cache between two forwards: reordering, repeating, taking tokens back."""

from __future__ import annotations

from typing import Any

import torch
from torch import Tensor
from transformers.cache_utils import Cache as TransformersCache

from keepset.errors import KeepsetError
from keepset.hf.forwards import Forwards
from keepset.hf.hooks import RopeDeltas
from keepset.hf.layer import LayerState
from keepset.hf.other_layers import HybridLayerState, cropped
from keepset.hf.progress import Progress
from keepset.recipe import Schedule


class EditableCache(Forwards, TransformersCache):
    """A transformers cache of keepset's layers and others, as `generate` edits it between two forwards.

    `ObservedCache` describes the attributes.
    """

    schedule: Schedule
    managed_layers: dict[int, LayerState]
    prompt_length: int | None
    progress: Progress | None
    _rope: RopeDeltas | None
    _is_changed = False
    """Whether a forward has begun to change the cache, and is not complete."""

    @property
    def is_whole(self) -> bool:
        """Whether neither a forward nor a compression has changed the cache in part."""
        return not self._is_changed

    def require_whole_forward(self) -> None:
        """Check that no forward has changed the cache in part.

        Raises:
            KeepsetError: one has.
        """
        if self._is_changed:
            raise KeepsetError(
                "A forward with this cache ended before its last layer, so its layers hold different tokens: make a "
                "new cache, or go on from a copy made before that forward (cache.fork())."
            )

    def reorder_cache(self, beam_idx: Any) -> None:
        self.require_whole_forward()
        if self.progress is None:
            super().reorder_cache(beam_idx)
            return
        # On the host, where every layer needs them.
        rows: Any = torch.tensor(self._requests(beam_idx), dtype=torch.long)
        if self._looks_at_prompt:
            raise KeepsetError("A batch cannot be reordered before its prompt is complete.")
        super().reorder_cache(rows)
        self.progress.reorder(rows.to(self.progress.lengths.device))
        if self._rope is not None:
            self._rope.reorder(rows)

    def batch_select_indices(self, indices: Tensor) -> None:
        self.require_whole_forward()
        if self.progress is None:
            super().batch_select_indices(indices)
        else:  # which all kinds of layers can
            self.reorder_cache(indices)

    def batch_repeat_interleave(self, repeats: int) -> None:
        self.require_whole_forward()
        if self.progress is None:
            super().batch_repeat_interleave(repeats)
        else:
            self.reorder_cache(torch.arange(len(self.progress.tokens)).repeat_interleave(max(repeats, 0)))

    def crop(self, tokens_to_remove: int) -> None:
        self.require_whole_forward()
        progress = self.progress
        if progress is None:
            if tokens_to_remove < 0:
                raise KeepsetError("The cache is empty, so no token can be taken back.")
            return
        removed = max(progress.logical - tokens_to_remove, 0) if tokens_to_remove > 0 else -tokens_to_remove
        new = progress.logical - (progress.compressed_at or 0)
        if removed > new:
            where = "that it holds" if progress.compressed_at is None else "after the newest compression"
            raise KeepsetError(
                f"Only the {new} tokens {where} can be taken back, not {removed}: take fewer back, or go "
                "on from a copy made before them (cache.fork())."
            )
        self._take_back(removed, self._without_newest(progress, removed))

    def _without_newest(self, progress: Progress, removed: int) -> list[tuple[Any, dict[str, Any]]]:
        """Check that the newest tokens can be taken back, and change nothing.

        Args:
            progress: the cache's.
            removed: how many tokens, with padding.

        Returns:
            Layers of transformers' own, each with the attributes that it has without these tokens.

        Raises:
            KeepsetError: a layer cannot take them back.
        """
        if removed and self._looks_at_prompt:
            raise KeepsetError(
                "Tokens of an incomplete prompt cannot be taken back, because the recipe has collected more from them "
                "than entries: go on from a copy made before them (cache.fork())."
            )
        if not all(kept.can_take_back(removed) for kept in self.managed_layers.values()):
            raise KeepsetError(
                f"The attention of the newest {removed} tokens is added up for the next compression already, which "
                "cannot be undone: take fewer back, or go on from a copy made before them (cache.fork())."
            )
        if removed and any(isinstance(kept, HybridLayerState) for kept in self.managed_layers.values()):
            raise KeepsetError(
                "The recurrent states of this model cannot take tokens back: go on from a copy made before them "
                "(cache.fork())."
            )
        length = progress.logical - removed
        return [
            (layer_cache, cropped(layer_cache, removed, length))
            for layer_cache in self.layers
            if not isinstance(layer_cache, LayerState)
        ]

    def _take_back(self, removed: int, others: list[tuple[Any, dict[str, Any]]], is_whole: bool = True) -> None:
        """Take back the newest tokens.

        Args:
            removed: how many, with padding.
            others: from `_without_newest`.
            is_whole: whether every head still has all of these tokens' entries.
        """
        if removed and self.progress is not None:
            per_request = self.progress.crop(removed)
            for kept in self.managed_layers.values():
                kept.take_back(removed, per_request if is_whole else None, self.progress.lengths)
        for layer, attributes in others:
            vars(layer).update(attributes)

    def activate_past_recording(self) -> None:
        """Check that assisted generation can draft tokens together with the prompt; transformers calls it before."""
        if self.schedule.every is not None:
            raise KeepsetError(
                "Assisted generation cannot go with compression while decoding (every=...), because its drafted "
                "tokens would be compressed before they are accepted: leave one of them out."
            )
        if self.schedule.turns:
            raise KeepsetError(
                "Assisted generation cannot go with compression between turns (turns=True), because rejected tokens "
                "take away the queries that a turn's end looks at: leave one of them out."
            )
        is_compressed = self.progress is not None and self.progress.compressed_at is not None
        if self.managed_layers and self.prompt_length is None and not is_compressed:
            raise KeepsetError(
                "Assisted generation needs keepset.Cache(..., prompt_length=...), because it drafts tokens "
                "together with the prompt."
            )
        super().activate_past_recording()

    @property
    def _looks_at_prompt(self) -> bool:
        """Return whether a prompt is incomplete, and more than its entries is collected from it."""
        return any(kept.prompt is not None and bool(kept.collector.needs) for kept in self.managed_layers.values())

    def _requests(self, rows: Tensor) -> list[int]:
        """Return the indices of requests, on the host."""
        assert self.progress is not None
        requests = len(self.progress.tokens)
        if rows.dtype == torch.bool:
            chosen = rows.nonzero()[:, 0].tolist() if len(rows) == requests else []
        else:
            chosen = rows.tolist()
        if not chosen or not all(-requests <= row < requests for row in chosen):
            raise KeepsetError(
                f"The cache holds {requests} requests, and a batch of it needs at least one of them: give indices from "
                f"0 to {requests - 1}, or a mask of {requests}."
            )
        return [row % requests for row in chosen]
