"""GVote: Adaptive KV-cache compression without manually setting budget (Tang and others 2025, arXiv:2509.03136)."""

from collections.abc import Iterator, Sequence

import torch
from jaxtyping import Int
from torch import Tensor
from transformers import PreTrainedModel

from keepset.bench.analysis import intervals
from keepset.bench.analysis.gaussianity import Gaussianity, hidden_gaussianity
from keepset.bench.analysis.rows import Figure
from keepset.bench.analysis.synthetic import Agreement, next_query
from keepset.bench.papers.entry import SCORE, Entry, Key, Measured, Measurement, Options, Sweep
from keepset.bench.tasks.task import Tokenizer
from keepset.methods.gvote import GVote
from keepset.texts import essay, essays

_LLAMA, _QWEN = "meta-llama/Llama-3.1-8B-Instruct", "Qwen/Qwen2.5-7B-Instruct"
_MODELS = (_LLAMA, "meta-llama/Llama-3.2-3B-Instruct", _QWEN, "Qwen/Qwen2.5-14B-Instruct")
_BASELINES = {"StreamLLM": "streaming_llm", "SnapKV": "snapkv", "AdaKV": "adakv(snapkv)"}
_KEEPS = (0.1, 0.2, 0.3, 0.4, 0.5)
"""Section 4.1: from 10 % to 50 %."""
_METRICS = (SCORE, "keep")
"""All figures draw accuracy over usage."""
_RULER = "ruler_cwe"
_LENGTH = 1024
"""Tokens of a text whose hidden states or queries are looked at."""
_LONGBENCH = "The paper cites LongBench v2, whose domains these are."


def _curves(*tasks: str) -> Sweep:
    """Accuracy over usage; the figures that draw it share their cells."""
    return Sweep(
        tasks, _BASELINES | {"GVote": "gvote"}, _KEEPS, metrics=_METRICS, average="all tasks", file="gvote-curves"
    )


def _ablation(parameter: str, values: Sequence[float]) -> Sweep:
    return Sweep(
        (_RULER,), {f"{parameter}={value}": f"gvote({parameter}={value})" for value in values}, metrics=_METRICS
    )


def _texts(tokenizer: Tokenizer, options: Options) -> Iterator[Int[Tensor, "1 tokens"]]:
    """The beginnings of essays, the longest first; as long as they are asked for, or all that an essay has."""
    length = options.lengths[0] if options.lengths else _LENGTH
    names = sorted(essays(), key=lambda name: -len(essay(name)))
    for name in names[: options.limit or len(names)]:
        yield torch.tensor([tokenizer(essay(name), verbose=False)["input_ids"][:length]])


def _rows(layers: Sequence[dict[int, Agreement]] | Sequence[dict[int, Gaussianity]], method: str) -> list[Measured]:
    """Means over each text's heads or channels: of all layers, and of each; intervals are over texts."""
    names = vars(next(iter(layers[0].values())))
    rows = []
    for task, wanted in [("all layers", list(layers[0])), *((f"layer {layer}", [layer]) for layer in layers[0])]:
        for name in names:
            values = [torch.cat([getattr(text[layer], name).double() for layer in wanted]) for text in layers]
            means = [float(each.nanmean()) for each in values if not each.isnan().all()]
            figure = Figure.of(sum(means) / len(means), intervals.of_mean(means)) if means else None
            rows.append(Measured(Key(task, method, None, name), figure, len(layers)))
    return rows


def measure_gaussianity(model: PreTrainedModel, tokenizer: Tokenizer, options: Options) -> list[Measured]:
    """Figure 2: how near each channel of the hidden states is to a normal distribution along a text."""
    skip = GVote().skip
    texts = [hidden_gaussianity(model, ids.to(model.device), skip) for ids in _texts(tokenizer, options)]
    return _rows(texts, "hidden states")


def measure_agreement(model: PreTrainedModel, tokenizer: Tokenizer, options: Options) -> list[Measured]:
    """Figure 3: how one synthesized query agrees with the query of a text's last token, which was masked."""
    method = GVote(samples=1, seed=options.seed)
    return _rows([next_query(model, method, ids.to(model.device)) for ids in _texts(tokenizer, options)], "GVote")


ENTRIES = (
    Entry(
        "gvote-figure-1",
        "GVote, Figure 1",
        "Accuracy over usage, from short to long tasks",
        (_LLAMA,),
        (_curves("gsm8k", _RULER, "longbench2_multi", "longbench2_single"),),
        note=_LONGBENCH,
    ),
    Entry(
        "gvote-figure-2",
        "GVote, Figure 2",
        "How near hidden states are to a normal distribution",
        (_LLAMA,),
        (Measurement(measure_gaussianity, f"a prefill of each essay's first {_LENGTH} tokens"),),
        note=(
            "The paper shows histograms, and names neither model nor text. Here are the distance of Kolmogorov and "
            "Smirnov, skewness and excess kurtosis over the first tokens of essays; 0 is a normal distribution."
        ),
    ),
    Entry(
        "gvote-figure-3",
        "GVote, Figure 3",
        "How synthesized queries agree with the next one",
        (_LLAMA,),
        (Measurement(measure_agreement, f"two prefills of each essay's first {_LENGTH} tokens"),),
        note=(
            "The paper names neither model nor text; its correlation is that of one head, and here the mean over all. "
            "Texts are the first tokens of essays."
        ),
    ),
    Entry(
        "gvote-figure-4",
        "GVote, Figure 4",
        "Accuracy over usage on eight benchmarks",
        (_QWEN,),
        (_curves("gsm8k", _RULER, "longbench2"),),
        note=f"{_LONGBENCH} With GSM8K and RULER they are eight, as many as the paper says without naming them.",
    ),
    Entry(
        "gvote-figure-5",
        "GVote, Figure 5",
        "Accuracy over usage under four models",
        _MODELS,
        (_curves("gsm8k", _RULER, "longbench2"),),
        note=_LONGBENCH,
    ),
    Entry(
        "gvote-figure-6",
        "GVote, Figure 6",
        "How many queries are sampled",
        (_LLAMA,),
        (_ablation("samples", (1, 2, 4, 8, 16, 32)),),
        note="The text names neither the model nor the values of S: these are its first model and powers of 2.",
    ),
    Entry(
        "gvote-figure-7",
        "GVote, Figure 7",
        "How much attention a step's budget holds",
        (_LLAMA,),
        (_ablation("p_nuc", (0.8, 0.85, 0.9, 0.95, 0.99)),),
        note="The text names neither the model nor the values of p: these are its first model and values around 0.95.",
    ),
)
