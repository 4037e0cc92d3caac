"""The contexts that an engine serves: the files of a folder, and those that requests have saved, with a limit."""

from __future__ import annotations

import hashlib
import logging
import os
import re
import time
from collections.abc import Callable, Collection, Iterable, Mapping, Sequence
from contextlib import suppress
from dataclasses import dataclass, field
from functools import cached_property
from pathlib import Path
from stat import S_ISREG
from typing import TYPE_CHECKING, cast
from uuid import uuid4

import torch
from jaxtyping import Int
from torch import Tensor

from keepset.contexts import file as context_files
from keepset.contexts.fingerprint import CHANGED, difference, make, stored_weights, text_digest, token_bytes
from keepset.errors import KeepsetError
from keepset.paged.eviction import RequestPlan
from keepset.recipe import Recipe
from keepset.recording import RecordedFeatures
from keepset.vllm.settings import is_compressed, recipe_of

if TYPE_CHECKING:
    from vllm.config import ModelConfig, VllmConfig


logger = logging.getLogger(__name__)

SUFFIX = ".safetensors"
_NAME = re.compile(r"[A-Za-z0-9][A-Za-z0-9_.-]{0,99}")
_VERSION = re.compile(r"[^@]+@\d{20}-[0-9a-f]+" + re.escape(SUFFIX))
_FOLDER = "saved"
_UNFINISHED = ".unfinished"
"""A folder beside those of owners. No owner can have this name."""
_ABANDONED = 3600
"""Seconds without a write after which an unfinished file is abandoned."""
_LOOKS = 20
"""How often a folder is listed at most while other servers replace versions in it."""
EVERYBODY = "everybody"
"""The owner of all saved contexts on a server without keys."""


def owner_of(key: str) -> str:
    """Return the owner of an API key. It cannot be computed without the key."""
    return hashlib.sha256(f"keepset owner {key}".encode()).hexdigest()[:32]


def fingerprint_of(model: ModelConfig) -> dict[str, str]:
    """Return the fingerprint of a model as vLLM loads it; without that of its weights if they are not in a folder.

    Args:
        model: vLLM's configuration of it.
    """
    dtype = cast(torch.dtype, model.dtype)
    weights = stored_weights(Path(model.model), model.hf_text_config, dtype) if Path(model.model).is_dir() else None
    if weights is None:
        logger.warning(
            "The weights of %s are not stored as files: what is saved is not checked against them.", model.model
        )
    digests = {} if weights is None else {"weights": weights}
    quantization = getattr(model.hf_config, "quantization_config", None)
    if quantization is None and model.quantization is not None:  # by vLLM, when it loads them
        quantization = {"quant_method": model.quantization}
    return {**make(model.architecture, model.hf_text_config, dtype, quantization), **digests}


