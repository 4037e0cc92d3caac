"""Retrieval heads, found by gates between full and streaming attention that are trained to close where they can.

The training is that of DuoAttention's authors (Xiao et al. 2024, arXiv:2410.10819, section 2.2). A gate of every KV
head mixes attention over all tokens with attention over sinks and recent tokens. All gates start at 1 and are trained;
the model is not. The loss is the mean squared change of the last hidden states of the tokens that ask for passkeys,
plus 0.05 times the gates' mean. The authors train 2000 steps on texts of up to 32,000 tokens with 128 sinks and 256
recent tokens; on a CPU, few steps on short texts with fewer sinks and recent tokens are enough.
"""

from __future__ import annotations

from collections.abc import Callable, Iterator, Mapping, Sequence
from contextlib import contextmanager
from contextvars import ContextVar
from dataclasses import dataclass, replace
from typing import Any

import torch
import torch.nn.functional as F
from jaxtyping import Bool, Float, Int
from torch import Tensor, nn
from transformers import AttentionInterface, PreTrainedModel, PreTrainedTokenizerBase

from keepset.core.statistics import Statistics
from keepset.errors import UnsupportedModelError
from keepset.kernels.softmax import Softmax, softmax_attention
from keepset.lab.calibrate.corpus import Corpus

SINKS, RECENT = 16, 64
_RATE, _WEIGHT = 0.1, 0.05
_NAME = "keepset_gates"
_gates: ContextVar[Mapping[int, Tensor] | None] = ContextVar("gates", default=None)


def with_gates(
    statistics: Statistics,
    model: PreTrainedModel,
    tokenizer: PreTrainedTokenizerBase,
    corpus: Corpus,
    *,
    steps: int,
    on_step: Callable[[], None] = lambda: None,
) -> Statistics:
    """Train gates, and return the statistics with them.

    Args:
        statistics: the statistics, of the layers to train.
        model: the model.
        tokenizer: the model's tokenizer.
        corpus: passages, between which passkeys are hidden.
        steps: how many steps to train, one text each.
        on_step: called after each step.
    """
    longest = getattr(model.config.get_text_config(decoder=True), "max_position_embeddings", None) or LENGTH
    texts = draw(tokenizer, corpus.passages, count=steps, length=min(LENGTH, longest), seed=corpus.seed)
    heads = {index: len(layer.direction) for index, layer in statistics.layers.items()}
    gates = retrieval_gates(model, texts, heads, on_step)
    provenance = {"steps": steps, "tokens": sum(len(text.ids) for text in texts), "sinks": SINKS, "recent": RECENT}
    return replace(statistics, retrieval=gates, provenance={**statistics.provenance, "gates": provenance})


