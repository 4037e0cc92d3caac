"""Recorded conversations in files of a user: those of LoCoMo, ShareGPT and MT-Eval, recognised by their shape.

LoCoMo (Maharana and others 2024, arXiv:2402.17753) has questions about its conversations. The others have none: there
the answers that were recorded are judged.
"""

from __future__ import annotations

import json
import re
from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import Any

from keepset.errors import CorruptFileError, KeepsetError, quoted
from keepset.lab import texts
from keepset.lab.tasks.chat_example import ChatQuestion, Message

Turn = tuple[Message, ...]
"""The messages from a user's to the assistant's answer, which is the last."""

_SPEAKERS = {
    "human": "user", "user": "user", "gpt": "assistant", "chatgpt": "assistant", "assistant": "assistant",
    "bing": "assistant", "bard": "assistant", "system": "system",
}  # fmt: skip
"""The roles of ShareGPT's speakers. A conversation with others, such as tools, is left out."""
_SESSION = re.compile(r"session_(\d+)")
_EVIDENCE = re.compile(r"D\d+:\d+")
_UNANSWERED = 5
"""LoCoMo's category of questions whose answers were not told."""
_ALLOWED = (
    "give a JSON file, or one JSON object a line, of LoCoMo (objects with session_1, session_2 ... and qa), ShareGPT "
    "(objects with conversations, whose messages have from and value) or MT-Eval (objects with conv, whose turns have "
    "user and sys)"
)


@dataclass(frozen=True)
class RecordedChat:
    """A recorded conversation.

    Attributes:
        id: its number in the file, counted from 0.
        turns: its turns, as far as they were answered.
        questions: questions about it; none if its answers are judged.
    """

    id: str
    turns: tuple[Turn, ...]
    questions: tuple[ChatQuestion, ...] = ()


@dataclass(frozen=True)
class Recording:
    """The conversations of a file.

    Attributes:
        name: the format's name.
        has_questions: whether there are questions about conversations.
        chats: the conversations.
    """

    name: str
    has_questions: bool
    chats: Sequence[RecordedChat]


def read_recordings(path: Path) -> Recording:
    """Return the conversations of a file.

    Args:
        path: the file, in UTF-8.

    Raises:
        KeepsetError: the file cannot be read, or its format is not known.
        CorruptFileError: the file is damaged.
    """
    items = _items(path)
    first = items[0] if items and isinstance(items[0], dict) else {}
    name = next((name for name, (is_of, _) in _FORMATS.items() if is_of(first)), None)
    if name is None:
        raise KeepsetError(f"{quoted(path)} holds no conversations of a known format: {_ALLOWED}.")
    chats, (_, read) = list[RecordedChat](), _FORMATS[name]
    for index, item in enumerate(items):
        try:
            chat = read(str(index), item)
        except (KeyError, TypeError, ValueError, AttributeError) as error:
            raise CorruptFileError(
                f"Conversation {index + 1} of {quoted(path)} is not like the first one, which is {name}'s "
                f"({type(error).__name__}: {error}): {_ALLOWED}."
            ) from error
        if chat is not None:
            chats.append(chat)
    return Recording(name, name == "locomo", chats)


def _items(path: Path) -> Sequence[Any]:
    text = texts.read(path)
    try:
        value = json.loads(text)
    except (ValueError, RecursionError):
        lines = list(texts.json_lines(text))
        for number, line in lines:
            if line is None:
                raise CorruptFileError(f"{quoted(path)}, line {number}, is no JSON object: {_ALLOWED}.") from None
        return [line for _, line in lines]
    return value if isinstance(value, list) else [value]


def _is_locomo(item: Mapping[str, Any]) -> bool:
    return "qa" in item and "session_1" in item.get("conversation", item)


