"""The reference for engines, written in transformers: every head of every layer has its own list of entries.

It takes the steps that the engine took, with the engine's own tokens, and knows nothing of pages.
"""

from __future__ import annotations

from collections import OrderedDict
from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass, field
from functools import cache
from typing import Any

import torch
from torch import Tensor
from transformers import AttentionInterface, AttentionMaskInterface, PreTrainedModel
from transformers.models.llama.modeling_llama import rotate_half

from keepset import Observation, Recipe
from keepset.core.features.attention import AttentionColumns, PromptQueryAttention
from keepset.core.features.moments import HiddenDistribution, HiddenMoments, QueryDistribution, QueryMoments
from keepset.core.features.queries import WindowAttention
from keepset.core.features.runtime_features import ModelStatistics
from keepset.core.statistics import load
from keepset.kernels.softmax import Softmax
from tests.paged.reference import blocks_gone, budget_of, is_executed, newest_event

NAME = "one_head_at_a_time"
_REMEMBERED = 6


@dataclass
class Head:
    """Entries of one KV head: keys, values and original positions, oldest first."""

    keys: Tensor
    values: Tensor
    positions: list[int]

    def only(self, positions: Sequence[int]) -> Head:
        """The entries at these positions."""
        wanted = set(positions)
        places = [place for place, position in enumerate(self.positions) if position in wanted]
        return Head(self.keys[places], self.values[places], [self.positions[place] for place in places])


@dataclass
class Layer:
    """One layer: its heads, its input, and all queries so far, after and before rotation, `[query_heads, n, head_dim]`.

    One with a `window` sees so many tokens, itself among them, and is not compressed. `blocks_gone` counts the leading
    blocks that the engine can do without, where only the data say how many.
    """

    heads: list[Head]
    queries: Tensor
    unrotated: Tensor
    hidden: Tensor
    window: int | None = None
    blocks_gone: int = 0

    def copy(self) -> Layer:
        """Independent of what happens to this one: tensors are replaced, never written to."""
        return Layer(list(self.heads), self.queries, self.unrotated, self.hidden, self.window, self.blocks_gone)


@dataclass
class Replay:
    """Best next tokens, their least lead, and events: (point, positions that layers and heads kept, layers left)."""

    best: list[int] = field(default_factory=list)
    margin: float = float("inf")
    events: list[tuple[int, dict[int, list[list[int]]], list[int]]] = field(default_factory=list)


Stored = Callable[[int, Tensor, Tensor], tuple[Tensor, Tensor]]
"""Returns what a cache holds of a layer's keys and values, `[..., head_dim]`; first comes the layer's index."""