def retrieval_gates(
    model: PreTrainedModel,
    texts: Sequence[Passkeys],
    kv_heads: Mapping[int, int],
    on_step: Callable[[], None] = lambda: None,
) -> dict[int, Float[Tensor, " kv_heads"]]:
    """Train gates from 0 to 1, and return them by layer index. The model does not change.

    Args:
        model: the model.
        texts: a text for each step.
        kv_heads: the number of KV heads of each layer to train.
        on_step: called after each step.

    Raises:
        UnsupportedModelError: hidden states are not finite.
    """
    gates = {
        index: torch.ones(heads, requires_grad=True, dtype=torch.float32, device=model.device)
        for index, heads in kv_heads.items()
    }
    everything = list(gates.values())
    optimizer = torch.optim.AdamW(everything, lr=_RATE, weight_decay=0.0)
    ramp = max(1, len(texts) // 5)
    decoder = model.get_decoder()
    with _gated(model):
        for step, text in enumerate(texts):
            ids = text.ids.to(model.device)[None]
            with torch.no_grad():
                target = decoder(ids, use_cache=False).last_hidden_state[0, text.asked :].float()
            _gates.set(gates)
            gated = decoder(ids, use_cache=False).last_hidden_state[0, text.asked :].float()
            _gates.set(None)
            loss = (gated - target).square().mean() + _WEIGHT * torch.cat(everything).mean()
            if not loss.isfinite():
                raise UnsupportedModelError(
                    "Some of the model's hidden states are not finite numbers: no gate can be found."
                )
            optimizer.param_groups[0]["lr"] = _RATE * min(1.0, (step + 1) / ramp, (len(texts) - step) / ramp)
            for gate, slope in zip(everything, torch.autograd.grad(loss, everything), strict=True):
                gate.grad = slope
            optimizer.step()
            with torch.no_grad():
                for gate in everything:
                    gate.clamp_(0, 1)
            on_step()
    return {index: gate.detach().float().cpu() for index, gate in gates.items()}


@contextmanager
def _gated(model: PreTrainedModel) -> Iterator[None]:
    """Make the model attend through the gates that are set, within the block."""
    before, trained = model.config._attn_implementation, [p for p in model.parameters() if p.requires_grad]
    model.set_attn_implementation(_NAME)
    model.requires_grad_(False)
    try:
        yield
    finally:
        _gates.set(None)
        model.set_attn_implementation(before)
        for parameter in trained:
            parameter.requires_grad_(True)


def _attention(
    module: nn.Module, query: Tensor, key: Tensor, value: Tensor, mask: Any, scaling: float | None = None, **kwargs: Any
) -> tuple[Tensor, None]:
    group, n = query.shape[1] // key.shape[1], query.shape[2]
    key, value = key.repeat_interleave(group, 1), value.repeat_interleave(group, 1)
    at = torch.arange(n, device=query.device)
    distance = at[:, None] - at
    window = kwargs.get("sliding_window")
    causal = (distance >= 0) & (distance < (window or n))
    factor = query.shape[-1] ** -0.5 if scaling is None else scaling
    softmax = Softmax(factor, kwargs.get("softcap"), kwargs.get("s_aux"))
    output = _masked(query, key, value, softmax, causal)
    gates = (_gates.get() or {}).get(int(module.layer_idx))  # type: ignore[arg-type]
    if gates is not None:
        near = causal & ((distance < RECENT) | (at < SINKS))
        streaming = _masked(query, key, value, softmax, near)
        gate = gates.to(output.dtype).repeat_interleave(group)[:, None, None]
        output = gate * output + (1 - gate) * streaming
    return output.transpose(1, 2).contiguous(), None


def _masked(
    query: Float[Tensor, "batch heads n head_dim"],
    key: Float[Tensor, "batch heads n head_dim"],
    value: Float[Tensor, "batch heads n value_dim"],
    softmax: Softmax,
    mask: Bool[Tensor, "n n"],
) -> Float[Tensor, "batch heads n value_dim"]:
    if softmax.plain:
        return F.scaled_dot_product_attention(query, key, value, attn_mask=mask, scale=softmax.scaling)
    return softmax_attention(query, key, value, softmax, mask[None, None])[0].transpose(1, 2)


AttentionInterface.register(_NAME, _attention)


LENGTH, PASSKEYS, WORDS = 512, 4, 8
"""Tokens of a text, number of passkeys in it, and words of a passkey."""
_WORDS = (
    "alpha bravo charlie delta echo foxtrot golf hotel india juliett kilo lima mike november oscar papa quebec romeo "
    "sierra tango uniform victor whiskey xray yankee zulu"
)
_ORDINALS = ("first", "second", "third", "fourth")


@dataclass(frozen=True, eq=False)
class Passkeys:
    """A text with passkeys.

    Attributes:
        ids: the text's tokens.
        asked: the token at which the questions for passkeys, with their answers, begin.
    """

    ids: Int[Tensor, " tokens"]
    asked: int


def draw(
    tokenizer: PreTrainedTokenizerBase,
    passages: Sequence[Int[Tensor, " _"]],
    *,
    count: int,
    length: int = LENGTH,
    seed: int,
) -> list[Passkeys]:
    """Draw texts with passkeys at random places between passages.

    Args:
        tokenizer: the model's tokenizer.
        passages: token ids of the passages.
        count: how many texts to draw.
        length: tokens of a text.
        seed: the seed of the draw.

    Raises:
        UnsupportedModelError: passkeys and questions do not fit the length.
    """
    chance, alphabet = torch.Generator().manual_seed(seed), _WORDS.split()

    def number(below: int) -> int:
        return int(torch.randint(below, (), generator=chance))

    def tokens(text: str) -> list[int]:
        return tokenizer(text, add_special_tokens=False)["input_ids"]

    haystack = [token for passage in passages for token in passage.tolist()]
    texts = []
    for _ in range(count):
        keys = [" ".join(alphabet[number(len(alphabet))] for _ in range(WORDS)) for _ in range(PASSKEYS)]
        named = list(zip(_ORDINALS, keys, strict=True))
        needles = [tokens(f"\n\nRemember: the {which} passkey is {key}.\n\n") for which, key in named]
        answers = [tokens(f"\n\nWhat is the {which} passkey? It is {key}.") for which, key in named]
        between = length - sum(map(len, needles)) - sum(map(len, answers))
        if between < 1:
            raise UnsupportedModelError(
                f"Passkeys and the questions for them do not fit the model's context of {length} tokens: retrieval "
                "heads cannot be found; leave them out with --gate-steps 0."
            )
        first = number(len(haystack))
        filler = (haystack * (between // len(haystack) + 2))[first : first + between]
        # The last part of the passage has no passkeys, so that none is near its question.
        insertions = sorted(number(max(1, between * 3 // 4)) for _ in needles)
        ids: list[int] = []
        for begin, end, needle in zip([0, *insertions], [*insertions, between], [*needles, []], strict=True):
            ids += filler[begin:end] + needle
        answered = [token for answer in answers for token in answer]
        texts.append(Passkeys(torch.tensor(ids + answered, dtype=torch.long), len(ids)))
    return texts
