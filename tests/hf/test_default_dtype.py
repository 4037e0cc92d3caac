"""`torch.set_default_dtype`: what stays and what is answered do not depend on it."""

from __future__ import annotations

import sys
from collections.abc import Iterator
from contextlib import contextmanager
from functools import cache
from pathlib import Path
from typing import Any

import pytest
import torch
from torch import Tensor
from torch.utils._python_dispatch import TorchDispatchMode
from torch.utils._pytree import tree_leaves

import keepset
from tests.hf.models import generate, kept_of, padded_prompt, recipe, statistics, tiny

DTYPES = {"half": torch.float16, "bfloat16": torch.bfloat16, "double": torch.float64}
MODELS = ["llama", "gpt_oss"]
"""One of plain attention, and one with sinks, windows and experts."""

ALL = [recipe(name, 12) for name in keepset.METHODS]
ALL += ["tova(keep=12, every=4)", "adakv(tova, keep=12, every=4)", "adakv(r_kv(window=4), keep=12, every=4)"]
ALL += ["adakv(distilled, keep=12, every=4)", "match(adakv(snapkv(window=4)), keep=12)", "gvote(future=3, keep=0.5)"]
ALL += ["quantized(adakv(knorm), bits=8, keep=12)", "quantized(tova, bits=4, keep=12)", "criticalkv(knorm, keep=12)"]
ALL += ["compilerkv(window=3, keep=12)", "compilerkv(window=3, elastic=True, keep=12)", "zigzag(second_pass, keep=12)"]
QUICK = ["adakv(snapkv(window=4), keep=12)", "tova(keep=12, every=4)", "gvote(future=3, keep=0.5)"]
QUICK += ["match(snapkv(window=4), window=4, keep=12)"]


@contextmanager
def default(dtype: torch.dtype) -> Iterator[None]:
    before = torch.get_default_dtype()
    torch.set_default_dtype(dtype)
    try:
        yield
    finally:
        torch.set_default_dtype(before)


class Promoted(TorchDispatchMode):
    """Notes the lines of keepset that make numbers of the default type of whole ones, as a quotient is."""

    def __init__(self) -> None:
        super().__init__()
        self.lines: set[str] = set()

    def __torch_dispatch__(self, operator: Any, types: Any, args: Any = (), kwargs: Any = None) -> Any:
        result = operator(*args, **(kwargs or {}))
        types_in = [part for part in tree_leaves((args, kwargs)) if isinstance(part, Tensor | torch.dtype)]
        half = [(part.dtype if isinstance(part, Tensor) else part) == torch.float16 for part in types_in]
        if isinstance(result, Tensor) and result.dtype == torch.float16 and not any(half):
            frame = sys._getframe(1)
            while frame.f_back is not None and "/torch/" in frame.f_code.co_filename:
                frame = frame.f_back
            if frame.f_code.co_filename.startswith(str(Path(keepset.__file__).parent)):
                self.lines.add(f"{frame.f_code.co_filename}:{frame.f_lineno}, {operator}")
        return result


def answer(name: str, text: str) -> tuple[Any, ...]:
    """What a padded request and another one keep at each event, and their tokens."""
    ids, mask = padded_prompt([0, 5], 30)
    past = keepset.Cache(tiny(name), text, history=True)
    output = generate(tiny(name), ids, past, mask, max_new_tokens=8)
    kept = [kept_of(event.keep_set, request) for event in past.events for request in range(2)]
    return kept, output.sequences.tolist()


@cache
def usual(name: str, text: str) -> tuple[Any, ...]:
    statistics(name)
    return answer(name, text)


@pytest.mark.parametrize("dtype", DTYPES)
@pytest.mark.parametrize("text", QUICK)
@pytest.mark.few(4)
def test_the_default_type_changes_nothing(text: str, dtype: str) -> None:
    expected = usual("llama", text)
    with default(DTYPES[dtype]):
        assert answer("llama", text) == expected


@pytest.mark.full
@pytest.mark.cross
@pytest.mark.parametrize("name", MODELS)
@pytest.mark.parametrize("text", ALL)
@pytest.mark.parametrize("dtype", DTYPES)
def test_it_changes_nothing_of_any_method(name: str, text: str, dtype: str) -> None:
    expected = usual(name, text)
    with default(DTYPES[dtype]), Promoted() as promoted:
        assert answer(name, text) == expected
    assert promoted.lines == set()


@pytest.mark.full
@pytest.mark.parametrize("dtype", DTYPES)
@pytest.mark.parametrize("text", QUICK)
def test_nor_for_kernels(triton_interpreted: None, text: str, dtype: str) -> None:
    expected = answer("llama_shallow", text)
    with default(DTYPES[dtype]):
        assert answer("llama_shallow", text) == expected
