"""Networks that predict a teacher's score of an entry from its key and value, fitted over passages (`distilled`).

Every passage is prefilled once for all teachers. The same share of each passage's entries is stored: keys before
rotation, values, and the teachers' scores. The share is chosen so that memory does not grow with the texts. Then all
heads' networks are fitted side by side.
"""

from __future__ import annotations

import hashlib
import json
import math
from collections.abc import Callable, Iterable, Mapping, Sequence
from dataclasses import dataclass, replace
from functools import reduce
from itertools import cycle
from operator import or_
from pathlib import Path
from typing import Any

import torch
import torch.nn.functional as F
from jaxtyping import Float, Int
from safetensors.torch import load_file, save_file
from torch import Tensor
from transformers import PreTrainedModel

from keepset.core.feature import Needs
from keepset.core.features.runtime_features import ModelStatistics
from keepset.core.method import Method
from keepset.core.observation import Observation
from keepset.core.statistics import FORMAT, LayerStatistics, Predictor, Statistics, knot_weights
from keepset.errors import KeepsetError, UnsupportedModelError
from keepset.hf.prompt_session import Recorder
from keepset.kernels.entry_format import MIDDLE, inputs_of
from keepset.lab.calibrate.corpus import SHORTEST, Corpus
from keepset.lab.calibrate.measure import SKIP
from keepset.recipe import Recipe

WIDTH, ROWS, STEPS, BATCH = 64, 49152, 500, 512
"""Width of the hidden layer, the most entries of each head in the fit, steps, and entries of a step."""
_RATE, _DECAY, _FLOOR = 2e-3, 0.05, 5e-3
"""AdamW's learning rate and weight decay; the share of a passage's mean score that is added before the logarithm."""
_RIDGE = 1.0
"""The ridge of the least-squares fit, for inputs of variance 1."""
_DEVIATION = 32.0
"""The ridge of each text length's difference from all lengths, larger because few entries have one length."""
_HALVINGS = (0, 0, 0, 1, 0, 0, 0, 2)
"""How often passages are halved, in turn. Most stay whole: networks are best at the most frequent length."""
_HELD_OUT = 8
"""One of this many passages is held out of the fit, to measure how well the networks rank."""
_HEADS_AT_ONCE, _ENTRIES_AT_ONCE = 128, 4096
_SLOPE_SPREAD, _SLOPE_WEIGHTS = 3.0, 0.05
"""The octaves of distance that the fit counts as one unit, and the largest initial weight of slopes."""
_RETRIEVAL, _LEAST_GATE = 0.5, 0.05
"""The exponent of a head's gate, by which its scores are multiplied, and the least gate that counts: the passages are
running text, which rarely needs the heads that find old facts."""
_KEEP = 0.25
"""The share of a head's entries at which the choices of teacher and networks are compared."""
CORRELATION, SHARE = "rank correlation with the teacher", f"share of the teacher's choice at keep={_KEEP}"
"""The names of the figures for held-out passages."""


@dataclass(frozen=True, eq=False)
class Samples:
    """Entries of passages with the teachers' scores.

    Attributes:
        inputs: the networks' inputs for each entry (`keepset.kernels.predictor.inputs_of`).
        wanted: the logarithm of the teachers' scores, times the length of the passage.
        ages: distance of each entry from the end of its passage in tokens; 1 for the last entry.
        lengths: tokens of each entry's passage.
    """

    inputs: Float[Tensor, "heads entries inputs"]
    wanted: Float[Tensor, "heads entries"]
    ages: Int[Tensor, " entries"]
    lengths: Int[Tensor, " entries"]


def parse_teachers(texts: Sequence[str]) -> list[Method]:
    """Return the methods that recipe texts name.

    Raises:
        KeepsetError: if a text is no recipe, or names `distilled`.
    """
    methods = [Recipe.parse(text).method for text in texts]
    for text, method in zip(texts, methods, strict=True):
        if any(measured.predictors for measured in method.traits.needs.of(ModelStatistics)):
            raise KeepsetError(f"The teacher {text!r} needs what it would teach: name another one, such as reread.")
    return methods


