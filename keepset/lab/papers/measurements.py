"""Measurements of papers other than sweeps: functions that an entry's `measure` names, with its settings."""

from collections.abc import Callable, Iterator, Mapping, Sequence

import torch
from jaxtyping import Int
from torch import Tensor
from transformers import PreTrainedModel

from keepset.core.tables import Tables, load
from keepset.errors import KeepsetError
from keepset.lab.analysis.intervals import Figure, of_mean
from keepset.lab.analysis.synthetic import Agreement, Gaussianity, hidden_gaussianity, next_query
from keepset.lab.corpus import default_texts
from keepset.lab.latency import Timing, latency
from keepset.lab.papers.entry import FigureKey, MeasuredFigure, PaperOptions, recipe_of
from keepset.lab.tasks.task import Tokenizer
from keepset.lab.texts import essay, essays
from keepset.methods.gvote import GVote

_CHARACTERS = 8
"""An upper bound of the characters of an essay's token."""


def hidden_states(
    model: PreTrainedModel, tokenizer: Tokenizer, options: PaperOptions, *, length: int
) -> list[MeasuredFigure]:
    """Measure how near each channel of the hidden states is to a normal distribution along texts.

    Args:
        model: the model.
        tokenizer: the model's tokenizer.
        options: the user's replacements.
        length: tokens of a text.
    """
    skip = GVote().skip
    texts = [hidden_gaussianity(model, ids.to(model.device), skip) for ids in _essays(tokenizer, options, length)]
    return _by_layer(texts, "hidden states")


def synthetic_queries(
    model: PreTrainedModel, tokenizer: Tokenizer, options: PaperOptions, *, length: int
) -> list[MeasuredFigure]:
    """Measure how one synthesized query agrees with that of the last, masked token of texts.

    Args:
        model: the model.
        tokenizer: the model's tokenizer.
        options: the user's replacements.
        length: tokens of a text.
    """
    method = GVote(samples=1, seed=options.seed)
    texts = [next_query(model, method, ids.to(model.device)) for ids in _essays(tokenizer, options, length)]
    return _by_layer(texts, "GVote")


def _essays(tokenizer: Tokenizer, options: PaperOptions, length: int) -> Iterator[Int[Tensor, "1 tokens"]]:
    """Yield the beginnings of essays, the longest essay first; a shorter essay is whole."""
    length = options.lengths[0] if options.lengths else length
    names = sorted(essays(), key=lambda name: -len(essay(name)))
    for name in names[: options.limit or len(names)]:
        yield torch.tensor([tokenizer(essay(name), verbose=False)["input_ids"][:length]], dtype=torch.long)


def _by_layer(
    texts: Sequence[dict[int, Agreement]] | Sequence[dict[int, Gaussianity]], method: str
) -> list[MeasuredFigure]:
    """Return means over each text's heads or channels, of all layers and of each; intervals are over texts."""
    layers = list(texts[0])
    rows = []
    for task, layer_ids in [("all layers", layers), *((f"layer {layer}", [layer]) for layer in layers)]:
        for name in vars(texts[0][layers[0]]):
            values = [torch.cat([getattr(text[layer], name).double() for layer in layer_ids]) for text in texts]
            means = [float(value.nanmean()) for value in values if not value.isnan().all()]
            rows.append(MeasuredFigure(FigureKey(task, method, None, name), of_mean(means), len(texts)))
    return rows


