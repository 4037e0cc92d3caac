"""`Tuner`: finds which of some recipes is nearest to the full cache on pieces of a text, by successive halving."""

import math
import random
from collections.abc import Callable, Iterator, Sequence
from dataclasses import dataclass, replace
from statistics import fmean
from typing import Any

import torch
from jaxtyping import Int
from torch import Tensor
from transformers import PreTrainedModel

from keepset.core.budget import Budget
from keepset.errors import BudgetError, KeepsetError
from keepset.hf.cache import Cache
from keepset.hf.model_support import head_dim_of
from keepset.hf.prompt_session import PromptSession, warm_up
from keepset.lab.candidate import Candidate, grid, text_of
from keepset.lab.compare.comparison import fidelity
from keepset.lab.halving import LEAST, ROUNDS, Halving, TunedRecipe, tied
from keepset.lab.record import Record
from keepset.lab.tasks.task import Tokenizer
from keepset.lab.texts import adds_bos, encode
from keepset.recipe import Recipe, in_full

SIZES = (2048, 1024, 512, 256)
"""Tokens of a piece: the largest size with enough pieces is used."""
PIECES = ROUNDS[-1]
SHARE = 16
"""A piece's continuation is the last of this many parts. Continuations never overlap; prompts may."""


@dataclass(frozen=True, eq=False)
class TextPiece:
    """A prompt that is compressed, and the text that follows it."""

    prompt: Int[Tensor, "1 tokens"]
    continuation: Int[Tensor, "1 n"]


def cut(tokenizer: Tokenizer, texts: Sequence[str], *, longest: int | None, seed: int) -> list[TextPiece]:
    """Return `PIECES` pieces of texts with the least overlap.

    Args:
        tokenizer: the model's tokenizer.
        texts: the texts.
        longest: tokens of the model's context; None if unknown.
        seed: the seed of their order.

    Raises:
        KeepsetError: the texts or the context are too short.
    """
    ids = [encode(tokenizer, text) for text in texts]
    if longest is not None and longest < SIZES[-1] + 1:
        raise KeepsetError(
            f"The model's context of {longest} tokens is too short for pieces of {SIZES[-1]} tokens: use a model with "
            "a longer one."
        )
    for size in SIZES:
        if longest is not None and size + 1 > longest:  # a piece may begin with a special token
            continue
        starts = _places([len(text) for text in ids], size)
        if len(starts) >= PIECES:
            break
    else:
        total, least = sum(map(len, ids)), SIZES[-1] + (PIECES - 1) * SIZES[-1] // SHARE
        raise KeepsetError(
            f"The text has {total} tokens, too few for {PIECES} pieces of {SIZES[-1]}: give one of {least} tokens or "
            "more, or several."
        )
    begin = [tokenizer.bos_token_id] if adds_bos(tokenizer) else []
    pieces = []
    for text, start in random.Random(seed).sample(starts, PIECES):
        end = start + size - size // SHARE
        prompt, after = begin + ids[text][start:end], ids[text][end : start + size]
        pieces.append(TextPiece(torch.tensor([prompt], dtype=torch.long), torch.tensor([after], dtype=torch.long)))
    return pieces


def _places(lengths: Sequence[int], size: int) -> list[tuple[int, int]]:
    """Return where pieces may begin, as text and token, so that they overlap as little as possible."""
    starts: list[tuple[int, int]] = []
    for parts in (1, 2, 4, 8, SHARE):
        step = size // parts
        starts = [(text, at) for text, length in enumerate(lengths) for at in range(0, length - size + 1, step)]
        if len(starts) >= PIECES:
            break
    return starts


