"""Whole models with random weights: prefill, decoding and events under keepset.Cache and transformers' own cache."""

from __future__ import annotations

import tempfile
from collections.abc import Callable
from pathlib import Path
from typing import Any

import torch
from transformers import AutoConfig, AutoModelForCausalLM, DynamicCache, PreTrainedModel

import keepset
from keepset.hf.batch import go_together
from keepset.hf.observed_cache import Progress
from keepset.hf.store import EntryStore
from on_gpu.kernels import ragged_counts
from on_gpu.measuring import Bench
from on_gpu.networks import write as write_networks

SHAPES: dict[str, dict[str, Any]] = {
    "Llama-3.1-8B": dict(
        model_type="llama",
        hidden_size=4096,
        intermediate_size=14336,
        num_hidden_layers=32,
        num_attention_heads=32,
        num_key_value_heads=8,
        vocab_size=128256,
        max_position_embeddings=131072,
        rope_theta=500000.0,
    ),
    "Qwen3-8B": dict(
        model_type="qwen3",
        hidden_size=4096,
        intermediate_size=12288,
        num_hidden_layers=36,
        num_attention_heads=32,
        num_key_value_heads=8,
        head_dim=128,
        vocab_size=151936,
        max_position_embeddings=131072,
    ),
}
_TINY = dict(
    model_type="llama",
    hidden_size=64,
    intermediate_size=96,
    num_hidden_layers=2,
    num_attention_heads=4,
    num_key_value_heads=2,
    vocab_size=200,
    max_position_embeddings=512,
)
DISTILLED = "distilled(stats='{stats}')"
PREFILL = (
    "snapkv",
    "adakv(snapkv)",
    f"pool({DISTILLED})",
    f"quantized(match(pool({DISTILLED})))",
    "expected_attention",
    "h2o",
    "glance",
    "reread",
)
EVENTS = ("knorm", DISTILLED, "snapkv", "adakv(snapkv)", "ams(tova)")
KEEPS = (0.25, 0.1)


