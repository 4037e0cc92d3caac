"""Compression while decoding, against a reference that holds everything and keeps lists of what was not dropped."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass, field, replace
from functools import cached_property
from typing import Any, ClassVar

import pytest
import torch
from jaxtyping import Float
from torch import Tensor
from torch.utils._python_dispatch import TorchDispatchMode
from torch.utils._pytree import tree_leaves
from transformers import AttentionInterface

import keepset
from keepset.core.budget import Budget
from keepset.core.feature import Needs
from keepset.core.features.moments import QueryDistribution, QueryMoments
from keepset.core.features.queries import WindowAttention, WindowSums
from keepset.core.features.runtime_features import RecentQueries
from keepset.core.method import Method
from keepset.core.observation import Observation
from keepset.core.traits import Traits
from keepset.hf import layer_stack
from keepset.kernels.softmax import Softmax
from tests.hf.models import (
    allocated,
    extended,
    feed,
    full,
    generate,
    hidden_states,
    kept_of,
    padded_prompt,
    prompt,
    refusal,
    rotated,
    same_keep_set,
    tiny,
)
from tests.hf.models import recipe as by_text

LENGTH, NEW = 21, 24

# --- the reference: one request


@dataclass
class Layer:
    """Everything that passed: `[heads, tokens, dim]`; and the positions that each KV head has not dropped."""

    module: Any
    queries: Tensor
    keys: Tensor
    values: Tensor
    hidden: Tensor | None = None
    kept: list[list[int]] = field(default_factory=list)
    state: dict[str, Tensor] = field(default_factory=dict)
    seen: list[list[tuple[list[int], Tensor]]] = field(default_factory=list)
    """Of every token and KV head the positions that it looked at, and the logits `[group, positions]`."""


class Naive:
    """The model without a cache of its own; each layer's attention is written out over what the heads kept."""

    current: Naive

    def __init__(self, model: Any, recipe: keepset.Recipe, prompt_length: int | None = None) -> None:
        self.model, self.recipe, self.prompt = model, recipe, prompt_length
        self.layers: dict[int, Layer] = {}
        self.length = 0
        self.steps: list[int] = []
        self.at_step: int | None = None
        self.events: list[tuple[int, dict[int, list[list[int]]]]] = []
        self.hidden: dict[int, list[Tensor]] = {}

    @torch.no_grad()
    def feed(self, ids: Tensor) -> Tensor:
        Naive.current = self
        n = ids.shape[1]
        self.prompt = self.prompt or n
        if len(self.steps) == self.length:  # or somebody has said at which steps of a batch these tokens came
            first = self.steps[-1] + 1 if self.steps else 0
            self.steps += range(first, first + n)
        implementation = self.model.config._attn_implementation
        self.model.set_attn_implementation("naive every")
        try:
            positions = torch.arange(self.length, self.length + n)[None]
            with hidden_states(self.model) as self.hidden:
                logits = self.model(ids, position_ids=positions, use_cache=False).logits
        finally:
            self.model.set_attn_implementation(implementation)
        point = self.point(self.length, self.length + n)
        self.length += n
        if point is not None:
            self.compress(point)
        return logits[0]

    def say(self, ids: Tensor, new: int) -> Tensor:
        """Greedy continuation, `[1, tokens]`, as `generate` does it: the last token is not fed."""
        said = ids
        logits = self.feed(ids[:, self.length :])
        for step in range(new):
            said = torch.cat([said, logits[-1:].argmax(-1, keepdim=True)], 1)
            if step < new - 1:
                logits = self.feed(said[:, -1:])
        return said

    def point(self, before: int, after: int) -> int | None:
        schedule, found = self.recipe.schedule, None
        for length in range(before + 1, after + 1):
            since = length - self.prompt
            if (since == 0 and schedule.prefill) or (since > 0 and since % schedule.every == 0):
                found = length
        return found

    def attend(self, module: Any, query: Tensor, key: Tensor, value: Tensor, scaling: float, window: Any) -> Tensor:
        index, n = module.layer_idx, query.shape[1]
        hidden = self.hidden[index][0][0] if index in self.hidden else None
        if index not in self.layers:
            self.layers[index] = Layer(module, query, key, value, hidden, [[] for _ in key])
        else:
            layer = self.layers[index]
            layer.queries = torch.cat([layer.queries, query], 1)
            layer.keys, layer.values = torch.cat([layer.keys, key], 1), torch.cat([layer.values, value], 1)
            layer.hidden = None if hidden is None else torch.cat([layer.hidden, hidden])
        layer = self.layers[index]
        group, output = len(query) // len(key), torch.empty(len(query), n, value.shape[-1])
        for head, kept in enumerate(layer.kept):
            kept.extend(range(self.length, self.length + n))
            for i in range(n):
                at = self.length + i
                layer.seen += [[]] * (len(layer.seen) == at)
                visible = [p for p in kept if p <= at and (window is None or at - p < window)]
                members = slice(head * group, (head + 1) * group)
                logits = query[members, i] @ layer.keys[head, visible].T * scaling
                layer.seen[at] = [*layer.seen[at], (visible, logits)]
                output[members, i] = logits.softmax(-1) @ layer.values[head, visible]
        return output

    def compress(self, point: int) -> None:
        method, budget = self.recipe.method, self.recipe.budget
        windows = getattr(self.model.config, "layer_types", None) or ["full_attention"] * len(self.layers)
        compressed = [index for index in sorted(self.layers) if windows[index] == "full_attention"]
        observations = [self.observe(index, compressed, point) for index in compressed]
        if method.traits.across_layers:
            keep_set = method.select_all(observations, budget)
        else:
            parts = [method.select(observation, budget).layer(observation.layer) for observation in observations]
            keep_set = keepset.KeepSet(parts)
        for observation in observations:
            layer = self.layers[observation.layer]
            for head, kept in enumerate(layer.kept):
                chosen = keep_set.positions(observation.layer, 0, head).tolist()
                assert set(chosen) <= set(kept)
                layer.kept[head] = chosen + [p for p in kept if p >= point]
                for at in range(point, len(layer.seen)):  # later tokens count as if they had come after the event
                    positions, logits = layer.seen[at][head]
                    stays = [i for i, p in enumerate(positions) if p in set(layer.kept[head])]
                    layer.seen[at][head] = [positions[i] for i in stays], logits[:, stays]
                for name, column in keep_set.layer(observation.layer).state.items():
                    layer.state.setdefault(name, torch.zeros(len(layer.kept), 1000))
                    exists = observation.valid[0, head]
                    layer.state[name][head, observation.positions[0, head, exists]] = column[0, head, exists]
        stay = {index: [[p for p in head if p < point] for head in self.layers[index].kept] for index in compressed}
        self.events.append((point, stay))

    def observe(self, index: int, compressed: list[int], point: int) -> Observation:
        layer, needs = self.layers[index], self.recipe.method.traits.needs
        kept = [[p for p in head if p < point] for head in layer.kept]
        most = max(map(len, kept))
        padded = torch.tensor([head + [0] * (most - len(head)) for head in kept])
        valid = torch.arange(most) < torch.tensor([len(head) for head in kept])[:, None]
        heads = torch.arange(len(kept))[:, None]
        first = max(0, point - (needs.window if point == self.prompt else needs.newest))
        features: dict[Any, Any] = {}
        for of in needs.of(QueryMoments):
            start = of.skip if point == self.prompt else max(of.skip, self.since(point, of.buffer))
            features[of] = self.moments(layer, start, point)
        for window in needs.of(WindowAttention) if point > self.prompt else ():
            sums = self.received(layer, window, point, padded, valid)
            features[window] = WindowSums(sums[None], min(window.window, self.recipe.schedule.every))
        return Observation(
            keys=(layer.keys[heads, padded] * valid[..., None])[None],
            values=(layer.values[heads, padded] * valid[..., None])[None],
            queries=layer.queries[None, :, first:point] if first < point else None,
            query_positions=torch.arange(first, point)[None] if first < point else None,
            positions=padded[None],
            valid=valid[None],
            lengths=torch.tensor([point]),
            prompts=torch.tensor([self.prompt]),
            features=features,
            softmax=Softmax(getattr(layer.module, "scaling", layer.keys.shape[-1] ** -0.5)),
            layer=index,
            layers=compressed,
            state={name: (column[heads, padded] * valid)[None] for name, column in layer.state.items()},
        )

    def since(self, point: int, newest: int) -> int:
        """The first token of the newest so many steps, but not of those before the interval."""
        end = self.steps[point - 1] + 1 if self.at_step is None else self.at_step
        first = end - min(newest, self.recipe.schedule.every)
        return sum(step < first for step in self.steps[:point])

    def received(self, layer: Layer, of: WindowAttention, point: int, padded: Tensor, valid: Tensor) -> Tensor:
        """Return the attention that every entry received, query by query."""
        by_head = of.sums_of == "each"
        group = layer.seen[point - 1][0][1].shape[0]
        sums = torch.zeros(len(layer.kept), 1000, *[group] * by_head)
        for at in range(self.since(point, of.window), point):
            for head, (looked_at, logits) in enumerate(layer.seen[at]):
                counted = torch.tensor([not of.history or p < point - of.window for p in looked_at])
                if counted.any():
                    largest = of.sums_of == "largest"
                    attention = (logits.amax(0, keepdim=True) if largest else logits)[:, counted].softmax(-1)
                    sums[head, torch.tensor(looked_at)[counted]] += attention.t() if by_head else attention.mean(0)
        of_entries = sums[torch.arange(len(sums))[:, None], padded]
        return of_entries * valid.view(*valid.shape, *[1] * by_head)

    def moments(self, layer: Layer, start: int, point: int) -> QueryDistribution:
        module = layer.module
        queries = module.q_proj(layer.hidden[start:point]).unflatten(-1, (-1, module.head_dim))
        if hasattr(module, "q_norm"):
            queries = module.q_norm(queries)
        queries = queries.transpose(0, 1)

        def ahead(rows: Tensor, future: int) -> Tensor:
            rotary = self.model.model.rotary_emb
            return torch.stack([rotated(module, rotary, rows, at) for at in range(point, point + future)]).mean(0)

        covariance = torch.stack([head.T.cov(correction=0) for head in queries])
        return QueryDistribution(queries.mean(1)[None], covariance[None], ahead)


