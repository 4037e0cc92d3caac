"""`PromptBuilder`: makes an example's token ids: those that are prefilled and compressed, and those that follow."""

from collections.abc import Sequence
from dataclasses import dataclass, replace
from typing import Literal

from keepset.errors import KeepsetError
from keepset.lab.tasks.task import Example, Question, Task, Tokenizer
from keepset.lab.texts import chat_frame

Mode = Literal["prompt", "agnostic", "task"]
"""Which part of an example is compressed, and whether its questions are known by then.

- `prompt`: context and question together.
- `agnostic`: the context, before its questions are known.
- `task`: the context, by recipes that know its questions (KVCompose 2025, arXiv:2509.05165, section 3.2.1:
  task-aware). For all other recipes the question is the end of the compressed prompt.
"""


@dataclass(frozen=True)
class Asking:
    """How every recipe is asked.

    Attributes:
        mode: which part of an example is compressed, and whether the questions are known by then.
        chat: whether prompts are chats, in tasks that allow it.
        temperature: 0 for greedy decoding, or 0.01 to 100.
        alone: whether answers are decoded one by one, so that seconds and memory belong to a single answer.
    """

    mode: Mode = "prompt"
    chat: bool = True
    temperature: float = 0.0
    alone: bool = False


@dataclass(frozen=True)
class TokenizedQuestion:
    """A question, its tokens if they follow the compressed prompt, and the tokens of each choice."""

    question: Question
    ids: tuple[int, ...]
    choices: tuple[tuple[int, ...], ...]


@dataclass(frozen=True)
class Prompt:
    """A prompt that is prefilled once, and the questions about it.

    Attributes:
        ids: the prompt's tokens.
        questions: the questions that follow.
        cut: tokens that were left out because they do not fit the model's context.
        tasks: the tokens of the questions for task-aware recipes.
    """

    ids: tuple[int, ...]
    questions: tuple[TokenizedQuestion, ...]
    cut: int = 0
    tasks: tuple[tuple[int, ...], ...] = ()


class PromptBuilder:
    """Makes the prompts of a task's examples.

    Context, question and the answer's prefix are one text. It is tokenized as lm-evaluation-harness does: white space
    before a choice belongs to the choice. In the mode `agnostic` each question follows the context's prompt and is
    tokenized by itself. In the mode `task` context, question, and what stands between it and the answer are tokenized
    one by one, so that all recipes have the same tokens; the last part is not compressed, as in kvpress' evaluation.

    In a chat, context and question are a user's message in the model's template, and the prefix begins the assistant's
    answer. If prompt and answer do not fit the model's context, the middle of the example's context is left out, as in
    LongBench (Bai and others 2023, arXiv:2308.14508).

    Args:
        tokenizer: the model's tokenizer.
        task: the task; its `generation` says how long an answer may be.
        asking: which part is compressed, and whether prompts are chats.
        longest: tokens of the model's context; None for no limit.
    """

    def __init__(self, tokenizer: Tokenizer, task: Task, asking: Asking, longest: int | None) -> None:
        self._tokenizer, self._mode, self._longest = tokenizer, asking.mode, longest
        self._answer = task.generation.tokens
        self._special = not (asking.chat and task.chat)
        self._before, self._after = ("", "") if self._special else chat_frame(tokenizer)

    def of(self, example: Example, *, task_aware: bool = False) -> list[Prompt]:
        """Return an example's prompts: one for all questions that follow a context, else one for each question.

        Args:
            example: the example.
            task_aware: in the mode `task`, whether the prompts are for recipes that know the questions.

        Raises:
            KeepsetError: the mode does not suit the example.
        """
        if self._mode == "prompt":
            return [self._joint(example, question) for question in example.questions]
        if not example.context.strip():
            raise KeepsetError(
                f"Example {example.id} has no context that could be compressed before its question is known: use the "
                "mode 'prompt'."
            )
        context = self._encode(self._before + example.context, self._special)
        if self._mode == "agnostic":
            questions = [self._tokenized(question, self._end(question)) for question in example.questions]
            return [self._fitted(Prompt(context, tuple(questions)), example, ())]
        question_ids = [self._encode(question.text, special=False) for question in example.questions]
        ends = [self._tokenized(question, self._after + question.prefix) for question in example.questions]
        if not all(question_ids):
            raise KeepsetError(f"Example {example.id} has no question that could be told: use the mode 'agnostic'.")
        if task_aware:
            joined = [replace(end, ids=ids + end.ids) for ids, end in zip(question_ids, ends, strict=True)]
            prompt = Prompt(context, tuple(joined), tasks=tuple(question_ids))
            return [self._fitted(prompt, example, ())]
        return [
            self._fitted(Prompt(context + ids, (end,)), example, ids)
            for ids, end in zip(question_ids, ends, strict=True)
        ]

    def _joint(self, example: Example, question: Question) -> Prompt:
        whole = self._tokenized(question, self._before + example.context + self._end(question), self._special)
        prompt = Prompt(whole.ids or self._begin(), (replace(whole, ids=()),))
        return self._fitted(prompt, example, self._encode(self._end(question), special=False))

    def _tokenized(self, question: Question, text: str, special: bool = False) -> TokenizedQuestion:
        """Tokenize a text that ends with a question. A choice's tokens are those that it adds to the stripped text.

        Args:
            question: the question.
            text: the text.
            special: whether the tokenizer adds special tokens.
        """
        ids = self._encode(text.rstrip() if question.choices else text, special)
        choices = tuple(self._encode(text + choice, special and bool(ids))[len(ids) :] for choice in question.choices)
        for choice, tokens in zip(question.choices, choices, strict=True):
            if not tokens:
                raise KeepsetError(f"The choice {choice!r} has no tokens, so it has no likelihood: leave it out.")
        return TokenizedQuestion(question, ids, choices)

    def _end(self, question: Question) -> str:
        return question.text + self._after + question.prefix

    def _fitted(self, prompt: Prompt, example: Example, end: Sequence[int]) -> Prompt:
        """Cut the middle out of a prompt's context, if prompt and answer are too long.

        Args:
            prompt: the prompt.
            example: the example.
            end: the prompt's tokens after the context.
        """
        after = max(
            len(question.ids) + max(map(len, question.choices), default=self._answer) for question in prompt.questions
        )
        excess = 0 if self._longest is None else len(prompt.ids) + after - self._longest
        if excess <= 0:
            return prompt
        before = len(self._encode(self._before, special=False))
        context = len(prompt.ids) - before - len(end)
        if excess >= context:
            raise KeepsetError(
                f"Example {example.id} does not fit the model's context of {self._longest} tokens, even without its "
                "own context: generate fewer tokens, or leave it out."
            )
        first = before + (context - excess + 1) // 2
        return replace(prompt, ids=prompt.ids[:first] + prompt.ids[first + excess :], cut=excess)

    def _begin(self) -> tuple[int, ...]:
        tokenizer = self._tokenizer
        token = tokenizer.eos_token_id if tokenizer.bos_token_id is None else tokenizer.bos_token_id
        if not isinstance(token, int):
            raise KeepsetError("An empty prompt needs a token that begins a text, and the model's tokenizer has none.")
        return (token,)

    def _encode(self, text: str, special: bool) -> tuple[int, ...]:
        begin = self._tokenizer.bos_token
        special = special and not (isinstance(begin, str) and text.startswith(begin))
        # verbose=False: no warning, because long prompts are cut before the model sees them.
        return tuple(self._tokenizer(text, add_special_tokens=special, verbose=False)["input_ids"])
