"""Generation after a cache: greedy tokens, answers up to a task's stop texts, likelihoods of given texts."""

import hashlib
import time
from collections.abc import Callable, Sequence
from dataclasses import dataclass, field
from typing import Any

import torch
from jaxtyping import Float, Int
from torch import Tensor
from torch.nn.utils.rnn import pad_sequence
from transformers import LogitsProcessor, PreTrainedModel

from keepset.hf.batch import go_together
from keepset.hf.cache import Cache
from keepset.hf.model_support import check_logits
from keepset.lab.tasks.task import Generation, Reply, Tokenizer

Pick = Callable[[Float[Tensor, "1 vocabulary"]], Int[Tensor, "1 1"]]
"""Picks a token by its logits."""


class Checked(LogitsProcessor):
    """Raises `KeepsetError` in `model.generate` if a logit is NaN."""

    def __call__(
        self, input_ids: Int[Tensor, "batch tokens"], scores: Float[Tensor, "batch vocabulary"]
    ) -> Float[Tensor, "batch vocabulary"]:
        check_logits(scores)
        return scores


@torch.no_grad()
def greedy(
    model: PreTrainedModel, cache: Any, ids: Int[Tensor, "1 n"], count: int, on_token: Callable[[], None] = lambda: None
) -> tuple[list[int], float]:
    """Generate `count` most likely tokens, ends of text included; return them and the seconds that they took.

    Args:
        model: the model.
        cache: any cache of transformers' with the tokens before `ids`; it grows.
        ids: the tokens that are fed first.
        count: how many tokens to generate.
        on_token: called after each token.
    """
    logits = model(ids, past_key_values=cache, use_cache=True, logits_to_keep=1).logits
    new: list[int] = []
    start = time.perf_counter()
    for _ in range(count):
        token = logits[:, -1].argmax(-1, keepdim=True)
        new.append(int(token))
        logits = model(token, past_key_values=cache, use_cache=True).logits
        on_token()
    return new, time.perf_counter() - start


def end_tokens(model: PreTrainedModel) -> list[int]:
    """Return the tokens that end a text according to the model's generation config."""
    ends = model.generation_config.eos_token_id
    return [ends] if isinstance(ends, int) else list(ends or ())


class StopCriterion:
    """Decides when an answer is over, and which generated tokens are the answer.

    An answer ends at an end-of-text token of the model or the tokenizer, at a text of `until`, or after the most tokens
    that the task allows. Texts are only searched in the newest tokens: as many as the longest text has bytes, and a few
    more.
    """

    def __init__(self, model: PreTrainedModel, tokenizer: Tokenizer, generation: Generation) -> None:
        self._ends = {*end_tokens(model), tokenizer.eos_token_id}
        self._tokenizer, self._tokens = tokenizer, generation.tokens
        self._until = [text for text in generation.until if text]
        # A last token without bytes, or half a character before the text, must not hide the text.
        self._window = 4 + max((len(text.encode()) for text in self._until), default=0)

    def reached(self, ids: list[int]) -> bool:
        """Return whether the newest token is the last one."""
        if ids[-1] in self._ends or len(ids) >= self._tokens:
            return True
        return bool(self._until) and self._stops(self._text(ids[-self._window :]))

    def answer(self, ids: list[int]) -> tuple[str, bool]:
        """Return the answer's text, and whether it ended by itself."""
        by_itself = ids[-1] in self._ends
        text = self._text(ids[:-1] if by_itself else ids)
        finished = by_itself or self._stops(text)
        for end in self._until:
            text = text.split(end)[0]
        return text, finished

    def _stops(self, text: str) -> bool:
        return any(end in text for end in self._until)

    def _text(self, ids: list[int]) -> str:
        return str(self._tokenizer.decode(ids, skip_special_tokens=True))


@dataclass(eq=False)
class Answer:
    """An answer on its own cache, while it is decoded and afterwards.

    Attributes:
        cache: the prompt and the answer so far.
        logits: logits of the next token, which `pick` picks.
        on_token: called whenever the cache has grown.
        ids: the tokens that were generated.
        seconds: an even share of the seconds of answers that were decoded together, plus those of its own events.
        beside: the sum over the tokens of the number of answers that were decoded at once.
        reply: the text without its end; the likelihoods of choices.
        finished: whether it ended by itself or at a text of `until`.
        over: whether it is complete.
        error: the error that has stopped it; the cache is unusable then.
    """

    cache: Cache
    logits: Float[Tensor, "1 vocabulary"]
    pick: Pick
    ending: StopCriterion
    on_token: Callable[[], None]
    ids: list[int] = field(default_factory=list)
    seconds: float = 0.0
    beside: int = 0
    reply: Reply = ""
    finished: bool = True
    over: bool = False
    error: Exception | None = None

    def say(self) -> None:
        """Pick the next token."""
        self.ids.append(int(self.pick(self.logits)))
        if self.ending.reached(self.ids):
            self.over = True
            self.reply, self.finished = self.ending.answer(self.ids)


