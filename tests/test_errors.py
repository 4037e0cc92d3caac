"""Each kind of refusal has a class of its own, so that a service can answer each its way."""

from __future__ import annotations

import importlib.util
from collections.abc import Callable
from pathlib import Path

import pytest
from transformers import T5Config

import keepset
from keepset.contexts.file import header
from keepset.errors import (
    BudgetError,
    CorruptFileError,
    KeepsetError,
    RecipeError,
    UnsupportedEngineError,
    UnsupportedModelError,
)
from keepset.serving.start_checks import check_installed


def encoder_decoder(folder: Path) -> None:
    T5Config(vocab_size=8, d_model=8).save_pretrained(folder)
    keepset.models.load(str(folder))


def damaged_file(folder: Path) -> None:
    (folder / "context").write_bytes(b"not tensors at all")
    header(folder / "context")


def no_engine(folder: Path) -> None:
    with pytest.MonkeyPatch.context() as patch:
        patch.setattr(importlib.util, "find_spec", lambda name: None)
        check_installed()


CASES: list[tuple[Callable[[Path], None], type[KeepsetError]]] = [
    (lambda _: keepset.Recipe.parse("snapvk(keep=0.5)"), RecipeError),
    (lambda _: keepset.Budget(keep=1.5), BudgetError),
    (encoder_decoder, UnsupportedModelError),
    (damaged_file, CorruptFileError),
    (no_engine, UnsupportedEngineError),
]


@pytest.mark.parametrize(("bad_input", "kind"), CASES, ids=[kind.__name__ for _, kind in CASES])
def test_a_service_can_tell_them_apart(
    bad_input: Callable[[Path], None], kind: type[KeepsetError], tmp_path: Path
) -> None:
    with pytest.raises(KeepsetError) as refusal:
        bad_input(tmp_path)
    assert type(refusal.value) is kind
    assert isinstance(refusal.value, ValueError)