class OwnedContexts:
    """The contexts of one owner.

    Each version of a context is its own file, and the newest counts. So no file that is being read is replaced.

    Args:
        contexts: the folder of all contexts.
        owner: the owner, as `owner_of` returns it, or `EVERYBODY`.

    Raises:
        KeepsetError: no owner can have this name.
    """

    def __init__(self, contexts: Path, owner: str) -> None:
        if owner != EVERYBODY and not re.fullmatch("[0-9a-f]{32}", owner):
            raise KeepsetError(f"{owner!r:.80} is no owner of contexts.")
        self.folder = contexts / _FOLDER / owner
        self._unfinished = contexts / _FOLDER / _UNFINISHED

    def newest(self) -> dict[str, Path]:
        """Return the newest version of every context, by name."""
        return _newest(self._files())

    def unfinished(self, name: str) -> Path:
        """Return a path for a new version of a context. It does not count before it is committed."""
        return self._unfinished / f"{name}@{uuid4().hex}{SUFFIX}"

    def commit(self, unfinished: Path, limit: int, used: Collection[Path]) -> None:
        """Make a written version the newest one.

        Versions are named in their order: by the time, or after the newest one if a clock was ahead when that was made.

        Args:
            unfinished: its path, from `unfinished`.
            limit: bytes that all of the owner's contexts may have together. The least recently used are deleted first.
            used: files that requests still need, which are never deleted.

        Raises:
            KeepsetError: the version by itself has more bytes.
        """
        size = unfinished.stat().st_size
        if size > limit:
            unfinished.unlink()
            raise KeepsetError(f"{_name_of(unfinished)!r} has {size} bytes, and an owner's contexts may have {limit}.")
        self.folder.mkdir(exist_ok=True)
        name = _name_of(unfinished)
        before = self.newest().get(name)
        version = time.time_ns() if before is None else max(time.time_ns(), _version_of(before) + 1)
        finished = self.folder / f"{name}@{version:020d}-{uuid4().hex[:8]}{SUFFIX}"
        os.replace(unfinished, finished)
        self.sweep(limit, used, finished)

    def sweep(self, limit: int | None, used: Collection[Path], last: Path | None = None) -> None:
        """Delete replaced versions, then the least recently used contexts until the rest is within the limit.

        Args:
            limit: bytes that all of the owner's contexts may have together; None to delete no contexts.
            used: files that requests still need, which are never deleted.
            last: the file that is deleted last, and never as a replaced version.
        """
        if limit is None:
            return
        stats = {}
        for path in self._files():
            with suppress(OSError):
                stats[path] = path.stat()
        # Other servers save into this folder meanwhile, so it is read once.
        newest = {*_newest(stats).values(), last}
        total = sum(stat.st_size for stat in stats.values())
        for path in sorted(stats, key=lambda path: (path in newest, path == last, stats[path].st_atime_ns)):
            if path not in used and (path not in newest or total > limit):
                with suppress(OSError):
                    path.unlink(missing_ok=True)
                    total -= stats[path].st_size

    @staticmethod
    def clear_unfinished(contexts: Path) -> None:
        """Delete abandoned files of processes that ended while they wrote."""
        for path in (contexts / _FOLDER / _UNFINISHED).glob("*"):
            with suppress(OSError):
                if path.stat().st_mtime < time.time() - _ABANDONED:
                    path.unlink()

    def touch(self, path: Path) -> None:
        """Note that the context in this file is used now."""
        with suppress(OSError):
            os.utime(path, ns=(time.time_ns(), path.stat().st_mtime_ns))

    def _files(self) -> list[Path]:
        for _ in range(_LOOKS):
            listed = {path for path in self.folder.glob(f"*@*{SUFFIX}") if _VERSION.fullmatch(path.name)}
            files = [path for path in listed if path.is_file()]
            if all(path.exists() for path in listed.difference(files)):
                break  # else another server has replaced a version by one that the list may lack
        return files


def _newest(files: Iterable[Path]) -> dict[str, Path]:
    """Return the newest version of every name among some files."""
    return {_name_of(path): path for path in sorted(files, key=lambda path: (_version_of(path), path.name))}


def _name_of(path: Path) -> str:
    """Return the name of the context that a version is of."""
    return path.name.split("@")[0]


def _version_of(path: Path) -> int:
    """Return the number by which versions of a context are ordered."""
    return int(path.name.split("@")[1].split("-")[0])


def queries_before(recipe: Recipe) -> int:
    """Return how many of the newest queries a compression after the prompt looks at."""
    return RecordedFeatures.of(recipe.method.traits.needs, recipe.schedule.every).reach()


def check_save(limit: int | None, name: str, objection: str = "") -> None:
    """Check that a request can be saved.

    Args:
        limit: bytes that an owner's contexts may have; None if the server saves none.
        name: the name to save under, as a client wrote it.
        objection: why the request cannot be saved, as the end of a sentence; "" if it can.

    Raises:
        KeepsetError: it cannot be saved.
    """
    if limit is None:
        raise KeepsetError("This server saves no contexts: start it with --contexts and --save-bytes.")
    if not _NAME.fullmatch(name):
        raise KeepsetError(
            f"A context cannot be saved as {name!r:.80}: use up to 100 letters, digits, _, - and dots, a letter or a "
            "digit first."
        )
    if objection:
        raise KeepsetError(f"A request that is saved is {objection}.")


