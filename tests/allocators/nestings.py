"""All nestings of two or three allocators, post-processors and presets, and what a request holds at each event."""

from __future__ import annotations

import itertools
from collections.abc import Sequence
from dataclasses import dataclass
from functools import cache

import torch
from torch import Tensor

from keepset import METHODS, Budget, Method
from keepset.core.method import Allocator
from keepset.errors import RecipeError
from tests.methods.naive import SMALL, Shape, observe

Nesting = tuple[str, ...]
"""Names of methods, the outermost first."""

AROUND = [name for name, kind in METHODS.items() if issubclass(kind, Allocator)]
INNERMOST = ["snapkv", "duo_attention", "gvote", "compilerkv", "kvcompose", "kvzip", "glance", "reread"]
"""A scorer that leaves all numbers to others, for all such, and every method that says some itself."""
CAPS = {"gvote": dict(p_nuc=0.3, samples=2, future=3), "compilerkv": dict(window=3, elastic=True)}
"""Methods to which a budget is a cap."""

LAYERS, HEADS = (0, 2, 7), 3


def made(nesting: Nesting) -> Method:
    """The method, which reads no more than short texts have."""
    *outer, innermost = nesting
    method = METHODS[innermost](**(SMALL | CAPS).get(innermost, {}))
    for name in reversed(outer):
        method = METHODS[name](method, **SMALL.get(name, {}))
    return method


@cache
def refusals() -> dict[Nesting, str]:
    """Every nesting, and the sentence with which it is refused; "" where it is not."""
    found = {}
    for depth, innermost in itertools.product((1, 2, 3), INNERMOST):
        for outer in itertools.product(AROUND, repeat=depth):
            nesting = (*outer, innermost)
            try:
                made(nesting)
            except RecipeError as error:
                found[nesting] = str(error)
            else:
                found[nesting] = ""
    return found


def allowed() -> list[Nesting]:
    return [nesting for nesting, sentence in refusals().items() if not sentence]


@dataclass
class Held:
    """The entries that every head of every layer holds of one request, and what the method remembers of them."""

    positions: list[list[list[int]]]
    state: list[dict[str, list[list[float]]]]

    @classmethod
    def of_prompt(cls, length: int) -> Held:
        return cls([[list(range(length)) for _ in range(HEADS)] for _ in LAYERS], [{} for _ in LAYERS])

    @property
    def counts(self) -> list[list[int]]:
        return [[len(head) for head in layer] for layer in self.positions]

    def grown(self, first: int, tokens: int) -> Held:
        """Return the state with new tokens, of which nothing is remembered yet."""
        positions = [[[*head, *range(first, first + tokens)] for head in layer] for layer in self.positions]
        zeros = [0.0] * tokens
        return Held(
            positions, [{name: [[*h, *zeros] for h in of] for name, of in columns.items()} for columns in self.state]
        )

    def compressed(self, method: Method, budget: Budget, length: int, prompt: int, seed: int) -> Held:
        """Return what stays at an event whose numbers are random."""
        observations = [
            observe(
                Shape((max(map(len, heads)),), HEADS, 2, 4, 3),
                layer=layer,
                layers=LAYERS,
                seed=seed + layer,
                positions=_rectangle(heads),
                valid=_rectangle([[True] * len(head) for head in heads]),
                lengths=torch.tensor([length]),
                prompts=torch.tensor([prompt]),
                state={name: _rectangle(column) for name, column in state.items()},
            )
            for layer, heads, state in zip(LAYERS, self.positions, self.state, strict=True)
        ]
        answer = method.select_all(observations, budget)
        positions, states = [], []
        for layer in LAYERS:
            kept = answer.layer(layer)
            positions.append([answer.positions(layer, 0, head).tolist() for head in range(HEADS)])
            head_indices = list(enumerate(kept.indices.split(kept.counts.flatten().tolist())))
            states.append(
                {name: [of[0, head][at].tolist() for head, at in head_indices] for name, of in kept.state.items()}
            )
        return Held(positions, states)


def _rectangle(heads: Sequence[Sequence[float]]) -> Tensor:
    """Heads as rows of one request, filled up with nothing."""
    longest = max(map(len, heads))
    rows = [torch.tensor(head) for head in heads]
    return torch.stack([torch.cat([row, row.new_zeros(longest - len(row))]) for row in rows])[None]
