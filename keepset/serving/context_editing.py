"""Context editing as clients of Anthropic's Messages ask for it: what is old is cleared before vLLM sees the prompt.

A client sends its whole history each time, so the same edits come out each time, and more with every turn. Contents are
left out and nothing is put in their place: the conversation that the server keeps goes on without them.
"""

from __future__ import annotations

import json
from collections.abc import Awaitable, Callable, Iterator, Sequence
from dataclasses import dataclass
from functools import partial
from typing import Any, NamedTuple

from keepset.errors import KeepsetError
from keepset.serving.exchange import Exchange

Block = dict[str, Any]

_FIELD = "context_management"
_TOOL_USES = "clear_tool_uses_20250919"
_THINKING = "clear_thinking_20251015"
_TOKENS = "input_tokens"
_COUNTED = ("model", "system", "tools", "tool_choice", "thinking", "output_config", "chat_template_kwargs")
"""What vLLM's route that counts tokens takes of a request, beside the messages."""
_SHOWN = 200
"""The most characters of a client's words in an error."""


class Cleared(NamedTuple):
    """What an edit clears.

    Attributes:
        messages: the messages without it.
        texts: what was cleared.
        number: in how many tool uses, or turns, it was.
    """

    messages: list[Any]
    texts: list[str]
    number: int


@dataclass(frozen=True)
class ClearToolUses:
    """Clears the oldest tool results.

    Attributes:
        trigger: `input_tokens` or `tool_uses`, and how many a prompt may have before anything is cleared.
        keep: how many of the newest tool uses stay whole.
        at_least: if fewer tokens would be cleared, nothing is.
        excluded: tools of which everything stays.
        inputs: whether inputs are cleared, too; or of which tools.
    """

    trigger: tuple[str, int] = (_TOKENS, 100_000)
    keep: int = 3
    at_least: int = 0
    excluded: frozenset[str] = frozenset()
    inputs: bool | frozenset[str] = False
    type = _TOOL_USES
    unit = "cleared_tool_uses"

    @property
    def needs_total(self) -> bool:
        """Whether the tokens of the whole prompt decide."""
        return self.trigger[0] == _TOKENS

    def clear(self, messages: list[Any]) -> Cleared:
        """Return the messages without old results."""
        uses = {block.get("id"): block for block in _blocks(messages, "assistant", "tool_use")}
        results = [one for one in _blocks(messages, "user", "tool_result") if one.get("tool_use_id") in uses]
        old = results[: max(len(results) - self.keep, 0)]
        if not self.needs_total and len(uses) <= self.trigger[1]:
            old = []
        emptied: dict[int, Block] = {}
        texts = []
        for result in old:
            use = uses[result["tool_use_id"]]
            if (tool := use.get("name")) in self.excluded:
                continue
            if result.get("content"):
                emptied[id(result)] = {**result, "content": ""}
                texts.append(_text(result["content"]))
            if use.get("input") and (self.inputs is True or (self.inputs and tool in self.inputs)):
                emptied[id(use)] = {**use, "input": {}}
                texts.append(_text(use["input"]))
        number = sum(id(one) in emptied or id(uses[one["tool_use_id"]]) in emptied for one in old)
        return Cleared(_edited(messages, lambda block: emptied.get(id(block), block)), texts, number)

    def is_due(self, total: int | None, cleared: int) -> bool:
        """Return whether the old results are to go.

        Args:
            total: how many tokens the prompt has without any edit; None if they are more than the model takes.
            cleared: how many of them the old results are.
        """
        if self.needs_total and total is not None and total <= self.trigger[1]:
            return False
        return cleared >= self.at_least


@dataclass(frozen=True)
class ClearThinking:
    """Clears the thinking of old turns.

    Attributes:
        keep: in how many of the newest turns with thinking it stays; None for all.
    """

    keep: int | None = 1
    type = _THINKING
    unit = "cleared_thinking_turns"
    needs_total = False

    def clear(self, messages: list[Any]) -> Cleared:
        """Return the messages without old thinking."""
        turns: list[list[Block]] = [[]]
        for message in messages:
            if _begins_turn(message):
                turns.append([])
            turns[-1] += _blocks([message], "assistant", "thinking", "redacted_thinking")
        with_thinking = [turn for turn in turns if turn]
        kept = len(with_thinking) if self.keep is None else self.keep
        old = with_thinking[: max(len(with_thinking) - kept, 0)]
        gone = {id(block) for turn in old for block in turn}
        texts = [str(block["thinking"]) for turn in old for block in turn if block.get("thinking")]
        return Cleared(_edited(messages, lambda block: None if id(block) in gone else block), texts, len(old))

    def is_due(self, total: int | None, cleared: int) -> bool:
        """Return True: what is old is always cleared."""
        return True


