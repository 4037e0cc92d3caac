"""Pages of idle conversations in files, in a process that computes.

A file holds pages as they are: the bytes of the caches, the columns of their slots, the layouts that say where the
entries of each head are, and the queries to which entries will be fitted. Read into other blocks, they are the same
conversation.
"""

from __future__ import annotations

import math
from collections.abc import Mapping, Sequence
from concurrent.futures import Future, ThreadPoolExecutor
from contextlib import suppress
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any
from zlib import crc32

import torch
from torch import Tensor
from vllm.logger import init_logger
from vllm.v1.kv_cache_interface import KVCacheConfig

from keepset.core.files import below
from keepset.errors import CorruptFileError, KeepsetError
from keepset.kernels.page_layout import PageLayout, blocks_needed
from keepset.paged.layer_group import LayerGroup
from keepset.paged.query_records import EndedQueries
from keepset.paged.ragged_heads import RaggedHeadTables
from keepset.vllm.spilled import FORMAT, SUFFIX, FilePages, in_order

logger = init_logger(__name__)

_WAITING = 2**31
"""The most bytes that wait in memory to be written. Conversations that lose their pages meanwhile are lost."""
_FAILED = -1
"""In place of a file's size: it could not be written."""
_CHECKS = "checks"
"""The name of the tensors' check sums in a file's metadata."""