@dataclass(frozen=True)
class SavedContext:
    """A file that requests to this model can begin with.

    Attributes:
        name: the name of the context.
        path, nbytes: the file, and its size in bytes.
        contents: the file's header.
        counts: entries of every head.
        owner: the owner who has saved it; "" for contexts that everybody may name.
    """

    name: str
    path: Path
    nbytes: int
    contents: context_files.Contents = field(repr=False)
    counts: Int[Tensor, "layers kv_heads"] = field(repr=False)
    owner: str = ""

    @property
    def digest(self) -> str:
        """The digest of the whole file."""
        return self.contents.digest

    @property
    def recipe(self) -> Recipe | None:
        """The recipe by which requests compress the context further; None if they do not compress it."""
        return Recipe.parse(self.contents.header.recipe) if self.contents.goes_on else None

    @property
    def plan(self) -> RequestPlan:
        """How requests that begin with it are compressed."""
        return RequestPlan(self.recipe, True, self.contents.prompt, self.contents.next_event)

    @property
    def title(self) -> str:
        """The name under which its requests are counted, which is different for each owner."""
        return f"{self.owner}/{self.name}" if self.owner else self.name

    @property
    def tokens(self) -> int:
        """The number of tokens of the context, kept or not."""
        return self.contents.header.tokens