class Measurer:
    """Measures recipes on pieces of a text, and the full cache's bytes for each piece."""

    def __init__(self, model: PreTrainedModel, pieces: Sequence[TextPiece], budget: Budget) -> None:
        self._model, self._budget = model, budget
        device = model.device
        self._pieces = [replace(p, prompt=p.prompt.to(device), continuation=p.continuation.to(device)) for p in pieces]
        self.full_bytes: dict[int, int] = {}
        warm_up(model, self._pieces[0].prompt)

    def __call__(self, number: int, recipes: Sequence[Recipe]) -> Iterator[Record]:
        """Measure recipes on one piece, and yield a record for each.

        Args:
            number: the number of the piece.
            recipes: the recipes.
        """
        piece = self._pieces[number]
        session = PromptSession(self._model, piece.prompt, recipes)
        full = session.compress(None)
        reference = full.follow(piece.continuation)
        self.full_bytes[number] = full.event.nbytes_before
        del full
        for recipe in recipes:
            record = Record(str(recipe), str(recipe.with_budget()))
            try:
                prompt = session.compress(recipe)
                self._check_share(recipe, prompt.event.kept / prompt.event.entries, prompt.cache.share, piece)
                yield replace(record, figures=fidelity(prompt, reference, piece.continuation))
                del prompt
            except KeepsetError as error:
                yield replace(record, error=str(error))

    def _check_share(self, recipe: Recipe, entries: float, nbytes: float, piece: TextPiece) -> None:
        keep, of, kept, most = self._budget.keep, "the bytes", nbytes, self._budget.bytes
        if keep is not None:
            of, kept, most = "the entries", entries, min(1.0, keep / piece.prompt.shape[1])
        assert most is not None
        if not recipe.method.traits.needs_budget and kept > most:
            raise BudgetError(
                f"{recipe} chooses itself how much it keeps, and kept {kept:.0%} of {of}: that is more than {most:.0%}."
            )


