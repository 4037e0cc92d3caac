"""Options that a request gives keepset, and the signatures that show that a server's front end has checked them."""

from __future__ import annotations

import dataclasses
import hashlib
import hmac
import json
import os
import secrets
from dataclasses import dataclass, replace
from reprlib import repr as shortened
from typing import Any

from keepset.core.budget import KINDS, LIMIT, Ranges
from keepset.errors import KeepsetError
from keepset.recipe import Recipe, nearest
from keepset.vllm.contexts import EVERYBODY
from keepset.vllm.settings import KEY

SIGNING_KEY = "KEEPSET_SIGNING_KEY"
"""The environment variable that holds the key."""


MAX_BYTES = 2**16
"""The most bytes of JSON of one request's options: twice what `MAX_RANGES` ranges of seven-digit tokens take."""

MAX_RANGES = 1024
"""The most ranges that one request may protect. Every layer reads all of them at every event, in 0.1 ms."""

MAX_NAME = 255
"""The most characters of a context's name. No file system takes longer names."""

NO_CONTEXTS = "This server keeps conversations, and no contexts: leave context and save out."

_FRONT_END = ("owner", "ticket")
_ADVICE = (
    'give one or more of "context": NAME, "save": NAME, "conversation": NAME, "forget": true, "bytes": 0.5, '
    '"keep": 512, "off": true and "protect": [[0, 512]] or "image", or leave it out'
)


@dataclass(frozen=True)
class RequestOptions:
    """The options of one request.

    Attributes:
        context: the name of the context with which it begins.
        keep: a budget that replaces that of the engine's recipe, also for a prompt that the recipe leaves whole because
            it is short; see `Budget`.
        bytes: such a budget as a share of bytes; see `Budget`.
        off: whether it is not compressed at all.
        protect: tokens that always stay, besides those of the recipe; see `Budget`.
        save: the name under which its context is saved.
        conversation: the name of the conversation whose turn it is; without one the conversation is found by its
            tokens.
        forget: whether the turn is computed anew, and replaces its conversation.
        owner: the owner whose contexts it sees and saves. Only a server's front end sets it.
        ticket: the ticket under which the engine notes why it refuses the request; "" if nobody asks.

    Raises:
        KeepsetError: options are of the wrong kind, too long, or do not go together.
    """

    context: str | None = None
    keep: int | float | None = None
    bytes: float | None = None
    off: bool = False
    protect: Any = ()
    save: str | None = None
    conversation: str | None = None
    forget: bool = False
    owner: str = EVERYBODY
    ticket: str = ""

    def __post_init__(self) -> None:
        names = dict.fromkeys(("context", "save", "conversation", "owner", "ticket"), (str, "a name"))
        numbers = dict.fromkeys(("keep", "bytes"), (int | float, "a number"))
        flags = dict.fromkeys(("off", "forget"), (bool, "true or false"))
        for name, (kind, right) in {**names, **numbers, **flags}.items():
            value = getattr(self, name)
            wrong = not isinstance(value, kind) or (kind is not bool and isinstance(value, bool))
            if value is not None and wrong:
                raise KeepsetError(f"{KEY}: {name} is {shortened(value)}: give {right}.")
            if isinstance(value, str) and len(value) > MAX_NAME:
                raise KeepsetError(f"{KEY}: {name} has {len(value)} characters: give at most {MAX_NAME}.")
        for name, right in (("keep", "a fraction, or a number of entries"), ("bytes", "a share such as 0.25")):
            value = getattr(self, name)
            if value is not None and not abs(value) < LIMIT:
                raise KeepsetError(f"{KEY}: {name} is no number of 64 bits: give {right}.")
        self._check_ranges()
        if self.off and (self.has_budget or self.protect):
            raise KeepsetError(f"{KEY}: with off nothing is dropped: leave keep, bytes and protect out.")
        if self.context is not None and self.is_own:
            raise KeepsetError(f"{KEY}: a context has a recipe of its own: leave keep, bytes, off and protect out.")

    def _check_ranges(self) -> None:
        """Raise KeepsetError if `protect` has too many ranges, or something that is no range."""
        if isinstance(self.protect, str):
            object.__setattr__(self, "protect", [self.protect])
        if not isinstance(self.protect, list | tuple):
            raise KeepsetError(
                f"{KEY}: protect is {shortened(self.protect)}: give ranges of tokens, such as [[0, 512]], or a kind of "
                "tokens, image or text."
            )
        if len(self.protect) > MAX_RANGES:
            raise KeepsetError(f"{KEY}: protect has {len(self.protect)} ranges: give at most {MAX_RANGES}.")
        for bounds in self.protect:
            if bounds in KINDS:
                continue
            pair = isinstance(bounds, list | tuple) and len(bounds) == 2
            if not pair or not all(type(bound) is int and 0 <= bound < LIMIT for bound in bounds):
                raise KeepsetError(
                    f"{KEY}: protect has a range that is no pair of tokens: give the first token of each and the one "
                    "after its last, such as [[0, 512]], or a kind of tokens, image or text."
                )

    @property
    def kinds(self) -> list[str]:
        """The kinds of tokens that the request protects, image or text."""
        return [kind for kind in self.protect if isinstance(kind, str)]

    @property
    def is_own(self) -> bool:
        """Whether the request is compressed differently from the engine's recipe."""
        return self.off or self.has_budget or bool(self.protect)

    @property
    def has_budget(self) -> bool:
        """Whether the request gives a budget in place of the recipe's."""
        return self.keep is not None or self.bytes is not None

    def to_signed(self) -> str:
        """Return the options as a signed text, which every interface of vLLM passes on and the engine accepts."""
        fields = dataclasses.fields(self)
        return signed(json.dumps({f.name: value for f in fields if (value := getattr(self, f.name)) != f.default}))

    def recipe(self, engine: Recipe | None, images: Ranges | None = ()) -> Recipe | None:
        """Return the recipe by which the request is compressed; None if it is not compressed.

        Args:
            engine: the engine's recipe; None if it only serves contexts.
            images: the token ranges of the request's images; None if they are unknown.

        Raises:
            KeepsetError: the recipe does not fit these options.
        """
        if engine is None and not self.off:
            raise KeepsetError(
                f"{KEY}: this server compresses no prompts: start it with a recipe, or leave keep and bytes out."
            )
        if self.off or engine is None:
            return None
        budget = engine.budget
        if self.has_budget:
            budget = replace(budget, keep=self.keep, bytes=self.bytes, short=0)
        merged = replace(engine, budget=replace(budget, protect=(*budget.protect, *self.protect)))
        return merged.require_budget().located(images)