@dataclass
class ProcessPages:
    """The pages of the layers in this process.

    Args:
        groups: the groups of compressed layers, by their places among all that are compressed in any process.
        config: vLLM's groups of layers.
        caches: the layers' caches by name, `[pages, ...]`; a block of a manager is one page or several.
    """

    groups: Mapping[int, LayerGroup]
    config: KVCacheConfig
    caches: Mapping[str, Tensor]

    def __post_init__(self) -> None:
        self._names = [group.layer_names for group in in_order(self.config.kv_cache_groups)]

    def read(self, pages: FilePages) -> dict[str, Tensor]:
        """Return what a file holds of pages, on the host.

        Args:
            pages: pages of a conversation that nothing has written to yet.

        Raises:
            KeyError: nothing is known of the conversation.
        """
        tensors = {}
        for place, blocks in enumerate(pages.blocks):
            for nth, cache in enumerate(self._caches(place)):
                rows = cache[_index(blocks, cache)].flatten(1)
                tensors[f"pages.{place}.{nth}"] = rows.contiguous().view(torch.uint8).cpu()
        for place, group in self.groups.items():
            columns = group.columns.of_blocks(_index(pages.blocks[place], group.pages_of(0)))
            tensors |= {f"columns.{place}.{name}": column.contiguous().cpu() for name, column in columns.items()}
            page = pages.ended.newest_page(place, group.block_size)
            if (fitted_to := group.ended_queries.pop(page, None)) is not None:
                tensors[f"queries.{place}.rows"] = fitted_to.queries
                tensors[f"queries.{place}.first"] = torch.tensor([fitted_to.first], dtype=torch.int32)
            layout = _tables(group).between_turns(page)
            tensors |= {f"layout.{place}.{name}": part[0].int().cpu() for name, part in layout._asdict().items()}
        return tensors

    def write(self, pages: FilePages, tensors: Mapping[str, Tensor]) -> None:
        """Make pages those of a conversation in a file.

        Args:
            pages: pages that nobody uses.
            tensors: what the file holds.

        Raises:
            CorruptFileError: the file holds something else than these pages; nothing was written then.
        """
        self._check(pages, tensors)
        for group in self.groups.values():
            for layer_index in range(len(group.layers)):
                group.pages_of(layer_index)  # vLLM fills the scales of rows now, or it would do so later
        for place, blocks in enumerate(pages.blocks):
            for nth, cache in enumerate(self._caches(place)):
                rows = tensors[f"pages.{place}.{nth}"].to(cache.device).view(cache.dtype)
                cache[_index(blocks, cache)] = rows.view(len(blocks), *cache.shape[1:])
        for place, group in self.groups.items():
            index = _index(pages.blocks[place], group.pages_of(0))
            group.columns.write_blocks(index, below(f"columns.{place}.", tensors))
            page = pages.ended.newest_page(place, group.block_size)
            if queries := below(f"queries.{place}.", tensors):
                group.ended_queries[page] = EndedQueries(queries["rows"], int(queries["first"]))
            layout = below(f"layout.{place}.", tensors)
            _tables(group).begin(
                page, PageLayout(**{name: part[None].to(index.device) for name, part in layout.items()})
            )
            _tables(group).go_on(page, pages.ended.tokens)

    def _caches(self, place: int) -> list[Tensor]:
        """Return the caches of a group's layers, by its blocks."""
        return [self.caches[name].unflatten(0, (self.config.num_blocks, -1)) for name in self._names[place]]

    def _check(self, pages: FilePages, tensors: Mapping[str, Tensor]) -> None:
        expected: dict[str, tuple[torch.dtype, tuple[int, ...]]] = {}
        for place, blocks in enumerate(pages.blocks):
            for nth, cache in enumerate(self._caches(place)):
                row_bytes = math.prod(cache.shape[1:]) * cache.itemsize
                expected[f"pages.{place}.{nth}"] = torch.uint8, (len(blocks), row_bytes)
        for place, group in self.groups.items():
            columns = group.columns.of_blocks(_index(pages.blocks[place], group.pages_of(0)))
            expected |= {f"columns.{place}.{name}": (torch.float32, (*one.shape,)) for name, one in columns.items()}
            layers = (len(group.layers),)
            expected |= {f"layout.{place}.{name}": (torch.int32, layers) for name in PageLayout._fields}
            expected[f"layout.{place}.counts"] = torch.int32, (*layers, group.kv_heads)
            if below(f"queries.{place}.", tensors):
                expected[f"queries.{place}.rows"] = group.ended_shape
                expected[f"queries.{place}.first"] = torch.int32, (1,)
        if {name: (tensor.dtype, (*tensor.shape,)) for name, tensor in tensors.items()} != expected:
            raise CorruptFileError(f"The file of conversation {pages.file} does not hold the pages that it says.")
        for place, group in self.groups.items():
            layout = PageLayout(**{name: part.long() for name, part in below(f"layout.{place}.", tensors).items()})
            own = -(-layout.length // group.block_size) - layout.first
            fits = (blocks_needed(layout.counts, layout.length, group.block_size) <= own) | (layout.length == 0)
            numbers = torch.cat([part.flatten() for part in layout])
            in_range = bool(((numbers >= 0) & (numbers <= pages.ended.tokens)).all())
            if not (in_range and bool(fits.all()) and not layout.shared.any()):
                raise CorruptFileError(f"The file of conversation {pages.file} says places that its pages do not have.")


def _index(blocks: Sequence[int], where: Any) -> Tensor:
    return torch.tensor(blocks, dtype=torch.long, device=where.device)


def _tables(group: LayerGroup) -> RaggedHeadTables:
    tables = group.planner.tables
    assert isinstance(tables, RaggedHeadTables)
    return tables


@dataclass
class PageFiles:
    """The files of one process. One thread does what is to be done with them, one after another.

    Args:
        folder: the folder of all files.
        rank: the number of the process.
    """

    folder: Path
    rank: int
    _writing: list[tuple[str, int, Future[int]]] = field(default_factory=list)
    _is_full: bool = False

    def __post_init__(self) -> None:
        self._thread = ThreadPoolExecutor(1, "keepset-conversations")

    def write(self, file: str, tensors: Mapping[str, Tensor], metadata: Mapping[str, Any]) -> None:
        """Begin to write a file, whole or not at all.

        Args:
            file: its name, without the ending.
            tensors: what it holds, by name.
            metadata: what can be written as JSON, by name.
        """
        nbytes = sum(tensor.nbytes for tensor in tensors.values())
        if sum(waiting for _, waiting, _ in self._writing) + nbytes > _WAITING:
            self.fail(file)
        else:
            self._writing.append((file, nbytes, self._thread.submit(self._write, file, tensors, metadata)))

    def fail(self, file: str) -> None:
        """Note that a file is not written."""
        failed: Future[int] = Future()
        failed.set_result(_FAILED)
        self._writing.append((file, 0, failed))

    def _write(self, file: str, tensors: Mapping[str, Tensor], metadata: Mapping[str, Any]) -> int:
        checks = {name: check_sum(tensor) for name, tensor in tensors.items()}
        try:
            FORMAT.write(self._path(file), tensors, {"format": FORMAT.version, **metadata, _CHECKS: checks})
            self._is_full, nbytes = False, self._path(file).stat().st_size
        except (KeepsetError, OSError) as error:
            if not self._is_full:
                logger.warning("Conversations that lose their pages are lost, until this is over: %s", error)
            self._is_full, nbytes = True, _FAILED
        return nbytes

    def read(self, file: str) -> Future[dict[str, Tensor]]:
        """Begin to read a file; a file that is not there or is damaged raises KeepsetError."""
        return self._thread.submit(self._read, file)

    def _read(self, file: str) -> dict[str, Tensor]:
        with FORMAT.opened(self._path(file)) as (reader, metadata):
            tensors = {name: reader[name] for name in reader.layout}
            if {name: check_sum(tensor) for name, tensor in tensors.items()} != metadata[_CHECKS]:
                raise FORMAT.corrupt(self._path(file))
            return tensors

    def delete(self, file: str) -> None:
        """Begin to delete a file, if it is there."""
        self._thread.submit(self._delete, file)

    def _delete(self, file: str) -> None:
        with suppress(OSError):
            self._path(file).unlink(missing_ok=True)

    def written(self) -> dict[str, list[int]]:
        """Return the bytes of files that were written since the last call; a negative number if one could not be."""
        done = {file: [writing.result()] for file, _, writing in self._writing if writing.done()}
        self._writing = [one for one in self._writing if one[0] not in done]
        return done

    def close(self) -> None:
        """Wait until everything is written."""
        self._thread.shutdown()

    def _path(self, file: str) -> Path:
        return self.folder / f"{file}-{self.rank}{SUFFIX}"


def check_sum(tensor: Tensor) -> int:
    """Return by what it is found that a tensor on the host was damaged in a file."""
    return crc32(tensor.contiguous().flatten().view(torch.uint8).numpy().data)
