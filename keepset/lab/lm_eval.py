"""A model for lm-evaluation-harness (EleutherAI) that compresses by a recipe.

`python -m keepset.lab.lm_eval --model keepset ...` runs the harness's own command line. The harness finds models by
import only, so this module is imported first.
"""

import logging
import re
import sys
from collections.abc import Sequence
from typing import Any

import torch
from lm_eval.__main__ import cli_evaluate
from lm_eval.api.registry import register_model
from lm_eval.models.huggingface import HFLM
from torch import Tensor
from tqdm import tqdm
from transformers import PreTrainedModel

from keepset.errors import KeepsetError
from keepset.hf.cache import Cache
from keepset.lab.generation import likelihoods
from keepset.recipe import Recipe

logger = logging.getLogger(__name__)
_EXAMPLE = 'write --model_args pretrained=FOLDER,recipe="snapkv(keep=0.25)"'

ScoringRequest = tuple[tuple[str, str] | None, list[int], list[int]]
"""A request, the tokens of its context, and the tokens of its continuation."""


@register_model("keepset")
class KeepsetLM(HFLM):
    """The harness's own transformers model, with prompts that a recipe compresses.

    Answers are generated after a compressed batch of prompts. A continuation is scored after its context was compressed
    without it. As in decoding, the whole context predicts the first token, before anything is dropped: no recipe
    changes the score of an answer with one token.

    Contexts run one by one, each once for all its continuations, which follow on forks, `batch_size` at a time. With
    `every=` continuations are fed in parts, so that compressions come where they would in decoding. A context that is
    too long for the model is cut from the left, as in the harness. From Python, give `model_args` as a dict, because
    the harness splits a text at every comma, also inside a recipe.

    Args:
        pretrained: a folder, a hub name or a model.
        recipe: a text such as `"snapkv(keep=0.25)"`, or a `Recipe`.
        batch_size: prompts that generate together, and continuations of one context that are scored together.
        options: any other arguments of the harness's `hf` model.

    Raises:
        KeepsetError: if model or recipe is missing or cannot be used, or `batch_size` is not an integer.
    """

    def __init__(
        self,
        pretrained: str | PreTrainedModel | None = None,
        recipe: str | Recipe | None = None,
        batch_size: int | str = 1,
        **options: Any,
    ) -> None:
        if not pretrained:
            raise KeepsetError(f"There is no model to evaluate: {_EXAMPLE}.")
        if not recipe:
            raise KeepsetError(f"There is no recipe to evaluate: {_EXAMPLE}, or --model hf for the full cache.")
        if not re.fullmatch("[1-9][0-9]*", str(batch_size)):
            raise KeepsetError(f"batch_size={batch_size} is not a number of requests: use a whole number from 1.")
        self.recipe = recipe if isinstance(recipe, Recipe) else Recipe.parse(str(recipe))
        self.recipe.require_budget()
        try:
            super().__init__(pretrained, batch_size=int(batch_size), **options)
        except (OSError, ValueError, TypeError, ImportError, RuntimeError, AssertionError) as error:
            cause = re.split(r"\. |\n", str(error).strip())[0].rstrip(".")
            name = pretrained if isinstance(pretrained, str) else type(pretrained).__name__
            raise KeepsetError(f"The model {name!r} cannot be loaded ({cause}): check --model_args.") from error
        self._cache().stop_watching()  # refuse a model or recipe now, before tasks are made

    def loglikelihood_rolling(self, requests: Any, disable_tqdm: bool = False) -> list[float]:
        raise KeepsetError(
            "loglikelihood_rolling scores a text from its first token on, so there is no prompt to compress: leave out "
            "tasks that measure perplexity."
        )

    def _loglikelihood_tokens(
        self, requests: Sequence[ScoringRequest], disable_tqdm: bool = False, **kwargs: Any
    ) -> list[tuple[float, bool]]:
        groups: dict[tuple[int, ...], list[int]] = {}
        cut = 0
        for index, (_, context, continuation) in enumerate(requests):
            excess = max(len(context) + len(continuation) - 1 - self.max_length, 0)
            groups.setdefault(tuple(context[excess:]), []).append(index)
            cut += excess > 0
        if single := sum(len(continuation) == 1 for _, _, continuation in requests):
            logger.warning(
                "%d of %d continuations are one token, which the whole prompt predicts before anything is dropped: no "
                "recipe changes their scores.",
                single,
                len(requests),
            )
        if cut:
            logger.warning("%d contexts are cut from the left, to a length of %d tokens.", cut, self.max_length)

        answers: dict[int, tuple[float, bool]] = {}
        mixed = self.mixed_precision_dtype
        # The longest first, so that a lack of memory shows early.
        for context in tqdm(sorted(groups, key=len, reverse=True), disable=disable_tqdm or self.rank != 0):
            # The harness's interface has these names.
            with torch.no_grad(), torch.autocast(self.device.type, mixed, enabled=mixed is not None):
                scored = self._score(context, [requests[index][2] for index in groups[context]])
                for index, answer in zip(groups[context], scored, strict=True):
                    answers[index] = answer
                    if (request := requests[index][0]) is not None:
                        self.cache_hook.add_partial("loglikelihood", request, answer)
        return [answers[index] for index in range(len(requests))]

    def _score(self, context: tuple[int, ...], continuations: Sequence[Sequence[int]]) -> list[tuple[float, bool]]:
        cache = self._cache()
        prompt = torch.tensor([context], dtype=torch.long, device=self.device)
        first = self.model(prompt, past_key_values=cache, logits_to_keep=1).logits[:, -1]
        return likelihoods(self.model, cache, first, continuations, self.batch_size, self.softmax_dtype)

    def _model_generate(self, context: Tensor, max_length: int, stop: list[str], **options: Any) -> Tensor:
        return super()._model_generate(context, max_length, stop, past_key_values=self._cache(), **options)

    def _cache(self) -> Cache:
        return Cache(self.model, self.recipe)


def main() -> None:
    """Run the harness's command line; bad input is one sentence on standard error, and exit code 2."""
    try:
        cli_evaluate()
    except KeepsetError as error:
        sys.stderr.write(f"keepset: {' '.join(str(error).splitlines())}\n")
        sys.exit(2)


if __name__ == "__main__":
    main()
