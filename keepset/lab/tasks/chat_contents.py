"""What conversations tell: facts about people, keys with values, strings with beginnings and ends, variables.

The last three are kinds of SCBench (Li and others 2024, arXiv:2412.10319), made from a seed at any length.
"""

from __future__ import annotations

import random
import string
import uuid
from collections.abc import Callable, Sequence
from dataclasses import dataclass, replace
from typing import NamedTuple

from keepset.lab import texts
from keepset.lab.tasks.chat_example import ChatQuestion, told_in

MOST_FACTS = 200
"""The most facts of a conversation, corrections included."""

_CORRECTS = 5
"""One fact of so many corrects an earlier one."""
_CHARACTERS = 24
"""Characters of the shortest passage around a fact."""
_HOPS = 3
"""The variables that have one value."""
_SYLLABLES = [consonant + vowel for consonant in "bdfgklmnprstvz" for vowel in "aeiou"]

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


class Told(NamedTuple):
    """The text of every turn, and all questions about them."""

    texts: list[str]
    questions: list[ChatQuestion]


@dataclass(frozen=True)
class Wanted:
    """What a conversation is to tell.

    Attributes:
        index: the number of the conversation.
        turns: how many turns it has.
        questions: how many questions there must be at least.
        size: a number to which its length is about proportional.
    """

    index: int
    turns: int
    questions: int
    size: int


@dataclass(frozen=True)
class Content:
    """A kind of content.

    Attributes:
        make: draws what is told.
        tokens: the most tokens of an answer.
        smallest: the smallest size for a number of turns and of questions.
    """

    make: Callable[[random.Random, Wanted], Told]
    tokens: int
    smallest: Callable[[int, int], int]


