"""The routes `GET /v1/conversations` and `DELETE /v1/conversations/NAME`."""

from __future__ import annotations

import asyncio
import secrets
import time
from typing import Any

from vllm.v1.engine.exceptions import EngineDeadError

from keepset.errors import KeepsetError
from keepset.vllm import stats
from keepset.vllm.questions import Question
from keepset.vllm.request_options import MAX_NAME

PATH = "/v1/conversations"
_SECONDS = 60.0
"""How long an answer may take. The engine answers between two steps."""
_PAUSE = 0.01


def is_route(method: str, path: str) -> bool:
    """Return whether a request is for one of the routes.

    Args:
        method: its method.
        path: its path, decoded, without the prefix of a proxy.
    """
    return (method, path) == ("GET", PATH) or (method == "DELETE" and path.startswith(f"{PATH}/"))


async def answer(state: Any, path: str, owner: str) -> dict[str, Any] | None:
    """Return the answer to a request for one of the routes; None if there is no conversation to delete.

    Args:
        state: the state of vLLM's application.
        path: the request's path.
        owner: the owner whose conversations it is about.

    Raises:
        KeepsetError: the name is none, or this server does not tell conversations.
        TimeoutError: the engine does not answer.
    """
    if state.vllm_config.parallel_config.data_parallel_size > 1:
        raise KeepsetError("Conversations are listed and deleted on servers with one engine: start it with one.")
    if path == PATH:
        return {"object": "list", "data": await _ask(state.engine_client, owner, None)}
    name = path.removeprefix(f"{PATH}/")
    if not 0 < len(name) <= MAX_NAME:
        raise KeepsetError(f"A conversation's name has {len(name)} characters: give one of 1 to {MAX_NAME}.")
    if not await _ask(state.engine_client, owner, name):
        return None
    return {"id": name, "object": "conversation.deleted", "deleted": True}


async def _ask(client: Any, owner: str, delete: str | None) -> Any:
    """Ask the process that schedules, and return what it answers.

    Args:
        client: vLLM's client of the engine.
        owner: the owner whose conversations it is about.
        delete: the name of a conversation to delete; None to list all.
    """
    question = Question(secrets.token_hex(16), owner, delete)
    try:
        await client.notify_kv_transfer_request_rejected(f"keepset-{question.ticket}", question.to_parameters())
    except EngineDeadError:
        raise TimeoutError from None
    until = time.monotonic() + _SECONDS
    while (said := stats.reply(question.ticket)) is None:
        if time.monotonic() > until:
            raise TimeoutError
        await asyncio.sleep(_PAUSE)
    return said
