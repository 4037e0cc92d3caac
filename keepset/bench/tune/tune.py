"""`Tuner`: finds the recipe for a text by measuring all recipes on pieces of it, by successive halving."""

import math
from collections.abc import Callable, Iterator, Sequence
from dataclasses import replace
from statistics import fmean
from typing import Any

import torch
from transformers import PreTrainedModel

from keepset.bench.analysis.intervals import Figure, of_score
from keepset.bench.candidate import text_of
from keepset.bench.compare.comparison import fidelity
from keepset.bench.generation import end_tokens
from keepset.bench.record import Record
from keepset.bench.tasks.task import Tokenizer
from keepset.bench.tune import space
from keepset.bench.tune.excerpts import ANSWER_TOKENS, TextPiece
from keepset.bench.tune.halving import LEAST, Halving, TunedRecipe
from keepset.core.budget import Budget
from keepset.errors import BudgetError, KeepsetError
from keepset.hf.cache import Cache
from keepset.hf.model_support import head_dim_of
from keepset.hf.prompt_session import PromptSession, warm_up
from keepset.recipe import Recipe, in_full
from keepset.texts import encode


class Measurer:
    """Measures recipes on pieces of a text, and the full cache's bytes and found facts for each piece."""

    def __init__(
        self, model: PreTrainedModel, tokenizer: Tokenizer, pieces: Sequence[TextPiece], budget: Budget
    ) -> None:
        self._model, self._tokenizer, self._budget = model, tokenizer, budget
        device = model.device
        self._pieces = [replace(p, prompt=p.prompt.to(device), continuation=p.continuation.to(device)) for p in pieces]
        self.full_found: dict[int, tuple[bool, ...]] = {}
        self.full_bytes: dict[int, int] = {}
        warm_up(model, self._pieces[0].prompt)

    def __call__(self, number: int, recipes: Sequence[Recipe]) -> Iterator[Record]:
        """Measure recipes on the piece with this number, and yield a record for each."""
        piece = self._pieces[number]
        session = PromptSession(self._model, piece.prompt, recipes)
        full = session.compress(None)
        reference = full.follow(piece.continuation)
        if number not in self.full_bytes:
            self.full_bytes[number] = full.event.nbytes_before
            self.full_found[number] = self._ask(piece, full.cache)
        del full
        for recipe in recipes:
            record = Record(str(recipe), str(recipe.with_budget()))
            try:
                prompt = session.compress(recipe)
                self._check_share(recipe, prompt.event.kept / prompt.event.entries, prompt.cache.share, piece)
                figures = fidelity(prompt, reference, piece.continuation)
                if piece.facts:
                    figures |= {"facts": len(piece.facts), "facts_found": sum(self._ask(piece, prompt.cache))}
                yield replace(record, figures=figures)
                del prompt
            except KeepsetError as error:
                yield replace(record, error=str(error))

    def _check_share(self, recipe: Recipe, entries: float, nbytes: float, piece: TextPiece) -> None:
        """Refuse a recipe that chooses its own number of entries and keeps more than the budget."""
        keep, of, kept, most = self._budget.keep, "the bytes", nbytes, self._budget.bytes
        if keep is not None:
            of, kept, most = "the entries", entries, min(1.0, keep / piece.prompt.shape[1])
        assert most is not None
        if not recipe.method.traits.needs_budget and kept > most:
            raise BudgetError(
                f"{recipe} chooses itself how much it keeps, and kept {kept:.0%} of {of}: that is more than {most:.0%}."
            )

    @torch.no_grad()
    def _ask(self, piece: TextPiece, cache: Cache) -> tuple[bool, ...]:
        """Return which facts the greedy answers contain; all questions run at once, each on a fork of the cache."""
        if not piece.facts:
            return ()
        questions = [encode(self._tokenizer, text) for text in piece.questions]
        longest = max(map(len, questions))
        padded = [[0] * (longest - len(row)) + row for row in questions]
        exists = [[0] * (longest - len(row)) + [1] * len(row) for row in questions]
        ids, mask = (torch.tensor(rows, device=self._model.device) for rows in (padded, exists))
        generate: Any = self._model.generate
        inputs = cache.ask(ids, mask)
        output = generate(
            **inputs,
            max_new_tokens=ANSWER_TOKENS,
            do_sample=False,
            temperature=None,
            top_p=None,
            top_k=None,
            pad_token_id=next(iter(end_tokens(self._model)), None),
        )
        answers = self._tokenizer.batch_decode(output[:, longest:], skip_special_tokens=True)
        return tuple(fact.answer in answer for fact, answer in zip(piece.facts, answers, strict=True))


