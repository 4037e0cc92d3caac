"""The figures of a comparison against the same ones worked out from runs of their own."""

import math
from collections.abc import Sequence
from dataclasses import replace
from functools import cache
from itertools import cycle
from statistics import NormalDist, fmean, stdev
from typing import Any

import pytest
import torch
from torch import Tensor
from transformers import DynamicCache

import keepset
from keepset.core.budget import Budget
from keepset.lab.candidate import grid
from keepset.lab.compare.comparison import LEAST_TOKENS, Comparison, conclusion, kl, kl_figures, mean, nll
from keepset.lab.compare.prompt import PromptComparer
from keepset.lab.compare.text_task import ANSWER_TOKENS, TextTask
from keepset.lab.record import Record
from keepset.lab.texts import Needle
from tests.hf.contract.builds import build
from tests.hf.models import full, generate, prompt, recipe, tiny

LENGTH, AFTER = 60, 20
COMPOSED = ["adakv(expected_attention(future=16), keep=15)", "pyramid(h2o, keep=15)", "adakv(tova, keep=15)"]
EVERY = [
    *(keepset.Recipe.parse(recipe(method, keep)) for method, keep in zip(keepset.METHODS, cycle((15, 0.4)))),
    *map(keepset.Recipe.parse, COMPOSED),
]


def divergence(step: Sequence[float], other: Sequence[float]) -> float:
    """KL in nats of two rows of log-probabilities."""
    return sum(math.exp(p) * (p - q) for p, q in zip(step, other, strict=True))


def best(step: Sequence[float]) -> int:
    return max(range(len(step)), key=step.__getitem__)


def log_probabilities(logits: list[float]) -> list[float]:
    total = math.log(math.fsum(math.exp(x) for x in logits))
    return [x - total for x in logits]


@pytest.mark.parametrize("dtype", [torch.float32, torch.bfloat16])
@pytest.mark.parametrize("tokens", [1, 2, 256, 257, 600])
def test_each_token_has_its_own_figure(tokens: int, dtype: torch.dtype) -> None:
    draw = torch.Generator().manual_seed(tokens)
    both = (3 * torch.randn(2, tokens, 5, generator=draw)).to(dtype)
    ids = torch.randint(5, (tokens,), generator=draw)
    p, q = ([log_probabilities(row) for row in logits.tolist()] for logits in both)
    assert kl(*both).tolist() == pytest.approx(list(map(divergence, p, q)), rel=1e-4, abs=1e-6)
    expected = [-p[i][ids[i + 1]] for i in range(tokens - 1)]
    assert nll(both[0], ids).tolist() == pytest.approx(expected, rel=1e-5, abs=1e-6)
    assert (mean(torch.tensor([])), mean(torch.tensor([1.0, 2.0, 6.0]))) == (0.0, 3.0)


class Numbers:
    """A tokenizer whose texts are the tokens' numbers."""

    def decode(self, ids: list[int], skip_special_tokens: bool) -> str:
        return " ".join(map(str, ids))


def task(answer: str | None = None) -> TextTask:
    ids = prompt(1, LENGTH + AFTER)
    needle = None if answer is None else Needle("", "Which?", answer)
    question = None if answer is None else prompt(1, 5, seed=1)
    return TextTask(ids[:, :LENGTH], ids[:, LENGTH:], question, needle)


def comparer(recipes: list[keepset.Recipe], architecture: str = "llama", answer: str | None = None) -> PromptComparer:
    return PromptComparer(tiny(architecture), Numbers(), task(answer), architecture, recipes)


@pytest.fixture(scope="module")
def measured() -> dict[str, tuple[Record, Tensor]]:
    """Every recipe's row and what it kept, all from one prefill."""
    one = comparer(EVERY)
    rows = list(one.run(grid(EVERY, [])))
    assert rows == one.comparison.rows
    return {row.recipe: (row, kept) for row, kept in zip(rows, one.comparison.kept, strict=True) if kept is not None}


@torch.no_grad()
def continued(model: Any, cache: Any, continuation: Tensor) -> list[list[float]]:
    """Log-probabilities after each token of a continuation, `[1, tokens]`, one at a time, after a prefill."""
    steps = [model(token[None, None], past_key_values=cache).logits[0, -1] for token in continuation[0]]
    return [step.double().log_softmax(-1).tolist() for step in steps]


