"""One prefill of a prompt that serves all candidates which compress its end; others have one of their own."""

from __future__ import annotations

import time
from collections.abc import Iterator, Sequence
from dataclasses import dataclass
from typing import TYPE_CHECKING

import torch
from jaxtyping import Float, Int
from torch import Tensor

from keepset.errors import KeepsetError
from keepset.evaluate.compare import needs_of
from keepset.evaluate.plan import Candidate
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
    """

    cache: Cache
    logits: Float[Tensor, "1 vocabulary"]
    seconds: float


def starts(
    model: transformers.PreTrainedModel, ids: Int[Tensor, "1 tokens"], candidates: Sequence[Candidate]
) -> Iterator[Start | KeepsetError]:
    """The prompt as each candidate caches it, or why it cannot; one at a time, so that no two are held."""
    refused = [_refused(model, candidate) for candidate in candidates]
    recipes = [_recipe(candidate) for candidate, error in zip(candidates, refused, strict=True) if error is None]
    shared = _Shared(model, ids, [recipe for recipe in recipes if recipe.schedule.every is None])
    for candidate, error in zip(candidates, refused, strict=True):
        if error is not None:
            yield error
            continue
        recipe = _recipe(candidate)
        try:
            yield shared.start(recipe) if recipe.schedule.every is None else _own(model, ids, recipe)
        except KeepsetError as found:
            yield found


class _Shared:
    """The prefill that many recipes share, run when the first of them comes."""

    def __init__(
        self, model: transformers.PreTrainedModel, ids: Int[Tensor, "1 tokens"], recipes: Sequence[Recipe]
    ) -> None:
        self._model, self._ids, self._recipes = model, ids, recipes
        self._run: tuple[Recorder, Tensor] | None = None

    def start(self, recipe: Recipe) -> Start:
        """The cache that the recipe leaves of the prompt."""
        recorder, logits = self._recorded(recipe)
        cache = Cache.from_prompt(self._model, recipe, recorder, recorder.observations)
        return Start(cache, logits, recorder.seconds_for(recipe.method.needs))

    def _recorded(self, recipe: Recipe) -> tuple[Recorder, Tensor]:
        """All share one, unless what one of them needs cannot be had of this prompt."""
        if self._run is None and self._recipes:
            try:
                self._run = self._record(self._recipes)
            except KeepsetError:
                self._recipes = []
        return self._run or self._record([recipe])

    def _record(self, recipes: Sequence[Recipe]) -> tuple[Recorder, Tensor]:
        recorder = Recorder(self._model, needs_of(recipes))
        try:
            return recorder, recorder.prefill(self._ids)
        finally:
            recorder.stop_watching()


@torch.no_grad()
def _own(model: transformers.PreTrainedModel, ids: Int[Tensor, "1 tokens"], recipe: Recipe) -> Start:
    cache = Cache(model, recipe)
    start = time.perf_counter()
    try:
        logits = model(ids, past_key_values=cache, use_cache=True, logits_to_keep=1).logits[:, -1]
    except BaseException:
        cache.stop_watching()
        raise
    return Start(cache, logits, time.perf_counter() - start - sum(event.seconds for event in cache.events))


def _refused(model: transformers.PreTrainedModel, candidate: Candidate) -> KeepsetError | None:
    """Why this candidate cannot be had of this model, so that it does not spoil what others share."""
    if candidate.error is not None:
        return KeepsetError(candidate.error)
    try:
        Cache(model, _recipe(candidate)).stop_watching()
    except KeepsetError as error:
        return error
    return None


def _recipe(candidate: Candidate) -> Recipe:
    """Its recipe; one that drops nothing for the full cache."""
    return candidate.recipe or Recipe.of(StreamingLLM(), keep=1.0)