class Tuner:
    """The race of all recipes on a text's pieces, under one budget: a share of bytes, or entries per head.

    `unfit` has the recipes that were never in the race, with the reason. `on_step` is called after each measurement.

    Raises:
        KeepsetError: the budget drops no entry of the shortest piece.
    """

    def __init__(
        self,
        model: PreTrainedModel,
        tokenizer: Tokenizer,
        pieces: Sequence[TextPiece],
        budget: Budget,
        name: str,
        on_step: Callable[[], None] = lambda: None,
    ) -> None:
        shortest = min(piece.prompt.shape[1] for piece in pieces)
        if budget.bytes == 1 or (budget.keep is not None and budget.keep >= shortest):
            raise KeepsetError(
                f"{text_of(budget)} leaves nothing to choose of pieces of {shortest} tokens: ask for less, or give a "
                "longer text."
            )
        self._model, self._pieces, self._name, self._shortest = model, pieces, name, shortest
        self._budget, self._head_dim = budget, head_dim_of(model)
        self._measurer = Measurer(model, tokenizer, pieces, budget)
        recipes, unfit = space.with_budget(space.scorers(), budget)
        self.unfit = {recipe.text(budget.keep, budget.bytes): why for recipe, why in unfit.items()}
        self.race = Halving(
            self._measurer,
            self._runnable(recipes),
            len(pieces),
            grow=lambda best: self._runnable(space.compositions(best)),
            grown=space.composed_at_most(),
            by_found=lambda: self.retrieves,
            on_step=on_step,
        )

    @property
    def retrieves(self) -> bool:
        """Whether the full cache finds any fact; if not, the facts that recipes find mean nothing."""
        return any(map(any, self._measurer.full_found.values()))

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

    def _runnable(self, recipes: Sequence[Recipe]) -> list[Recipe]:
        """Return the recipes that the model supports and that have a choice; note the others as `unfit`."""
        able = []
        for recipe in recipes:
            try:
                self._check_choice(recipe)
                Cache(self._model, recipe).stop_watching()
            except KeepsetError as error:
                self.unfit[str(recipe)] = str(error)
            else:
                able.append(recipe)
        return able

    def _check_choice(self, recipe: Recipe) -> None:
        """Refuse a recipe whose budget is used up by tokens that always stay, so that it has no choice."""
        keep, budget = recipe.budget_of_sizes([(self._head_dim,) * 2]).keep, recipe.budget
        always = budget.sinks + (0 if budget.recent_extra else budget.recent)
        entries = math.floor(keep * self._shortest) if isinstance(keep, float) else keep
        if recipe.method.traits.needs_budget and entries is not None and always >= entries:
            raise KeepsetError(
                f"It always keeps {always} entries, and {text_of(budget)} of {self._shortest} tokens are "
                f"{entries}: there is nothing to choose, so give a longer text or a larger budget."
            )

    def to_json(self) -> dict[str, Any]:
        """Return the results so far, as `keepset tune --json` prints them."""
        race = self.race
        tied = race.tied() if race.pieces >= LEAST else []
        # Of tied recipes, the one with the cheapest prefill; none while there are too few measurements.
        chosen = min(tied, key=lambda entry: entry.first(race.pieces).mean("prefill_seconds"), default=None)
        full, facts = self._measurer.full_bytes, self._pieces[0].facts
        found = [fmean(each) for each in self._measurer.full_found.values() if each]
        return {
            "model": self._name,
            "budget": text_of(self._budget),
            "tokens": round(fmean(piece.prompt.shape[1] for piece in self._pieces)),
            "continuation_tokens": self._pieces[0].continuation.shape[1],
            "pieces": len(self._pieces),
            "facts": len(facts),
            "round": race.round,
            "rounds": race.rounds,
            "measured": race.pieces,
            "full": {
                "kv_bytes": round(fmean(full.values())) if full else None,
                **({"found": _figure(of_score(found))} if facts else {}),
            },
            "recipe": None if chosen is None else str(chosen.recipe),
            # A file with this text means the same when defaults have changed.
            "recipe_in_full": None if chosen is None else in_full(str(chosen.recipe)),
            "tied": [str(entry.recipe) for entry in tied],
            "verdict": self._verdict(tied, chosen),
            "rows": [_row(entry, alive=alive) for entry, alive in race.standing()],
            "dropped": [{"recipe": recipe, "reason": reason} for recipe, reason in self.dropped.items()],
        }

    def _verdict(self, tied: Sequence[TunedRecipe], chosen: TunedRecipe | None) -> list[str]:
        sentences, pieces = [], self.race.pieces
        if chosen is None:
            count = "1 piece" if pieces == 1 else f"{pieces} pieces"
            measured = f"measured on {count}" if pieces else "not all were measured on as much as one piece"
            sentences.append(f"Too little is known to name a recipe ({measured}): give it more time or text.")
            if pieces:
                sentences.append(f"The best so far is {self.race.ranked()[0].recipe}.")
        elif len(tied) == 1:
            ran = sum(entry.error is None for entry in self.race.entries)
            sentences.append(f"Use {chosen.recipe}: the best of {ran} recipes on {pieces} pieces.")
        else:
            rest = ", ".join(str(entry.recipe) for entry in tied if entry is not chosen)
            sentences.append(
                f"There is no winner: {pieces} pieces cannot tell {chosen.recipe} from {rest}. "
                f"Use {chosen.recipe}, whose prefill is the cheapest of these {len(tied)}."
            )
        if self._pieces[0].facts and self._measurer.full_found and not self.retrieves:
            sentences.append(
                "The full cache finds none of the facts either, so retrieval says nothing: the order is by KL alone."
            )
        return sentences


def _row(entry: TunedRecipe, *, alive: bool) -> dict[str, Any]:
    names = ("keep", "share", "kv_bytes", "kv_bytes_full", "prefill_seconds", "prefill_seconds_full")
    return {
        "recipe": str(entry.recipe),
        "pieces": len(entry.figures),
        "finalist": alive,
        "kl": _figure(entry.kl),
        "top1": entry.mean("top1"),
        **({} if entry.found is None else {"found": _figure(entry.found)}),
        **{name: entry.mean(name) for name in names},
    }


def _figure(figure: Figure | None) -> dict[str, float | None]:
    if figure is None:
        return {"mean": None, "low": None, "high": None}
    return {"mean": figure.value, "low": figure.low, "high": figure.high}
