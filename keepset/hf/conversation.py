"""`Conversation`: a chat under transformers that computes only what is new, and is compressed between turns."""

from __future__ import annotations

import copy
from collections.abc import Mapping, Sequence
from pathlib import Path
from typing import Any

import torch
from transformers import PreTrainedModel, PreTrainedTokenizerBase

from keepset.core.budget import Ranges, joined
from keepset.core.edits import Continuation, Span, continuation_of
from keepset.core.roles import system_span, user_mark
from keepset.errors import KeepsetError, quoted
from keepset.hf import saved
from keepset.hf.cache import Cache
from keepset.hf.model_support import check_model
from keepset.hf.recipe_notes import warn_without_bos
from keepset.recipe import Recipe

_NONE = -1
"""A token that no text has."""


class Conversation:
    """A chat of one model, which stays in a `Cache` between its turns.

    Every turn gets the whole history, as a server does. The policy is that of a vLLM server with the same recipe, and
    so are the entries that stay:

    - Nothing is compressed while a turn is answered. When the next one begins, all that was said is compressed. A share
      is one of all tokens that were said.
    - A turn that is asked for again goes on with the entries that it had.
    - Its answer may come back in other words or tokens. That turn is over, too, and what differs is computed.
    - What the history does not contain any more is dropped. Nothing is computed again, and what came after it keeps its
      positions.
    - A history that differs before the newest turn is computed anew.

    Args:
        model: a decoder-only transformers model.
        tokenizer: its tokenizer, with a chat template.
        recipe: a recipe with `turns=True`, such as `"pool(snapkv, bytes=0.25, turns=True)"`.
        template: further arguments of the chat template, such as `tools` or `enable_thinking`.

    Attributes:
        cache: holds the entries; another one after the conversation was computed anew.
        reused: how many tokens of the newest prompt were not computed.
        computed: how many of them were.
        dropped: how many tokens that were said the newest prompt has not gone on with.

    Raises:
        KeepsetError: the recipe or the model cannot be used, or there is no chat template.
    """

    def __init__(
        self, model: PreTrainedModel, tokenizer: PreTrainedTokenizerBase, recipe: str | Recipe, **template: Any
    ) -> None:
        self._model, self._tokenizer, self._template = model, tokenizer, template
        self.cache = Cache(model, recipe)
        if not self.cache.schedule.turns:
            raise KeepsetError(f"{self.cache.recipe} does not compress between turns: add turns=True to it.")
        if not self.cache.managed_layers:
            raise KeepsetError("No layer of this model caches a whole text, so there is no conversation to go on with.")
        if not tokenizer.chat_template:
            raise KeepsetError(
                "The tokenizer has no chat template: set tokenizer.chat_template, or use a chat model's."
            )
        protects = self.cache.recipe.budget.protects_system
        self._mark = user_mark(tokenizer) if protects else []
        """The tokens before a user's message, if what comes before the first one is protected."""
        self.reused = self.computed = self.dropped = 0
        self._ids: list[int] = []
        """The token at each position of the cache."""
        self._left_out: tuple[Span, ...] = ()
        """Spans of positions without entries, because the history does not contain them any more."""
        self._newest = 0
        """How many of the other tokens are the newest turn's prompt."""

    @property
    def nbytes(self) -> int:
        """Bytes allocated."""
        return self.cache.nbytes

    def say(self, messages: Sequence[Mapping[str, Any]], **options: Any) -> str:
        """Answer a history of messages.

        Args:
            messages: the whole history, whose last message is answered, as the chat template takes it.
            options: arguments of `model.generate`, such as `max_new_tokens`.

        Returns:
            The answer's text without special tokens; for the next turn append it to the history.

        Raises:
            KeepsetError: several answers are asked for. If the model fails, the next turn is computed anew.
        """
        config = options.get("generation_config") or self._model.generation_config
        for name in ("num_beams", "num_return_sequences"):
            if (options.get(name) or getattr(config, name, None) or 1) > 1:
                raise KeepsetError(f"A conversation has one answer to each turn: leave {name} out, or use fork().")
        prompt = self._rendered(messages, add_generation_prompt=True)
        warn_without_bos(self.cache.recipe, self._tokenizer, prompt)
        self._go_on(prompt, options.get("max_new_tokens") or getattr(config, "max_new_tokens", None) or 0)
        # `generate` skips as many ids as the cache has tokens, those that were left out among them.
        ids = torch.tensor([[*self._ids, *prompt[self.reused :]]], dtype=torch.long, device=self._model.device)
        try:
            # Without a mask it would take a token that ends turns for padding.
            generate: Any = self._model.generate
            output = generate(ids, attention_mask=torch.ones_like(ids), past_key_values=self.cache, **options)
        except BaseException:  # the cache may hold a part of the turn
            self._begin_anew()
            raise
        sequence = getattr(output, "sequences", output)[0].tolist()
        self._ids = sequence[: self.cache.get_seq_length()]  # the last token was not fed
        self._newest = len(prompt)
        return str(self._tokenizer.decode(sequence[ids.shape[1] :], skip_special_tokens=True))

    def edit(self, messages: Sequence[Mapping[str, Any]]) -> None:
        """Say what the history is now, without an answer: what it does not contain any more is freed at once.

        The newest turn is over then. What the history has in addition is computed with the next turn.

        Args:
            messages: the whole history.
        """
        self._go_on([*self._rendered(messages, add_generation_prompt=False), _NONE], 0)
        self.computed = 0

    def save(self, path: str | Path, *, force: bool = False) -> None:
        """Write the conversation into one file, compressed: the newest turn is over in the file, not here.

        Every next turn has the same tokens and entries as here. Only asking again for the newest one is computed anew.
        The messages are not in the file.

        Args:
            force: replace a file that is there.

        Raises:
            KeepsetError: the file exists or cannot be written, nothing was said yet, or the model has layers of a kind
                that cannot be saved.
        """
        if not self._ids:
            raise KeepsetError("Nothing was said yet, so there is nothing to save: call say() first.")
        saved.check_new(path, force)
        over = self.fork().cache
        over.compact(self._said, system=self._system)
        said, event = saved.Said(self._ids, self._left_out, self._newest), over.events[-1] if over.events else None
        model = check_model(self._model)
        saved.save(Path(path), over, str(over.recipe), event, model, model.config.name_or_path or "", said)

    @classmethod
    def load(
        cls, path: str | Path, model: PreTrainedModel, tokenizer: PreTrainedTokenizerBase, **template: Any
    ) -> Conversation:
        """Return the conversation that `save` has written, ready for its next turn.

        Args:
            model: the model that it was held with; it serves no other.
            tokenizer: its tokenizer.
            template: as for a new conversation.

        Raises:
            KeepsetError: the file is no saved conversation, damaged, of another version or of another model.
        """
        context = saved.load(Path(path), check_model(model))
        if context.said is None:
            raise KeepsetError(
                f"{quoted(path)} is a saved context and no conversation: give a file that Conversation.save has "
                "written, or load it with keepset.Cache.load."
            )
        conversation = cls(model, tokenizer, context.recipe, **template)
        conversation._ids, conversation._left_out, conversation._newest = context.said
        context.restore(conversation.cache)
        conversation.cache.events = [] if context.event is None else [context.event]
        return conversation

    def fork(self) -> Conversation:
        """Return an independent copy: what is said to one is not known to the other."""
        copied = copy.copy(self)
        copied.cache, copied._ids = self.cache.fork(), list(self._ids)
        return copied

    @property
    def _said(self) -> int:
        """How many tokens were said, without those that the history does not contain any more."""
        return len(self._ids) - sum(end - first for first, end in self._left_out)

    @property
    def _system(self) -> Ranges | None:
        """Where all before the first user's message is; None if the recipe does not protect it."""
        return system_span(self._ids, self._mark) if self._mark else None

    def _rendered(self, messages: Sequence[Mapping[str, Any]], add_generation_prompt: bool) -> list[int]:
        options: dict[str, Any] = {**self._template, "tokenize": True, "return_dict": False}
        return list(
            self._tokenizer.apply_chat_template(
                [dict(message) for message in messages], add_generation_prompt=add_generation_prompt, **options
            )
        )

    def _go_on(self, prompt: Sequence[int], new: int) -> None:
        """Make the cache hold what a prompt has of all that was said, and nothing else.

        Args:
            prompt: its tokens, of which at least the last is computed.
            new: how many tokens the answer may have.
        """
        said = self._said
        going_on = continuation_of(self._ids, self._left_out, self._newest, prompt, 0)
        tokens, matched = going_on.tokens, going_on.matched
        has_room = self._has_room(tokens + len(prompt) - matched + new, len(prompt) + new)
        if self._ids and not (has_room and self._take(going_on, said)):
            tokens = matched = 0
            self._begin_anew()
        before = [span for span in self._left_out if span[0] < tokens]
        self._left_out = joined([*before, *going_on.left_out]) if tokens else ()
        del self._ids[tokens:]
        self._newest = min(self._newest, matched)
        self.reused, self.computed, self.dropped = matched, len(prompt) - matched, said - matched

    def _take(self, going_on: Continuation, said: int) -> bool:
        """Return whether the cache could go on.

        Args:
            going_on: from which of its tokens.
            said: how many tokens were said.
        """
        if not going_on.tokens:
            return False
        try:
            if going_on.is_over:
                self.cache.compact(said, going_on.tokens, self._system)
            else:
                self.cache.crop(going_on.tokens)
            self.cache.leave_out(going_on.left_out)
        except BaseException as error:
            if isinstance(error, KeepsetError) and self.cache.is_whole:
                return False  # the past has changed, or the model has states that have read it
            self._begin_anew()
            raise
        return True

    def _has_room(self, positions: int, alone: int) -> bool:
        """Return whether the model has so many positions; or no more for the same text alone.

        Args:
            positions: tokens of the text with what was left out.
            alone: tokens of the text alone.
        """
        most = getattr(self._model.config.get_text_config(decoder=True), "max_position_embeddings", None)
        return most is None or positions <= max(most, alone)

    def _begin_anew(self) -> None:
        self.cache = Cache(self._model, self.cache.recipe)
        self._ids, self._left_out, self._newest = [], (), 0
