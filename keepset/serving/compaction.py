"""Compaction as clients of OpenAI's Responses ask for it: an item that stands for all that was said before.

Its `encrypted_content` holds the input items themselves, signed with the client's API key, and they are put back in its
place before vLLM sees them. So the prompt goes on with the conversation that the server keeps compressed, and is
computed like any other if that is gone. Nothing is computed to make an item, and the server stores none.
"""

from __future__ import annotations

import asyncio
import base64
import hashlib
import hmac
import json
import secrets
import time
import zlib
from collections import defaultdict
from collections.abc import Callable
from dataclasses import dataclass
from functools import partial
from typing import Any, NamedTuple

from keepset.errors import KeepsetError
from keepset.serving.exchange import Exchange

Item = dict[str, Any]

VERSION = 1
MAX_CONTENT = 2**24
"""The most bytes of JSON that the compaction items of a request hold."""
MAX_ITEMS = 2**16
"""The most items that a compaction item holds."""

MAX_COMPACTIONS = 256
"""The most compaction items of a request."""

_KINDS = ("compaction", "compaction_summary")
"""What clients call the item; the second is codex's older word."""
_TRIGGER = "compaction_trigger"
_DIGEST = hashlib.sha256().digest_size
_RAW = -15  # zlib's word for a stream without a header
_STORED = ("previous_response_id", "previous_input_messages")
"""Other ways to say what was said before, which only vLLM knows."""
_COMPLETED = ("response.completed", "response.incomplete")

_NOTHING: dict[str, Any] = {
    "input_tokens": 0,
    "input_tokens_details": {"cached_tokens": 0, "cache_write_tokens": 0},
    "output_tokens": 0,
    "output_tokens_details": {"reasoning_tokens": 0},
    "total_tokens": 0,
}
"""The usage of a compaction: nothing is computed."""

_RESPONSE: dict[str, Any] = {
    "background": False,
    "frequency_penalty": 0.0,
    "instructions": None,
    "max_output_tokens": None,
    "max_tool_calls": None,
    "metadata": {},
    "parallel_tool_calls": True,
    "presence_penalty": 0.0,
    "prompt_cache_key": None,
    "reasoning": None,
    "safety_identifier": None,
    "service_tier": "auto",
    "temperature": 1.0,
    "text": {"format": {"type": "text"}},
    "tool_choice": "auto",
    "tools": [],
    "top_logprobs": 0,
    "top_p": 1.0,
    "truncation": "disabled",
    "user": None,
}
"""What a response repeats of its request, and what it says if the request says nothing."""


class Held(NamedTuple):
    """What a compaction item stands for.

    Attributes:
        items: the input items.
        tokens: how many tokens they had in a prompt; 0 if they were not counted.
    """

    items: list[Item]
    tokens: int