def _naive_attention(
    module: Any, query: Tensor, key: Tensor, value: Tensor, mask: Any, scaling: float | None = None, **kwargs: Any
) -> tuple[Tensor, None]:
    scaling = query.shape[-1] ** -0.5 if scaling is None else scaling
    window = kwargs.get("sliding_window")
    output = Naive.current.attend(module, query[0], key[0], value[0], scaling, window)
    return output[None].transpose(1, 2).contiguous(), None


AttentionInterface.register("naive every", _naive_attention)


def check_events(past: keepset.Cache, naive: Naive) -> None:
    """Check that there were the same events, and that each kept the same positions."""
    assert [event.length for event in past.events] == [length for length, _ in naive.events]
    assert [kept_of(event.keep_set) for event in past.events] == [heads for _, heads in naive.events]
    if past.events:
        assert past.keep_set is past.events[-1].keep_set


# --- recipes


@dataclass(frozen=True)
class Habit(Method):
    """Remembers what an entry was worth at the events before, and that it was there."""

    name: ClassVar[str] = "habit"
    paper: ClassVar[str] = "none"

    @cached_property
    def traits(self) -> Traits:
        return Traits(needs=Needs(RecentQueries(3)))

    def score(self, observation: Observation) -> Float[Tensor, "batch kv_heads entries"]:
        usage = observation.by_query_group(observation.window_attention(3)).sum((2, 3))
        worth = observation.state.get("worth", torch.zeros_like(usage))
        return 0.7 * worth + usage + observation.state.get("age", torch.zeros_like(usage))

    def remember(self, observation: Observation, scores: Tensor) -> dict[str, Tensor]:
        return {"worth": scores, "age": observation.state.get("age", torch.zeros_like(scores)) + 1}