def _locomo(id_: str, item: Mapping[str, Any]) -> RecordedChat:
    """Read a conversation of two people: the first speaks as the user, the second as the assistant.

    A session begins with its date. Of the questions those stay whose evidence is in the conversation.
    """
    said = item.get("conversation", item)
    messages, turn_of, turn = list[Message](), dict[str, int](), 1
    for session in sorted(int(match[1]) for match in map(_SESSION.fullmatch, said) if match):
        begins = f"({said[f'session_{session}_date_time']})\n"
        for line in said[f"session_{session}"]:
            role = "user" if line["speaker"] == said["speaker_a"] else "assistant"
            if not messages and role == "assistant":
                messages.append({"role": "user", "content": begins.rstrip()})
                begins = ""
            if messages and (messages[-1]["role"], role) == ("assistant", "user"):
                turn += 1
            photo = f" [photo: {line['blip_caption']}]" if "blip_caption" in line else ""
            messages.append({"role": role, "content": f"{begins}{line['speaker']}: {line['text']}{photo}"})
            turn_of[line["dia_id"]], begins = turn, ""
    turns = _turns(messages)
    questions = list[ChatQuestion]()
    for asked in item["qa"]:
        evidence = _EVIDENCE.findall(" ".join(asked["evidence"]))
        if asked["category"] == _UNANSWERED or not evidence or not turn_of.keys() >= set(evidence):
            continue
        told = max(turn_of[line] for line in evidence)
        if told <= len(turns):
            text = f"{asked['question']} Please answer in a few words."
            groups = (f"category {asked['category']}",)
            questions.append(ChatQuestion(text, str(asked["answer"]), told=told, groups=groups))
    return RecordedChat(id_, turns, tuple(questions))


def _is_sharegpt(item: Mapping[str, Any]) -> bool:
    lines = item.get("conversations")
    return isinstance(lines, list) and all(isinstance(line, dict) and {"from", "value"} <= {*line} for line in lines)


def _sharegpt(id_: str, item: Mapping[str, Any]) -> RecordedChat | None:
    lines = item["conversations"]
    if not all(line["from"] in _SPEAKERS for line in lines):
        return None
    messages = [{"role": _SPEAKERS[line["from"]], "content": str(line["value"])} for line in lines]
    return RecordedChat(id_, _turns(messages))


def _is_mt_eval(item: Mapping[str, Any]) -> bool:
    turns = item.get("conv")
    return isinstance(turns, list) and all(isinstance(turn, dict) and {"user", "sys"} <= {*turn} for turn in turns)


def _mt_eval(id_: str, item: Mapping[str, Any]) -> RecordedChat:
    pairs = [(str(turn["user"]), str(turn["sys"])) for turn in item["conv"]]
    messages = [
        message
        for user, answer in pairs
        for message in ({"role": "user", "content": user}, {"role": "assistant", "content": answer})
    ]
    return RecordedChat(id_, _turns(messages))


def _turns(messages: Sequence[Message]) -> tuple[Turn, ...]:
    """Return whole turns: messages up to an answer. What follows the last answer is left out.

    Neighbours of one role become one message, and an answer before the first user's message is left out.
    """
    joined = list[Message]()
    for message in messages:
        if joined and joined[-1]["role"] == message["role"]:
            joined[-1] = {**message, "content": f"{joined[-1]['content']}\n{message['content']}"}
        elif message["role"] != "assistant" or any(earlier["role"] == "user" for earlier in joined):
            joined.append(message)
    turns, begin = list[Turn](), 0
    for end, message in enumerate(joined, 1):
        if message["role"] == "assistant":
            turns.append(tuple(joined[begin:end]))
            begin = end
    return tuple(turns)


_FORMATS: dict[
    str, tuple[Callable[[Mapping[str, Any]], bool], Callable[[str, Mapping[str, Any]], RecordedChat | None]]
] = {"locomo": (_is_locomo, _locomo), "sharegpt": (_is_sharegpt, _sharegpt), "mt_eval": (_is_mt_eval, _mt_eval)}
