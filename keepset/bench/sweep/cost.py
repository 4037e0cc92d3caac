"""The tokens that a sweep takes, known before it begins."""

from collections.abc import Sequence
from dataclasses import dataclass

from keepset.bench.sweep.prompts import Mode, PromptBuilder
from keepset.bench.sweep.sweep import Group, count
from keepset.bench.tasks.task import Tokenizer


@dataclass(frozen=True)
class Cost:
    """The size of a sweep.

    Attributes:
        cells: number of cells.
        examples: number of examples.
        prompt_tokens: tokens of all prefills.
        answer_tokens: tokens of all questions and answers at most.
    """

    cells: int
    examples: int
    prompt_tokens: int
    answer_tokens: int

    def __str__(self) -> str:
        return (
            f"{self.cells:,} cells of {self.examples:,} examples: {self.prompt_tokens:,} tokens of prompts and at most "
            f"{self.answer_tokens:,} of answers"
        )


def cost(groups: Sequence[Group], tokenizer: Tokenizer, mode: Mode, chat: bool) -> Cost:
    """Count what groups take, done or not.

    Args:
        groups: all groups of a sweep.
        tokenizer: the model's.
        mode: what is compressed.
        chat: whether prompts are chats.

    Returns:
        Number of cells and examples, tokens of prompts and of answers.
    """
    frames = {use: PromptBuilder(tokenizer, mode=mode, chat=use, longest=None) for use in {chat, False}}
    prompt_tokens = answer_tokens = 0
    for group in groups:
        answer = group.task.generation.tokens
        for prompt in frames[chat and group.task.chat].of(group.example, answer):
            prompt_tokens += len(prompt.ids)
            for question in prompt.questions:
                longest = max(map(len, question.choices), default=answer)
                answer_tokens += len(group.candidates) * (len(question.ids) + longest)
    return Cost(count(groups), len({group.key for group in groups}), prompt_tokens, answer_tokens)