@dataclass(frozen=True)
class Seal:
    """Makes compaction items of one client and model, and opens them.

    Attributes:
        api_key: the client's API key; empty if the server has none.
        model: the name under which the client asks for the model or adapter.
    """

    api_key: bytes
    model: str

    def sealed(self, held: Held) -> str:
        """Return the `encrypted_content` of a compaction item.

        Raises:
            KeepsetError: the items are too large.
        """
        content = json.dumps({"model": self.model, **held._asdict()}, ensure_ascii=False, separators=(",", ":"))
        content_bytes = content.encode("utf-8", "surrogatepass")
        if len(content_bytes) > MAX_CONTENT or len(held.items) > MAX_ITEMS:
            raise KeepsetError(
                f"The input has {len(content_bytes)} bytes in {len(held.items)} items: compact at most {MAX_CONTENT} "
                f"bytes in {MAX_ITEMS} items."
            )
        compressor = zlib.compressobj(zlib.Z_BEST_COMPRESSION, wbits=_RAW)
        packed = compressor.compress(content_bytes) + compressor.flush()
        return base64.urlsafe_b64encode(bytes([VERSION]) + self._digest(packed) + packed).decode()

    def opened(self, text: Any, most: int = MAX_CONTENT) -> tuple[Held, int]:
        """Return what a compaction item stands for, and how many bytes that has.

        Args:
            text: its `encrypted_content`, as the client sent it.
            most: how many bytes it may have.

        Raises:
            KeepsetError: the item is none of this client's, model's and version's, or too large.
        """
        if not isinstance(text, str) or len(text) > 2 * MAX_CONTENT:
            raise KeepsetError(
                f"The encrypted_content of a compaction item is no text of at most {2 * MAX_CONTENT} characters: send "
                "it as the server gave it."
            )
        try:
            raw = base64.b64decode(text, altchars=b"-_", validate=True)
        except ValueError:
            raw = b""
        if raw[:1] not in (b"", bytes([VERSION])):
            raise KeepsetError(
                f"A compaction item has version {raw[0]}, and this server reads {VERSION}: send what it stands for."
            )
        digest, packed = raw[1 : 1 + _DIGEST], raw[1 + _DIGEST :]
        if not hmac.compare_digest(digest, self._digest(packed)):
            raise KeepsetError(
                "A compaction item was changed, or made for another API key: send the item as the server gave it, or "
                "what it stands for."
            )
        return self._read(packed, most)

    def _digest(self, packed: bytes) -> bytes:
        key = hashlib.sha256(b"keepset compaction " + self.api_key).digest()
        return hmac.digest(key, bytes([VERSION]) + packed, "sha256")

    def _read(self, packed: bytes, most: int) -> tuple[Held, int]:
        """Return what a genuine item holds. Without API keys everybody can make one, so nothing is trusted here."""
        stream = zlib.decompressobj(_RAW)
        try:
            content = stream.decompress(packed, most + 1)
            if len(content) > most:
                raise KeepsetError(
                    f"The compaction items of a request hold more than {MAX_CONTENT} bytes: send fewer of them."
                )
            fields = json.loads(content.decode("utf-8", "surrogatepass"))
        except (zlib.error, UnicodeDecodeError, json.JSONDecodeError, RecursionError):
            fields = None
        match fields:
            case {"model": str(model), "tokens": int(tokens), "items": [*items]} if is_input(items):
                if model != self.model:
                    raise KeepsetError(
                        f"A compaction item was made for the model {model[:200]!r}: ask that one, or send what the "
                        "item stands for."
                    )
                return Held(items, tokens), len(content)
        raise KeepsetError("A compaction item holds no input items: send it as the server gave it.")


def is_input(items: list[Any]) -> bool:
    """Return whether a list is one of input items that a compaction item may hold: not too many, and no other such."""
    return len(items) <= MAX_ITEMS and all(isinstance(item, dict) and not _is_compaction(item) for item in items)


def expanded(items: list[Any], opened: Callable[[Any], Held]) -> Held:
    """Return the input items for which others stand.

    Clients repeat items in front of a compaction item which it holds already, such as the user's messages. They are
    left out. The others stay where they are.

    Args:
        items: the input of a request.
        opened: returns what an `encrypted_content` stands for.

    Returns:
        the items, and the tokens that the newest compaction item counted.
    """
    result: list[Any] = []
    tokens, places = 0, defaultdict[str, list[int]](list)
    left_out: set[int] = set()
    for item in items:
        said = [item]
        if _is_compaction(item):
            said, tokens = opened(item.get("encrypted_content"))
            for key in set(map(_identity, said)):
                left_out.update(places.pop(key, ()))
        for one in said:
            places[_identity(one)].append(len(result))
            result.append(one)
    return Held([one for place, one in enumerate(result) if place not in left_out], tokens)