SEGMENTS = "window=6, kernel=3, segment_mass=0.2, min_segment=2, max_segment=6"
RECIPES = {
    name: keepset.Recipe.parse(text)
    for name, text in {
        "snapkv": "snapkv(window=5, kernel=3, keep=12)",
        "tova": "tova(keep=9)",
        "knorm": "knorm(keep=10)",
        "streaming_llm": "streaming_llm(keep=10, sinks=2)",
        "random": "random(keep=8, recent=1)",
        "expected_attention": "expected_attention(future=8, skip=2, buffer=11, keep=11)",
        "keydiff": "keydiff(keep=9)",
        "lagkv": "lagkv(lag=3, skip=1, keep=9)",
        "r_kv": "r_kv(window=3, kernel=3, keep=9)",
        "r_kv_max": "r_kv(window=4, kernel=3, group='max', mix_lambda=0.5, keep=9)",
        "rpc_rare": "rpc(window=16, kernel=3, aggregation='all', keep=22)",
        "rpc": "rpc(window=3, kernel=3, keep=9)",
        "chunkkv": "chunkkv(expected_attention(future=8, skip=1, buffer=6, epsilon=0.01), chunk=3, keep=10)",
        "protected": "snapkv(window=4, keep=28, every=1, protect_prompt=True)",
        "ranges_protected": "adakv(snapkv(window=3), keep=14, protect=[[2, 5], [9, 11]])",
        "random_protected": "random(keep=9, recent=2, every=1, protect_prompt=True)",
        "adakv_protected": "adakv(snapkv(window=3), keep=27, every=1, protect_prompt=True)",
        "compilerkv_each_head": "compilerkv(window=4, elastic=False, global_mean=False, keep=10)",
        "adakv": "adakv(snapkv(window=4), keep=10)",
        "ams": f"ams(tova, {SEGMENTS}, keep=14, sinks=2, recent=3)",
        "adakv_ams": f"adakv(ams(snapkv(window=4), {SEGMENTS}), keep=12, sinks=1, recent=4)",
        "pyramid": "pyramid(snapkv(window=4), keep=10)",
        "pool": "pool(knorm, keep=9, sinks=1)",
        "no_buffer": "expected_attention(future=8, skip=2, buffer=0, keep=11)",
    }.items()
}
RECIPES["habit"] = keepset.Recipe.of(Habit(), keep=9, recent=1)