@cache
def reference() -> list[list[float]]:
    """The same of transformers' own cache and attention."""
    model = tiny("llama")
    model.set_attn_implementation("sdpa")
    cache = DynamicCache(config=model.config)
    with torch.no_grad():
        model(task().prompt, past_key_values=cache)
    return continued(model, cache, task().continuation)


def mean_nll(steps: list[list[float]]) -> float:
    tokens = task().continuation[0].tolist()
    return fmean(-step[token] for step, token in zip(steps, tokens[1:], strict=False))


@pytest.mark.full
@pytest.mark.parametrize("text", EVERY, ids=str)
def test_figures_are_of_a_run_of_its_own(text: keepset.Recipe, measured: dict[str, tuple[Record, Tensor]]) -> None:
    row, kept = measured[str(text)]
    model = tiny("llama")
    expected = reference()
    cache = keepset.Cache(model, text)
    with torch.no_grad():
        model(task().prompt, past_key_values=cache)
    nbytes, share, keep_set = cache.nbytes, cache.share, cache.keep_set
    assert keep_set is not None
    steps = continued(model, cache, task().continuation)

    pairs = list(zip(expected, steps, strict=True))
    assert row.figures["kl"] == pytest.approx(fmean(divergence(a, b) for a, b in pairs), rel=1e-3, abs=1e-6)
    assert row.figures["nll_delta"] == pytest.approx(mean_nll(steps) - mean_nll(expected), abs=1e-4)
    assert row.figures["top1"] == fmean(best(a) == best(b) for a, b in pairs)
    assert row.figures["kl"] > 1e-3

    heads = [keep_set.positions(layer, 0, head) for layer in keep_set.layers for head in range(kept.shape[1])]
    assert [mask.nonzero()[:, 0].tolist() for mask in kept.flatten(0, 1)] == [head.tolist() for head in heads]
    assert row.figures["keep"] == sum(map(len, heads)) / (len(heads) * LENGTH)
    assert (row.figures["kv_bytes"], row.figures["share"]) == (nbytes, share)
    assert row.figures["kv_bytes_full"] == LENGTH * len(heads) * 2 * 16 * 4
    assert row.error is None and not row.replies and "needle_found" not in row.figures


def test_figures_of_the_full_cache_and_seconds_of_what_a_recipe_needs() -> None:
    comparison = comparer([]).comparison
    assert comparison.full["nll"] == pytest.approx(mean_nll(reference()), abs=1e-5)
    assert comparison.full["kv_bytes"] == LENGTH * 2 * 2 * 2 * 16 * 4
    assert (comparison.tokens, comparison.continuation_tokens) == (LENGTH, AFTER)
    assert comparison.rows == [] and not comparison.failed
    texts = ["knorm(keep=15)", "tova(keep=15)", "h2o(keep=15)", "expected_attention(future=16, keep=15)"]
    recipes = [keepset.Recipe.parse(text) for text in texts]
    for row in comparer(recipes).run(grid(recipes, [])):
        own = row.figures["prefill_seconds"] - row.figures["prefill_seconds_full"]
        assert row.figures["prefill_seconds_full"] > 0 and 0 < row.figures["select_seconds"] <= own + 1e-9
        assert (own - row.figures["select_seconds"] < 1e-9) == row.recipe.startswith("knorm")


@pytest.mark.parametrize(
    "architecture", ["llama", *(pytest.param(name, marks=pytest.mark.full) for name in ("gemma3", "qwen3"))]
)
def test_keeping_all_costs_nothing(architecture: str) -> None:
    every = [keepset.Recipe.parse(recipe(method, 1.0)) for method in keepset.METHODS]
    for row in comparer(every, architecture).run(grid(every, [])):
        rounded = row.method.startswith("quantized")
        assert row.figures["keep"] == 1.0 and (rounded or row.figures["top1"] == 1)
        assert abs(row.figures["kl"]) < (1e-3 if rounded else 1e-6)
        assert abs(row.figures["nll_delta"]) < (1e-2 if rounded else 1e-5)


# --- the question


