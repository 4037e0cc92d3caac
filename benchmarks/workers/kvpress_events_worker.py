"""Times kvpress's part of one compression event, or that of the AMS authors' copy if it is first on the path."""

from collections.abc import Callable
from types import SimpleNamespace
from typing import Any

import events
import kvpress
import torch
from torch import Tensor
from transformers import LlamaConfig
from transformers.models.llama.modeling_llama import LlamaAttention, LlamaRotaryEmbedding

# So narrow that projecting the queries again, which only kvpress does, costs nearly nothing.
HIDDEN = 64


class Given(kvpress.ScorerPress):
    """A press with given scores."""

    def score(self, *_: Any) -> Tensor:
        return self.scores


def inputs(tokens: int, newest: int) -> tuple[Any, ...]:
    """Return the inputs of presses: module, hidden states, keys, values, no attention, the layer's arguments."""
    config = LlamaConfig(
        hidden_size=HIDDEN,
        num_attention_heads=events.QUERY_HEADS,
        num_key_value_heads=events.KV_HEADS,
        head_dim=events.HEAD_DIM,
        attn_implementation="sdpa",
    )
    module = LlamaAttention(config, 0)
    module.rotary_emb = LlamaRotaryEmbedding(config)
    hidden = events.randn(1, newest, HIDDEN, seed=5)
    keys, values = (events.randn(1, events.KV_HEADS, tokens, events.HEAD_DIM, seed=seed) for seed in (3, 4))
    positions = torch.arange(tokens - newest, tokens)[None]
    return module, hidden, keys, values, None, {"position_embeddings": module.rotary_emb(hidden, positions)}


def authors(keep_ratio: float, base: Any) -> Any:
    return kvpress.AdaptiveMassSegmentWrapperHeadPress(
        base_press=base,
        compression_ratio=1 - keep_ratio,
        window_size=events.WINDOW,
        segment_mass=0.1,
        min_seg_len=16,
        max_seg_len=256,
        min_keep_per_segment=1,
        n_sink=events.SINKS,
        always_keep_last=events.RECENT,
        credit_decay=0.9,
        mix_beta=0.9,
    )


def selection(tokens: int, keep: int) -> events.Run:
    base = Given()
    base.scores = events.scores(tokens)
    press, usage = authors(keep / tokens, base), events.usage(tokens)
    press._window_scores_from_attn = lambda *_: usage
    narrow = torch.zeros(1, events.KV_HEADS, tokens, 1)
    module, hidden = SimpleNamespace(layer_idx=0), torch.zeros(1, events.WINDOW + 1, 1)
    return lambda: press.compress(module, hidden, narrow, narrow, None, {})


def score(press: Any, window: int) -> events.Prepare:
    def prepare(tokens: int, keep: int) -> events.Run:
        given = inputs(tokens, window + 1)
        return lambda: press.score(*given)

    return prepare


def mass(tokens: int, keep: int) -> events.Run:
    press = authors(keep / tokens, Given())
    module, hidden, keys, _, attentions, arguments = inputs(tokens, events.WINDOW + 1)
    return lambda: press._window_scores_from_attn(module, hidden, keys, attentions, arguments, events.WINDOW)


def ams(tokens: int, keep: int) -> events.Run:
    press = authors(keep / tokens, kvpress.KnormPress())
    given = inputs(tokens, events.WINDOW + 1)
    return lambda: press.compress(*given)


def expected_attention(tokens: int, keep: int) -> events.Run:
    press = kvpress.ExpectedAttentionPress(compression_ratio=1 - keep / tokens)
    given = inputs(tokens, events.BUFFER + press.n_sink)
    return lambda: press.compress(*given)


CASES: dict[str, Callable[[int, int], events.Run]] = {
    "ams selection": selection,
    "tova scores": score(kvpress.TOVAPress(), 1),
    "snapkv scores": score(kvpress.SnapKVPress(window_size=events.SNAPKV_WINDOW), events.SNAPKV_WINDOW),
    "window mass": mass,
    "ams(knorm) event": ams,
    "expected_attention event": expected_attention,
}

if __name__ == "__main__":
    events.serve(CASES, ("transformers", "torch"))