def measure(bench: Bench, name: str, *, everything: bool) -> None:
    """Measure decoding, events and prefill of one shape: `everything` for the first, else only what differs."""
    model = random_model(bench, name)
    tokens = 32768 if bench.on_gpu else 80
    for batch in (1, 8) if bench.on_gpu else (2,):
        _decoding(bench, name, model, tokens, batch)
    with tempfile.TemporaryDirectory() as folder:
        stats = Path(folder) / "networks.safetensors"
        write_networks(model.config, head_size(model.config), stats)
        if everything:
            for recipe in EVENTS:
                _event(bench, name, model, recipe, tokens // 4 if bench.on_gpu else tokens, stats)
        _prefill(bench, name, model, tokens, PREFILL, stats)
        if bench.on_gpu and everything:
            _prefill(bench, name, model, 8192, PREFILL, stats)
            _decoding(bench, name, model, tokens, 32)
            _prefill(bench, name, model, 131072, PREFILL[:3], stats)


@torch.no_grad()
def random_model(bench: Bench, name: str) -> PreTrainedModel:
    """Return a model of a shape, with random weights."""
    shape = dict(SHAPES[name] if bench.on_gpu else _TINY)
    config = AutoConfig.for_model(shape.pop("model_type"), **shape)
    before = torch.get_default_dtype()
    torch.set_default_dtype(bench.dtype)
    try:
        with bench.device:
            return AutoModelForCausalLM.from_config(config).eval()
    finally:
        torch.set_default_dtype(before)


def head_size(config: Any) -> int:
    """Numbers of a key."""
    return getattr(config, "head_dim", None) or config.hidden_size // config.num_attention_heads


def _ids(bench: Bench, model: PreTrainedModel, batch: int, n: int) -> torch.Tensor:
    return torch.randint(3, model.config.vocab_size, (batch, n), device=bench.device)


def _decoding(bench: Bench, name: str, model: PreTrainedModel, tokens: int, batch: int) -> None:
    part = f"{name}: one token after {tokens}, batch {batch}"
    config = model.config
    heads, size = config.num_key_value_heads, head_size(config)
    entry = 2 * size * model.dtype.itemsize * heads * config.num_hidden_layers
    weights = sum(parameter.nbytes for parameter in model.parameters())
    new = _ids(bench, model, batch, 1)

    def step(cache: Any) -> Callable[[], Any]:
        @torch.no_grad()
        def run() -> None:
            model(new, past_key_values=cache, use_cache=True)

        return run

    def full() -> Callable[[], Any]:
        model.set_attn_implementation("sdpa")
        cache = DynamicCache(config=config)
        for layer in range(config.num_hidden_layers):
            shape = batch, heads, tokens, size
            cache.update(*(torch.randn(shape, device=bench.device, dtype=model.dtype) for _ in range(2)), layer)
        return step(cache)

    def one(keep: float, ragged: bool, rows: int) -> keepset.Cache:
        entries = int(keep * tokens)
        counts = ragged_counts(entries, heads) if ragged else [entries] * heads
        recipe = f"adakv(snapkv, keep={keep})" if ragged else f"snapkv(keep={keep})"
        return filled(keepset.Cache(model, recipe), model, counts, tokens, rows)

    def kept(keep: float, ragged: bool) -> Callable[[], Any]:
        return step(one(keep, ragged, batch))

    def side_by_side(keep: float) -> Callable[[], Any]:
        caches = [one(keep, True, 1) for _ in range(batch)]
        return torch.no_grad()(lambda: go_together(model, caches, new))

    repeats = 20 if bench.on_gpu else 1
    figures = [bench.run(part, "full cache", full, nbytes=weights + tokens * batch * entry, repeats=repeats)]
    for keep in KEEPS:
        nbytes = weights + int(keep * tokens) * batch * entry
        for ragged in (False, True):
            what = f"keep {keep}, {'ragged' if ragged else 'uniform'}"
            make = lambda k=keep, r=ragged: kept(k, r)  # noqa: E731
            figures.append(bench.run(part, what, make, nbytes=nbytes, against="full cache", repeats=repeats))
        if batch > 1:
            what, ragged = f"keep {keep}, ragged, {batch} caches side by side", f"keep {keep}, ragged"
            make = lambda k=keep: side_by_side(k)  # noqa: E731
            figures.append(bench.run(part, what, make, nbytes=nbytes, against=ragged, repeats=repeats))
    for figure in figures:
        if figure.median:
            figure.extra["tokens per second"] = 1e3 * batch / figure.median


def filled(cache: keepset.Cache, model: PreTrainedModel, counts: list[int], tokens: int, batch: int) -> keepset.Cache:
    """Return a cache of random entries as it is after a compression."""
    device, config = model.device, model.config
    size = head_size(config)
    lengths = torch.full((batch,), tokens, device=device)
    here = [tokens] * batch
    cache.progress = Progress(tokens, tokens, lengths, lengths, here, here, compressed_at=tokens)
    for layer in cache.managed_layers.values():
        total = batch * sum(counts)
        columns = {name: torch.randn(total, size, device=device, dtype=model.dtype) for name in ("keys", "values")}
        columns["positions"] = torch.cat([torch.arange(n, device=device, dtype=torch.int32) for n in counts * batch])
        layer.store = EntryStore.of(columns, torch.tensor([counts] * batch))
        layer.logical = tokens
    cache.stop_watching()
    return cache


def _event(bench: Bench, name: str, model: PreTrainedModel, recipe: str, keep: int, stats: Path) -> None:
    """Time a token that an event follows, and the token before it; the difference is the event."""
    every, repeats = (256, 5) if bench.on_gpu else (3, 1)
    part = f"{name}: a token after {keep} + {every} entries"
    whole, recipe = recipe.format(stats=stats), recipe.format(stats="...")
    text = f"{keepset.Recipe.parse(whole).with_budget(keep=keep)}"[:-1] + f", every={every})"
    ids = _ids(bench, model, 1, keep + every)

    @torch.no_grad()
    def step(at: int) -> Callable[[], Any]:
        """Return the step of the token at `at`, each time on a copy; copies are made before the clock starts."""
        cache = keepset.Cache(model, text)
        for piece in (ids[:, :keep], ids[:, keep:at]):
            model(piece, past_key_values=cache, use_cache=True, logits_to_keep=1)
        copies = [cache.fork() for _ in range(bench.runs(repeats))]
        return torch.no_grad()(lambda: model(ids[:, at : at + 1], past_key_values=copies.pop(), use_cache=True))

    before = f"{recipe}, the token before"
    plain = bench.run(part, before, lambda: step(keep + every - 2), repeats=repeats)
    figure = bench.run(part, recipe, lambda: step(keep + every - 1), against=before, repeats=repeats)
    if figure.median and plain.median:
        figure.extra["event ms"] = figure.median - plain.median
        figure.extra["event / decoding"] = (figure.median - plain.median) / (every * plain.median)


def _prefill(
    bench: Bench, name: str, model: PreTrainedModel, tokens: int, recipes: tuple[str, ...], stats: Path
) -> None:
    part = f"{name}: prefill of {tokens}"
    repeats = 3 if bench.on_gpu and tokens <= 32768 else 1
    texts = [str(keepset.Recipe.parse(recipe.format(stats=stats)).with_budget(keep=0.25)) for recipe in recipes]
    for recipe in (None, *texts):
        if bench.on_gpu:
            torch.cuda.reset_peak_memory_stats()
        figure = bench.run(
            part,
            "full cache" if recipe is None else recipe.replace(str(stats), "..."),
            lambda r=recipe: prefill(bench, model, tokens, r),
            against="" if recipe is None else "full cache",
            repeats=repeats,
        )
        if bench.on_gpu and figure.median:
            figure.extra["peak GiB"] = torch.cuda.max_memory_allocated() / 2**30


def prefill(bench: Bench, model: PreTrainedModel, tokens: int, recipe: str | None) -> Callable[[], None]:
    """Return a function that prefills random tokens under a recipe; None: the full cache."""
    ids = _ids(bench, model, 1, tokens)

    @torch.no_grad()
    def run() -> None:
        if recipe is None:
            model.set_attn_implementation("sdpa")
        cache = DynamicCache(config=model.config) if recipe is None else keepset.Cache(model, recipe)
        model(ids, past_key_values=cache, use_cache=True, logits_to_keep=1)

    return run