Edit = ClearToolUses | ClearThinking


async def respond(exchange: Exchange) -> None:
    """Answer a request to `/v1/messages`, and say which edits were applied.

    Raises:
        KeepsetError: an edit is unknown or wrong.
    """
    await _answer(exchange, _with_edits, [b'"message_delta"'])


async def count(exchange: Exchange) -> None:
    """Answer a request to `/v1/messages/count_tokens` with the tokens after the edits, and before.

    Raises:
        KeepsetError: an edit is unknown or wrong.
    """
    await _answer(exchange, _with_original)


def edits_of(value: Any) -> list[Edit]:
    """Return the edits that a request asks for.

    Args:
        value: its `context_management`.

    Raises:
        KeepsetError: an edit is unknown or wrong.
    """
    match value:
        case {"edits": [*entries], **others} if not others and all(isinstance(entry, dict) for entry in entries):
            edits = [_edit_of(dict(entry)) for entry in entries]
        case {**others} if not others:
            edits = []
        case _:
            raise KeepsetError(f'{_FIELD} is no object {{"edits": [...]}}: write it so, or leave it out.')
    if len({edit.type for edit in edits}) < len(edits):
        raise KeepsetError(f"{_FIELD} has several edits of one type: give each of them once.")
    return edits


def _edit_of(entry: dict[str, Any]) -> Edit:
    kind = entry.pop("type", None)
    edit: Edit
    if kind == _TOOL_USES:
        edit = ClearToolUses(
            trigger=_amount(entry, "trigger", (_TOKENS, "tool_uses"), 0) or ClearToolUses.trigger,
            keep=(_amount(entry, "keep", ("tool_uses",), 0) or ("", ClearToolUses.keep))[1],
            at_least=(_amount(entry, "clear_at_least", (_TOKENS,), 0) or ("", ClearToolUses.at_least))[1],
            excluded=_names(entry.pop("exclude_tools", None), "exclude_tools"),
            inputs=_inputs(entry.pop("clear_tool_inputs", None)),
        )
    elif kind == _THINKING:
        keep = entry.get("keep")
        if keep in ("all", {"type": "all"}):
            entry.pop("keep")
            edit = ClearThinking(None)
        else:
            edit = ClearThinking((_amount(entry, "keep", ("thinking_turns",), 1) or ("", ClearThinking.keep))[1])
    else:
        raise KeepsetError(f"There is no edit {str(kind)[:_SHOWN]!r} here: use {_TOOL_USES} or {_THINKING}.")
    if entry:
        raise KeepsetError(f"{kind} has no option {str(min(entry))[:_SHOWN]!r}: leave it out.")
    return edit


def _amount(entry: dict[str, Any], name: str, kinds: tuple[str, ...], least: int) -> tuple[str, int] | None:
    """Take an option such as `{"type": "tool_uses", "value": 3}` out of an edit; None if it is not given.

    Args:
        entry: the edit, from which the option is removed.
        name: the option's name.
        kinds: what may be counted.
        least: the smallest number.
    """
    match entry.pop(name, None):
        case None:
            return None
        case {"type": str(kind), "value": int(value), **others} if kind in kinds and not others:
            if value >= least and not isinstance(value, bool):
                return kind, value
    raise KeepsetError(
        f'{name} is something else than {{"type": "{kinds[0]}", "value": N}} with a number of at least {least}: write '
        "it so, or leave it out."
    )


def _names(value: Any, name: str) -> frozenset[str]:
    """Return names of tools.

    Args:
        value: the names, as the client wrote them; None for none.
        name: the option's name.
    """
    if value is not None and not (isinstance(value, list) and all(isinstance(one, str) for one in value)):
        raise KeepsetError(f"{name} is no list of the names of tools: give one, or leave it out.")
    return frozenset(value or ())


def _inputs(value: Any) -> bool | frozenset[str]:
    return value if isinstance(value, bool) else _names(value, "clear_tool_inputs")


