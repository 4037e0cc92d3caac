"""`Progress`: how far a cache has come. `KnownTokens`: the known tokens of its text. `Event`: one compression.

`generate` skips as many of the first ids as the cache has tokens, and assumes that they are the cache's. No hook on a
model sees these ids. So `generate` is wrapped for caches that check their text (`KnowsText`). With any other cache it
is unchanged."""

from __future__ import annotations

import warnings
from abc import ABC, abstractmethod
from collections.abc import Mapping
from dataclasses import dataclass, replace
from functools import wraps
from operator import add
from typing import Any, NamedTuple, Self, TypeGuard

from jaxtyping import Bool, Int
from torch import Tensor
from transformers import GenerationMixin
from transformers.generation.continuous_batching.continuous_api import ContinuousBatchingManager

from keepset.contexts.fingerprint import text_digest
from keepset.core.budget import Ranges
from keepset.core.keep_set import KeepSet
from keepset.errors import KeepsetError
from keepset.hf.attention import NAME


class KnownTokens(ABC):
    """The first tokens of a cache, as far as they are known. It never changes, so copies share it.

    Attributes:
        given: how many of them were given by the caller; `generate` has chosen the later ones.
    """

    given: int

    @abstractmethod
    def first_other(self, ids: Int[Tensor, "batch n"], real: Bool[Tensor, "batch logical"] | None) -> int | None:
        """Return the first place where an input has another token; None if there is none.

        Args:
            ids: the input's tokens.
            real: which of them are no padding; None if all are.
        """

    @abstractmethod
    def first(self, length: int) -> Self | None:
        """Return the known tokens among the first `length` tokens."""

    @abstractmethod
    def rows(self, rows: Int[Tensor, " rows"]) -> Self:
        """Return the known tokens of a batch of these requests."""

    def check(self, ids: Int[Tensor, "batch n"], real: Bool[Tensor, "batch logical"] | None, logical: int) -> None:
        """Refuse an input that begins with other tokens.

        Args:
            ids: the input's tokens.
            real: which of them are no padding; None if all are.
            logical: tokens of the cache, for the error.

        Raises:
            KeepsetError: a token is another one than the caller has given before.
        """
        mismatch = self.first_other(ids, real)
        if mismatch is not None and mismatch < self.given:
            raise KeepsetError(
                f"The cache holds {logical} tokens, and the input begins with others: make a new "
                "keepset.Cache for each text, or ask several questions about one text on forks of its cache "
                "(cache.fork())."
            )
        if mismatch is not None:
            warnings.warn(
                "The input has other tokens than the cache in the place of those that were generated before, and the "
                "cache keeps its own: add new tokens to the ids that generate has returned, or use a cache.fork() made "
                "before it.",
                stacklevel=4,
            )


@dataclass(frozen=True, eq=False)
class ToldTokens(KnownTokens):
    """Tokens whose ids are known.

    Attributes:
        ids: of the tokens.
    """

    ids: Int[Tensor, "batch n"]
    given: int

    def first_other(self, ids: Int[Tensor, "batch n"], real: Bool[Tensor, "batch logical"] | None) -> int | None:
        n = min(self.ids.shape[1], ids.shape[1])
        differs = self.ids[:, :n] != ids[:, :n].to(self.ids.device)
        if real is not None:
            differs &= real[:, :n].to(differs.device)
        token_indices = differs.any(0).nonzero()
        return int(token_indices[0]) if len(token_indices) else None

    def first(self, length: int) -> ToldTokens:
        return replace(self, ids=self.ids[:, :length], given=min(self.given, length))

    def rows(self, rows: Int[Tensor, " rows"]) -> ToldTokens:
        return replace(self, ids=self.ids[rows.to(self.ids.device)])


@dataclass(frozen=True, eq=False)
class SavedText(KnownTokens):
    """A text whose digest and number of tokens are in a file."""

    digest: str
    given: int

    def first_other(self, ids: Int[Tensor, "batch n"], real: Bool[Tensor, "batch logical"] | None) -> int | None:
        if real is not None:  # padding may be any token, and the digest has a certain one
            return None
        texts = ids[:, : self.given].tolist()
        return None if all(text_digest(text) == self.digest for text in texts) else 0

    def first(self, length: int) -> SavedText | None:
        return self if length >= self.given else None

    def rows(self, rows: Int[Tensor, " rows"]) -> SavedText:
        return self