@torch.no_grad()
def step(model: PreTrainedModel, answers: Sequence[Answer]) -> None:
    """Decode one more token of every answer, and note errors in the answers that they concern.

    Args:
        model: the model.
        answers: answers that are not over. Their caches may differ in length.
    """
    began, events = time.perf_counter(), [len(answer.cache.events) for answer in answers]
    for answer in answers:
        answer.say()
    active = [answer for answer in answers if not answer.over]
    if active:
        _feed(model, active)
    selecting = [
        sum(event.seconds for event in answer.cache.events[before:])
        for answer, before in zip(answers, events, strict=True)
    ]
    share = (time.perf_counter() - began - sum(selecting)) / len(answers)
    for answer, event_seconds in zip(answers, selecting, strict=True):
        answer.seconds += share + event_seconds
        answer.beside += len(answers)
    for answer in active:
        if answer.error is None:
            answer.on_token()


def _feed(model: PreTrainedModel, answers: Sequence[Answer]) -> None:
    tokens = torch.tensor([[answer.ids[-1]] for answer in answers], dtype=torch.long, device=model.device)
    errors: dict[int, Exception] = {}
    try:
        if len(answers) == 1:
            logits = model(tokens, past_key_values=answers[0].cache, use_cache=True).logits[:, -1]
        else:
            logits, errors = go_together(model, [answer.cache for answer in answers], tokens)
    except Exception as error:
        logits, errors = None, dict.fromkeys(range(len(answers)), error)
    for row, answer in enumerate(answers):
        answer.error = errors.get(row)
        if answer.error is None:
            answer.logits = logits[row : row + 1]


def picker(temperature: float, device: torch.device, *draw: object) -> Pick:
    """Return a function that picks the next token by its logits.

    Args:
        temperature: 0 for the most likely token; else it is drawn.
        device: the device of the logits.
        draw: what the draw is for; equal ones draw alike.
    """
    if not temperature:
        return lambda logits: logits.argmax(-1, keepdim=True)
    seed = int.from_bytes(hashlib.sha256(repr(draw).encode()).digest()[:7], "big")
    generator = torch.Generator(device).manual_seed(seed)

    def drawn(logits: Tensor) -> Tensor:
        weights = (logits.float() / temperature).softmax(-1)
        # Like torch.multinomial, but without its error if a logit has overflowed; greedy decoding raises none either.
        return (weights / torch.empty_like(weights).exponential_(generator=generator)).argmax(-1, keepdim=True)

    return drawn


@torch.no_grad()
def likelihoods(
    model: PreTrainedModel,
    cache: Cache,
    first: Float[Tensor, "1 vocabulary"],
    continuations: Sequence[Sequence[int]],
    together: int,
    dtype: torch.dtype | None = None,
) -> list[tuple[float, bool]]:
    """Return the log-likelihood of each continuation of a cache, and whether greedy decoding would generate it.

    Args:
        model: the model.
        cache: the tokens before the continuations; it does not change, because they run on forks.
        first: logits of the continuations' first token.
        continuations: tokens of each continuation.
        together: how many continuations run at once.
        dtype: dtype of the softmax; that of the logits if None.
    """
    tokens = [torch.tensor(continuation, dtype=torch.long, device=first.device) for continuation in continuations]
    scores: list[tuple[float, bool]] = []
    for start in range(0, len(tokens), together):
        part = tokens[start : start + together]
        logits = _follow(model, cache, first, pad_sequence([row[:-1] for row in part], batch_first=True))
        for row, target in zip(logits, part, strict=True):
            target_logits = row[: len(target)]
            likely = target_logits.log_softmax(-1, dtype).gather(-1, target[:, None])
            scores.append((float(likely.sum()), bool((target_logits.argmax(-1) == target).all())))
    return scores


def _follow(
    model: PreTrainedModel, cache: Cache, first: Float[Tensor, "1 vocabulary"], tokens: Int[Tensor, "rows n"]
) -> Float[Tensor, "rows n_and_one vocabulary"]:
    """Return the logits after the cache and after every token. Rows may be padded at their end."""
    logits, (rows, length) = [first.expand(len(tokens), 1, -1)], tokens.shape
    if length:
        fork = cache.fork()
        try:
            fork.batch_repeat_interleave(rows)
            chunks = tokens.split(cache.schedule.every or length, 1)
            logits += [model(chunk, past_key_values=fork, use_cache=True).logits for chunk in chunks]
        finally:
            fork.stop_watching()
    return torch.cat(logits, 1)