def greedy(cache: Any, prompt: Tensor, asked: Tensor, tokens: int = ANSWER_TOKENS) -> list[int]:
    """What `generate` says to a prompt and a question; with a cache, to what it kept of the prompt."""
    model, ids = tiny("llama"), torch.cat([prompt, asked], 1)
    if cache is None:
        output = full(model, ids, max_new_tokens=tokens)
    else:
        with torch.no_grad():
            model(prompt, past_key_values=cache)
        output = generate(model, ids, cache, max_new_tokens=tokens)
    said = output.sequences[0, ids.shape[1] :].tolist()
    return said[: said.index(2)] if 2 in said else said


def answered(cache: Any = None) -> list[int]:
    return greedy(cache, task().prompt, prompt(1, 5, seed=1))


def test_answers_are_greedy_and_follow_the_question() -> None:
    recipes = [keepset.Recipe.parse(text) for text in ("snapkv(window=5, keep=12)", "adakv(tova, keep=12)")]
    expected = answered()
    one = comparer(recipes, answer=str(expected[-1]))
    assert one.comparison.full["answer"] == " ".join(map(str, expected))
    assert one.comparison.full["needle_found"] is True
    assert one.comparison.to_json()["needle"] == {"question": "Which?", "answer": str(expected[-1])}
    for row, text in zip(one.run(grid(recipes, [])), recipes, strict=True):
        answer = " ".join(map(str, answered(keepset.Cache(tiny("llama"), text))))
        assert row.replies[0] == answer != one.comparison.full["answer"]
        assert row.figures["needle_found"] == (str(expected[-1]) in answer)


def test_an_answer_ends_where_the_model_ends_it_and_case_does_not_matter(monkeypatch: pytest.MonkeyPatch) -> None:
    expected = answered()
    for ends in (expected[4], [expected[4], expected[6]]):
        monkeypatch.setattr(tiny("llama").generation_config, "eos_token_id", ends)
        first = expected.index(expected[4])
        assert comparer([], answer="x").comparison.full["answer"] == " ".join(map(str, expected[:first]))

    monkeypatch.setattr(Numbers, "decode", lambda self, ids, skip_special_tokens: "  In OSLO.\n")
    found = comparer([], answer="Oslo").comparison.full
    assert (found["answer"], found["needle_found"]) == ("In OSLO.", True)


# --- rows


def test_what_cannot_be_had_is_a_row_with_the_reason_and_does_not_stop_the_others() -> None:
    recipes = keepset.Recipe.parse_list("streaming_llm, snapkv(window=8), tova(keep=8, every=4), tova")
    one = comparer(recipes[2:])
    rows = list(one.run(grid(recipes, [Budget(3)])))
    texts = ["streaming_llm(keep=3)", "snapkv(window=8, keep=3)", "tova(keep=8, every=4)", "tova(keep=3)"]
    assert [row.recipe for row in rows] == texts
    assert [row.method for row in rows] == ["streaming_llm", "snapkv(window=8)", "tova(every=4)", "tova"]
    assert [row.error is None for row in rows] == [False, False, False, True] and one.comparison.failed
    assert "below the 4 entries that always stay" in str(rows[0].error) and "leave every= out" in str(rows[2].error)
    assert "kl" in rows[3].figures and not rows[2].figures
    assert [kept is None for kept in one.comparison.kept] == [True, True, True, False]
    assert sorted(one.comparison.to_json()["rows"][1]) == ["error", "method", "recipe", "requested"]


# --- the conclusion claims no more than one text shows


def told(method: str, kl: float, around: float = 0.0, budget: float = 0.1, found: bool | None = None) -> Record:
    figures: dict[str, Any] = {"kl": kl, "kl_low": kl - around, "kl_high": kl + around, "share": budget, "top1": 0.9}
    if found is not None:
        figures["needle_found"] = found
    return Record(f"{method}(bytes={budget})", method, f"bytes={budget}", figures=figures)


def compared(*rows: Record, tokens: int = 1024, **full: Any) -> Comparison:
    return Comparison("model", tokens, 64, full, rows=list(rows))


