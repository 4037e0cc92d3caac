"""Conversations: what is told in their turns is asked for afterwards.

The assistant's answers are fixed ("I see."), and an answer begins with given words. So small models can do it, and
recipes are judged by what they keep.
"""

from __future__ import annotations

import math
import random
import re
from bisect import bisect_left
from collections import Counter
from collections.abc import Sequence
from dataclasses import dataclass, replace
from functools import partial
from pathlib import Path
from statistics import fmean
from typing import Literal

from keepset.errors import KeepsetError
from keepset.lab.tasks.chat_contents import CONTENTS, MOST_FACTS, Wanted, facts_for
from keepset.lab.tasks.chat_example import SEEN, ChatExample, ChatQuestion, Message, begun, rendered, told_in
from keepset.lab.tasks.fit import fit
from keepset.lab.tasks.recorded import RecordedChat, Recording, read_recordings
from keepset.lab.tasks.task import Example, Generation, Question, Reply, Task, TaskSettings, Tokenizer
from keepset.lab.texts import encode

_OF_TOOLS = ("chat_tools", "chat_cleared")
NAMES = (*CONTENTS, *_OF_TOOLS)
EXAMPLES = 50
"""The number of conversations without a limit."""

Answers = Literal["none", "right", "own"]
"""What of a question stays in the history for the next one: nothing, or the question with the right answer, or with the
model's own."""

_STAY = 3
"""The newest results of tools that are not cleared, as Anthropic's `clear_tool_uses_20250919` keeps by default."""

_SHORT = 32
"""The most tokens of an answer to a question about a recorded conversation."""
_JUDGED = 64
"""How many tokens of a recorded answer are judged."""
_WORD = re.compile(r"\w+")
_ARTICLES = ("a", "an", "the")


@dataclass(frozen=True)
class ChatSettings(TaskSettings):
    """The settings of tasks, and those of conversations.

    Attributes:
        turns: how many turns come before the questions.
        compactions: how often conversations are compressed meanwhile; each number makes a task of its own.
        questions: how many questions are asked about a conversation, if it has so many.
        answers: what of a question stays in the history for the next one.
        file: recorded conversations, in place of made ones; None for none.
    """

    turns: int = 15
    compactions: tuple[int, ...] = (1, 8)
    questions: int = 10
    answers: Answers = "none"
    file: Path | None = None


def make(name: str, settings: TaskSettings) -> list[Task]:
    """Return a task for every length and every number of compactions.

    Args:
        name: one of `NAMES`.
        settings: the settings, perhaps with those of conversations.

    Raises:
        KeepsetError: there are too many turns or questions, fewer turns than compactions, or the file cannot be read.
    """
    chat = settings if isinstance(settings, ChatSettings) else ChatSettings(settings.data, settings.lengths)
    variants = [(length, count) for length in chat.lengths for count in chat.compactions]
    if chat.file is not None:
        if name != "chat":
            raise KeepsetError(f"A file has conversations of its own: ask for chat with it, and not for {name}.")
        recording = read_recordings(chat.file)
        return [RecordedTask(recording, length, count, chat.questions, chat.answers) for length, count in variants]
    if CONTENTS.get(name) in (None, CONTENTS["chat"]) and facts_for(chat.turns, chat.questions) > MOST_FACTS:
        raise KeepsetError(
            f"{chat.turns} turns with {chat.questions} questions are too many for different facts: ask for at most "
            f"{MOST_FACTS} turns and {MOST_FACTS * 4 // 5} questions."
        )
    return [
        MadeTask(name, length, chat.turns, count, questions=chat.questions, answers=chat.answers)
        for length, count in variants
    ]


