"""Conversations: each turn tells a fact or corrects an earlier one, and all facts are asked for after the last turn.

The assistant's answers are fixed ("I see."), and an answer begins with the words of its sentence. So small models can
do it, and recipes are judged by what they keep. Of the kinds of SCBench (Li and others 2024, arXiv:2412.10319) this is
that of many facts, with all questions about one history (`chat`), or one in each turn, followed by the right answer
(`chat_turns`).
"""

from __future__ import annotations

import copy
import random
from collections.abc import Mapping, Sequence
from dataclasses import dataclass, replace
from functools import partial
from typing import Any

from keepset.errors import KeepsetError
from keepset.lab import texts
from keepset.lab.tasks.fit import fit
from keepset.lab.tasks.task import Example, Generation, Question, Reply, Task, TaskSettings, Tokenizer

NAMES = ("chat", "chat_turns", "chat_tools", "chat_cleared")
EXAMPLES = 50
"""The number of conversations without a limit."""
MOST_TURNS = 200

Message = Mapping[str, Any]
"""A message as chat templates take it. The last one may have `begun`, the first words of its answer; see `begun`."""

_TOKENS = 5
_PARTS = 3
"""The history's parts, from the oldest, that have scores of their own."""
_CORRECTS = 5
"""One turn of so many corrects a fact."""
_STAY = 3
"""The newest results of tools that are not cleared, as Anthropic's `clear_tool_uses_20250919` keeps by default."""
_CHARACTERS = 24
"""Characters of the shortest passage of a turn."""
_ASKED = "Please complete a sentence that you have read before."
_ANSWERED: Message = {"role": "assistant", "content": "I see."}

_PEOPLE = (
    "sister", "brother", "uncle", "aunt", "cousin", "boss", "neighbour", "teacher", "doctor", "dentist", "friend",
    "grandfather", "grandmother", "nephew", "niece", "landlord", "lawyer", "barber", "plumber", "coach",
)  # fmt: skip
_THINGS: tuple[tuple[str, tuple[str, ...]], ...] = (
    ("My {}'s dog is called", ("Rocky", "Luna", "Bella", "Max", "Charlie", "Daisy", "Oscar", "Molly", "Buddy", "Lucy")),
    ("My {} lives in", texts.CITIES),
    ("My {}'s favourite fruit is the", ("cherry", "mango", "lemon", "banana", "pear", "fig", "peach", "grape")),
    ("My {} has a car that is", ("green", "yellow", "purple", "orange", "white", "black", "brown", "pink", "grey")),
    ("My {} plays the", ("violin", "flute", "trumpet", "drums", "harp", "guitar", "organ", "cello", "banjo")),
    ("My {}'s birthday is in", ("January", "March", "April", "June", "July", "August", "October", "November")),
    ("My {} collects old", ("stamps", "coins", "maps", "watches", "bottles", "toys", "radios", "clocks", "keys")),
    ("My {} is learning to speak", ("French", "Polish", "Greek", "Turkish", "Korean", "Arabic", "Danish", "Russian")),
    ("My {} is afraid of", ("spiders", "snakes", "ghosts", "mice", "thunder", "clowns", "bees", "needles", "horses")),
    ("My {}'s secret number is", tuple(str(number) for number in range(13, 100, 7))),
)  # fmt: skip
"""The first words of facts, and the words that can end them."""


@dataclass(frozen=True)
class ChatQuestion(Question):
    """A question whose answer was told in a turn.

    Attributes:
        told: the turn in which the newest value was told, counted from 1.
        stale: the value that it has replaced; empty if there was none.
        groups: scores of their own that the answer counts for.
    """

    told: int = 0
    stale: str = ""
    groups: tuple[str, ...] = ()

    @property
    def message(self) -> Message:
        """The message that asks it."""
        return {"role": "user", "content": self.text, "begun": self.prefix}

    @property
    def answer(self) -> Message:
        """The right answer."""
        return {"role": "assistant", "content": f"{self.prefix} {self.target}."}


@dataclass(frozen=True)
class ChatExample(Example):
    """A conversation; `context` joins what was said.

    Attributes:
        turns: the messages of every turn, of which the last is the assistant's answer.
        cleared: all messages as they are when the questions are asked, if these differ.
    """

    turns: tuple[tuple[Message, ...], ...] = ()
    cleared: tuple[Message, ...] = ()

    @property
    def asked(self) -> list[ChatQuestion]:
        """All questions."""
        return [question for question in self.questions if isinstance(question, ChatQuestion)]

    @property
    def messages(self) -> list[Message]:
        """All messages as they were said."""
        return [message for turn in self.turns for message in turn]


