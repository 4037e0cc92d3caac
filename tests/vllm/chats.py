"""The reference of conversations: the model goes on with what it has kept, one head at a time."""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from dataclasses import dataclass, replace

from keepset import Recipe
from keepset.recipe import Schedule
from tests.paged.reference import budget_of
from tests.vllm.oracle import Oracle

Positions = dict[int, list[list[int]]]
"""The positions that each head of each layer has."""


@dataclass(frozen=True)
class ChatTurn:
    """One turn: prompt and answer, how many of the prompt's tokens were not computed, and what is there of these."""

    prompt: list[int]
    answer: list[int]
    reused: int
    begins_with: Positions


def replay(
    oracle: Oracle,
    text: str,
    new: Sequence[list[int]],
    answers: int,
    again: Sequence[int] = (),
    left_out: Mapping[int, Sequence[tuple[int, int]]] | None = None,
    reworded: Mapping[int, int] | None = None,
    system: int = 0,
) -> list[ChatTurn]:
    """Follow a conversation.

    Args:
        oracle: the model.
        text: the recipe, with `turns=True`.
        new: the tokens that each turn adds to what was said.
        answers: tokens of each answer.
        again: turns that are asked for once more, before the next one.
        left_out: spans of positions that the client leaves out from a turn on.
        reworded: turns before which the client replaces the newest answer, all but so many of its first tokens.
        system: so many first tokens always stay.
    """
    recipe, turns = Recipe.parse(text), []
    oracle._layers, oracle._memory = [], {}
    ids: list[int] = []  # by position
    gone: set[int] = set()
    prompt = length = 0
    for number, added in enumerate(new):
        if number:
            compact(oracle, recipe, length, length - len(gone), prompt, system)
        for first, end in (left_out or {}).get(number, ()):
            gone |= set(range(first, end))
            for layer in oracle._layers:
                there = [position for position in range(length) if not first <= position < end]
                layer.heads = [head.only(there) for head in layer.heads]
        if number in (reworded or {}):
            length = prompt + (reworded or {})[number]
            take_back(oracle, length)
            del ids[length:]
        ids += added
        prompt = len(ids)
        turns.append(ask(oracle, ids, gone, length, answers, recipe))
        if number in again:
            take_back(oracle, prompt - 1)  # all but the prompt's last token is still there
            turns.append(ask(oracle, ids, gone, prompt - 1, answers, recipe))
        ids += turns[-1].answer
        length = len(ids) - 1  # the last token is not fed
    return turns


def take_back(oracle: Oracle, length: int) -> None:
    """Forget all tokens but the first `length`."""
    for layer in oracle._layers:
        layer.heads = [head.only(range(length)) for head in layer.heads]
        layer.queries, layer.unrotated = (part[:, :length] for part in (layer.queries, layer.unrotated))
        layer.hidden = layer.hidden[:length]
    for columns in oracle._memory.values():
        for heads in columns.values():
            for numbers in heads:
                for position in [position for position in numbers if position >= length]:
                    del numbers[position]


def ask(
    oracle: Oracle, ids: list[int], gone: set[int], length: int, answers: int, recipe: Recipe | None = None
) -> ChatTurn:
    """Answer a prompt, of which the first `length` tokens were fed; the recipe may have an `every`."""
    every = None if recipe is None else recipe.schedule.every
    begins_with = {
        index: [list(head.positions) for head in layer.heads]
        for index, layer in enumerate(oracle._layers)
        if layer.window is None
    }
    said, done = list(ids), length
    for _ in range(answers):
        best, _ = oracle._forward(said, done, len(said) - 1)
        done = len(said)
        said.append(int(best[-1]))
        if recipe is not None and every is not None and done > len(ids) and (done - len(ids)) % every == 0:
            compact(oracle, recipe, done, done - len(gone), len(ids))
    prompt = [token for position, token in enumerate(ids) if position not in gone]
    return ChatTurn(prompt, said[len(ids) :], length - len(gone), begins_with)


def compact(oracle: Oracle, recipe: Recipe, length: int, said: int, prompt: int, system: int = 0) -> None:
    """Drop what the recipe does not keep of all that was said: a share is one of these tokens."""
    budget = budget_of(recipe, oracle._layers[0].heads[0].keys.shape[-1])
    budget = replace(budget, protect=[[0, system]]) if system else budget
    if said < budget.short:
        return
    budget = replace(budget, short=0)
    if isinstance(budget.keep, float):
        always = budget.sinks + budget.recent
        budget = replace(budget, keep=max(int(budget.keep * said + 1e-9), always, 1))
    event = Recipe(recipe.written, budget, Schedule(every=recipe.schedule.every or 1 << 20))
    compressed = {index: layer for index, layer in enumerate(oracle._layers) if layer.window is None}
    observations = [oracle._observe(event, index, layer, length, prompt) for index, layer in compressed.items()]
    chosen = event.method.select_all(observations, budget)
    for index, layer in compressed.items():
        oracle._remember(index, layer.heads, chosen.layer(index).state)
        layer.heads = [
            head.only(chosen.positions(index, 0, number).tolist()) for number, head in enumerate(layer.heads)
        ]
