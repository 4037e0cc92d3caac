"""Questions about conversations, which a server's front end asks the process that schedules.

vLLM has one message to a connector that waits for no place in a batch: a request that was rejected before the engine
has seen it. A question is sent in such a message, signed like the options of requests. Its answer is noted under its
ticket, as refusals are.
"""

from __future__ import annotations

import dataclasses
import json
from dataclasses import dataclass
from typing import Any

from keepset.errors import KeepsetError
from keepset.vllm.request_options import has_key, signed, verified
from keepset.vllm.settings import KEY

_QUESTION = "question"


@dataclass(frozen=True)
class Question:
    """A question about an owner's conversations.

    Attributes:
        ticket: the ticket under which it is answered.
        owner: the owner.
        delete: the name of a conversation to delete; None to list all.
    """

    ticket: str
    owner: str
    delete: str | None = None

    def to_parameters(self) -> dict[str, str]:
        """Return the question as parameters of a rejected request."""
        return {KEY: signed(json.dumps({_QUESTION: dataclasses.asdict(self)}))}


def question_of(parameters: Any) -> Question | None:
    """Return the question in parameters of a request; None if this server's front end has asked none there."""
    said = parameters.get(KEY) if isinstance(parameters, dict) and has_key() else None
    try:
        fields = json.loads(verified(said)) if said is not None else {}
    except KeepsetError:  # a client has written it
        return None
    return Question(**fields[_QUESTION]) if _QUESTION in fields else None
