"""The contexts that an engine serves: files of a folder, looked for again at every request."""

from __future__ import annotations

import hashlib
import logging
from collections.abc import Iterator, Sequence
from dataclasses import dataclass, field
from functools import cached_property
from pathlib import Path
from typing import TYPE_CHECKING, cast

import torch
from jaxtyping import Int
from torch import Tensor

from keepset.core.observation import BIAS
from keepset.errors import KeepsetError
from keepset.hf import saved
from keepset.hf.fingerprint import difference, make, stored_weights

if TYPE_CHECKING:
    from vllm.config import VllmConfig

logger = logging.getLogger(__name__)

SUFFIX = ".safetensors"
"""Of the files; a context's name is its file's without it."""


@dataclass(frozen=True)
class Context:
    """A file that requests to this model can begin with.

    Attributes:
        name, path, nbytes: of the file.
        contents: what it says of itself.
        counts: entries of every head.
    """

    name: str
    path: Path
    nbytes: int
    contents: saved.Contents = field(repr=False)
    counts: Int[Tensor, "layers kv_heads"] = field(repr=False)

    @property
    def digest(self) -> str:
        """Of all that the file holds."""
        return self.contents.digest

    @property
    def tokens(self) -> int:
        """Of the context, kept or not."""
        return self.contents.header.tokens


class ContextLibrary:
    """Looks into a folder. A file is opened again once it has changed; its entries are read by who loads it.

    Args:
        folder: of the files.
        config: the engine's.
    """

    def __init__(self, folder: Path, config: VllmConfig) -> None:
        self._folder = folder
        self._model = config.model_config
        self._known: dict[str, tuple[tuple[int, ...], Context | KeepsetError]] = {}
        self._whole: set[str] = set()
        self._listed: tuple[int, list[Context]] = -1, []

    def named(self, name: str) -> Context:
        """The context of this name.

        Raises:
            KeepsetError: there is none, or it cannot be served to this model; says why.
        """
        path = self._folder / f"{name}{SUFFIX}"
        try:
            # A name is no path: nothing outside of the folder can be named.
            stat = path.stat() if Path(name).name == name else None
        except (OSError, ValueError):
            stat = None
        if stat is None:
            raise KeepsetError(f"There is no context {name!r} on this server; {self._others()}.")
        version = stat.st_mtime_ns, stat.st_size, stat.st_ino
        if name not in self._known or self._known[name][0] != version:
            try:
                self._known[name] = version, self._opened(name, path, stat.st_size)
            except KeepsetError as error:
                self._known[name] = version, error
        known = self._known[name][1]
        if isinstance(known, KeepsetError):
            raise known
        return known

    def checked(self, name: str) -> Context:
        """The same, once it was read as a whole: a damaged one is found out here, too. Takes as long as reading it."""
        context = self.named(name)
        if context.digest not in self._whole:
            saved.entries(context.path, context.digest)
            self._whole.add(context.digest)
        return context

    def beginning(self, tokens: Sequence[int]) -> Context | None:
        """The longest context that is this prompt's beginning; there must be a token left to compute."""
        fitting = [context for context in self if context.contents.text and context.tokens < len(tokens)]
        longest, text, done = None, hashlib.sha256(), 0
        for context in sorted(fitting, key=lambda context: context.tokens):
            text.update(saved.token_bytes(tokens[done : context.tokens]))
            done = context.tokens
            if text.hexdigest() == context.contents.text:
                longest = context
        return longest

    def __iter__(self) -> Iterator[Context]:
        """All that can be served, by name. The folder is looked through once something has come or gone."""
        version = self._folder.stat().st_mtime_ns if self._folder.is_dir() else 0
        if version != self._listed[0]:
            contexts = []
            for name in self._names():
                try:
                    contexts.append(self.named(name))
                except KeepsetError:
                    continue  # who names it is told
            self._listed = version, contexts
        return iter(self._listed[1])

    @cached_property
    def _fingerprint(self) -> dict[str, str]:
        """Of the model; without its weights where those are not found in a folder."""
        model, dtype = self._model, cast(torch.dtype, self._model.dtype)
        weights = stored_weights(Path(model.model), model.hf_text_config, dtype) if Path(model.model).is_dir() else None
        if weights is None:
            logger.warning(
                "Whether contexts are of the weights of %s is not checked: they are stored in another way.", model.model
            )
        known = {} if weights is None else {"weights": weights}
        return {**make(model.architecture, model.hf_text_config, dtype), **known}

    def _names(self) -> list[str]:
        return sorted(path.name.removesuffix(SUFFIX) for path in self._folder.glob(f"*{SUFFIX}"))

    def _others(self) -> str:
        names = self._names()
        return f"it has {', '.join(names[:10])}{' and others' if len(names) > 10 else ''}" if names else "it has none"

    def _opened(self, name: str, path: Path, nbytes: int) -> Context:
        contents, longest = saved.contents(path), self._model.max_model_len
        if differs := difference(contents.fingerprint, self._fingerprint):
            raise KeepsetError(f"Context {name!r} is of another model, whose {differs}: build it with this one.")
        reasons = {
            f"it has {contents.requests} requests": contents.requests != 1,
            "it has padding": contents.padded,
            "it adds biases to attention (give its match biases=False)": BIAS in contents.columns,
            "its entries are in 8 bits (leave int8(...) around its recipe out)": "key_scale" in contents.columns,
            "it would be compressed further while it is asked (leave its every= out)": contents.goes_on,
            "not all layers of its model are compressed": len(contents.counts) != contents.layers,
            "its layers differ in their heads": len({counts.shape for counts in contents.counts.values()}) != 1,
            f"it has {contents.header.tokens} tokens, and this server takes {longest} with question and answer": (
                contents.header.tokens + 2 > longest
            ),
        }
        for reason, applies in reasons.items():
            if applies:
                raise KeepsetError(f"Context {name!r} cannot be served: {reason}.")
        return Context(name, path, nbytes, contents, torch.cat(list(contents.counts.values())))