def generation_costs(
    model: PreTrainedModel,
    tokenizer: Tokenizer,
    options: PaperOptions,
    *,
    full: str,
    methods: Mapping[str, str],
    lengths: Sequence[int],
    rounds: int,
    output: int = 0,
) -> list[MeasuredFigure]:
    """Measure time and memory of a generation: medians over rounds.

    Args:
        model, tokenizer: the model that generates, and its tokenizer.
        options: `lengths`, `limit` and `answer_tokens` replace prompts, rounds and generated tokens.
        full: the paper's name of the full cache.
        methods: the texts of recipes with a budget, by the paper's names.
        lengths: tokens of each prompt.
        rounds: generations of each cache at each length.
        output: tokens to generate; 0 for a quarter of the prompt's.

    Raises:
        KeepsetError: if the texts have fewer tokens than a prompt.
    """
    lengths = options.lengths or lengths
    text = "\n\n".join(default_texts())[: _CHARACTERS * max(lengths)]
    ids = tokenizer(text, return_tensors="pt", verbose=False)["input_ids"].to(model.device)
    recipes = [recipe_of(recipe, options.files) for recipe in methods.values()]
    names = [(full, None), *((name, recipe.budget.keep) for name, recipe in zip(methods, recipes, strict=True))]
    rows: list[MeasuredFigure] = []
    for length in lengths:
        output_tokens = options.answer_tokens or output or length // 4
        if length > ids.shape[1]:
            raise KeepsetError(
                f"The texts have {ids.shape[1]} tokens, fewer than {length}: give fewer --prompt-tokens."
            )
        *_, timings = latency(model, [ids[:, :length]], recipes, output_tokens, options.limit or rounds)
        for (name, keep), timing in zip(names, timings, strict=True):
            for metric, value in _paper_units(timing).items():
                figure = None if value is None else Figure(value)
                key = FigureKey(f"{length} + {output_tokens}", name, keep, metric)
                rows.append(
                    MeasuredFigure(key, figure, len(timing.rounds), int(timing.error is not None), timing.error)
                )
    return sorted(rows, key=lambda row: (int(row.key.task.split()[0]), row.key.metric))


def _paper_units(timing: Timing) -> dict[str, float | None]:
    figures = timing.figures()
    peak, nbytes = figures.get("peak_bytes"), figures.get("kv_bytes")
    return {
        "seconds to the first token": figures.get("first_seconds"),
        "tokens per second": figures.get("tokens_per_second"),
        "seconds": figures.get("seconds"),
        "peak memory, MB": None if peak is None else peak / 2**20,
        "keys and values, MB": None if nbytes is None else nbytes / 2**20,
    }


def head_weights(model: PreTrainedModel, tokenizer: Tokenizer, options: PaperOptions) -> list[MeasuredFigure]:
    """Return the mean weight of a table's heads, and the share of heads below 1, layer by layer.

    Args:
        model, tokenizer: not used.
        options: names the file of tables.
    """
    tables, rows = _tables(options), []
    for name, of_head in (("weight", tables.weights), ("heads below 1", (tables.weights < 1).float())):
        for layer, of_layer in enumerate(of_head.mean(2).T.tolist(), 1):
            rows += _by_budget(tables, f"layer {layer}", name, of_layer)
    return rows


def thresholds(model: PreTrainedModel, tokenizer: Tokenizer, options: PaperOptions) -> list[MeasuredFigure]:
    """Return a table's mean threshold over all layers, for each bin of either risk.

    Args:
        model, tokenizer: not used.
        options: names the file of tables.
    """
    tables, rows = _tables(options), []
    of_bin = tables.gate.mean(1)
    for risk, means in (("perplexity", of_bin.mean(1)), ("entropy", of_bin.mean(2))):
        for number, of_budget in enumerate(means.T.tolist(), 1):
            rows += _by_budget(tables, f"{risk}, bin {number} of {means.shape[1]}", "threshold", of_budget)
    return rows


def _tables(options: PaperOptions) -> Tables:
    if "tables" not in options.files:
        raise KeepsetError(
            "This figure shows a model's tables: give a file with --tables, made by "
            "`keepset compile --model MODEL --out tables.safetensors`."
        )
    return load(str(options.files["tables"]))


def _by_budget(tables: Tables, task: str, metric: str, of_budget: Sequence[float]) -> list[MeasuredFigure]:
    return [
        MeasuredFigure(FigureKey(task, "CompilerKV", keep, metric), Figure(value), 1)
        for keep, value in zip(tables.budgets.tolist(), of_budget, strict=True)
    ]


MEASUREMENTS: Mapping[str, Callable[..., list[MeasuredFigure]]] = {
    function.__name__: function
    for function in (hidden_states, synthetic_queries, generation_costs, head_weights, thresholds)
}
"""The functions that an entry can name."""