def scheduled(name: str, every: int, prefill: bool = True) -> keepset.Recipe:
    return replace(RECIPES[name], schedule=keepset.Schedule(prefill, every))


by_recipe = pytest.mark.parametrize("name", RECIPES)
pytestmark = pytest.mark.filterwarnings("ignore:compilerkv has no tables")
with_prefill = pytest.mark.parametrize("prefill", [True, False], ids=["prefill", "no prefill"])


@pytest.mark.parametrize(
    "name",
    ["adakv", "duo_attention", *(pytest.param(name, marks=pytest.mark.full) for name in RECIPES if name != "adakv")],
)
def test_how_much_stays_follows_from_lengths(name: str, monkeypatch: pytest.MonkeyPatch) -> None:
    """A GPU is not asked before entries are stored. An event that keeps more or less is an error."""
    monkeypatch.setattr("keepset.hf.cache.is_async_device", lambda device: True)
    text = f"{by_text(name, 12)[:-1]}, every=5)" if name not in RECIPES else scheduled(name, every=5)
    (ids, mask), cache, start = padded_prompt([0, 6], LENGTH + 17), keepset.Cache(tiny("llama"), text), 0
    for tokens in (LENGTH, 3, 8, 1, 5):  # after prompts of two lengths several at once, also beyond an event
        fed, shown_mask = ids[:, start : start + tokens], mask[:, : start + tokens]
        with torch.no_grad():
            tiny("llama")(fed, attention_mask=shown_mask, past_key_values=cache, use_cache=True)
        start += tokens
    assert [event.length for event in cache.events][-2:] == [LENGTH + 10, LENGTH + 15]


def follow(
    recipe: keepset.Recipe, new: int, model: Any = None, length: int = LENGTH
) -> tuple[keepset.Cache, Naive, Tensor]:
    """Generate from a prompt with the cache and with the reference: the same tokens, events and positions."""
    model, ids = model or tiny("llama"), prompt(1, length)
    past, naive = keepset.Cache(model, recipe, history=True), Naive(model, recipe)
    said = generate(model, ids, past, max_new_tokens=new).sequences
    assert torch.equal(said, naive.say(ids, new))
    check_events(past, naive)
    return past, naive, said


@pytest.mark.spread
@by_recipe
@pytest.mark.parametrize(("every", "new"), [(1, 9), (7, 16), (16, NEW)])
@with_prefill
def test_tokens_and_positions_are_those_of_the_reference(name: str, every: int, new: int, prefill: bool) -> None:
    recipe = scheduled(name, every=every, prefill=prefill)
    new = NEW if "protected" in name else new  # there is little to drop
    past, _, said = follow(recipe, new)
    decoded = (new - 1) // every
    assert len(past.events) == decoded + recipe.schedule.prefill and decoded
    assert not torch.equal(said, full(tiny("llama"), prompt(1, LENGTH), max_new_tokens=new).sequences)


