"""Answers, token by token, on a cache that is there; they end where a task says."""

from __future__ import annotations

import hashlib
import time
from collections.abc import Callable, Sequence
from dataclasses import dataclass, field
from typing import TYPE_CHECKING

import torch
from jaxtyping import Float, Int
from torch import Tensor

from keepset.bench.tasks.task import Generation
from keepset.hf.cache import Cache

if TYPE_CHECKING:
    import transformers

Pick = Callable[[Float[Tensor, "1 vocabulary"]], Int[Tensor, "1 1"]]
"""From logits to a token."""


class Ending:
    """When an answer is over, and what of it is the answer.

    It ends at one of the model's or the tokenizer's own ends, at a text of `until`, or after so many tokens. Texts are
    looked for in the newest tokens only: in as many as the longest has bytes, and a few more.
    """

    def __init__(
        self,
        model: transformers.PreTrainedModel,
        tokenizer: transformers.PreTrainedTokenizerBase,
        generation: Generation,
    ) -> None:
        ends = model.generation_config.eos_token_id
        self._ends = {*([ends] if isinstance(ends, int) else ends or []), tokenizer.eos_token_id}
        self._tokenizer, self._tokens = tokenizer, generation.tokens
        self._until = [text for text in generation.until if text]
        # A newest token of no bytes, or half a character before the text, must not hide it.
        self._window = 4 + max((len(text.encode()) for text in self._until), default=0)

    def reached(self, ids: list[int]) -> bool:
        """Whether the newest token is the last one."""
        if ids[-1] in self._ends or len(ids) >= self._tokens:
            return True
        return bool(self._until) and self._stops(self._text(ids[-self._window :]))

    def answer(self, ids: list[int]) -> tuple[str, bool]:
        """The answer's text, and whether it ended by itself."""
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


@dataclass
class Said:
    """The tokens of one answer, its end included.

    Attributes:
        seconds: they took; of the time of answers that were decoded together, an even share.
    """

    ids: list[int] = field(default_factory=list)
    seconds: float = 0.0


@torch.no_grad()
def generate(
    model: transformers.PreTrainedModel,
    cache: Cache,
    first: Float[Tensor, "rows vocabulary"],
    picks: Sequence[Pick],
    ending: Ending,
    on_token: Callable[[], None] = lambda: None,
) -> list[Said]:
    """One answer for each request of the cache, which they leave when they are at their end.

    Args:
        first: the logits of each answer's first token, which whatever was cached last has told.
        picks: of each answer.
        on_token: is called whenever the cache has grown.
    """
    answers = [Said() for _ in picks]
    going, logits, began = list(range(len(picks))), first, time.perf_counter()
    while True:
        for row, answer in enumerate(going):
            answers[answer].ids.append(int(picks[answer](logits[row : row + 1])))
        stay = [row for row, answer in enumerate(going) if not ending.reached(answers[answer].ids)]
        began, before = time.perf_counter(), began
        for answer in going:
            answers[answer].seconds += (began - before) / len(going)
        if not stay:
            return answers
        if len(stay) < len(going):
            cache.batch_select_indices(torch.tensor(stay))
            going = [going[row] for row in stay]
        tokens = torch.tensor([[answers[answer].ids[-1]] for answer in going], device=logits.device)
        logits = model(tokens, past_key_values=cache, use_cache=True).logits[:, -1]
        on_token()


def picker(temperature: float, device: torch.device, *draw: object) -> Pick:
    """The most likely token; with a temperature one drawn from all tokens, the same for the same `draw`."""
    if not temperature:
        return lambda logits: logits.argmax(-1, keepdim=True)
    seed = int.from_bytes(hashlib.sha256(repr(draw).encode()).digest()[:7], "big")
    generator = torch.Generator(device).manual_seed(seed)

    def drawn(logits: Tensor) -> Tensor:
        weights = (logits.float() / temperature).softmax(-1)
        # As torch.multinomial draws one, but a number that overflowed is no error here, as it is none when greedy.
        return (weights / torch.empty_like(weights).exponential_(generator=generator)).argmax(-1, keepdim=True)

    return drawn
