"""Texts that are made to a length: as long as they may be, never longer."""

import math
from collections.abc import Callable

from keepset.bench.tasks.task import Example, Tokenizer

_FULL = 0.97
"""What fills so much of the room is not made longer."""


def room(tokenizer: Tokenizer, length: int, answer: int) -> int:
    """How many of `length` tokens are left for an example, less its answer and a chat template's own."""
    if not tokenizer.chat_template:
        return length - answer
    empty = [{"role": "user", "content": ""}]
    text = str(tokenizer.apply_chat_template(empty, tokenize=False, add_generation_prompt=True))
    return length - answer - len(tokenizer(text, add_special_tokens=False)["input_ids"])


def measure(tokenizer: Tokenizer, example: Example) -> int:
    """Tokens of an example with its longest question, each part encoded by itself: joined they are no more."""

    def count(text: str) -> int:
        # verbose=False: the model may take more than the tokenizer knows of.
        return len(tokenizer(text, add_special_tokens=False, verbose=False)["input_ids"])

    special = tokenizer.num_special_tokens_to_add()
    return special + count(example.context) + max(count(q.text) + count(f" {q.prefix}") for q in example.questions)


def fit(
    make: Callable[[int], Example],
    count: Callable[[Example], int],
    room: int,
    *,
    smallest: int,
    largest: int | None = None,
    guess: int | None = None,
) -> tuple[int, Example] | None:
    """The size whose example fills the room, and that example; None where not even the smallest fits.

    Examples grow about evenly with their size, which need not be tokens. `guess` is where to begin.
    """
    low, best, high = smallest - 1, None, math.inf if largest is None else largest + 1
    size, over = int(max(smallest, min(guess or smallest, high - 1))), False
    while low + 1 < high:
        example = make(size)
        tokens = count(example)
        if tokens <= room:
            low, best = size, (size, example)
            if tokens >= _FULL * room:
                break
        else:
            high, over = size, True
        # In proportion until there is one that fits and one that does not, then halfway between the two.
        step = (low + high) / 2 if best is not None and over else size * room / max(tokens, 1)
        size = int(max(low + 1, min(step, high - 1)))
    return best