@pytest.mark.few(6)
@pytest.mark.cross
@pytest.mark.parametrize(
    ("architecture", "name", "length"),
    [
        ("llama_mqa", "adakv", LENGTH),
        *((name, "expected_attention", LENGTH) for name in ("llama_yarn", "qwen3", "ministral3", "phi", "cohere")),
        *(("gemma3", name, LENGTH) for name in ("snapkv", "pool")),
        ("phi3_partial", "pyramid", LENGTH),
        ("gpt2", "tova", LENGTH),
        # Prompts shorter than what is looked at.
        *(("smollm3", name, length) for name in ("snapkv", "expected_attention", "habit") for length in (1, 2, 4)),
    ],
)
@with_prefill
def test_other_architectures_and_short_prompts(architecture: str, name: str, length: int, prefill: bool) -> None:
    follow(scheduled(name, every=5, prefill=prefill), 14, tiny(architecture), length)


@pytest.mark.few(2)
@pytest.mark.cross
@pytest.mark.parametrize("name", ["snapkv", "expected_attention", "adakv", "habit", "pool", "knorm"])
@pytest.mark.parametrize("every", [1, 6, 8, 30])
@with_prefill
def test_turns_cross_event_points(name: str, every: int, prefill: bool) -> None:
    """In chunks, too. Of old events figures stay, and what was kept only where a cache has its history."""
    recipe = scheduled(name, every=every, prefill=prefill)
    model, ids = tiny("llama"), prompt(1, LENGTH)
    past, naive = keepset.Cache(model, recipe, history=True), Naive(model, recipe)
    chunked = keepset.Cache(model, recipe, prompt_length=LENGTH)
    for seed, (tokens, new) in enumerate([(9, 3), (1, 6), (25, 2), (2, 4)], 1):
        said = generate(model, ids, past, max_new_tokens=new).sequences
        assert torch.equal(said, naive.say(ids, new))
        chunk = dict(prefill_chunk_size=(4, 16)[every % 3 > 0]) if seed == 1 else {}
        assert torch.equal(generate(model, ids, chunked, max_new_tokens=new, **chunk).sequences, said)
        ids = torch.cat([said, prompt(1, tokens, seed)], 1)
    check_events(past, naive)
    # At most one event in a forward, so some points are passed over.
    points = [length for length in range(LENGTH + every, naive.length + 1, every)]
    assert set(event.length for event in past.events if event.length > LENGTH) <= set(points)
    assert past.layers[0].store.counts == [len(kept) for kept in naive.layers[0].kept]
    for light, whole in zip(chunked.events, past.events, strict=True):
        assert light.kept == whole.kept == whole.keep_set.entries
        assert (light.length, light.entries, light.nbytes_before) == (whole.length, whole.entries, whole.nbytes_before)
        assert (light.keep_set is None) == (light is not chunked.events[-1])
    assert same_keep_set(chunked.keep_set, past.keep_set)


@pytest.mark.parametrize("text", ["knorm(keep=4, every=3)", "snapkv(window=2, keep=4, every=3)"])
@torch.no_grad()
def test_one_call_ends_the_prompt_and_reaches_a_later_event(text: str) -> None:
    """Layers that wait for one another still have the later event before them when the first one ends at the last."""
    model, ids = tiny("llama"), prompt(1, 12)
    past, naive = keepset.Cache(model, text, prompt_length=2, history=True), Naive(model, keepset.Recipe.parse(text), 2)
    calls = [model(part, past_key_values=past, use_cache=True).logits[0] for part in ids.split([1, 5, 6], 1)]
    turns = [naive.feed(part) for part in ids.split([2, 4, 6], 1)]
    torch.testing.assert_close(torch.cat(calls)[1:], torch.cat(turns)[1:], rtol=1e-4, atol=5e-5)
    assert [event.length for event in past.events] == [2, 5, 11]
    check_events(past, naive)


# --- batches