class KnowsText:
    """A cache that learns the ids that `generate` is given, and those that it returns."""

    progress: Any

    def resume(self) -> None:
        """Make the model continue with this cache's text, whatever other caches it ran with in between."""

    def check_reach(self, present: int, reached: int) -> None:
        """Refuse to generate if the model cannot go on with this cache as far as that.

        Args:
            present: tokens of the text so far, padding and what the cache holds included.
            reached: tokens of the text that will have been fed to the model at most.

        Raises:
            KeepsetError: says how far it can.
        """

    def check_text(self, ids: Int[Tensor, "rows n"]) -> None:
        """Refuse the ids of a whole text, padding included, if they begin with other tokens than the cache holds.

        Raises:
            KeepsetError: tokens that were given before have changed. For generated tokens there is only a warning.
        """
        progress = self.progress
        if progress is None or progress.known is None or ids.shape[1] <= progress.logical:
            return
        requests, rows = len(progress.tokens), len(ids)
        if requests % rows == 0:  # else `update` says so
            progress.known.check(ids.repeat_interleave(requests // rows, 0), progress.valid, progress.logical)

    def remember_text(self, ids: Int[Tensor, "rows n"], given_tokens: int) -> None:
        """Record the ids of a whole text, the first of which the cache holds.

        Args:
            ids: a row for each request, or for several neighbours.
            given_tokens: how many of the first tokens the caller has given; the others were generated.
        """
        progress = self.progress
        if progress is None or len(progress.tokens) % len(ids):
            return
        rows = ids.repeat_interleave(len(progress.tokens) // len(ids), 0)
        progress.known = ToldTokens(rows, given_tokens).first(progress.logical)


def _watched(generate: Any) -> Any:
    """Return `generate`, wrapped so that caches that know their text check and record it."""

    @wraps(generate)
    def watched(
        self: GenerationMixin, inputs: Tensor | None = None, generation_config: Any = None, *args: Any, **kwargs: Any
    ) -> Any:
        past, ids = kwargs.get("past_key_values"), kwargs.get("input_ids", inputs)
        if isinstance(past, KnowsText):
            past.resume()
            settings = _Settings(kwargs, generation_config, self.generation_config)
            if settings.of("use_cache") is False:
                raise KeepsetError("use_cache=False lets no cache be used: leave it or past_key_values out.")
            present = _present(ids, kwargs)
            past.check_reach(present, present + settings.new(present) - 1)
        if not isinstance(past, KnowsText) or not _is_whole_text(ids, kwargs):
            return generate(self, inputs, generation_config, *args, **kwargs)
        past.check_text(ids)
        output = generate(self, inputs, generation_config, *args, **kwargs)
        sequences, config = ids, generation_config or self.generation_config
        beams = kwargs.get("num_beams") or getattr(config, "num_beams", None) or 1
        # Generated rows of several beams are not in the order of the cache's requests.
        if not kwargs.get("custom_generate") and beams == 1:
            sequences = output if isinstance(output, Tensor) else getattr(output, "sequences", ids)
        past.remember_text(sequences, ids.shape[1])
        return output

    return watched


_NEW = 20
"""Tokens that transformers generates if nothing says how many."""


class _Settings(NamedTuple):
    """What a call of `generate` is told, from what comes first to what comes last."""

    kwargs: Mapping[str, Any]
    config: Any
    own: Any

    def of(self, name: str) -> Any:
        """Return a setting; None if nothing says it."""
        values = (self.kwargs.get(name), getattr(self.config, name, None), getattr(self.own, name, None))
        return next((value for value in values if value is not None), None)

    def new(self, present: int) -> int:
        """Return how many tokens are generated at most after so many."""
        new, longest = self.of("max_new_tokens"), self.of("max_length")
        return new if new is not None else _NEW if longest is None else max(longest - present, 0)


def _present(ids: Any, kwargs: Mapping[str, Any]) -> int:
    inputs = (ids, kwargs.get("inputs_embeds"), kwargs.get("attention_mask"))
    return max((tensor.shape[1] for tensor in inputs if isinstance(tensor, Tensor) and tensor.ndim > 1), default=0)


def _is_whole_text(ids: Any, kwargs: Mapping[str, Any]) -> TypeGuard[Tensor]:
    """Return whether these are the ids of all tokens: by transformers' rule they are as many as the mask covers."""
    if not isinstance(ids, Tensor) or ids.ndim != 2 or not ids.numel() or kwargs.get("inputs_embeds") is not None:
        return False
    mask = kwargs.get("attention_mask")
    return mask is None or mask.shape[-1] == ids.shape[1]


GenerationMixin.generate = _watched(GenerationMixin.generate)  # type: ignore[method-assign]


def _batching(switch: Any) -> Any:
    """Return `switch_to_cb_friendly_attn`, wrapped so that `generate_batch` takes a model with keepset's attention.

    It has a cache of its own, and takes the implementations that it knows by their names. When it ends, it sets again
    what it found.
    """

    @wraps(switch)
    def switched(self: Any, model: Any, *args: Any, **kwargs: Any) -> None:
        is_own = model.config._attn_implementation == NAME
        if is_own:
            model.set_attn_implementation("sdpa" if model._supports_sdpa else "eager")
        switch(self, model, *args, **kwargs)
        if is_own:
            self._original_attn_impl = NAME

    return switched


ContinuousBatchingManager.switch_to_cb_friendly_attn = _batching(  # type: ignore[method-assign]
    ContinuousBatchingManager.switch_to_cb_friendly_attn
)


@dataclass(frozen=True, eq=False)
class Event:
    """One compression.

    Attributes:
        length: logical length of the cache at the event, padding included.
        keep_set: what stayed; None for events before the newest unless the cache keeps its history.
        entries: number of entries before it, over all layers, requests and KV heads.
        kept: number of entries that stayed.
        nbytes_before: bytes of the keys and values before it.
        seconds: time spent on choosing and freeing.
    """

    length: int
    keep_set: KeepSet | None
    entries: int
    kept: int
    nbytes_before: int
    seconds: float


@dataclass(eq=False)
class Progress:
    """Lengths of a cache, the same in all layers between two forwards. The first layer of a forward advances them.

    Tensors are never modified, so copies share them.

    Attributes:
        logical, prompt: tokens of the cache and of its prompt, padding included.
        lengths, prompts: tokens of each request and of its prompt, padding left out.
        tokens, prompt_tokens: the same on the host.
        valid: which tokens are not padding; None while all are real.
        compressed_at: logical length at the newest event, if there was one.
        positions: positions of the newest forward's tokens, counted from each request's first; padding has that of the
            token before. None between two forwards.
        known: the first tokens, as far as they are known.
        images: where the images of each request are, in positions; None if that is not known.
        turn: logical length at which the newest turn began; None if the cache is not compressed by turns. The first
            forward of a turn is taken for its prompt.
    """

    logical: int
    prompt: int
    lengths: Int[Tensor, " batch"]
    prompts: Int[Tensor, " batch"]
    tokens: list[int]
    prompt_tokens: list[int]
    valid: Bool[Tensor, "batch logical"] | None = None
    compressed_at: int | None = None
    positions: Int[Tensor, "batch n"] | None = None
    known: KnownTokens | None = None
    images: tuple[Ranges, ...] | None = None
    turn: int | None = None

    @property
    def has_images(self) -> bool:
        """Return whether a request is known to have images."""
        return self.images is not None and any(self.images)

    def add_images(self, found: tuple[Ranges, ...] | None) -> None:
        """Record where images are among the newest tokens; None if that is not known."""
        self.images = None if self.images is None or found is None else tuple(map(add, self.images, found))

    def crop(self, removed: int) -> list[int]:
        """Take back the newest tokens; return how many of them were real in each request."""
        real = [removed] * len(self.tokens)
        if self.valid is None:
            self.lengths = self.lengths - removed
        else:
            gone = self.valid[:, self.logical - removed :].sum(-1)
            self.valid = self.valid[:, : self.logical - removed]
            self.lengths, real = self.lengths - gone, gone.tolist()
        self.prompts = self.prompts.minimum(self.lengths)
        self.tokens = [before - taken for before, taken in zip(self.tokens, real, strict=True)]
        self.prompt_tokens = list(map(min, self.prompt_tokens, self.tokens))
        self.logical -= removed
        self.compressed_at = None if self.compressed_at is None else min(self.compressed_at, self.logical)
        if self.turn is not None:
            self.turn = self.prompt = self.logical
        self.known = None if self.known is None else self.known.first(self.logical)
        if self.images is not None:
            self.images = tuple(
                tuple((first, min(end, length)) for first, end in row_images if first < length)
                for row_images, length in zip(self.images, self.tokens, strict=True)
            )
        return real

    def reorder(self, rows: Int[Tensor, " rows"]) -> None:
        """Make the batch consist of these requests."""
        self.lengths, self.prompts = self.lengths[rows], self.prompts[rows]
        chosen = rows.tolist()
        self.tokens = [self.tokens[row] for row in chosen]
        self.prompt_tokens = [self.prompt_tokens[row] for row in chosen]
        self.valid = None if self.valid is None else self.valid[rows]
        self.known = None if self.known is None else self.known.rows(rows)
        self.images = None if self.images is None else tuple(self.images[row] for row in chosen)