async def respond(exchange: Exchange) -> None:
    """Answer a request to `/v1/responses` that has to do with compaction.

    Raises:
        KeepsetError: the request cannot be answered.
    """
    request = exchange.request
    threshold = _threshold(request.pop("context_management", None))
    given = request.get("input")
    items = given if isinstance(given, list) else [{"role": "user", "content": given}]
    is_trigger = [isinstance(item, dict) and item.get("type") == _TRIGGER for item in items]
    if threshold is None and not any(is_trigger) and not any(map(_is_compaction, items)):
        await exchange.forward()
        return
    seal = Seal(exchange.api_key, await _model_of(exchange))
    if any(is_trigger):
        if is_trigger.index(True) + 1 < len(items):
            raise KeepsetError(f"An item {_TRIGGER!r} is not the last one of the input: put it there.")
        compaction = await _compacted(exchange, seal, items[:-1])
        await _answer_trigger(exchange, seal.model, compaction)
        return
    held = await _expanded(exchange, seal, items)
    if isinstance(given, list):
        request["input"] = held.items
    if threshold is None or _stored(request) is not None:
        await exchange.forward()
    else:
        marks = [f'"{event}"'.encode() for event in _COMPLETED]
        await exchange.forward(partial(_with_item, seal, held, threshold), marks)


async def compact(exchange: Exchange) -> None:
    """Answer a request to `/v1/responses/compact`.

    Raises:
        KeepsetError: the request cannot be answered.
    """
    given = exchange.request.get("input")
    items = given if isinstance(given, list) else [{"role": "user", "content": given}] if given else []
    if not exchange.request.get("model"):
        raise KeepsetError("The request names no model: give the one that is to go on with what was said.")
    seal = Seal(exchange.api_key, await _model_of(exchange))
    compaction = await _compacted(exchange, seal, items)
    await exchange.answer(
        {
            "id": f"resp_{secrets.token_hex(16)}",
            "object": "response.compaction",
            "created_at": int(time.time()),
            "output": [compaction],
            "usage": _NOTHING,
        }
    )


def _is_compaction(item: Any) -> bool:
    return isinstance(item, dict) and item.get("type") in _KINDS


def _identity(item: Any) -> str:
    """Return what an item says, however it is written: without ids, and a message's text as its parts."""
    if not isinstance(item, dict):
        return json.dumps(item)
    bare = {name: value for name, value in item.items() if name not in ("id", "status") and value is not None}
    if "role" in bare:
        content = bare.get("content")
        parts = content if isinstance(content, list) else [{"text": content}]
        bare |= {"type": "message"}
        bare["content"] = [part["text"] if isinstance(part, dict) and "text" in part else part for part in parts]
    return json.dumps(bare, sort_keys=True)


def _threshold(value: Any) -> int | None:
    """Return above how many new tokens an answer has a compaction item; None for never."""
    match value:
        case None | []:
            return None
        case [{"type": "compaction"} as entry] if entry.keys() <= {"type", "compact_threshold"}:
            threshold = entry.get("compact_threshold")
            if threshold is None or (type(threshold) is int and threshold > 0):
                return threshold
    raise KeepsetError(
        'context_management is something else than [{"type": "compaction", "compact_threshold": N}] with a number of '
        "tokens: write it so, or leave it out."
    )


def _stored(request: dict[str, Any]) -> str | None:
    """Return which field of a request stands for what was said before, beside its input."""
    return next((name for name in _STORED if request.get(name) is not None), None)


async def _model_of(exchange: Exchange) -> str:
    """Return the name of the model or adapter that a request asks for."""
    _, listed = await exchange.ask("GET", "/v1/models")
    names = [model["id"] for model in listed["data"]]
    name = exchange.request.get("model") or names[0]
    if name not in names:
        raise KeepsetError(f"There is no model {str(name)[:200]!r} here: ask for one of {', '.join(names)[:1000]}.")
    return str(name)


