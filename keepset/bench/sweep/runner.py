"""`Runner`: what every candidate makes of one example, all of them on one prefill of its context."""

from __future__ import annotations

from collections.abc import Callable, Iterator, Sequence
from dataclasses import replace
from functools import partial
from statistics import fmean
from typing import TYPE_CHECKING

import torch

from keepset.bench.candidate import Candidate
from keepset.bench.cell import Cell, Outcome
from keepset.bench.sweep.asking import Asker
from keepset.bench.sweep.holding import nbytes_full
from keepset.bench.sweep.memory import is_out_of_memory
from keepset.bench.sweep.prefill import Prefill, Start
from keepset.bench.sweep.prompts import Prompts
from keepset.bench.tasks.task import Example, Task
from keepset.errors import KeepsetError
from keepset.hf.join import can_join
from keepset.offline.compile.contamination import refuse_contaminated

if TYPE_CHECKING:
    import transformers

TOGETHER = 4
"""As many full caches may be held by candidates that are asked as a batch."""

Ask = Callable[[Sequence[Start]], list[list[Outcome]]]
"""From prompts that are cached, each candidate's way, to the outcomes of their questions."""


class Runner:
    """Asks the same of every candidate, so that cells differ by nothing but the recipe.

    A prompt is prefilled once for all recipes that compress its end; recipes that compress while decoding (`every=`)
    have a prefill of their own. The first token of an answer is foretold by the whole prompt, as in `generate`;
    where a question follows a compressed context, by what was kept of it. Answers are the most likely tokens; with a
    temperature they are drawn from all tokens, by the seed, the example and the question alone, so that all candidates
    have the same luck. Whatever else the model's generation config says, other than what ends an answer, is left out.

    Args:
        model: a causal language model.
        tokenizer: the model's.
        agnostic: compress the context before any question is known, instead of context and question together.
        chat: ask in the model's chat template.
        temperature: 0 for greedy decoding.

    Raises:
        KeepsetError: the model has no chat template, or the temperature is out of range.
    """

    def __init__(
        self,
        model: transformers.PreTrainedModel,
        tokenizer: transformers.PreTrainedTokenizerBase,
        *,
        agnostic: bool,
        chat: bool,
        temperature: float = 0.0,
    ) -> None:
        # Divided by less, logits overflow.
        if not (temperature == 0 or 0.01 <= temperature <= 100):
            raise KeepsetError(
                f"A temperature of {temperature} is out of range: use 0 for greedy decoding, or 0.01 to 100."
            )
        longest = getattr(model.config.get_text_config(decoder=True), "max_position_embeddings", None)
        self._prompts = Prompts(tokenizer, agnostic=agnostic, chat=chat, longest=longest)
        self._model, self._asker = model, Asker(model, tokenizer, temperature)

    def run(self, task: Task, example: Example, candidates: Sequence[Candidate], seed: int) -> Iterator[Cell]:
        """A cell for every candidate, in their order; what cannot be had is a cell with an error."""
        contenders = [_Contender(_unseen(candidate, example)) for candidate in candidates]
        try:
            prompts = self._prompts.of(example, task.generation.tokens)
        except KeepsetError as error:
            for contender in contenders:
                contender.fail(error)
                yield contender.cell(task, example, seed)
            return
        if cut := max(prompt.cut for prompt in prompts):
            example = replace(example, facts={**example.facts, "cut": cut})
        asked = 0
        for prompt in prompts:
            ids = torch.tensor([prompt.ids], device=self._model.device)
            prefill = Prefill(self._model, ids, [contender.candidate for contender in contenders])
            ask = partial(self._asker.ask, task, prompt, (seed, example.id), asked)
            batched = not task.decodes and not any(question.choices for question in prompt.asked)
            for group in _groups(prefill, contenders, batched):
                _ask(ask, prefill, group)
                if prompt is prompts[-1]:
                    yield from (contender.cell(task, example, seed) for contender in group)
            asked += len(prompt.asked)