class Tuner:
    """The race of recipes on a text's pieces, under one budget: a share of bytes, or entries per head.

    `unfit` has the recipes that were never in the race, with the reason. `on_step` is called after each measurement.

    Raises:
        KeepsetError: a recipe has a budget of its own, or the budget drops no entry of the pieces.
    """

    def __init__(
        self,
        model: PreTrainedModel,
        pieces: Sequence[TextPiece],
        recipes: Sequence[Recipe],
        budget: Budget,
        name: str,
        on_step: Callable[[], None] = lambda: None,
    ) -> None:
        for recipe in recipes:
            if recipe.budget.is_given:
                raise BudgetError(f"{recipe} names a budget, and all recipes get the same one: leave it out.")
        tokens = pieces[0].prompt.shape[1]
        if budget.bytes == 1 or (budget.keep is not None and budget.keep >= tokens):
            raise KeepsetError(
                f"{text_of(budget)} leaves nothing to choose of pieces of {tokens} tokens: ask for less, or give a "
                "longer text."
            )
        self._model, self._pieces, self._name, self._tokens = model, pieces, name, tokens
        self._budget, self._head_dim = budget, head_dim_of(model)
        self._measurer = Measurer(model, pieces, budget)
        self.unfit: dict[str, str] = {}
        self.race = Halving(self._measurer, self._runnable(grid(recipes, [budget])), len(pieces), on_step)

    def run(self) -> None:
        """Run the race; an interruption keeps the results so far.

        Raises:
            KeepsetError: no recipe can run.
        """
        self.race.run()
        if not self.race.alive:
            raise KeepsetError(f"No recipe can run: {next(iter(self.dropped.values()), 'there is none')}")

    @property
    def dropped(self) -> dict[str, str]:
        """Recipes without figures, with the reason."""
        failed = {str(entry.recipe): entry.error for entry in self.race.entries if entry.error is not None}
        return {**self.unfit, **failed}

    def _runnable(self, candidates: Sequence[Candidate]) -> list[Recipe]:
        """Return the recipes that the model supports and that have a choice; note the others as `unfit`."""
        able = []
        for candidate in candidates:
            try:
                if candidate.recipe is None:
                    raise BudgetError(candidate.error)
                self._check_choice(candidate.recipe)
                Cache(self._model, candidate.recipe).stop_watching()
            except KeepsetError as error:
                self.unfit[candidate.text] = str(error)
            else:
                able.append(candidate.recipe)
        return able

    def _check_choice(self, recipe: Recipe) -> None:
        """Refuse a recipe whose budget is used up by tokens that always stay, so that it has no choice."""
        keep, budget = recipe.budget_of_sizes([(self._head_dim,) * 2]).keep, recipe.budget
        always = budget.sinks + (0 if budget.recent_extra else budget.recent)
        entries = math.floor(keep * self._tokens) if isinstance(keep, float) else keep
        if recipe.method.traits.needs_budget and entries is not None and always >= entries:
            raise KeepsetError(
                f"It always keeps {always} entries, and {text_of(budget)} of {self._tokens} tokens are {entries}: "
                "there is nothing to choose, so give a longer text or a larger budget."
            )

    def to_json(self) -> dict[str, Any]:
        """Return the results so far, as `keepset tune --json` prints them."""
        race = self.race
        tied_entries = tied(race.ranked()) if race.pieces >= LEAST else []
        # Of tied recipes, the one with the cheapest prefill; none while there are too few measurements.
        chosen = min(tied_entries, key=lambda entry: entry.first(race.pieces).mean("prefill_seconds"), default=None)
        full = self._measurer.full_bytes
        return {
            "model": self._name,
            "budget": text_of(self._budget),
            "tokens": self._tokens,
            "continuation_tokens": self._pieces[0].continuation.shape[1],
            "pieces": len(self._pieces),
            "round": race.round,
            "rounds": race.rounds,
            "measured": race.pieces,
            "full": {"kv_bytes": round(fmean(full.values())) if full else None},
            "recipe": None if chosen is None else str(chosen.recipe),
            # A file with this text means the same when defaults have changed.
            "recipe_in_full": None if chosen is None else in_full(str(chosen.recipe)),
            "tied": [str(entry.recipe) for entry in tied_entries],
            "verdict": self._verdict(tied_entries, chosen),
            "rows": [_row(entry, alive=alive) for entry, alive in race.standing()],
            "dropped": [{"recipe": recipe, "reason": reason} for recipe, reason in self.dropped.items()],
        }

    def _verdict(self, tied_entries: Sequence[TunedRecipe], chosen: TunedRecipe | None) -> list[str]:
        pieces = self.race.pieces
        if chosen is None:
            count = "1 piece" if pieces == 1 else f"{pieces} pieces"
            measured = f"measured on {count}" if pieces else "not all were measured on as much as one piece"
            best = [f"The best so far is {self.race.ranked()[0].recipe}."] if pieces else []
            return [f"Too little is known to name a recipe ({measured}): give it more time or text.", *best]
        if len(tied_entries) == 1:
            ran = sum(entry.error is None for entry in self.race.entries)
            return [f"Use {chosen.recipe}: the best of {ran} recipes on {pieces} pieces."]
        rivals = ", ".join(str(entry.recipe) for entry in tied_entries if entry is not chosen)
        return [
            f"There is no winner: {pieces} pieces cannot tell {chosen.recipe} from {rivals}. "
            f"Use {chosen.recipe}, whose prefill is the cheapest of these {len(tied_entries)}."
        ]


def _row(entry: TunedRecipe, *, alive: bool) -> dict[str, Any]:
    names = (
        "top1",
        "keep",
        "share",
        "counted_bytes",
        "kv_bytes",
        "kv_bytes_full",
        "prefill_seconds",
        "prefill_seconds_full",
    )
    assert entry.kl is not None
    kl = {"mean": entry.kl.value, "low": entry.kl.low, "high": entry.kl.high}
    means = {name: entry.mean(name) for name in names}
    return {"recipe": str(entry.recipe), "pieces": len(entry.figures), "finalist": alive, "kl": kl, **means}