class ChatTask(Task):
    """Conversations of at most so many tokens, with the longest question and its answer, or with all that stay.

    Args:
        name: the kind of conversations.
        length: tokens of a conversation.
        compactions: how often the history is compressed: the last time before the questions, the other times after even
            parts of the turns.
        questions: how many questions are asked about a conversation, if it has so many.
        answers: what of a question stays in the history for the next one.

    Attributes:
        stays: whether each question is a turn.
    """

    def __init__(self, name: str, length: int, compactions: int, questions: int, answers: Answers) -> None:
        self.length, self.compactions, self.questions, self.answers = length, compactions, questions, answers
        self.stays = answers != "none"
        times = "once" if compactions == 1 else f"{compactions} times"
        self.name = f"{name}@{length}, compressed {times}{f', {answers} answers stay' if self.stays else ''}"

    def ends(self, turns: int) -> list[int]:
        """Return the turns, of so many, after which the history is compressed, counted from 1."""
        return [turns * number // self.compactions for number in range(1, self.compactions + 1)]

    def check(self, tokenizer: Tokenizer) -> None:
        """Raise `KeepsetError` if a tokenizer has no chat template."""
        if not tokenizer.chat_template:
            raise KeepsetError(
                f"{self.name} needs a chat template, and the model's tokenizer has none: use a chat model."
            )

    def chosen(self, questions: Sequence[ChatQuestion], seed: str) -> tuple[ChatQuestion, ...]:
        """Return as many questions as are asked, in their order.

        Args:
            questions: all questions.
            seed: draws them.
        """
        count = min(self.questions, len(questions))
        return tuple(
            questions[at] for at in sorted(random.Random(f"asked {seed}").sample(range(len(questions)), count))
        )

    def count(self, begins: Tokenizer, example: Example) -> int:
        """Return the tokens of a conversation with its longest question and answer, or with all that stay.

        Args:
            begins: the tokenizer of `begun`.
            example: the conversation.
        """
        assert isinstance(example, ChatExample)
        answered = example.asked if self.stays else ()
        before = [message for question in answered for message in (question.message, question.answer)]
        longest = max(example.asked, key=lambda question: len(question.text) + len(question.prefix))
        extra = self.generation.tokens * (len(example.asked) if self.answers == "own" else 1)
        return len(rendered(begins, [*example.messages, *before, longest.message], asks=True)) + extra

    def judge(self, question: Question, reply: Reply) -> dict[str, float]:
        assert isinstance(question, ChatQuestion)
        targets = (question.target,) if isinstance(question.target, str) else question.target
        is_stale = bool(question.stale) and question.stale in str(reply)
        return {self.metric: 0.0 if is_stale else fmean(float(target in str(reply)) for target in targets)}


class MadeTask(ChatTask):
    """Conversations that are made from a seed.

    Args:
        kind: one of `NAMES`. With `chat_tools` facts are in results of tools, with `chat_cleared` these are also taken
            out of the history before the questions, but for the newest.
        length: tokens of a conversation.
        turns: how many turns come before the questions.
        compactions, questions, answers: see `ChatTask`.
    """

    metric = "right"

    def __init__(
        self, kind: str, length: int, turns: int, compactions: int, *, questions: int = 10, answers: Answers = "none"
    ) -> None:
        if not 1 <= compactions <= turns:
            raise KeepsetError(f"{turns} turns cannot be compressed {compactions} times: ask for 1 to {turns}.")
        super().__init__(kind, length, compactions, questions, answers)
        self.kind, self.turns, self._content = kind, turns, CONTENTS["chat" if kind in _OF_TOOLS else kind]
        self.generation = Generation(self._content.tokens)

    def examples(self, tokenizer: Tokenizer, *, limit: int | None = None, seed: int = 0) -> Sequence[ChatExample]:
        self.check(tokenizer)
        examples, guess, begins = list[ChatExample](), None, begun(tokenizer)
        smallest = self._content.smallest(self.turns, self.questions)
        for index in range(EXAMPLES if limit is None else limit):
            make = partial(self._example, f"{self.turns} {seed} {index}", index)
            fitted = fit(make, partial(self.count, begins), self.length, smallest=smallest, guess=guess)
            if fitted is None:
                raise KeepsetError(
                    f"{self.length} tokens leave no room for {self.turns} turns and {self.questions} questions: ask "
                    "for more."
                )
            guess, example = fitted
            assert isinstance(example, ChatExample)
            examples.append(example)
        return examples

    def _example(self, seed: str, index: int, size: int) -> ChatExample:
        """Return a conversation.

        Args:
            seed: draws what is told, and in which turns.
            index: the number of the conversation.
            size: a number to which its length is about proportional.
        """
        wanted = Wanted(index, self.turns, self.questions, size)
        told = self._content.make(random.Random(f"chat {seed}"), wanted)
        turns = tuple(self._turn(number, text) for number, text in enumerate(told.texts, 1))
        said = [message for turn in turns for message in turn]
        return ChatExample(
            str(index),
            "\n".join(message["content"] for message in said),
            self.chosen(told.questions, seed),
            {"length": self.length, "turns": self.turns},
            turns,
            _cleared(said) if self.kind == "chat_cleared" else (),
        )

    def _turn(self, number: int, text: str) -> tuple[Message, ...]:
        if self.kind not in _OF_TOOLS:
            return {"role": "user", "content": text}, SEEN
        function = {"name": "read_note", "arguments": {"number": number}}
        call = {"type": "function", "id": f"call{number:05}", "function": function}
        return (
            {"role": "user", "content": f"Please read note {number}."},
            {"role": "assistant", "content": "I will read it.", "tool_calls": [call]},
            {"role": "tool", "name": "read_note", "tool_call_id": call["id"], "content": text},
            SEEN,
        )


class RecordedTask(ChatTask):
    """Recorded conversations, of each as many turns from its first one on as fit.

    If there are questions about them, answers are judged by F1 over words. Otherwise the last recorded answer is:
    the score is the geometric mean of the probabilities that its first tokens have.

    Args:
        recording: the conversations.
        length, compactions, questions, answers: see `ChatTask`.
    """

    def __init__(self, recording: Recording, length: int, compactions: int, questions: int, answers: Answers) -> None:
        super().__init__(recording.name, length, compactions, questions, answers)
        self._recording = recording
        self.metric = "f1" if recording.has_questions else "likelihood"
        self.generation = Generation(_SHORT if recording.has_questions else _JUDGED)

    def examples(self, tokenizer: Tokenizer, *, limit: int | None = None, seed: int = 0) -> Sequence[ChatExample]:
        self.check(tokenizer)
        begins, examples = begun(tokenizer), list[ChatExample]()
        for chat in self._recording.chats:
            if limit is not None and len(examples) >= limit:
                break
            example = self._longest(begins, chat, f"{seed} {chat.id}")
            if example is not None and len(example.turns) >= self.compactions:
                examples.append(example)
        if not examples:
            raise KeepsetError(
                f"No conversation of the file has {self.compactions} turns and a question in {self.length} tokens: ask "
                "for more tokens, or for fewer compactions."
            )
        return examples

    def _longest(self, begins: Tokenizer, chat: RecordedChat, seed: str) -> ChatExample | None:
        """Return the conversation of as many turns as fit; None if there is nothing to ask about them."""

        def is_longer(turns: int) -> bool:
            example = self._first(begins, chat, seed, turns)
            return example is not None and self.count(begins, example) > self.length

        most = 1
        while most < len(chat.turns) and not is_longer(most):
            most *= 2
        too_many = bisect_left(range(min(most, len(chat.turns)) + 1), True, key=is_longer)
        return self._first(begins, chat, seed, too_many - 1)

    def _first(self, begins: Tokenizer, chat: RecordedChat, seed: str, turns: int) -> ChatExample | None:
        """Return the conversation of the first turns; None if there is nothing to ask about them.

        Args:
            begins: the tokenizer of `begun`.
            chat: the whole conversation.
            seed: draws the questions.
            turns: how many turns there are; the last one asks if nothing else does.
        """
        history = chat.turns[:turns]
        if self._recording.has_questions:
            asked = [
                replace(question, groups=(told_in(question.told, turns), *question.groups))
                for question in chat.questions
                if question.told <= turns
            ]
        elif turns > 1:
            history, (*_, question, answer) = history[:-1], history[-1]
            count = len(encode(begins, answer["content"])[:_JUDGED])
            asked = [ChatQuestion(question["content"], count, choices=(answer["content"],))] if count else []
        else:
            asked = []
        if not asked:
            return None
        context = "\n".join(message["content"] for turn in history for message in turn)
        facts = {"length": self.length, "turns": len(history)}
        return ChatExample(chat.id, context, self.chosen(asked, seed), facts, history)

    def judge(self, question: Question, reply: Reply) -> dict[str, float]:
        if isinstance(reply, str):
            return {self.metric: _f1(reply, question.target)}
        [(likelihood, _)] = reply
        return {self.metric: math.exp(likelihood / question.target)}


def _f1(text: str, target: str) -> float:
    """Return the harmonic mean of precision and recall of words, without articles and punctuation."""
    said, right = (
        Counter(word for word in _WORD.findall(words.lower()) if word not in _ARTICLES) for words in (text, target)
    )
    common = (said & right).total()
    return 2 * common / (said.total() + right.total()) if common else 0.0


def _cleared(messages: Sequence[Message]) -> tuple[Message, ...]:
    """Return messages without what is in all but the newest results of tools."""
    results = [index for index, message in enumerate(messages) if message["role"] == "tool"]
    old = set(results[:-_STAY])
    return tuple({**message, "content": ""} if index in old else message for index, message in enumerate(messages))