class ContextLibrary:
    """The contexts of a folder. A changed file is opened again; its entries are read when it is loaded.

    An owner sees the contexts that it has saved, and those directly in the folder, which everybody sees.

    Args:
        folder: the folder of the files.
        config: vLLM's configuration.

    Attributes:
        changed: a digest of the model's weights if they were changed since they were loaded; else "".
    """

    def __init__(self, folder: Path, config: VllmConfig) -> None:
        self.folder, self.changed = folder, ""
        self._model = config.model_config
        self._recipe = recipe_of(config) if is_compressed(config) else None
        self._known: dict[Path, tuple[tuple[int, ...], SavedContext | KeepsetError]] = {}
        self._whole: set[str] = set()
        self._listed: dict[Path, tuple[int, list[SavedContext], dict[str, str]]] = {}

    def forget(self, changed: str) -> None:
        """Look at all files of contexts again; `changed` is the attribute."""
        self.changed = changed
        self._known.clear()
        self._whole.clear()
        self._listed.clear()

    def named(self, name: str, owner: str) -> SavedContext:
        """Return the context of a name.

        Args:
            name: the name, as a client wrote it.
            owner: the owner who asks.

        Raises:
            KeepsetError: there is none, or it cannot be served with this model.
        """
        context = None
        if Path(name).name == name and "\0" not in name:  # no path: nothing outside of the folder can be named
            # Another server may replace a version, and delete it, between the two steps.
            context = self._newest_of(name, owner) or self._newest_of(name, owner)
        if context is None:
            raise KeepsetError(f"There is no context {name!r} on this server; {self._others(owner)}.")
        return context

    def checked(self, name: str, owner: str) -> SavedContext:
        """Return the context of a name. The whole file is read once, so that damage is found.

        Args:
            name: the name, as a client wrote it.
            owner: the owner who asks.

        Raises:
            KeepsetError: there is none, it is damaged, or it cannot be served with this model.
        """
        context = self.named(name, owner)
        try:
            self._check_whole(context)
        except KeepsetError as error:
            newer = self.named(name, owner)  # raises if the file is gone
            if newer.digest != context.digest:  # it has been replaced meanwhile
                self._check_whole(newer)
                return newer
            self._known[context.path] = self._known[context.path][0], error
            self._listed.pop(context.path.parent, None)
            raise
        return context

    def _check_whole(self, context: SavedContext) -> None:
        if context.digest not in self._whole:
            context_files.entries(context.path, context.digest)
            self._whole.add(context.digest)

    def _newest_of(self, name: str, owner: str) -> SavedContext | None:
        owned_path = OwnedContexts(self.folder, owner).newest().get(name)
        return self._at(owned_path or self.folder / f"{name}{SUFFIX}", name, owner if owned_path else "")

    def question(self, context: SavedContext, prompt: Sequence[int]) -> tuple[list[int], bool]:
        """Return the question in the prompt of a request that names a context.

        If the prompt begins with the context's tokens, the question is the rest. If not, it is the whole prompt without
        the tokens that every message begins with. A context that a request has saved is only served to prompts that
        begin with its tokens.

        Args:
            context: the context.
            prompt: the prompt's token ids.

        Returns:
            The question's tokens, and whether the prompt begins with the context's tokens.

        Raises:
            KeepsetError: the question is empty, or with the context it is too long for this server.
        """
        longest, opening = self._model.max_model_len, context.contents.opening
        begins = bool(context.contents.text) and text_digest(prompt[: context.tokens]) == context.contents.text
        if begins:
            question = list(prompt[context.tokens :])
        elif context.owner:
            raise KeepsetError(
                f"The prompt does not begin with the {context.tokens} tokens of context {context.name!r}: send the "
                "whole conversation, and then the new message, or do not name the context."
            )
        elif opening and list(prompt[: len(opening)]) == opening:
            question = context.contents.joint + list(prompt[len(opening) :])
        else:
            question = list(prompt)
        if not question or context.tokens + len(question) >= longest:
            raise KeepsetError(
                f"Context {context.name!r} has {context.tokens} tokens and the question {len(question)}: a question "
                f"needs at least one, and all with an answer at most the {longest} that this server takes."
            )
        return question, begins

    def beginning(self, tokens: Sequence[int], owner: str) -> SavedContext | None:
        """Return the longest context that a prompt begins with; None if there is none or it is the whole prompt.

        Args:
            tokens: the prompt's token ids.
            owner: the owner who asks.
        """
        fitting = [context for context in self.all(owner) if context.contents.text and context.tokens < len(tokens)]
        longest, text, done = None, hashlib.sha256(), 0
        for context in sorted(fitting, key=lambda context: context.tokens):
            text.update(token_bytes(tokens[done : context.tokens]))
            done = context.tokens
            if text.hexdigest() == context.contents.text and context.path.is_file():
                longest = context
        return longest

    def all(self, owner: str) -> list[SavedContext]:
        """Return all contexts that can be served to an owner: its own by name, then those of everybody by name."""
        owned = OwnedContexts(self.folder, owner)
        contexts = self._in(owned.folder, owned.newest, owner)
        names = {context.name for context in contexts}
        return [
            *contexts,
            *(context for context in self._in(self.folder, self._shared, "") if context.name not in names),
        ]

    def refused(self, owner: str) -> dict[str, str]:
        """Return why files of an owner, or of everybody, cannot be served, by the names of their contexts."""
        owned = OwnedContexts(self.folder, owner)
        self.all(owner)  # reads changed files
        return {**self._listed[self.folder][2], **self._listed[owned.folder][2]}

    def _shared(self) -> dict[str, Path]:
        files = (path for path in sorted(self.folder.glob(f"*{SUFFIX}")) if path.is_file())
        return {path.name.removesuffix(SUFFIX): path for path in files}

    def _in(self, folder: Path, files: Callable[[], Mapping[str, Path]], owner: str) -> list[SavedContext]:
        try:
            version = folder.stat().st_mtime_ns
        except OSError:
            version = 0
        if folder not in self._listed or self._listed[folder][0] != version:
            contexts, refused, found = list[SavedContext](), dict[str, str](), files()
            self._known = {
                path: entry for path, entry in self._known.items() if path.parent != folder or path in found.values()
            }
            for name, path in found.items():
                try:
                    if (context := self._at(path, name, owner)) is not None:
                        contexts.append(context)
                except KeepsetError as error:  # a request that names it also gets the error
                    refused[name] = str(error)
            self._listed[folder] = version, contexts, refused
        return self._listed[folder][1]

    def _at(self, path: Path, name: str, owner: str) -> SavedContext | None:
        """Return the context in a file, if there is one. Raises KeepsetError if it cannot be served.

        Args:
            path: the file.
            name: the context's name.
            owner: the client that it belongs to.
        """
        try:
            stat = path.stat()
        except (OSError, ValueError):
            stat = None
        if stat is None or not S_ISREG(stat.st_mode):
            self._known.pop(path, None)
            return None
        version = stat.st_mtime_ns, stat.st_size, stat.st_ino
        if path not in self._known or self._known[path][0] != version:
            self._listed.pop(path.parent, None)
            try:
                self._known[path] = version, self._opened(name, path, stat.st_size, owner)
            except KeepsetError as error:
                self._known[path] = version, error
        opened = self._known[path][1]
        if isinstance(opened, KeepsetError):
            raise opened
        return opened

    @property
    def fingerprint(self) -> dict[str, str]:
        """The fingerprint of the model; without that of its weights if they are not in a folder."""
        return {**self._loaded, **({CHANGED: self.changed} if self.changed else {})}

    @cached_property
    def _loaded(self) -> dict[str, str]:
        """The fingerprint of the model as it was loaded."""
        return fingerprint_of(self._model)

    def objection(self, name: str, contents: context_files.Contents) -> str:
        """Return why a context is not of the model as it is now; "" if it is.

        Args:
            name: the name of the context.
            contents: its file's header.
        """
        differs = difference(contents.fingerprint, self.fingerprint)
        if differs and self.changed:
            return (
                f"Context {name!r} is not of this server's weights, which were changed in place: save it again by a "
                "request, or restart the server with contexts of the new weights."
            )
        precision = f"--dtype {self.fingerprint['precision']}"
        return (
            differs
            and f"Context {name!r} is of another model, whose {differs}: build it with this one, and {precision}."
        )

    def _goes_on(self, contents: context_files.Contents) -> bool:
        """Return whether requests can compress a context further: the next event reads only data that is to come."""
        recipe, engine = Recipe.parse(contents.header.recipe), self._recipe
        assert contents.next_event is not None
        same = engine is not None and (recipe.method, recipe.schedule.every) == (engine.method, engine.schedule.every)
        return same and contents.next_event - queries_before(recipe) >= contents.header.tokens

    def _others(self, owner: str) -> str:
        names = sorted({*OwnedContexts(self.folder, owner).newest(), *self._shared()})
        return f"it has {', '.join(names[:10])}{' and others' if len(names) > 10 else ''}" if names else "it has none"

    def _opened(self, name: str, path: Path, nbytes: int, owner: str) -> SavedContext:
        contents, longest = context_files.contents(path), self._model.max_model_len
        method, layers = Recipe.parse(contents.header.recipe).method, self._model.hf_text_config.num_hidden_layers
        if objection := self.objection(name, contents):
            raise KeepsetError(objection)
        reasons = {
            f"it has {contents.requests} requests": contents.requests != 1,
            "it has padding": contents.padded,
            "it has images, which a server cannot compare with those of a request": contents.images,
            "its requests are compressed further, for which the server's recipe must have its method and every=, and "
            f"its next compression must look at new queries alone ({contents.header.recipe})": (
                contents.goes_on and not self._goes_on(contents)
            ),
            "not all layers of its model are compressed": len(contents.counts) != contents.layers or contents.states,
            f"it has {contents.layers} layers, and the model {layers}": contents.layers != layers,
            "its heads have another size than the model's": contents.sizes != {self._model.get_head_size()},
            "it has tokens that the model does not have": any(
                token >= self._model.get_vocab_size() for token in (*contents.opening, *contents.joint)
            ),
            "it lacks what its recipe looks at": contents.goes_on
            and not {*method.traits.state_names} <= contents.columns,
            "its layers differ in their heads": len({counts.shape for counts in contents.counts.values()}) != 1,
            f"it has {contents.header.tokens} tokens, and this server takes {longest} with question and answer": (
                contents.header.tokens + 2 > longest
            ),
        }
        for reason, applies in reasons.items():
            if applies:
                raise KeepsetError(f"Context {name!r} cannot be served: {reason}.")
        return SavedContext(name, path, nbytes, contents, torch.cat(list(contents.counts.values())), owner)
