"""What a request may say of itself to keepset: in a server's requests, and in `SamplingParams(extra_args=...)`."""

from __future__ import annotations

import dataclasses
import json
from dataclasses import dataclass, replace
from typing import Any

from keepset.errors import KeepsetError
from keepset.recipe import Recipe
from keepset.vllm.owned_contexts import EVERYBODY
from keepset.vllm.settings import KEY

_ADVICE = (
    'give one or more of "context": NAME, "save": NAME, "keep": 0.5, "off": true and "protect": [[0, 512]], or leave '
    "it out"
)


@dataclass(frozen=True)
class Wishes:
    """One request's.

    Attributes:
        context: the name of what it goes on from.
        keep: another budget than the engine's recipe has; see `Budget`.
        off: whether it is not compressed at all.
        protect: ranges of its tokens that always stay, besides those of the recipe.
        save: the name of the context that it leaves.
        owner: whose contexts it sees and saves; a server says so for those who ask it.

    Raises:
        KeepsetError: some of these do not go together, or are of the wrong kind.
    """

    context: str | None = None
    keep: int | float | None = None
    off: bool = False
    protect: Any = ()
    save: str | None = None
    owner: str = EVERYBODY

    def __post_init__(self) -> None:
        names = dict.fromkeys(("context", "save", "owner"), (str, "a name"))
        for name, (kind, right) in {**names, "off": (bool, "true or false")}.items():
            value = getattr(self, name)
            if value is not None and not isinstance(value, kind):
                raise KeepsetError(f"{KEY}: {name} is {value!r:.80}: give {right}.")
        if self.off and (self.keep is not None or self.protect):
            raise KeepsetError(f"{KEY}: with off nothing is dropped: leave keep and protect out.")
        if self.context is not None and self.is_own:
            raise KeepsetError(f"{KEY}: a context has a recipe of its own: leave keep, off and protect out.")

    @property
    def is_own(self) -> bool:
        """Whether the request is compressed otherwise than the engine's recipe says."""
        return self.off or self.keep is not None or bool(self.protect)

    def as_json(self) -> str:
        """As text, which every interface of vLLM passes on."""
        fields = dataclasses.fields(self)
        return json.dumps({f.name: value for f in fields if (value := getattr(self, f.name)) != f.default})

    def recipe(self, engine: Recipe | None) -> Recipe | None:
        """What the request is compressed by; None if not at all.

        Args:
            engine: the engine's recipe; None where it has contexts alone.

        Raises:
            KeepsetError: that cannot be.
        """
        if engine is None and not self.off:
            raise KeepsetError(f"{KEY}: this server compresses no prompts: start it with a recipe, or leave keep out.")
        if self.off or engine is None:
            return None
        budget = engine.budget
        keep = budget.keep if self.keep is None else self.keep
        ranges = self.protect if isinstance(self.protect, list | tuple) else (self.protect,)
        return replace(engine, budget=replace(budget, keep=keep, protect=(*budget.protect, *ranges))).require_budget()


def wishes_of(said: Any) -> Wishes:
    """What is said, as an object or its text.

    Raises:
        KeepsetError: it is something else.
    """
    try:
        wishes = json.loads(said) if isinstance(said, str) else said
    except (ValueError, RecursionError):
        wishes = said
    names = {field.name for field in dataclasses.fields(Wishes)}
    if isinstance(wishes, dict) and wishes and wishes.keys() <= names and None not in wishes.values():
        return Wishes(**wishes)
    raise KeepsetError(f"{KEY} is {said!r:.200}: {_ADVICE}.")