class Oracle:
    """A model whose attention is a loop over heads. A quantised cache has a `stored`."""

    def __init__(
        self, model: PreTrainedModel, block_size: int, stored: Stored = lambda _, keys, values: (keys, values)
    ) -> None:
        # Each of several has a name of its own: the registry holds one function for a name.
        self._name = f"{NAME}_{id(self)}"
        AttentionInterface.register(self._name, self._attend)
        AttentionMaskInterface.register(self._name, lambda *args, **kwargs: None)
        self.model, self.block_size, self._stored = model, block_size, stored
        self._layers: list[Layer] = []
        self._start = 0
        self._raw: dict[int, tuple[Tensor, Tensor]] = {}  # a layer's input, and its queries before rotation
        # What methods wrote beside entries, by layer, name, head and position.
        self._memory: dict[int, dict[str, list[dict[int, float]]]] = {}
        self._prompts: OrderedDict[tuple[int, ...], tuple[list[Layer], Tensor, Tensor]] = OrderedDict()
        for index, layer in enumerate(model.model.layers):
            layer.self_attn.q_proj.register_forward_hook(
                lambda module, args, output, index=index: self._raw.__setitem__(index, (args[0], output))
            )

    def replay(
        self, recipe: Recipe | None, prompt: list[int], tokens: list[int], steps: Sequence[tuple[int, int]]
    ) -> Replay:
        """Follow a request in the engine's steps (first token, number of tokens).

        One that does not follow the step before starts the request again, at 0 or behind a prefix that was cached.
        """
        found, ids, done = Replay(), prompt + tokens, 0
        for run in _runs(steps):
            self._memory, length = {}, 0
            ends = {stop for _, stop in run}
            for start, stop in _merged(run, recipe, len(prompt)):
                first = max(length, len(prompt) - 1)  # the first token after which there is one to choose
                best, margin = self._forward(ids[:stop], length, first)
                for end in range(first + 1, stop + 1):
                    # Only the end of a step, and where no token was known yet, gives a new one.
                    if end in ends and end - len(prompt) == done:
                        found.margin = min(found.margin, float(margin[end - 1 - first]))
                        found.best.append(int(best[end - 1 - first]))
                        done += 1
                length = stop
                if recipe is not None and (event := newest_event(recipe, len(prompt), start, stop)):
                    self._event(found, recipe, len(prompt), event, stop)
        return found

    @torch.no_grad()
    def _forward(self, ids: list[int], start: int, first: int) -> tuple[Tensor, Tensor]:
        """Feeds the tokens from `start` on: the best next token after each from `first` on, and its lead.

        The beginning of a text, which nothing has compressed yet, is computed once for all recipes.
        """
        text = tuple(ids)
        if start == 0 and text in self._prompts:
            self._prompts.move_to_end(text)
            layers, best, margin = self._prompts[text]
            self._layers = [layer.copy() for layer in layers]
            return best, margin
        if self.model.config._attn_implementation != self._name:
            self.model.set_attn_implementation(self._name)
        if start == 0:
            self._layers = []
        self._start = start
        logits = self.model(
            torch.tensor([ids[start:]]),
            position_ids=torch.arange(start, len(ids))[None],
            use_cache=False,
            logits_to_keep=max(len(ids) - first, 1),
        ).logits[0]
        two = logits.topk(2)
        best, margin = two.indices[:, 0], two.values[:, 0] - two.values[:, 1]
        if start == 0:
            self._prompts[text] = [layer.copy() for layer in self._layers], best, margin
            while len(self._prompts) > _REMEMBERED:
                self._prompts.popitem(last=False)
        return best, margin

    def _attend(
        self,
        module: Any,
        query: Tensor,
        key: Tensor,
        value: Tensor,
        attention_mask: Any,
        scaling: float,
        sliding_window: int | None = None,
        **_: Any,
    ) -> tuple[Tensor, None]:
        """Appends the new entries, and attends head by head."""
        new, index = query.shape[2], module.layer_idx
        key, value = self._stored(index, key, value)
        group = query.shape[1] // key.shape[1]
        hidden, projected = self._raw[index]
        raw = projected.view(1, new, query.shape[1], -1).transpose(1, 2)[0]
        if index == len(self._layers):
            empty = [Head(key[0, 0, :0], value[0, 0, :0], []) for _ in range(key.shape[1])]
            self._layers.append(Layer(empty, query[0, :, :0], raw[:, :0], hidden[0, :0], sliding_window))
        layer = self._layers[index]
        layer.queries = torch.cat([layer.queries, query[0]], 1)
        layer.unrotated = torch.cat([layer.unrotated, raw], 1)
        layer.hidden = torch.cat([layer.hidden, hidden[0]])
        output = torch.empty(1, new, query.shape[1], value.shape[-1])
        mine = torch.arange(self._start, self._start + new)
        for number, head in enumerate(layer.heads):
            longer = Head(
                torch.cat([head.keys, key[0, number]]),
                torch.cat([head.values, value[0, number]]),
                head.positions + mine.tolist(),
            )
            layer.heads[number] = longer
            ages = mine[:, None] - torch.tensor(longer.positions)
            unseen = (ages < 0) | (ages >= (layer.window or len(longer.positions) + ages.max()))
            for member in range(number * group, (number + 1) * group):
                logits = (query[0, member] @ longer.keys.t() * scaling).masked_fill(unseen, float("-inf"))
                output[0, :, member] = logits.softmax(-1) @ longer.values
        return output, None

    def _event(self, found: Replay, recipe: Recipe, prompt: int, at: int, length: int) -> None:
        """Compresses every layer that has something to drop."""
        kept: dict[int, list[list[int]]] = {}
        left: list[int] = []
        method = recipe.method
        whole = self._compressed
        observations = [self._observe(recipe, index, self._layers[index], at, prompt) for index in whole]
        chosen = method.select_all(observations, budget_of(recipe, observations[0].head_dim))
        for index in whole:
            layer = self._layers[index]
            old = [[position for position in head.positions if position < at] for head in layer.heads]
            answer = [chosen.positions(index, 0, number).tolist() for number in range(len(old))]
            if method.traits.fixed_total and not is_executed(recipe, self.block_size, at, old, answer):
                continue
            kept[index] = answer
            if not method.traits.fixed_total and not self._fits(layer, [len(head) for head in answer], at, length):
                left.append(index)
                continue
            self._remember(index, layer.heads, chosen.layer(index).state)
            newer = [[position for position in head.positions if position >= at] for head in layer.heads]
            layer.heads = [head.only(stay + new) for head, stay, new in zip(layer.heads, answer, newer, strict=True)]
        if kept:
            found.events.append((at, kept, left))

    def _observe(self, recipe: Recipe, index: int, layer: Layer, at: int, prompt: int) -> Observation:
        """The observation of an event."""
        heads = [head.only(range(at)) for head in layer.heads]
        most = max(len(head.positions) for head in heads)
        keys = torch.zeros(1, len(heads), most, heads[0].keys.shape[-1])
        values = torch.zeros(1, len(heads), most, heads[0].values.shape[-1])
        positions = torch.zeros(1, len(heads), most, dtype=torch.long)
        valid = torch.zeros(1, len(heads), most, dtype=torch.bool)
        state = {name: torch.zeros(1, len(heads), most) for name in self._memory.get(index, {})}
        for number, head in enumerate(heads):
            have = len(head.positions)
            keys[0, number, :have], values[0, number, :have] = head.keys, head.values
            positions[0, number, :have] = torch.tensor(head.positions)
            valid[0, number, :have] = True
            for name, column in state.items():
                memory = self._memory[index][name][number]
                column[0, number, :have] = torch.tensor([memory.get(position, 0.0) for position in head.positions])
        needs = recipe.method.traits.needs
        window = torch.arange(at - needs.window, at)
        features: dict[Any, Any] = {
            of: self._moments(layer, of.skip, min(of.buffer, recipe.schedule.every or at), at, prompt)
            for of in needs.of(QueryMoments)
        }
        features |= {of: load(of.file) for of in needs.of(ModelStatistics)}
        for columns in needs.of(AttentionColumns):
            attention = self._columns(layer, at)
            statistic = attention.sum(1) if columns.statistic == "sum" else attention.amax(1)
            features[columns] = statistic[None].float()
        for again in needs.of(PromptQueryAttention):
            features[again] = self._once_more(layer, again.stride, at)[None].float()
        for hidden in needs.of(HiddenMoments):
            mean, variance = _hidden_moments(layer.hidden[hidden.skip : at].double())
            features[hidden] = HiddenDistribution(
                mean, variance, lambda rows, future: self._future_queries(index, rows, at, future)
            )
        seen = Observation(
            keys=keys,
            values=values,
            positions=positions,
            valid=valid,
            queries=_at(layer.queries, window)[None] if needs.window else None,
            query_positions=window[None] if needs.window else None,
            features=features,
            lengths=torch.tensor([at]),
            prompts=torch.tensor([prompt]),
            softmax=Softmax(heads[0].keys.shape[-1] ** -0.5),
            layer=index,
            layers=self._compressed,
            state=state,
        )
        if at == prompt:
            return seen
        return seen.with_features(
            {of: of.made(seen, min(of.window, recipe.schedule.every)) for of in needs.of(WindowAttention)}
        )

    @property
    def _compressed(self) -> list[int]:
        return [index for index, layer in enumerate(self._layers) if layer.window is None]

    def _columns(self, layer: Layer, at: int) -> Tensor:
        """The whole attention of a prompt that nothing has compressed, `[query_heads, n, n]`."""
        group = layer.queries.shape[0] // len(layer.heads)
        keys = torch.stack([head.keys[:at] for head in layer.heads]).repeat_interleave(group, 0).double()
        logits = layer.queries[:, :at].double() @ keys.transpose(1, 2) * keys.shape[-1] ** -0.5
        return logits.masked_fill(torch.ones(at, at).triu(1).bool(), float("-inf")).softmax(-1)

    def _once_more(self, layer: Layer, stride: int, at: int) -> Tensor:
        """Mean squares of what a prompt's entries would receive of its queries, all turned to the place after it."""
        group = layer.queries.shape[0] // len(layer.heads)
        rows = layer.unrotated[:, :at:stride].double()
        keys = torch.stack([head.keys[:at] for head in layer.heads]).repeat_interleave(group, 0).double()
        turned = rows @ self._mean_rotation(at, 1, rows.shape[-1]).double()
        return (turned @ keys.transpose(1, 2) * keys.shape[-1] ** -0.5).softmax(-1).square().mean(1)

    @torch.no_grad()
    def _future_queries(self, index: int, hidden: Tensor, at: int, future: int) -> Tensor:
        """Queries of these hidden states, turned as the mean of the positions to come does."""
        projected = self.model.model.layers[index].self_attn.q_proj(hidden[0])
        heads = projected.view(hidden.shape[1], self.model.config.num_attention_heads, -1).transpose(0, 1)
        return (heads @ self._mean_rotation(at, future, heads.shape[-1]))[None]

    def _moments(self, layer: Layer, skip: int, buffer: int, at: int, prompt: int) -> QueryDistribution:
        """Features of the whole prompt at its end, and of the newest queries later."""
        first = max(skip, 0 if at == prompt else at - buffer)
        rows = layer.unrotated[:, first:at].double()
        mean = rows.mean(1) if rows.shape[1] else rows.new_zeros(rows.shape[0], rows.shape[2])
        centred = rows - mean[:, None]
        covariance = centred.transpose(1, 2) @ centred / max(rows.shape[1], 1)

        def rotate(vectors: Tensor, future: int) -> Tensor:
            return vectors @ self._mean_rotation(at, future, vectors.shape[-1])

        return QueryDistribution(mean[None].float(), covariance[None].float(), rotate)

    @cache  # noqa: B019  # there is one oracle
    def _mean_rotation(self, at: int, future: int, width: int) -> Tensor:
        """The matrix that turns a row as the mean of the `future` positions from `at` on does."""
        unit = torch.eye(width)
        cos, sin = self.model.model.rotary_emb(unit, torch.arange(at, at + future)[None])
        return sum(unit * cos[0, t] + rotate_half(unit) * sin[0, t] for t in range(future)) / future

    def _remember(self, index: int, heads: list[Head], state: Mapping[str, Tensor]) -> None:
        self._memory[index] = {
            name: [
                dict(zip(head.positions, column[0, number].tolist(), strict=False)) for number, head in enumerate(heads)
            ]
            for name, column in state.items()
        }

    def _fits(self, layer: Layer, kept: list[int], at: int, length: int) -> bool:
        """Return whether what stays fits into the blocks that the layer still has, and note how many are not needed."""
        gone = blocks_gone(self.block_size, kept, at, length)
        if gone < layer.blocks_gone:
            return False
        layer.blocks_gone = gone
        return True


