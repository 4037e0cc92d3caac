"""Documents as contexts: built with the model before its servers start, and how many of them a pool holds."""

from __future__ import annotations

import time
from collections.abc import Iterator, Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import Any

from keepset.recipe import Recipe
from keepset.serving.metrics import pool


@dataclass(frozen=True)
class Document:
    """A document's file, named as a server calls it, and the seconds that compressing it took."""

    path: Path
    seconds: float


def build(
    model: str, dtype: str | None, recipe: Recipe, documents: Sequence[list[int]], to: Path
) -> Iterator[Document]:
    """Writes each document's cache, compressed by a recipe, as a context of the model in that folder.

    Args:
        model, dtype: as `models.load` has them; a dtype that it does not know is the server's own way to choose.
        recipe: what to keep.
        documents: tokens of each.
        to: the folder for the files.
    """
    import torch

    from keepset import models
    from keepset.hf.cache import Cache

    loaded, _ = models.load(model, dtype=None if dtype == "auto" else dtype)
    for number, tokens in enumerate(documents):
        start, path = time.perf_counter(), to / f"document-{number}.safetensors"
        cache = Cache(loaded, recipe)
        with torch.no_grad():
            loaded(torch.tensor([tokens], device=loaded.device), past_key_values=cache, logits_to_keep=1)
        cache.save(path, token_ids=tokens)
        yield Document(path, time.perf_counter() - start)


def held(tokens: int, documents: Sequence[Document], url: str, saved: bool) -> dict[str, Any]:
    """What a document takes in the pool of the server there, and how many fit; None where it does not say.

    Counted are the blocks that requests share: of a prompt those that are full.

    Args:
        tokens: of a document.
        documents: all of them.
        url: the server's.
        saved: whether it has them as contexts; else it computes them.
    """
    figures: dict[str, Any] = dict.fromkeys(("nbytes", "held", "file_nbytes", "build_seconds"))
    if saved:
        figures["file_nbytes"] = sum(each.path.stat().st_size for each in documents) / len(documents)
        figures["build_seconds"] = sum(each.seconds for each in documents) / len(documents)
    if (there := pool(url)) is not None:
        blocks, block_bytes = _blocks(documents, there.block_size)
        if not saved:
            blocks = tokens // there.block_size
        # One of them is nobody's.
        most = int((there.blocks - 1) / blocks) if blocks else None
        figures |= {"blocks": blocks, "pool_blocks": there.blocks, "nbytes": blocks * block_bytes, "held": most}
    return figures


def _blocks(documents: Sequence[Document], block_size: int) -> tuple[float, int]:
    """Blocks that requests share of a context, the mean, and bytes of one."""
    import torch

    from keepset.hf import saved
    from keepset.paged.contexts import ContextPlacement

    blocks, block_bytes = 0, 0
    for document in documents:
        contents = saved.contents(document.path)
        counts = torch.cat(list(contents.counts.values()))
        placement = ContextPlacement.of(counts, contents.header.tokens, block_size, 1, shared=True)
        blocks += placement.own - placement.first
        if not block_bytes:
            columns = next(iter(saved.entries(document.path, contents.digest).values()))
            entry_bytes = sum(columns[name].shape[-1] * columns[name].itemsize for name in ("keys", "values"))
            block_bytes = counts.numel() * block_size * entry_bytes
    return blocks / len(documents), block_bytes
