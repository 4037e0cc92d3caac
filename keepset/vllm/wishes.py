"""What a request may say of itself to keepset: `{"context": NAME}`, in a server's requests and in `SamplingParams`."""

from __future__ import annotations

import json
from dataclasses import asdict, dataclass
from typing import Any

from keepset.errors import KeepsetError
from keepset.vllm.settings import KEY


@dataclass(frozen=True)
class Wishes:
    """One request's.

    Attributes:
        context: the name of what it goes on from.
    """

    context: str

    def as_json(self) -> str:
        """As text, which every interface of vLLM passes on."""
        return json.dumps(asdict(self))


def wishes_of(said: Any) -> Wishes:
    """What is said, as an object or its text.

    Raises:
        KeepsetError: it is something else.
    """
    try:
        wishes = json.loads(said) if isinstance(said, str) else said
    except (ValueError, RecursionError):
        wishes = said
    if isinstance(wishes, dict) and list(wishes) == ["context"] and isinstance(wishes["context"], str):
        return Wishes(wishes["context"])
    raise KeepsetError(f'{KEY} is {said!r}: give {{"context": NAME}}, or leave it out.')
