"""Examples of a given length: as long as possible, never longer."""

import math
from collections.abc import Callable

from keepset.lab.tasks.task import Example, Tokenizer
from keepset.lab.texts import encode

_FULL = 0.97
"""An example that fills this share of the room is not made longer."""


def room(tokenizer: Tokenizer, length: int, answer: int) -> int:
    """Return how many tokens an example may have beside its answer and a chat template.

    Args:
        tokenizer: the model's tokenizer.
        length: tokens of the whole.
        answer: the most tokens of the answer.
    """
    if not tokenizer.chat_template:
        return length - answer
    empty = [{"role": "user", "content": ""}]
    text = str(tokenizer.apply_chat_template(empty, tokenize=False, add_generation_prompt=True))
    return length - answer - len(encode(tokenizer, text))


def measure(tokenizer: Tokenizer, example: Example) -> int:
    """Return the tokens of an example with its longest question.

    Each part is encoded separately; joined they have at most as many tokens.

    Args:
        tokenizer: the model's tokenizer.
        example: the example.
    """
    questions = (len(encode(tokenizer, q.text)) + len(encode(tokenizer, f" {q.prefix}")) for q in example.questions)
    return tokenizer.num_special_tokens_to_add() + len(encode(tokenizer, example.context)) + max(questions)


def fit(
    make: Callable[[int], Example],
    count: Callable[[Example], int],
    room: int,
    *,
    smallest: int,
    largest: int | None = None,
    guess: int | None = None,
) -> tuple[int, Example] | None:
    """Find the size whose example fills the room; return it and its example, or None if even the smallest is too long.

    Args:
        make: makes an example whose length is about proportional to a size. A size need not be in tokens.
        count: counts the tokens of an example.
        room: tokens that the example may have.
        smallest: the smallest size.
        largest: the largest size; None for no limit.
        guess: the size to try first.
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
        # The next size is in proportion, until one fits and one does not; then it is halfway between the two.
        step = (low + high) / 2 if best is not None and over else size * room / max(tokens, 1)
        size = int(max(low + 1, min(step, high - 1)))
    return best