class _Contender:
    """A candidate on one example, and what has become of it so far."""

    def __init__(self, candidate: Candidate) -> None:
        self.candidate = candidate
        self.outcomes: list[Outcome] = []
        self.start: Start | None = None

    def begin(self, prefill: Prefill) -> None:
        """Caches the prompt its way, unless it has."""
        if self.start is not None:
            return
        try:
            self.start = prefill.start(self.candidate)
        except KeepsetError as error:
            self.fail(error)

    def hand_over(self) -> Start:
        """What it has begun, which is somebody else's now: the cache goes as soon as it is used up."""
        assert self.start is not None
        start, self.start = self.start, None
        return start

    def fail(self, error: KeepsetError) -> None:
        """It cannot be had: the first reason stays."""
        self.candidate = replace(self.candidate, error=self.candidate.error or str(error))

    def cell(self, task: Task, example: Example, seed: int) -> Cell:
        """What is told of it."""
        return Cell(
            task=task.name,
            seed=seed,
            example=example.id,
            recipe=self.candidate.text,
            method=self.candidate.method,
            requested=self.candidate.requested,
            facts=example.facts,
            metric=task.metric,
            outcome=_mean(self.outcomes) if self.candidate.error is None else None,
            error=self.candidate.error,
        )


def _groups(prefill: Prefill, contenders: Sequence[_Contender], batched: bool) -> Iterator[list[_Contender]]:
    """All of them, begun: neighbours together where they may be asked as a batch and do not hold too much."""
    group: list[_Contender] = []
    for contender in contenders:
        alone = not batched or _compresses_again(contender.candidate)
        if group and (alone or not _joins(group) or not (_begins(contender, prefill) and _fits(contender, group))):
            yield group
            group = []
        contender.begin(prefill)
        group.append(contender)
    if group:
        yield group


def _joins(group: Sequence[_Contender]) -> bool:
    """Whether what has begun can be asked together with others."""
    return all(can_join(contender.start.cache) for contender in group if contender.start is not None)


def _begins(contender: _Contender, prefill: Prefill) -> bool:
    """Whether memory is enough for it beside those that have begun."""
    try:
        contender.begin(prefill)
    except (MemoryError, RuntimeError) as error:
        if not is_out_of_memory(error):
            raise
        return False
    return True


def _fits(contender: _Contender, group: Sequence[_Contender]) -> bool:
    """Whether a group that it joins does not hold too much; one that cannot be had is no burden."""
    if contender.start is None:
        return True
    cache = contender.start.cache
    others = (other.start.cache.nbytes for other in group if other.start is not None)
    return sum(others, cache.nbytes) <= TOGETHER * nbytes_full(cache)


def _ask(ask: Ask, prefill: Prefill, group: Sequence[_Contender]) -> None:
    """Asks all that have begun; one after another if one spoils it for the others, or memory is not enough."""
    begun = [contender for contender in group if contender.start is not None]
    if not begun:
        return
    try:
        for contender, outcomes in zip(begun, ask([contender.hand_over() for contender in begun]), strict=True):
            contender.outcomes += outcomes
        return
    except KeepsetError as error:
        if len(begun) == 1:
            return begun[0].fail(error)
    except (MemoryError, RuntimeError) as error:
        if len(begun) == 1 or not is_out_of_memory(error):
            raise
    for contender in begun:
        contender.begin(prefill)
        _ask(ask, prefill, [contender])


def _compresses_again(candidate: Candidate) -> bool:
    """Whether it does while decoding."""
    return candidate.recipe is not None and candidate.recipe.schedule.every is not None


def _unseen(candidate: Candidate, example: Example) -> Candidate:
    """The candidate; with an error if its tables were compiled from this very text."""
    if candidate.recipe is None or candidate.error is not None:
        return candidate
    try:
        refuse_contaminated(
            candidate.recipe, "".join([example.context, *(question.text for question in example.questions)])
        )
    except KeepsetError as error:
        return replace(candidate, error=str(error))
    return candidate


def _mean(outcomes: Sequence[Outcome]) -> Outcome:
    """The means of all figures, and all replies."""

    def mean(name: str) -> float:
        return fmean(getattr(outcome, name) for outcome in outcomes)

    return Outcome(
        scores={name: fmean(outcome.scores[name] for outcome in outcomes) for name in outcomes[0].scores},
        replies=[reply for outcome in outcomes for reply in outcome.replies],
        keep=mean("keep"),
        kv_bytes=round(mean("kv_bytes")),
        kv_bytes_full=round(mean("kv_bytes_full")),
        tokens=mean("tokens"),
        finished=mean("finished"),
        repetition=mean("repetition"),
        prefill_seconds=mean("prefill_seconds"),
        select_seconds=mean("select_seconds"),
        decode_seconds=mean("decode_seconds"),
    )