@pytest.mark.few(2)
@pytest.mark.parametrize("name", ["snapkv", "expected_attention", "habit", "adakv"])
@torch.no_grad()
def test_padding_in_later_turns(name: str) -> None:
    """A row with padding has fewer tokens: its windows reach further back, and its positions count its own."""
    every, turns = 8, [(LENGTH, [3, 0]), (1, [0, 0]), (1, [0, 0]), (9, [4, 0]), (1, [0, 0]), (3, [0, 2]), (5, [0, 0])]
    model = tiny("llama")
    past = keepset.Cache(model, scheduled(name, every=every), history=True)
    naive = [Naive(model, scheduled(name, every=every), LENGTH - turns[0][1][row]) for row in (0, 1)]
    mask = torch.empty(2, 0, dtype=torch.long)
    length = 0
    for seed, (n, padding) in enumerate(turns):
        ids, new = padded_prompt(padding, n, seed)
        mask = torch.cat([mask, new], 1)
        logits = feed(model, past, ids, mask)
        columns = [length + n - (length + n - LENGTH) % every if length + n >= LENGTH else 0]
        for row, reference in enumerate(naive):
            # Points are logical: in the row's own count they lie by its padding earlier.
            own_point = int(mask[row, : columns[0]].sum()) if columns[0] > length else None
            reference.point = lambda before, after, own_point=own_point: own_point  # type: ignore[method-assign]
            reference.at_step = columns[0]
            reference.steps += range(length + padding[row], length + n)
            expected = reference.feed(ids[row : row + 1, padding[row] :])
            torch.testing.assert_close(logits[row, padding[row] :], expected, rtol=1e-4, atol=5e-5)
        length += n
    assert [event.length for event in past.events] == [LENGTH, 29, 37]
    for row, reference in enumerate(naive):
        assert [kept_of(event.keep_set, row) for event in past.events] == [heads for _, heads in reference.events]


@pytest.mark.few(2)
@pytest.mark.cross
@pytest.mark.parametrize("name", ["snapkv", "expected_attention", "adakv", "knorm"])
@pytest.mark.parametrize("padding", [[0, 0], [0, 6]], ids=str)
@torch.no_grad()
def test_tokens_are_taken_back_up_to_the_newest_event(name: str, padding: list[int]) -> None:
    model, recipe = tiny("llama"), scheduled(name, every=8)
    ids, mask = padded_prompt(padding, LENGTH)
    straight, turning = (keepset.Cache(model, recipe, history=True) for _ in range(2))
    new, taken_back = prompt(2, 20, 1), prompt(2, 20, 2)

    def fed(cache: keepset.Cache, tokens: Tensor) -> Tensor:
        return feed(model, cache, tokens, extended(mask, cache.get_seq_length() + tokens.shape[1]))

    for cache in (straight, turning):
        fed(cache, ids)
        for token in new.T[:10, :, None]:
            fed(cache, token)
    fed(turning, taken_back[:, :4])
    turning.crop(-3)
    turning.crop(-2)
    turning.crop(LENGTH + 8)
    for token in new.T[8:, :, None]:
        again = fed(turning, token)
    for token in new.T[10:, :, None]:
        expected = fed(straight, token)
    torch.testing.assert_close(again, expected, rtol=1e-4, atol=5e-5)
    assert len(turning.events) == len(straight.events) == 3
    for ours, right in zip(turning.events, straight.events, strict=True):
        assert same_keep_set(ours.keep_set, right.keep_set)
    with refusal("after the newest compression can be taken back"):
        turning.crop(LENGTH + 15)


STACKED = [
    "distilled(OPTIONS)",
    "adakv(distilled, OPTIONS)",
    "pool(distilled, OPTIONS)",
    "quantized(pool(knorm), OPTIONS)",
]
"""Networks see one layer after another. Random walks meet the other methods."""


@pytest.mark.few(2)
@pytest.mark.cross
@pytest.mark.parametrize("padding", [[0, 0], [0, 7]], ids=str)
@pytest.mark.parametrize("method", STACKED)
@pytest.mark.parametrize("name", ["llama", "gemma3"])  # the latter has windows between its full layers
def test_layers_together_keep_what_each_keeps_alone(
    name: str, method: str, padding: list[int], monkeypatch: pytest.MonkeyPatch
) -> None:
    text = method.replace("OPTIONS", f"keep=14, every=8, prefill={name == 'llama'}")
    chooser, shown = type(keepset.Recipe.parse(text).method), list[Sequence[int]]()
    select_all, (ids, mask) = chooser.select_all, padded_prompt(padding, 19)

    def select(self: keepset.Method, observations: Sequence[Observation], budget: Budget) -> keepset.KeepSet:
        shown.extend(observation.layer_ids for observation in observations)
        return select_all(self, observations, budget)

    monkeypatch.setattr(chooser, "select_all", select)
    runs = []
    for limit in ("", "CACHE_BLOCK", "_WORKSPACE"):
        if limit:
            monkeypatch.setattr(layer_stack, limit, limit == "CACHE_BLOCK")
        past = keepset.Cache(tiny(name), text, history=True)
        said = generate(tiny(name), ids, past, mask, max_new_tokens=18)
        runs.append((torch.stack(said.logits), past))
        assert max(map(len, shown)) == (1 if limit == "_WORKSPACE" else len(past.compressed_layers))
        shown.clear()
    (together, past), *limited_runs = runs
    for logits, limited in limited_runs:
        assert torch.equal(together, logits) and past.nbytes == limited.nbytes
        assert len(past.events) == len(limited.events) > 1
        for a, b in zip(past.events, limited.events, strict=True):
            assert same_keep_set(a.keep_set, b.keep_set) and a.entries == b.entries