def with_predictors(
    statistics: Statistics,
    model: PreTrainedModel,
    corpus: Corpus,
    teachers: Sequence[str],
    *,
    folder: Path | None = None,
    width: int = WIDTH,
    on_passage: Callable[[], None] = lambda: None,
    on_step: Callable[[], None] = lambda: None,
) -> Statistics:
    """Fit networks to the teachers' scores, and return the statistics with them.

    Args:
        statistics: the layers' statistics, with the rotation that is undone.
        teachers: recipe texts; with several, the mean of the logarithms of their scores is fitted.
        folder: the folder for each passage's samples until the end, so that an interrupted run can continue; None to
            keep them in memory.
        width: width of each network's hidden layer.
        on_passage: called after each passage.
        on_step: called after each step of the fit, `STEPS` times.

    Raises:
        KeepsetError: a teacher cannot be used on this model.
        UnsupportedModelError: scores are not finite.
    """
    methods = parse_teachers(teachers)
    passages = cut_passages(corpus)
    held_count = max(1, len(passages) // _HELD_OUT) if len(passages) > 1 else 0
    share = min(1.0, ROWS / sum(map(len, passages[: len(passages) - held_count])))
    key = _key(statistics, corpus, teachers, share)
    parts: list[Samples] = []
    for number, passage in enumerate(passages):
        part = _kept(folder, key, number)
        if part is None:
            part = _sampled(model, statistics, passage, methods, share, corpus.seed + number)
            _keep(folder, key, number, part)
        parts.append(part)
        on_passage()
    fitted, held_out = _together(parts[: len(parts) - held_count]), parts[len(parts) - held_count :]
    fitted = replace(fitted, wanted=fitted.wanted - fitted.wanted.mean())  # so that an average entry has the score 1
    predictor = fit(fitted, width=width, seed=corpus.seed, device=model.device, on_step=on_step)
    if statistics.retrieval:
        predictor = _favouring(predictor, statistics.gates().flatten())
    heads = len(next(iter(statistics.layers.values())).direction)
    predictors = {
        index: predictor.of_heads(slice(row * heads, (row + 1) * heads)) for row, index in enumerate(statistics.layers)
    }
    provenance = {
        "teachers": list(teachers),
        "passages": len(passages) - held_count,
        "entries": fitted.inputs.shape[1],
        "longest": int(fitted.lengths.max()),
        "width": width,
        "held_out": _quality(predictor, _together(held_out), heads, list(statistics.layers)) if held_out else None,
    }
    return replace(statistics, predictors=predictors, provenance={**statistics.provenance, "predictors": provenance})


def cut_passages(corpus: Corpus) -> list[Int[Tensor, " _"]]:
    """Return the passages in different lengths: most whole, of others the first half or the first quarter.

    None is cut to fewer than `SHORTEST` tokens.
    """
    halvings = zip(corpus.passages, cycle(_HALVINGS))
    return [passage[: max(len(passage) >> times, SHORTEST)] for passage, times in halvings]


def _sampled(
    model: PreTrainedModel, statistics: Statistics, ids: Tensor, teachers: Sequence[Method], share: float, seed: int
) -> Samples:
    """Return a share of the entries of one passage; the first entries, which always stay, are left out.

    Args:
        model: the model.
        statistics: its statistics.
        ids: the passage.
        teachers: the methods whose scores are learned.
        share: the share of the entries.
        seed: the seed of the draw.
    """
    needs = reduce(or_, (teacher.traits.needs for teacher in teachers), Needs())
    recorder = Recorder(model, needs).prefill(ids.to(model.device)[None])
    order = torch.randperm(len(ids) - SKIP, generator=torch.Generator().manual_seed(seed))
    token_indices = SKIP + order[: math.ceil(share * len(order))].sort().values
    targets = torch.stack([_wanted(teacher, recorder.observations) for teacher in teachers]).mean(0)
    inputs = [
        _inputs(observation, statistics.layers[observation.layer], token_indices)
        for observation in recorder.observations
    ]
    if not targets.isfinite().all():
        raise UnsupportedModelError("Some of the teachers' scores are not finite numbers: nothing can be fitted.")
    return Samples(
        torch.cat(inputs), targets[:, token_indices], len(ids) - token_indices, torch.full_like(token_indices, len(ids))
    )


def _wanted(teacher: Method, observations: Sequence[Observation]) -> Float[Tensor, "heads entries"]:
    """Return the logarithms of a teacher's scores for all heads; if some are negative, the scores on one scale."""
    scores = torch.cat([teacher.score(observation)[0].float().cpu() for observation in observations])
    counted = scores[:, SKIP:]
    if bool((counted < 0).any()):
        return (scores - counted.mean()) / counted.std().clamp(min=1e-12)
    # Attention is divided among all entries, so in a text of twice the length each gets half.
    return (scores + _FLOOR * counted.mean()).log() + math.log(scores.shape[1])


def _inputs(
    observation: Observation, layer: LayerStatistics, token_indices: Int[Tensor, " count"]
) -> Float[Tensor, "kv_heads count inputs"]:
    keys, values = (part[0].float().cpu()[:, token_indices] for part in (observation.keys, observation.values))
    angles = token_indices[:, None].double() * layer.frequency.double()
    plain = keys / layer.gain
    plain = plain * angles.cos().float() - plain[..., layer.partner] * angles.sin().float()
    return inputs_of(plain, values).half()


def fit(
    samples: Samples, *, width: int, seed: int, device: torch.device, on_step: Callable[[], None] = lambda: None
) -> Predictor:
    """Fit one network per head to the least mean squared error of log scores; all heads side by side.

    The linear part of the log score and the effect of an entry's age are fitted together by least squares. The hidden
    layer and the slopes are fitted to the residual.

    Args:
        width: numbers of the hidden layer.
        seed: seed of the initial weights and of the order of entries.
        on_step: called `STEPS` times.

    Returns:
        The networks of all heads, as those of one layer.
    """
    heads = range(0, len(samples.inputs), _HEADS_AT_ONCE)
    parts, reported = [], 0
    for number, first in enumerate(heads):
        few = slice(first, first + _HEADS_AT_ONCE)

        def step(done: int, number: int = number) -> None:
            nonlocal reported
            while reported < (number * STEPS + done) // len(heads):
                reported += 1
                on_step()

        part = Samples(
            *(tensor.to(device) for tensor in (samples.inputs[few], samples.wanted[few], samples.ages, samples.lengths))
        )
        parts.append(_fitted(part, width, seed + first, step))
    return Predictor(*map(torch.cat, zip(*parts, strict=True)))


@torch.enable_grad()
def _fitted(samples: Samples, width: int, seed: int, on_step: Callable[[int], None]) -> Predictor:
    chance, device = torch.Generator().manual_seed(seed), samples.inputs.device
    heads, entries, size = samples.inputs.shape
    centre, scale = _mean_and_spread(samples.inputs)
    mean, spread = _mean_and_spread(samples.wanted[..., None])
    row_weights, knots = (
        knot_weights(counts, math.ceil(math.log2(int(counts.max()))) + 1) for counts in (samples.lengths, samples.ages)
    )
    # The effect of a distance in all texts, and the difference from it in texts of each length.
    deviations = (row_weights[:, :, None] * knots[:, None]).flatten(1)
    knots = torch.cat([knots, deviations], 1)
    usual = knots.mean(0)

    def block(entries: slice | Tensor) -> tuple[Tensor, Tensor, Tensor]:
        inputs, targets = samples.inputs[:, entries].float(), samples.wanted[:, entries, None]
        return (inputs - centre) / scale, (knots[entries] - usual).expand(heads, -1, -1), (targets - mean) / spread

    blocks = [slice(first, first + _ENTRIES_AT_ONCE) for first in range(0, entries, _ENTRIES_AT_ONCE)]
    ridge = torch.full((size + knots.shape[1],), _RIDGE, dtype=torch.float32, device=device)
    ridge[len(ridge) - deviations.shape[1] :] = _DEVIATION
    linear, age = _least_squares((block(part) for part in blocks), ridge).split([size, knots.shape[1]], 1)

    octaves = (samples.ages.float().log2()[:, None] - MIDDLE) / _SLOPE_SPREAD

    def weights(*shape: int, most: float) -> Tensor:
        return ((torch.rand(shape, generator=chance, dtype=torch.float32) * 2 - 1) * most).to(device)

    hidden, bias = weights(heads, size, width, most=size**-0.5), weights(heads, 1, width, most=size**-0.5)
    # Slopes begin with small weights: with zeros, the hidden layer would learn nothing from them at first.
    output = torch.stack([torch.zeros_like(bias[:, 0]), weights(heads, width, most=_SLOPE_WEIGHTS)], -1)
    last = torch.zeros(heads, 1, 2, dtype=torch.float32, device=device)
    lean = torch.zeros(heads, size, 1, dtype=torch.float32, device=device)
    learnt = [part.requires_grad_() for part in (hidden, bias, output, last, lean)]
    optimizer = torch.optim.AdamW(learnt, _RATE, weight_decay=_DECAY)
    schedule = torch.optim.lr_scheduler.CosineAnnealingLR(optimizer, STEPS)
    for step in range(STEPS):
        chosen = torch.randint(entries, (min(BATCH, entries),), generator=chance).to(device)
        inputs, by_age, targets = block(chosen)
        left = targets - inputs @ linear - by_age @ age
        score, slope = (F.gelu(inputs @ hidden + bias) @ output + last).split(1, -1)
        loss = (score + (slope + inputs @ lean) * octaves[chosen] - left).square().mean(1).sum()
        optimizer.zero_grad()
        loss.backward()  # type: ignore[no-untyped-call]
        optimizer.step()
        schedule.step()
        on_step(step + 1)
    with torch.no_grad():
        units = spread * torch.tensor([1.0, 1 / _SLOPE_SPREAD], dtype=torch.float32, device=device)  # of both outputs
        straight = (torch.cat([linear, lean], 2) / scale.transpose(1, 2) * units).transpose(1, 2).contiguous()
        folded = (hidden / scale.transpose(1, 2)).transpose(1, 2).contiguous()
        shifted = bias[:, 0] - (folded @ centre.transpose(1, 2))[..., 0]
        constant = (last * units)[:, 0] - (straight @ centre.transpose(1, 2))[..., 0]
        constant[:, 0] += mean[:, 0, 0]
        by_age = (_table(age[..., 0], row_weights) - (usual @ age)[..., None]) * spread
        parts = straight, folded, shifted, (output * units).transpose(1, 2).contiguous(), constant, by_age
        return Predictor(*(part.detach().cpu() for part in parts))


def _favouring(predictor: Predictor, gates: Float[Tensor, " heads"]) -> Predictor:
    """Return networks whose scores are multiplied by a power of their heads' gates; the mean log score is unchanged."""
    factor = _RETRIEVAL * gates.clamp(min=_LEAST_GATE).log()
    bias = predictor.output_bias + torch.stack([factor - factor.mean(), torch.zeros_like(factor)], -1)
    return predictor._replace(output_bias=bias)


def _mean_and_spread(
    rows: Float[Tensor, "heads entries size"],
) -> tuple[Float[Tensor, "heads 1 size"], Float[Tensor, "heads 1 size"]]:
    """Return mean and standard deviation over the entries, computed head by head."""
    means = torch.stack([head.float().mean(0, keepdim=True) for head in rows])
    return means, torch.stack([head.float().std(0, keepdim=True) for head in rows]).clamp(min=1e-6)


def _table(
    age: Float[Tensor, "heads weights"], row_weights: Float[Tensor, "entries lengths"]
) -> Float[Tensor, "heads lengths knots"]:
    """Return the effect of each distance in texts of each length; a length without passages takes the nearest one's.

    Args:
        age: the effect of each distance in all texts, then its difference in texts of each length.
        row_weights: weights of the lengths at each entry.
    """
    lengths = row_weights.shape[1]
    all_texts, differences = age.split([age.shape[1] // (lengths + 1), age.shape[1] // (lengths + 1) * lengths], 1)
    present_lengths = row_weights.sum(0).nonzero()[:, 0]
    nearest = present_lengths[
        (torch.arange(lengths, device=present_lengths.device)[:, None] - present_lengths).abs().argmin(1)
    ]
    return all_texts[:, None] + differences.unflatten(1, (lengths, -1))[:, nearest]


def _least_squares(
    blocks: Iterable[tuple[Tensor, Tensor, Tensor]], ridge: Float[Tensor, " weights"]
) -> Float[Tensor, "heads weights 1"]:
    """Return the least-squares weights of inputs and knots, over blocks of entries.

    Args:
        blocks: inputs, knots and targets.
        ridge: numbers that are added to the diagonal.
    """
    total: Tensor | None = None
    for inputs, knots, targets in blocks:
        regressors = torch.cat([inputs, knots], 2)
        sums = regressors.transpose(1, 2) @ torch.cat([regressors, targets], 2)
        total = sums if total is None else total + sums
    assert total is not None
    products, goals = total[:, :, :-1], total[:, :, -1:]
    # By Cholesky factors, because PyTorch's general solver never returns for such large batches on some CPUs.
    return torch.cholesky_solve(goals, torch.linalg.cholesky(products + ridge.diag()))


def _quality(predictor: Predictor, held_out: Samples, heads: int, layers: Sequence[int]) -> dict[str, Any]:
    """Return how well networks rank held-out entries: rank correlation, and share of the choice.

    Args:
        predictor: the networks of all heads.
        held_out: entries that they were not fitted to.
        heads: heads of a layer.
        layers: the layers' indices.
    """
    row_weights = knot_weights(held_out.lengths, predictor.age.shape[1])
    knots = knot_weights(held_out.ages, predictor.age.shape[2])
    scores, slopes = predictor.outputs_of(held_out.inputs.float()).unbind(-1)
    octaves = held_out.ages.float().log2().clamp(max=knots.shape[1] - 1) - MIDDLE
    predicted = scores + slopes * octaves + torch.einsum("el,hlk,ek->he", row_weights, predictor.age, knots)
    ranks = [part.argsort(-1).argsort(-1).float() for part in (predicted, held_out.wanted)]
    centred = [part - part.mean(-1, keepdim=True) for part in ranks]
    correlation = F.cosine_similarity(centred[0], centred[1], dim=-1)
    count = max(1, round(_KEEP * predicted.shape[1]))
    chosen = [
        torch.zeros_like(predicted).scatter(1, part.topk(count, 1).indices, 1) for part in (predicted, held_out.wanted)
    ]
    shared = (chosen[0] * chosen[1]).sum(1) / count
    by_layer = [part.view(-1, heads).mean(1).tolist() for part in (correlation, shared)]
    return {
        "by_layer": {
            name: dict(zip(map(str, layers), numbers, strict=True))
            for name, numbers in zip((CORRELATION, SHARE), by_layer, strict=True)
        },
        "entries": predicted.shape[1],
    }


def _together(parts: Sequence[Samples]) -> Samples:
    inputs, targets = (torch.cat([getattr(part, name) for part in parts], 1) for name in ("inputs", "wanted"))
    ages, lengths = (torch.cat([getattr(part, name) for part in parts]) for name in ("ages", "lengths"))
    return Samples(inputs, targets, ages, lengths)


def _key(statistics: Statistics, corpus: Corpus, teachers: Sequence[str], share: float) -> str:
    """Return a text that differs whenever the samples of a passage would differ.

    Args:
        statistics: the statistics.
        corpus: the passages.
        teachers: the teachers' recipes.
        share: the share of the entries.
    """
    settings: Mapping[str, Any] = {
        "format": FORMAT,
        "model": statistics.provenance["model"],
        "corpus": [corpus.sha256, corpus.seed, [len(passage) for passage in corpus.passages], _HALVINGS],
        "teachers": list(teachers),
        "share": share,
    }
    return hashlib.sha256(json.dumps(settings, sort_keys=True, default=str).encode()).hexdigest()[:16]


def _kept(folder: Path | None, key: str, number: int) -> Samples | None:
    if folder is None or not (path := folder / f"{key}-{number}.safetensors").is_file():
        return None
    return Samples(**load_file(path))


def _keep(folder: Path | None, key: str, number: int, part: Samples) -> None:
    if folder is None:
        return
    folder.mkdir(parents=True, exist_ok=True)
    unfinished = folder / f"{key}-{number}.unfinished"
    save_file({name: tensor.contiguous() for name, tensor in vars(part).items()}, unfinished)
    unfinished.replace(folder / f"{key}-{number}.safetensors")
