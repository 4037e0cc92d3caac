"""`Measurer`: measures recipes on one piece of a text, with one prefill for all of them."""

from collections.abc import Iterator, Sequence
from dataclasses import replace
from typing import Any

import torch
from transformers import PreTrainedModel

from keepset.bench.compare.comparison import fidelity
from keepset.bench.generation import end_tokens
from keepset.bench.record import Record
from keepset.bench.tasks.task import Tokenizer
from keepset.bench.tune.excerpts import ANSWER_TOKENS, TextPiece
from keepset.errors import BudgetError, KeepsetError
from keepset.hf.cache import Cache
from keepset.hf.prompt_session import PromptSession, warm_up
from keepset.recipe import Recipe


class Measurer:
    """Measure recipes on pieces of a text.

    Attributes:
        full_found: by piece, which of its facts the full cache finds.
        full_bytes: by piece, bytes that the full cache holds.
    """

    def __init__(
        self, model: PreTrainedModel, tokenizer: Tokenizer, pieces: Sequence[TextPiece], keep: int | float
    ) -> None:
        self._model, self._tokenizer, self._keep = model, tokenizer, keep
        self._pieces = [piece.to(model.device) for piece in pieces]
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
            record = Record(str(recipe), str(recipe.without_budget()))
            try:
                prompt = session.compress(recipe)
                self._check_share(recipe, prompt.event.kept / prompt.event.entries, piece)
                figures = fidelity(prompt, reference, piece.continuation)
                if piece.facts:
                    figures |= {"facts": len(piece.facts), "facts_found": sum(self._ask(piece, prompt.cache))}
                yield replace(record, figures=figures)
                del prompt
            except KeepsetError as error:
                yield replace(record, error=str(error))

    def _check_share(self, recipe: Recipe, kept: float, piece: TextPiece) -> None:
        """Refuse a recipe that chooses its own number of entries and keeps more than the budget."""
        most = self._keep if isinstance(self._keep, float) else self._keep / piece.prompt.shape[1]
        if not recipe.method.traits.needs_budget and kept > most:
            raise BudgetError(
                f"{recipe} chooses itself how much it keeps, and kept {kept:.0%}: that is more than {most:.0%}."
            )

    @torch.no_grad()
    def _ask(self, piece: TextPiece, cache: Cache) -> tuple[bool, ...]:
        """Return which facts the greedy answers hold; all questions are asked at once, each on a fork of the cache."""
        if not piece.facts:
            return ()
        questions = [self._tokenizer(text, add_special_tokens=False)["input_ids"] for text in piece.questions]
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