# --- costs


class Made(TorchDispatchMode):
    """Memory that operations make, and that is not a part of what they are given."""

    def __init__(self) -> None:
        super().__init__()
        self.storages: list[torch.UntypedStorage] = []

    def __torch_dispatch__(self, op: Any, types: Any, args: Any = (), kwargs: Any = None) -> Any:
        answer = op(*args, **(kwargs or {}))
        input_storages = {
            tensor.untyped_storage().data_ptr() for tensor in tree_leaves(args) if isinstance(tensor, Tensor)
        }
        for tensor in tree_leaves(answer):
            if isinstance(tensor, Tensor) and tensor.untyped_storage().data_ptr() not in input_storages:
                self.storages.append(tensor.untyped_storage())
        return answer


@pytest.mark.parametrize("text", ["snapkv", "adakv(snapkv)", "ams(tova)"])
@torch.no_grad()
def test_an_event_copies_what_stays_and_no_more(text: str) -> None:
    """Keys and values that no method looks at are in memory once while they are packed."""
    model = tiny("llama")
    method = keepset.Recipe.parse(text).method
    past = keepset.Cache(model, keepset.Recipe.of(method, keep=200, every=10))
    model(prompt(1, 300), past_key_values=past, logits_to_keep=1)
    for step in range(9):
        model(prompt(1, 1, step), past_key_values=past)
    with Made() as storages:
        model(prompt(1, 1, 9), past_key_values=past)
    assert len(past.events) == 2
    columns = [layer.store.packed[name] for layer in past.layers for name in ("keys", "values")]
    large = [storage.nbytes() for storage in storages.storages if storage.nbytes() >= columns[0].nbytes]
    assert large == [column.nbytes for column in columns]
    assert past.events[1].nbytes_before == past.events[1].entries * 128 and past.events[1].seconds > 0


@pytest.mark.parametrize(("name", "reach"), [("snapkv", 5), ("expected_attention", 11), ("knorm", 0), ("tova", 1)])
@torch.no_grad()
def test_queries_are_looked_at_only_before_an_event_and_hardly_any_is_held(name: str, reach: int) -> None:
    model = tiny("llama")
    past = keepset.Cache(model, scheduled(name, every=20))
    model(prompt(1, LENGTH), past_key_values=past)
    for step in range(1, 45):
        model(prompt(1, 1, step), past_key_values=past)
        looked_at = max(0, step % 20 - (20 - reach))
        for layer in past.layers:
            recorder, moments = layer.collector.recorder, 4 * 4 * (1 + 16 + 16 * 17 // 2)
            assert (recorder.nbytes > 0) == (looked_at > 0)
            assert recorder.window.size <= min(looked_at, 6 if name == "expected_attention" else 1)
            assert recorder.nbytes <= moments + 2 * (4 * 16 * 4 + 8 + 2 * 16 * 4)
            columns = set(layer.store.packed) - {"keys", "values", "positions"}
            assert columns == ({"received of 5"} if name == "snapkv" and looked_at > 1 else set())


@torch.no_grad()
def test_hooks_hold_nothing_of_calls_that_are_over() -> None:
    """Neither of those with another cache, nor of those that fail."""
    model, another = tiny("llama"), keepset.Cache(tiny("llama"), scheduled("snapkv", every=4))
    past = keepset.Cache(model, scheduled("expected_attention", every=40))
    for cache in (past, another):
        model(prompt(1, LENGTH), past_key_values=cache)
    assert past.nbytes == allocated(past)
    with refusal("The cache holds 1 requests, and the input has 2"):
        model(prompt(2, 3), past_key_values=past)
    assert past.nbytes == allocated(past)
