"""What a sweep takes, said before it begins."""

from collections.abc import Sequence
from dataclasses import dataclass

from keepset.bench.sweep.prompts import Mode, Prompts
from keepset.bench.sweep.sweep import Group, count
from keepset.bench.tasks.task import Tokenizer


@dataclass(frozen=True)
class Cost:
    """What a sweep takes: tokens of all prefills, and of all cells' answers at most."""

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
    """Of all groups, those that are done already too."""
    frames = {use: Prompts(tokenizer, mode=mode, chat=use, longest=None) for use in {chat, False}}
    prompt_tokens = answer_tokens = 0
    for group in groups:
        answer = group.task.generation.tokens
        for prompt in frames[chat and group.task.chat].of(group.example, answer):
            prompt_tokens += len(prompt.ids)
            for question in prompt.questions:
                longest = max(map(len, question.choices), default=answer)
                answer_tokens += len(group.candidates) * (len(question.ids) + longest)
    return Cost(count(groups), len({group.key for group in groups}), prompt_tokens, answer_tokens)