def parse_options(options: Any) -> RequestOptions:
    """Return the options that a client gives.

    Args:
        options: the client's object, or its JSON text.

    Raises:
        KeepsetError: it is something else, an option is unknown or out of range, or the object is too large.
    """
    fields = _fields(options)
    if fields is None:
        raise KeepsetError(f"{KEY} is {shortened(options)}: {_ADVICE}.")
    names = {field.name for field in dataclasses.fields(RequestOptions)}
    for name in fields.keys() - names:
        raise KeepsetError(f"{KEY} has no option {shortened(name)}{nearest(name, names - {*_FRONT_END})}")
    for name in _FRONT_END:
        if name in fields:
            raise KeepsetError(f"{KEY}: the API key decides who owns contexts: leave {name} out.")
    return RequestOptions(**fields)


def _fields(options: Any) -> dict[str, Any] | None:
    """Return an object's fields; None if it is no object, has no fields, or a field is null."""
    try:
        text = options if isinstance(options, str) else json.dumps(options)
        size = len(text.encode(errors="replace"))
        if size > MAX_BYTES:
            raise KeepsetError(f"{KEY} has {size} bytes: give at most {MAX_BYTES}.")
        fields = json.loads(text)
    except KeepsetError:
        raise
    except (ValueError, TypeError, RecursionError):
        return None
    return fields if isinstance(fields, dict) and fields and None not in fields.values() else None


def new_key() -> str:
    """Return a key for one start of a server."""
    return secrets.token_hex(32)


def has_key() -> bool:
    """Return whether this process has a key."""
    return bool(os.environ.get(SIGNING_KEY))


def signed(text: str) -> str:
    """Return a text with its signature in front."""
    return f"{_signature(text)} {text}"


def verified(value: Any) -> str:
    """Return the text that `signed` has signed.

    Args:
        value: the value that reached the engine; anything but a signed text is refused.

    Raises:
        KeepsetError: it is something else, or the signature was made with another key.
    """
    signature, _, text = value.partition(" ") if isinstance(value, str) else ("", "", "")
    if not hmac.compare_digest(signature.encode(errors="replace"), _signature(text).encode()):
        raise KeepsetError(
            f"{KEY} came by a route on which this server does not check it: give it at the top of the body of a "
            "request to a route that takes it."
        )
    return text


def _signature(text: str) -> str:
    key = os.environ[SIGNING_KEY].encode()
    return hmac.new(key, text.encode(errors="surrogatepass"), hashlib.sha256).hexdigest()


def from_signed(text: Any) -> RequestOptions:
    """Return the options that `RequestOptions.to_signed` has signed.

    Args:
        text: the signed text.

    Raises:
        KeepsetError: the text is something else, or was not signed with this server's key.
    """
    return RequestOptions(**json.loads(verified(text)))
