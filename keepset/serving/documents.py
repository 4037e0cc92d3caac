"""Documents as saved contexts that are built before a server starts, and how many of them a pool holds."""

from __future__ import annotations

import time
from collections.abc import Iterator, Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import Any

from keepset.recipe import Recipe
from keepset.serving.metrics import block_pool


@dataclass(frozen=True)
class Document:
    """A compressed document: its file, named like the context on the server, and the seconds that compressing took."""

    path: Path
    seconds: float


def build(
    model: str, dtype: str | None, recipe: Recipe, documents: Sequence[list[int]], to: Path
) -> Iterator[Document]:
    """Compress documents into contexts, and yield each when its file is written."""
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
    """Return the size of a document in a server's pool, and how many documents fit; None for unknown figures.

    Only blocks that requests share are counted; a prompt shares its full blocks. `saved` says whether the server has
    the documents as contexts; else it computes their `tokens`.
    """
    figures: dict[str, Any] = dict.fromkeys(("nbytes", "held", "file_nbytes", "build_seconds"))
    if saved:
        figures["file_nbytes"] = sum(each.path.stat().st_size for each in documents) / len(documents)
        figures["build_seconds"] = sum(each.seconds for each in documents) / len(documents)
    if (pool := block_pool(url)) is not None:
        blocks, block_bytes = _blocks(documents, pool.block_size)
        if not saved:
            blocks = tokens // pool.block_size
        # One block of a pool is never used.
        most = int((pool.blocks - 1) / blocks) if blocks else None
        figures |= {"blocks": blocks, "pool_blocks": pool.blocks, "nbytes": blocks * block_bytes, "held": most}
    return figures


def _blocks(documents: Sequence[Document], block_size: int) -> tuple[float, int]:
    """Return the mean number of a context's blocks that requests share, and the bytes of a block."""
    import torch

    from keepset.contexts import file as context_files
    from keepset.paged.contexts import ContextPlacement

    blocks, block_bytes = 0, 0
    for document in documents:
        contents = context_files.contents(document.path)
        counts = torch.cat(list(contents.counts.values()))
        placement = ContextPlacement.of(counts, contents.header.tokens, block_size, 1, shared=True)
        blocks += placement.own - placement.first
        if not block_bytes:
            columns = next(iter(context_files.entries(document.path, contents.digest).values()))
            entry_bytes = sum(columns[name].shape[-1] * columns[name].itemsize for name in ("keys", "values"))
            block_bytes = counts.numel() * block_size * entry_bytes
    return blocks / len(documents), block_bytes