def test_the_nearest_is_named_and_overlapping_intervals_are_a_tie() -> None:
    said = conclusion(compared(told("a", 0.1, 0.04), told("b", 0.2, 0.05), told("c", 0.9)))
    assert said.startswith("On this text, with 10% of a full 16-bit cache's bytes, a is nearest to the full cache (KL")
    assert "of 64 places), c furthest (KL 0.900)." in said
    a, b, c = told("a", 0.1, 0.06), told("b", 0.2, 0.05), told("c", 0.9)
    assert "a and b are nearest to the full cache, a tie (KL 0.100 to 0.200 over 64 tokens); c is" in conclusion(
        compared(c, b, a)
    )
    assert "the recipes cannot be told apart (KL 0.100 to 0.200 over 64 tokens)" in conclusion(compared(b, a))
    # Who keeps more than its budget is not compared with those who do not.
    greedy = told("a", 0.1)
    greedy = replace(greedy, figures={**greedy.figures, "share": 0.24})
    said = conclusion(compared(greedy, told("b", 0.2), told("c", 0.9)))
    assert "with 10% of a full 16-bit cache's bytes, b is nearest" in said
    assert "with 24% of a full 16-bit cache's bytes, a is nearest" in conclusion(compared(greedy))


def test_all_that_answer_are_named_and_nothing_is_concluded_from_a_short_text() -> None:
    rows = told("a", 0.1), told("b", 0.9)
    assert conclusion(compared(*rows, tokens=41)) == (
        f"Nothing can be concluded from a text of 41 tokens: give one of at least {LEAST_TOKENS}."
    )
    assert "a is nearest" in conclusion(compared(*rows, tokens=LEAST_TOKENS))
    decoded = replace(compared(*rows, tokens=200), drift_tokens=256)
    assert "a is nearest" in conclusion(decoded)  # what was decoded is part of the text
    larger = [told("a", 0.1, budget=0.25, found=True), told("b", 0.2, budget=0.25, found=True)]
    smaller = [told(name, 0.1 + at, found=name in "bc") for at, name in enumerate("abcdefg")]
    said = conclusion(compared(*larger, *smaller, needle_found=True))
    assert said == (
        "Asked one question with 10% of a full 16-bit cache's bytes, b and c answer as the full cache does; a, d, e "
        "and 2 more have lost the fact."
    )
    none = [replace(each, figures={**each.figures, "needle_found": False}) for each in smaller]
    assert conclusion(compared(*none, needle_found=True)).startswith("Under none of these budgets")


def test_intervals_are_of_the_mean_over_the_tokens() -> None:
    """Compared with the normal interval, which a bootstrap of many values comes to."""
    values = torch.rand(400, generator=torch.Generator().manual_seed(0), dtype=torch.float64)
    figures = kl_figures(values)
    margin = NormalDist().inv_cdf(0.975) * stdev(values.tolist()) / math.sqrt(400)
    middle = fmean(values.tolist())
    assert abs(figures["kl"] - middle) < 1e-9
    assert abs(figures["kl_low"] - (middle - margin)) < 0.1 * margin
    assert abs(figures["kl_high"] - (middle + margin)) < 0.1 * margin
    assert kl_figures(torch.tensor([0.5, math.inf]))["kl_high"] == math.inf


@pytest.mark.parametrize(
    ("kind", "method", "words"),
    [
        ("hunyuan_v1_dense", "expected_attention(future=8)", "makes its queries in a way"),  # while the prompt runs
        # at once
        pytest.param("gemma3n_text", "gvote(p_nuc=0.9, future=8)", "share keys and values", marks=pytest.mark.full),
    ],
)
def test_a_recipe_that_the_model_refuses_is_a_row(kind: str, method: str, words: str) -> None:
    """The others have the figures that they have without it."""
    model, recipes = build(kind), keepset.Recipe.parse_list(f"knorm, {method}, h2o")

    def rows(recipes: list[keepset.Recipe]) -> list[Record]:
        candidates = grid(recipes, [Budget(15)])
        ran = [candidate.recipe for candidate in candidates if candidate.recipe is not None]
        return list(PromptComparer(model, Numbers(), task(), kind, ran).run(candidates))

    first, refused, last = rows(recipes)
    assert refused.error is not None and words in refused.error and not refused.figures
    for row, expected in zip((first, last), rows([recipes[0], recipes[2]]), strict=True):
        assert row.error is None
        assert [row.figures[name] for name in ("kl", "keep", "top1")] == pytest.approx(
            [expected.figures[name] for name in ("kl", "keep", "top1")]
        )