async def _expanded(exchange: Exchange, seal: Seal, items: list[Any]) -> Held:
    """Return the input items of a request, without compaction items."""
    number = sum(map(_is_compaction, items))
    if not number:
        return Held(items, 0)
    if number > MAX_COMPACTIONS:
        raise KeepsetError(
            f"The input has {number} compaction items: send the newest one, or at most {MAX_COMPACTIONS}."
        )
    if (name := _stored(exchange.request)) is not None:
        raise KeepsetError(f"{name} and a compaction item both stand for what was said before: leave one of them out.")
    left = MAX_CONTENT

    def opened(text: Any) -> Held:
        nonlocal left
        held, size = seal.opened(text, left)
        left -= size
        return held

    return await asyncio.to_thread(expanded, items, opened)


async def _compacted(exchange: Exchange, seal: Seal, items: list[Any]) -> Item:
    """Return the compaction item for a request's input."""
    if (name := _stored(exchange.request)) is not None:
        raise KeepsetError(f"{name} names what only vLLM has stored: send all that was said as input to compact it.")
    held = await _expanded(exchange, seal, items)
    if not held.items or not is_input(held.items):
        raise KeepsetError(f"The input is no list of 1 to {MAX_ITEMS} items to compact: send what was said.")
    return await asyncio.to_thread(_item, seal, held)


def _item(seal: Seal, held: Held) -> Item:
    return {"id": f"cmp_{secrets.token_hex(16)}", "type": "compaction", "encrypted_content": seal.sealed(held)}


async def _answer_trigger(exchange: Exchange, model: str, compaction: Item) -> None:
    """Answer with a response that has the compaction item only, as a stream if the request asks for one."""
    request = exchange.request
    repeated = {name: default if request.get(name) is None else request[name] for name, default in _RESPONSE.items()}
    moment = int(time.time())
    begun: dict[str, Any] = {
        "id": f"resp_{secrets.token_hex(16)}",
        "object": "response",
        "created_at": moment,
        "completed_at": None,
        "status": "in_progress",
        "model": model,
        "output": [],
        "error": None,
        "incomplete_details": None,
        "previous_response_id": None,
        "store": False,
        "usage": None,
        **repeated,
    }
    done = {**begun, "status": "completed", "completed_at": moment, "output": [compaction], "usage": _NOTHING}
    if not request.get("stream"):
        await exchange.answer(done)
        return
    events: list[dict[str, Any]] = [
        {"type": "response.created", "response": begun},
        {"type": "response.in_progress", "response": begun},
        {"type": "response.output_item.added", "output_index": 0, "item": compaction},
        {"type": "response.output_item.done", "output_index": 0, "item": compaction},
        {"type": "response.completed", "response": done},
    ]
    await exchange.stream([{**event, "sequence_number": number} for number, event in enumerate(events)])


async def _with_item(seal: Seal, held: Held, threshold: int, content: dict[str, Any]) -> list[dict[str, Any]]:
    """Return the objects in place of an answer or its last event: if there is much new, with a compaction item.

    The item holds the answer, too, and comes last: only then the number of tokens is known.

    Args:
        seal: makes the item.
        held: the request's input.
        threshold: more tokens than these are much, beyond those that the newest compaction item has counted.
        content: the answer, or an event.
    """
    response = content.get("response", content)
    usage = response.get("usage") or _NOTHING
    if usage["input_tokens"] - held.tokens <= threshold:
        return [content]
    try:
        said = Held([*held.items, *response["output"]], usage["total_tokens"])
        compaction = await asyncio.to_thread(_item, seal, said)
    except KeepsetError:  # too large: the client goes on without it
        return [content]
    index = len(response["output"])
    response["output"].append(compaction)
    if response is content:
        return [content]
    number = content["sequence_number"]
    told = [
        {"type": f"response.output_item.{word}", "output_index": index, "item": compaction}
        for word in ("added", "done")
    ]
    return [{**event, "sequence_number": number + more} for more, event in enumerate([*told, content])]