def facts_for(turns: int, questions: int) -> int:
    """Return how many facts are told, corrections included: at least one in each turn, and enough for the questions.

    Args:
        turns: how many turns there are.
        questions: how many questions there must be.
    """
    return max(turns, questions + (questions - 1) // (_CORRECTS - 1))


def _facts(draw: random.Random, wanted: Wanted) -> Told:
    """Tell facts in passages of essays; a correction counts from there on."""
    count = facts_for(wanted.turns, wanted.questions)
    passages = _cut(texts.haystack(wanted.index, count * wanted.size).split(), count)
    told, questions = list[str](), dict[str, ChatQuestion]()
    for number, (fact, words) in enumerate(zip(_sentences(draw, count), passages, strict=True)):
        opening, sentence = fact.opening, fact.sentence
        earlier = questions.get(opening)
        if earlier is not None:
            sentence = f"This has changed: {sentence}"
        told.append(texts.insert(" ".join(words), replace(fact, sentence=sentence), draw.random()))
        turn = _turn_of(number, count, wanted.turns)
        groups = (told_in(turn, wanted.turns), f"corrected {'no' if earlier is None else 'yes'}")
        stale = "" if earlier is None else str(earlier.target)
        questions[opening] = ChatQuestion(
            "Please complete a sentence that you have read before.",
            fact.answer,
            opening,
            told=turn,
            stale=stale,
            groups=groups,
        )
    return Told([" ".join(part) for part in _cut(told, wanted.turns)], list(questions.values()))


def _sentences(draw: random.Random, count: int) -> list[texts.Needle]:
    """Return so many facts; one that corrects an earlier one begins with the same words.

    Neighbours are of other kinds, and a word ends several facts of one kind only after all others have.
    """
    people, things = draw.sample(_PEOPLE, len(_PEOPLE)), draw.sample(_THINGS, len(_THINGS))
    ends = {begins: draw.sample(words, len(words)) for begins, words in things}
    facts, new, uncorrected = list[texts.Needle](), 0, dict[str, str]()
    for number in range(1, count + 1):
        if number % _CORRECTS:
            begins = things[new % len(things)][0]
            opening = begins.format(people[(new + new // len(people)) % len(people)])
            uncorrected[opening], new = begins, new + 1
        else:
            opening = draw.choice(list(uncorrected))
            begins = uncorrected.pop(opening)
        ends[begins].append(word := ends[begins].pop(0))
        facts.append(texts.Needle(f"{opening} {word}.", "", word))
    return facts


def _pairs(draw: random.Random, wanted: Wanted) -> Told:
    """Tell keys of three syllables with values of four digits."""
    keys = _words(draw, wanted.size)
    return _values({key: str(draw.randrange(1000, 10000)) for key in keys}, wanted.turns)


def _uuids(draw: random.Random, wanted: Wanted) -> Told:
    """Tell keys and values that are random UUIDs, as in SCBench."""
    return _values({_uuid(draw): _uuid(draw) for _ in range(wanted.size)}, wanted.turns)


def _uuid(draw: random.Random) -> str:
    return str(uuid.UUID(int=draw.getrandbits(128), version=4))


def _values(pairs: dict[str, str], turns: int) -> Told:
    questions = [
        _asked("Please repeat a value.", value, f"The value of {key} is", _turn_of(number, len(pairs), turns), turns)
        for number, (key, value) in enumerate(pairs.items())
    ]
    return _listed([f"The value of {key} is {value}." for key, value in pairs.items()], questions, turns)


def _strings(draw: random.Random, wanted: Wanted) -> Told:
    """Tell strings of which each shares its beginning with one string and its end with another."""
    count = wanted.size
    begins, middles, ends = (_words(draw, number) for number in (-(-count // 2), count, -(-count // 2)))
    lines = [f"{begins[at // 2]}-{middles[at]}-{ends[(at + 1) // 2 % len(ends)]}" for at in range(count)]
    draw.shuffle(lines)
    questions = []
    for number, line in enumerate(lines):
        begin, _, end = line.split("-")
        text = f"Which string begins with {begin} and ends with {end}?"
        turn = _turn_of(number, count, wanted.turns)
        questions.append(_asked(text, line, "It is", turn, wanted.turns))
    return _listed(lines, questions, wanted.turns)


def _variables(draw: random.Random, wanted: Wanted) -> Told:
    """Tell values of variables, of which each is copied to a second variable and from there to a third.

    The assignments of different values are mixed.
    """
    count, names = wanted.size, set[str]()
    while len(names) < count * _HOPS:
        names.add("".join(draw.choices(string.ascii_uppercase, k=3)))
    drawn = draw.sample(sorted(names), len(names))
    chains = [drawn[at : at + _HOPS] for at in range(0, len(drawn), _HOPS)]
    values = [str(number) for number in draw.sample(range(10_000, 100_000), count)]
    order, lines, last = draw.sample([*range(count)] * _HOPS, count * _HOPS), list[str](), dict[int, int]()
    names_of = [[value, *chain] for value, chain in zip(values, chains, strict=True)]
    for number, chain in enumerate(order):
        value, variable, *_ = names_of[chain]
        lines.append(f"{variable} = {value}")
        del names_of[chain][0]
        last[chain] = _turn_of(number, len(order), wanted.turns)
    questions = [
        _asked(
            f"Which {_HOPS} variables have the value {value}?",
            tuple(chain),
            f"The variables with the value {value} are",
            last[number],
            wanted.turns,
        )
        for number, (value, chain) in enumerate(zip(values, chains, strict=True))
    ]
    return _listed(lines, questions, wanted.turns)


def _asked(text: str, target: str | tuple[str, ...], prefix: str, turn: int, turns: int) -> ChatQuestion:
    return ChatQuestion(text, target, prefix, told=turn, groups=(told_in(turn, turns),))


def _listed(lines: Sequence[str], questions: list[ChatQuestion], turns: int) -> Told:
    """Return lines as the texts of so many turns."""
    begins = "Please keep these lines in mind.\n"
    return Told([begins + "\n".join(part) for part in _cut(lines, turns)], questions)


def _cut(parts: Sequence[str], count: int) -> list[Sequence[str]]:
    """Cut a sequence into so many sequences of about equal lengths."""
    return [parts[len(parts) * at // count : len(parts) * (at + 1) // count] for at in range(count)]


def _turn_of(number: int, count: int, turns: int) -> int:
    """Return the turn, counted from 1, in which `_cut` puts one of so many parts."""
    return next(turn for turn in range(1, turns + 1) if number < count * turn // turns)


def _words(draw: random.Random, count: int) -> list[str]:
    """Return so many different words that no language has, of three syllables."""
    words = dict[str, None]()
    while len(words) < count:
        words["".join(draw.choices(_SYLLABLES, k=3))] = None
    return list(words)


def _one_each(turns: int, questions: int) -> int:
    return max(turns, questions)


CONTENTS = {
    "chat": Content(_facts, 5, lambda turns, questions: _CHARACTERS),
    "chat_kv": Content(_uuids, 40, _one_each),
    "chat_kv_short": Content(_pairs, 6, _one_each),
    "chat_prefix_suffix": Content(_strings, 16, _one_each),
    "chat_vt": Content(_variables, 20, _one_each),
}
"""The kinds of content by name. The size of `chat` is in characters around each fact, the others' in items."""