def _hidden_moments(rows: Tensor) -> tuple[Tensor, Tensor]:
    rows = rows if len(rows) else rows.new_zeros(1, rows.shape[1])
    return rows.mean(0)[None].float(), rows.var(0, unbiased=False)[None].float()


def _at(rows: Tensor, positions: Tensor) -> Tensor:
    """Rows at these positions, zeros before the text's beginning."""
    return rows[:, positions.clamp(min=0)].masked_fill((positions < 0)[:, None], 0.0)


def _runs(steps: Sequence[tuple[int, int]]) -> list[list[tuple[int, int]]]:
    """Steps as (start, stop), cut where a request starts again."""
    runs: list[list[tuple[int, int]]] = []
    for start, tokens in steps:
        if not runs or runs[-1][-1][1] != start:
            runs.append([])
        runs[-1].append((start, start + tokens))
    return runs


def _merged(run: list[tuple[int, int]], recipe: Recipe | None, prompt: int) -> list[tuple[int, int]]:
    """Joins steps that no event separates: their tokens may as well be fed together."""
    merged = [run[0]]
    for start, stop in run[1:]:
        before = merged[-1]
        if recipe is None or not newest_event(recipe, prompt, *before):
            merged[-1] = before[0], stop
        else:
            merged.append((start, stop))
    return merged