@dataclass(frozen=True)
class ChatSettings(TaskSettings):
    """The settings of tasks, and those of conversations.

    Attributes:
        turns: how many turns come before the questions.
        compactions: how often conversations are compressed meanwhile; each number makes a task of its own.
    """

    turns: int = 15
    compactions: tuple[int, ...] = (1, 8)


def make(name: str, settings: TaskSettings) -> list[Task]:
    """Return a task for every length and every number of compactions.

    Args:
        name: one of `NAMES`.
        settings: the settings, perhaps with those of conversations.

    Raises:
        KeepsetError: there are too many turns, or fewer than compactions.
    """
    chat = settings if isinstance(settings, ChatSettings) else ChatSettings(settings.data, settings.lengths)
    if chat.turns > MOST_TURNS:
        raise KeepsetError(f"{chat.turns} turns are too many for different facts: ask for at most {MOST_TURNS}.")
    return [ChatTask(name, length, chat.turns, count) for length in chat.lengths for count in chat.compactions]


class ChatTask(Task):
    """Conversations of so many tokens, with the longest question and its answer, or with all questions that are turns.

    Args:
        kind: one of `NAMES`. With `chat_tools` facts are in results of tools, with `chat_cleared` these are also taken
            out of the history before the questions, but for the newest. With `chat_turns` each question is a turn, and
            the next one follows the right answer; else all follow the same history.
        length: tokens of a conversation.
        turns: how many turns come before the questions.
        compactions: how often the history is compressed: the last time before the questions, the other times after even
            parts of the turns.
    """

    metric, generation = "right", Generation(_TOKENS)

    def __init__(self, kind: str, length: int, turns: int, compactions: int) -> None:
        if not 1 <= compactions <= turns:
            raise KeepsetError(f"{turns} turns cannot be compressed {compactions} times: ask for 1 to {turns}.")
        self.kind, self.length, self.turns, self.compactions = kind, length, turns, compactions
        self.asks_in_turns = kind == "chat_turns"
        times = "once" if compactions == 1 else f"{compactions} times"
        self.name = f"{kind}@{length}, compressed {times}"

    @property
    def ends(self) -> list[int]:
        """The turns after which the history is compressed, counted from 1."""
        return [self.turns * number // self.compactions for number in range(1, self.compactions + 1)]

    def examples(self, tokenizer: Tokenizer, *, limit: int | None = None, seed: int = 0) -> Sequence[ChatExample]:
        if not tokenizer.chat_template:
            raise KeepsetError(
                f"{self.name} needs a chat template, and the model's tokenizer has none: use a chat model."
            )
        examples, guess, begins = list[ChatExample](), None, begun(tokenizer)
        for index in range(EXAMPLES if limit is None else limit):
            make = partial(self._example, f"{self.turns} {seed} {index}", index)
            fitted = fit(make, partial(self._count, begins), self.length - _TOKENS, smallest=_CHARACTERS, guess=guess)
            if fitted is None:
                raise KeepsetError(f"{self.length} tokens leave no room for {self.turns} turns: ask for more.")
            guess, example = fitted
            assert isinstance(example, ChatExample)
            examples.append(example)
        return examples

    def judge(self, question: Question, reply: Reply) -> dict[str, float]:
        assert isinstance(question, ChatQuestion)
        is_stale = bool(question.stale) and question.stale in str(reply)
        return {"right": float(question.target in str(reply) and not is_stale)}

    def _example(self, seed: str, index: int, size: int) -> ChatExample:
        """Return a conversation.

        Args:
            seed: draws the facts, and their places in the turns.
            index: the number of the conversation.
            size: characters that a turn has beside its fact.
        """
        draw = random.Random(f"chat {seed}")
        passages = _passages(texts.haystack(index, self.turns * size), self.turns)
        turns, questions = list[tuple[Message, ...]](), dict[str, ChatQuestion]()
        for number, (fact, passage) in enumerate(zip(_facts(draw, self.turns), passages, strict=True), 1):
            corrected = questions.get(fact.opening)
            told = fact if corrected is None else replace(fact, sentence=f"This has changed: {fact.sentence}")
            turns.append(self._turn(number, texts.insert(passage, told, draw.random())))
            question = ChatQuestion(
                _ASKED, fact.answer, fact.opening, told=number, groups=self._groups(number, corrected)
            )
            questions[fact.opening] = question if corrected is None else replace(question, stale=corrected.target)
        said = [message for turn in turns for message in turn]
        return ChatExample(
            str(index),
            "\n".join(message["content"] for message in said),
            tuple(questions.values()),
            {"length": self.length, "turns": self.turns},
            tuple(turns),
            _cleared(said) if self.kind == "chat_cleared" else (),
        )

    def _count(self, tokenizer: Tokenizer, example: Example) -> int:
        """Return the tokens of a conversation with its longest question, or with all that are turns."""
        assert isinstance(example, ChatExample)
        longest = max(example.asked, key=lambda question: len(texts.encode(tokenizer, question.prefix)))
        answered = example.asked if self.asks_in_turns else ()
        before = [message for question in answered for message in (question.message, question.answer)]
        return len(rendered(tokenizer, [*example.messages, *before, longest.message], asks=True))

    def _turn(self, number: int, text: str) -> tuple[Message, ...]:
        if self.kind in ("chat", "chat_turns"):
            return {"role": "user", "content": text}, _ANSWERED
        function = {"name": "read_note", "arguments": {"number": number}}
        call = {"type": "function", "id": f"call{number:05}", "function": function}
        return (
            {"role": "user", "content": f"Please read note {number}."},
            {"role": "assistant", "content": "I will read it.", "tool_calls": [call]},
            {"role": "tool", "name": "read_note", "tool_call_id": call["id"], "content": text},
            _ANSWERED,
        )

    def _groups(self, number: int, corrected: ChatQuestion | None) -> tuple[str, ...]:
        """Return the groups of a fact that is told in a turn, and perhaps corrects another."""
        part = (number - 1) * _PARTS // self.turns
        first, last = -(-self.turns * part // _PARTS) + 1, -(-self.turns * (part + 1) // _PARTS)
        return f"told {first} to {last}", f"corrected {'no' if corrected is None else 'yes'}"


def _facts(draw: random.Random, turns: int) -> list[texts.Needle]:
    """Return the fact of every turn; one that corrects an earlier one begins with the same words.

    Neighbours are of other kinds, and a word ends several facts of one kind only after all others have.
    """
    people, things = draw.sample(_PEOPLE, len(_PEOPLE)), draw.sample(_THINGS, len(_THINGS))
    ends = {begins: draw.sample(words, len(words)) for begins, words in things}
    facts, new, uncorrected = list[texts.Needle](), 0, dict[str, str]()
    for turn in range(1, turns + 1):
        if turn % _CORRECTS:
            begins = things[new % len(things)][0]
            opening = begins.format(people[(new + new // len(people)) % len(people)])
            uncorrected[opening], new = begins, new + 1
        else:
            opening = draw.choice(list(uncorrected))
            begins = uncorrected.pop(opening)
        ends[begins].append(word := ends[begins].pop(0))
        facts.append(texts.Needle(f"{opening} {word}.", "", word))
    return facts


def _passages(text: str, count: int) -> list[str]:
    """Cut a text into so many passages of whole words and about equal lengths."""
    words = text.split()
    return [" ".join(words[len(words) * at // count : len(words) * (at + 1) // count]) for at in range(count)]


def _cleared(messages: Sequence[Message]) -> tuple[Message, ...]:
    """Return messages without what is in all but the newest results of tools."""
    results = [index for index, message in enumerate(messages) if message["role"] == "tool"]
    old = set(results[:-_STAY])
    return tuple({**message, "content": ""} if index in old else message for index, message in enumerate(messages))


def begun(tokenizer: Tokenizer) -> Tokenizer:
    """Return a tokenizer whose chat template begins the answer with the words `begun` of the last message."""
    begins = copy.copy(tokenizer)
    template = tokenizer.get_chat_template().removesuffix("\n")
    begins.chat_template = template + "{% if add_generation_prompt %}{{ messages[-1]['begun'] or '' }}{% endif %}"
    return begins


def rendered(tokenizer: Tokenizer, messages: Sequence[Message], *, asks: bool) -> list[int]:
    """Return the tokens of messages.

    Args:
        tokenizer: a tokenizer with a chat template.
        messages: the messages.
        asks: whether the beginning of an answer follows.
    """
    return list(
        tokenizer.apply_chat_template(
            [dict(message) for message in messages], add_generation_prompt=asks, tokenize=True, return_dict=False
        )
    )
