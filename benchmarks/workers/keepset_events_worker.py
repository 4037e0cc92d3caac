"""Times keepset's part of one compression event, and bare operations beside it."""

from collections.abc import Callable

import events
import torch
from torch import Tensor

from keepset.allocators.ams import AMS
from keepset.core.budget import Budget
from keepset.core.features.moments import QueryDistribution, QueryMoments
from keepset.core.features.queries import WindowAttention, WindowSums
from keepset.core.keep_set import HeadCounts
from keepset.core.method import Method
from keepset.core.observation import Observation
from keepset.hf.store import EntryStore
from keepset.kernels.columns import Moments
from keepset.methods.expected_attention import ExpectedAttention
from keepset.methods.keys import Knorm
from keepset.methods.window import TOVA, SnapKV


class Given(Method):
    """A method with given scores."""

    name = "given"
    paper = "none"

    def score(self, observation: Observation) -> Tensor:
        return observation.state["scores"]


class Selection(AMS):
    """AMS with given usage."""

    def _usage(self, observation: Observation) -> Tensor:
        return observation.state["usage"]


def observe(tokens: int, queries: int = events.WINDOW) -> Observation:
    keys, values = (events.randn(1, events.KV_HEADS, tokens, events.HEAD_DIM, seed=seed) for seed in (3, 4))
    return Observation(
        keys=keys,
        values=values,
        queries=events.randn(1, events.QUERY_HEADS, queries, events.HEAD_DIM, seed=5),
        positions=torch.arange(tokens).expand(1, events.KV_HEADS, -1).contiguous(),
    )


def selection(tokens: int, keep: int) -> events.Run:
    method, budget = Selection(scorer=Given()), Budget(keep, events.SINKS, events.RECENT)
    narrow = torch.zeros(1, events.KV_HEADS, tokens, 1)
    state = {"scores": events.scores(tokens), "usage": events.usage(tokens)}
    observation = Observation(keys=narrow, values=narrow, state=state)
    return lambda: method.select(observation, budget)


def bare(tokens: int, keep: int) -> events.Run:
    scores = events.scores(tokens)
    return lambda: scores.topk(keep, dim=-1).indices.sort(dim=-1)


def score(method: Method) -> events.Prepare:
    def prepare(tokens: int, keep: int) -> events.Run:
        observation = observe(tokens)
        return lambda: method.score(observation)

    return prepare


def mass(tokens: int, keep: int) -> events.Run:
    method, observation = AMS(scorer=TOVA(), window=events.WINDOW), observe(tokens)
    return lambda: method._usage(observation)


def ams(tokens: int, keep: int) -> events.Run:
    """Time the whole event: the window's sums, which are added while queries come, scores, choice, and the move."""
    method, budget = AMS(scorer=Knorm(), window=events.WINDOW), Budget(keep, events.SINKS, events.RECENT)
    seen = observe(tokens)
    features = {WindowAttention(events.WINDOW): WindowSums(events.usage(tokens), events.WINDOW)}

    def run() -> EntryStore:
        observation = Observation(keys=seen.keys, values=seen.values, positions=seen.positions, features=features)
        return pack(observation, method.select(observation, budget).layer(0).indices, keep)

    return run


def expected_attention(tokens: int, keep: int) -> events.Run:
    """Time the whole event: moments of the recorded queries, scores, choice, and the move of kept entries."""
    method = ExpectedAttention()
    seen = observe(tokens, events.BUFFER)
    assert seen.queries is not None
    queries, budget, future = seen.queries, Budget(keep, 4, 0), torch.arange(tokens, tokens + method.future)
    frequencies = 10000.0 ** -(torch.arange(0, events.HEAD_DIM, 2) / events.HEAD_DIM)
    angles = (future[:, None] * frequencies).repeat(1, 2)

    def rotate(rows: Tensor, _: int) -> Tensor:
        left, right = rows.chunk(2, -1)
        return rows * angles.cos().mean(0) + torch.cat([-right, left], -1) * angles.sin().mean(0)

    def run() -> EntryStore:
        moments = Moments()
        moments.add(queries, torch.ones(1, events.BUFFER, dtype=torch.bool), full=True)
        found = QueryDistribution(moments.mean, moments.covariance, rotate)
        observation = Observation(
            keys=seen.keys, values=seen.values, positions=seen.positions, features={QueryMoments(method.skip): found}
        )
        return pack(observation, method.select(observation, budget).layer(0).indices, keep)

    return run


def pack(observation: Observation, indices: Tensor, keep: int) -> EntryStore:
    columns = {"keys": observation.keys, "values": observation.values, "positions": observation.positions.int()}
    return EntryStore.pack(columns, indices, HeadCounts(torch.full((1, events.KV_HEADS), keep)))


def gather(tokens: int, keep: int) -> events.Run:
    observation = observe(tokens)
    indices = events.scores(tokens).topk(keep, dim=-1).indices.sort(dim=-1).values.flatten()
    return lambda: pack(observation, indices, keep)


def copy(tokens: int, keep: int) -> events.Run:
    observation = observe(keep)
    columns = observation.keys, observation.values, observation.positions.int()
    return lambda: [column.clone() for column in columns]


CASES: dict[str, Callable[[int, int], events.Run]] = {
    "ams selection": selection,
    "topk and sort": bare,
    "tova scores": score(TOVA()),
    "snapkv scores": score(SnapKV(window=events.SNAPKV_WINDOW)),
    "window mass": mass,
    "ams(knorm) event": ams,
    "expected_attention event": expected_attention,
    "gather": gather,
    "copy": copy,
}

if __name__ == "__main__":
    events.serve(CASES, ("keepset", "torch"))
