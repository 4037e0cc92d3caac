"""One prefill of a prompt that serves all candidates which compress its end; others have one of their own."""

from __future__ import annotations

import time
from collections.abc import Sequence
from dataclasses import dataclass
from typing import TYPE_CHECKING

import torch
from jaxtyping import Float, Int
from torch import Tensor

from keepset.bench.candidate import Candidate
from keepset.bench.compare import needs_of
from keepset.errors import KeepsetError
from keepset.hf.cache import Cache
from keepset.hf.recorder import Recorder
from keepset.methods.streaming_llm import StreamingLLM
from keepset.recipe import Recipe

if TYPE_CHECKING:
    import transformers


@dataclass(frozen=True)
class Start:
    """A prompt that is cached.

    Attributes:
        logits: what the prompt's last token foretells, before anything was dropped.
        seconds: that the prefill takes with this recipe alone, its selection not counted.
        whole: it drops nothing and stands for the full cache.
    """

    cache: Cache
    logits: Float[Tensor, "1 vocabulary"]
    seconds: float
    whole: bool


class Prefill:
    """The prefill of one prompt, run when the first candidate that shares it comes.

    Args:
        candidates: all that will come.
    """

    def __init__(
        self, model: transformers.PreTrainedModel, ids: Int[Tensor, "1 tokens"], candidates: Sequence[Candidate]
    ) -> None:
        self._model, self._ids = model, ids
        self._sharing = [_recipe(candidate) for candidate in candidates if candidate.error is None]
        self._shared: tuple[Recorder, Tensor] | None = None

    def start(self, candidate: Candidate) -> Start:
        """The prompt as this candidate caches it.

        Raises:
            KeepsetError: it cannot be had.
        """
        if candidate.error is not None:
            raise KeepsetError(candidate.error)
        recipe = _recipe(candidate)
        if recipe.schedule.every is not None:
            return self._own(recipe)
        _check(self._model, recipe)
        recorder, logits = self._recorded(recipe)
        cache = Cache.from_prompt(self._model, recipe, recorder, recorder.observations)
        return Start(cache, logits, recorder.seconds_for(recipe.method.needs), candidate.recipe is None)

    def _recorded(self, recipe: Recipe) -> tuple[Recorder, Tensor]:
        """All share one, unless what one of them needs cannot be had of this prompt."""
        if self._shared is None and self._sharing:
            try:
                self._shared = self._record([other for other in self._sharing if _shares(self._model, other)])
            except KeepsetError:
                self._sharing = []
        return self._shared or self._record([recipe])

    def _record(self, recipes: Sequence[Recipe]) -> tuple[Recorder, Tensor]:
        recorder = Recorder(self._model, needs_of(recipes))
        try:
            return recorder, recorder.prefill(self._ids)
        finally:
            recorder.stop_watching()

    @torch.no_grad()
    def _own(self, recipe: Recipe) -> Start:
        cache = Cache(self._model, recipe)
        began = time.perf_counter()
        try:
            logits = self._model(self._ids, past_key_values=cache, use_cache=True, logits_to_keep=1).logits[:, -1]
        except BaseException:
            cache.stop_watching()
            raise
        return Start(cache, logits, time.perf_counter() - began - sum(event.seconds for event in cache.events), False)


def _shares(model: transformers.PreTrainedModel, recipe: Recipe) -> bool:
    """Whether a prefill with others can serve it, which it must not spoil for them."""
    try:
        _check(model, recipe)
    except KeepsetError:
        return False
    return recipe.schedule.every is None


def _check(model: transformers.PreTrainedModel, recipe: Recipe) -> None:
    """Refuses what cannot be had of this model, without a prompt."""
    Cache(model, recipe).stop_watching()


def _recipe(candidate: Candidate) -> Recipe:
    """Its recipe; one that drops nothing for the full cache."""
    return candidate.recipe or Recipe.of(StreamingLLM(), keep=1.0)