async def _answer(
    exchange: Exchange,
    change: Callable[[list[dict[str, Any]], dict[str, Any]], Awaitable[list[dict[str, Any]]]],
    marks: Sequence[bytes] = (),
) -> None:
    """Edit the messages of a request, and let vLLM answer.

    Args:
        exchange: the request.
        change: tells an answer's objects which edits were applied, if the request asks for some.
        marks: only events of a stream that contain one of these are changed.
    """
    applied = await _edit(exchange)
    if applied is None:
        await exchange.forward()
    else:
        await exchange.forward(partial(change, applied), marks)


async def _edit(exchange: Exchange) -> list[dict[str, Any]] | None:
    """Edit the messages of a request; return which edits were applied, or None if it asks for none.

    The tokens of a prompt are those that it has when all is cleared, and those of what was cleared. Whether an edit is
    due depends on their sum, so an edit that was due once stays so.
    """
    request = exchange.request
    value = request.pop(_FIELD, None)
    if value is None:
        return None
    edits, messages = edits_of(value), request.get("messages")
    if not isinstance(messages, list):
        return []  # vLLM itself refuses it
    found = [(edit, cleared) for edit in edits if (cleared := edit.clear(messages)).number]
    tokens = [await _tokens_of(exchange, cleared.texts) for _, cleared in found]
    total = None
    if any(edit.needs_total for edit, _ in found):
        for edit, _ in found:
            messages = edit.clear(messages).messages
        left = await _prompt_tokens(exchange, messages)
        total = None if left is None else left + sum(tokens)
    applied = []
    for (edit, cleared), number in zip(found, tokens, strict=True):
        if edit.is_due(total, number):
            request["messages"] = edit.clear(request["messages"]).messages
            applied.append({"type": edit.type, edit.unit: cleared.number, "cleared_input_tokens": number})
    return applied


async def _tokens_of(exchange: Exchange, texts: list[str]) -> int:
    """Return how many tokens some texts have by themselves, one a line."""
    asked = {"model": exchange.request.get("model"), "prompt": "\n".join(texts), "add_special_tokens": False}
    status, answer = await exchange.ask("POST", "/tokenize", asked)
    return int(answer["count"]) if status == 200 else 0  # else vLLM refuses the request itself


async def _prompt_tokens(exchange: Exchange, messages: list[Any]) -> int | None:
    """Return how many tokens a prompt has with some messages; None if they are more than the model takes."""
    asked = {name: exchange.request[name] for name in _COUNTED if name in exchange.request} | {"messages": messages}
    status, answer = await exchange.ask("POST", "/v1/messages/count_tokens", asked)
    return int(answer["input_tokens"]) if status == 200 else None


async def _with_edits(applied: list[dict[str, Any]], content: dict[str, Any]) -> list[dict[str, Any]]:
    if content["type"] in ("message", "message_delta"):
        content[_FIELD] = {"applied_edits": applied}
    return [content]


async def _with_original(applied: list[dict[str, Any]], content: dict[str, Any]) -> list[dict[str, Any]]:
    cleared = sum(edit["cleared_input_tokens"] for edit in applied)
    content[_FIELD] = {"original_input_tokens": content["input_tokens"] + cleared}
    return [content]


def _begins_turn(message: Any) -> bool:
    """Return whether a message is a user's, with more than results of tools."""
    if not isinstance(message, dict) or message.get("role") != "user":
        return False
    content = message.get("content")
    return not isinstance(content, list) or any(
        not isinstance(one, dict) or one.get("type") != "tool_result" for one in content
    )


def _blocks(messages: list[Any], role: str, *types: str) -> Iterator[Block]:
    """Yield the blocks of some types in the messages of a role."""
    for message in messages:
        if isinstance(message, dict) and message.get("role") == role and isinstance(message.get("content"), list):
            yield from (one for one in message["content"] if isinstance(one, dict) and one.get("type") in types)


def _edited(messages: list[Any], change: Callable[[Any], Any]) -> list[Any]:
    """Return messages with other blocks; None in place of a block leaves it out."""
    edited = []
    for message in messages:
        if isinstance(message, dict) and isinstance(message.get("content"), list):
            blocks = map(change, message["content"])
            edited.append({**message, "content": [block for block in blocks if block is not None]})
        else:
            edited.append(message)
    return edited


def _text(content: Any) -> str:
    """Return the text of a tool's result or input, as vLLM gives it to the chat template."""
    if isinstance(content, str):
        return content
    if isinstance(content, list):
        return "\n".join(str(one.get("text", "")) for one in content if isinstance(one, dict))
    return json.dumps(content)
