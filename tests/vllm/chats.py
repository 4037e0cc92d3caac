"""The reference of conversations: the model goes on with what it has kept, one head at a time."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass, replace

from keepset import Recipe
from keepset.recipe import Schedule
from tests.paged.reference import budget_of
from tests.vllm.oracle import Oracle

Positions = dict[int, list[list[int]]]
"""The positions that each head of each layer has."""


@dataclass(frozen=True)
class ChatTurn:
    """One turn: its whole prompt, its answer, how many tokens it goes on from, and what is there of these."""

    prompt: list[int]
    answer: list[int]
    goes_on_from: int
    begins_with: Positions


def replay(
    oracle: Oracle, text: str, new: Sequence[list[int]], answers: int, *, again: Sequence[int] = ()
) -> list[ChatTurn]:
    """Follow a conversation.

    Args:
        oracle: the model.
        text: the recipe, with `turns=True`.
        new: the tokens that each turn adds to what was said.
        answers: tokens of each answer.
        again: turns that are asked for once more, before the next one.
    """
    recipe, turns = Recipe.parse(text), []
    oracle._layers, oracle._memory, length, said = [], {}, 0, []
    for number, added in enumerate(new):
        prompt = [*said, *added]
        if number:
            compact(oracle, recipe, length, len(turns[-1].prompt))
        turns.append(ask(oracle, prompt, length, answers))
        if number in again:
            for layer in oracle._layers:  # all but the prompt's last token is still there
                layer.heads = [head.only(range(len(prompt) - 1)) for head in layer.heads]
                layer.queries, layer.unrotated = (
                    part[:, : len(prompt) - 1] for part in (layer.queries, layer.unrotated)
                )
                layer.hidden = layer.hidden[: len(prompt) - 1]
            turns.append(ask(oracle, prompt, len(prompt) - 1, answers))
        said = [*prompt, *turns[-1].answer]
        length = len(said) - 1  # the last token is not fed
    return turns


def ask(oracle: Oracle, prompt: list[int], length: int, answers: int) -> ChatTurn:
    """Answer a prompt, of which the first `length` tokens were fed."""
    begins_with = {index: [list(head.positions) for head in layer.heads] for index, layer in enumerate(oracle._layers)}
    ids, done = list(prompt), length
    for _ in range(answers):
        best, _ = oracle._forward(ids, done, len(ids) - 1)
        done = len(ids)
        ids.append(int(best[-1]))
    return ChatTurn(prompt, ids[len(prompt) :], length, begins_with)


def compact(oracle: Oracle, recipe: Recipe, length: int, prompt: int) -> None:
    """Drop what the recipe does not keep of all that was said: a share is one of these tokens."""
    budget = budget_of(recipe, oracle._layers[0].heads[0].keys.shape[-1])
    if isinstance(budget.keep, float):
        always = budget.sinks + budget.recent
        budget = replace(budget, keep=max(int(budget.keep * length + 1e-9), always, 1))
    event = Recipe(recipe.written, budget, Schedule(every=1 << 20))
    observations = [oracle._observe(event, index, layer, length, prompt) for index, layer in enumerate(oracle._layers)]
    chosen = event.method.select_all(observations, budget)
    for index, layer in enumerate(oracle._layers):
        oracle._remember(index, layer.heads, chosen.layer(index).state)
        layer.heads = [
            head.only(chosen.positions(index, 0, number).tolist()) for number, head in enumerate(layer.heads)
        ]
