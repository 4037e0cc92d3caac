"""Files of conversations that have lost their pages: which there are, and how many bytes they may have."""

from __future__ import annotations

import platform
from collections.abc import Iterator, Sequence
from contextlib import suppress
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any, NamedTuple

import torch
import vllm
from vllm.config import VllmConfig, set_current_vllm_config
from vllm.logger import init_logger
from vllm.platforms import current_platform
from vllm.v1.kv_cache_interface import KVCacheConfig, KVCacheGroupSpec

from keepset.contexts.fingerprint import CHANGED
from keepset.core.files import TensorFile, clear_abandoned
from keepset.errors import KeepsetError
from keepset.paged.turns import EndedTurn
from keepset.vllm.contexts import fingerprint_of
from keepset.vllm.settings import SpillSettings, recipe_of
from keepset.vllm.spec import KeepSpec

logger = init_logger(__name__)

SUFFIX = ".safetensors"
_FOLDER = "conversations"
_IS = "{path} is no conversation's file"
FORMAT = TensorFile(
    metadata="keepset_conversation",
    version=1,
    foreign=f"{_IS}.",
    other=f"{_IS} of format {{version}}, but {{found}}.",
    damaged="The conversation in {path} is damaged.",
)
"""The kind of file that holds one process's pages of a conversation."""


class FilePages(NamedTuple):
    """Pages that are written to a file, or read from it.

    Attributes:
        file: the file's name, without rank and ending.
        ended: what the layers must know of the conversation.
        blocks: the ids of the blocks that hold something, by logical position, for each group of layers: those of
            compressed ones first, each kind in vLLM's order.
    """

    file: str
    ended: EndedTurn
    blocks: Sequence[Sequence[int]]


class Spill(NamedTuple):
    """A conversation that is written to a file before a step, because the step writes to its pages.

    Attributes:
        pages: its pages.
        chooses: whether its turn has ended in the step before, so that it is still to be chosen what stays of it.
        metadata: what its file says of it; plain JSON.
    """

    pages: FilePages
    chooses: bool
    metadata: dict[str, Any]


def in_order(groups: Sequence[KVCacheGroupSpec]) -> list[KVCacheGroupSpec]:
    """Return vLLM's groups of layers in the order of `FilePages`."""
    return sorted(groups, key=lambda group: not isinstance(group.kv_cache_spec, KeepSpec))


def folder_of(spills: SpillSettings) -> Path:
    """Return the folder of conversations' files, which is made if it is not there."""
    folder = Path(spills.folder) / _FOLDER
    folder.mkdir(exist_ok=True)
    return folder


def identity_of(config: VllmConfig, groups: KVCacheConfig) -> dict[str, Any]:
    """Return what two engines must have in common, so that one reads the other's pages; plain JSON.

    Args:
        config: vLLM's configuration.
        groups: its groups of layers.
    """
    model, parallel = config.model_config, config.parallel_config
    # CPUs store entries in the order in which their instructions read them.
    instructions = [torch.backends.cpu.get_cpu_capability(), torch.cpu._is_amx_tile_supported()]
    with set_current_vllm_config(config):  # vLLM may have changed transformers' classes, which then ask for it
        fingerprint = fingerprint_of(model)
    specs = [
        [group.layer_names, group.kv_cache_spec.block_size, group.kv_cache_spec.page_size_bytes]
        for group in groups.kv_cache_groups
    ]
    return {
        **fingerprint,
        **({} if "weights" in fingerprint else {"name": model.model, "revision": str(model.revision)}),
        "recipe": str(recipe_of(config)),
        "layers": specs,
        "cache": config.cache_config.cache_dtype,
        "vllm": vllm.__version__,
        "processes": [parallel.tensor_parallel_size, parallel.pipeline_parallel_size],
        "device": [current_platform.device_type, platform.machine(), *instructions],
    }


class StoredFile(NamedTuple):
    """A conversation's files that an earlier engine has written.

    Attributes:
        file: their name, without rank and ending.
        metadata: what the first says.
        nbytes: their bytes.
    """

    file: str
    metadata: dict[str, Any]
    nbytes: int


def stored_files(folder: Path, identity: dict[str, Any]) -> Iterator[StoredFile]:
    """Yield the files that an engine can read, the least recently written first; others are left alone.

    Files of weights that were changed in place are deleted, because no engine will have these again.

    Args:
        folder: the folder of conversations' files.
        identity: what the engine is, as `identity_of` returns it.
    """
    clear_abandoned(folder, ".*")
    paths = {}
    for path in folder.glob(f"{'[0-9a-f]' * 32}-0{SUFFIX}"):
        with suppress(OSError):
            paths[path] = path.stat().st_mtime_ns
    for path in sorted(paths, key=paths.__getitem__):
        file = path.name.removesuffix(f"-0{SUFFIX}")
        try:
            with FORMAT.opened(path) as (_, metadata):
                theirs = dict(metadata["identity"])
            if theirs == identity:
                yield StoredFile(file, metadata, sum(part.stat().st_size for part in _parts(folder, file)))
            elif theirs.pop(CHANGED, None) is not None and theirs == identity:
                remove(folder, file)
        except (KeepsetError, OSError) as error:
            logger.warning("A conversation is computed anew: %s", error)


def remove(folder: Path, file: str) -> None:
    """Delete what all processes of this machine have written of a conversation.

    Args:
        folder: the folder of conversations' files.
        file: the file's name, without rank and ending.
    """
    for part in _parts(folder, file):
        with suppress(OSError):
            part.unlink(missing_ok=True)


def _parts(folder: Path, file: str) -> list[Path]:
    return list(folder.glob(f"{file}-*{SUFFIX}"))


@dataclass
class SpilledBytes:
    """The bytes of files, and which ones are too many.

    Args:
        limits: the most bytes of all files, and of one owner's.
    """

    limits: SpillSettings
    _files: dict[str, tuple[str, int]] = field(default_factory=dict)

    def add(self, file: str, owner: str, nbytes: int) -> None:
        """Note a file; those that were noted first are the least recently used.

        Args:
            file: its name.
            owner: whose it is.
            nbytes: its bytes.
        """
        self._files[file] = owner, nbytes

    def remove(self, file: str) -> None:
        """Note that a file is gone."""
        self._files.pop(file, None)

    def of(self, file: str) -> int:
        """Return the bytes of a file; 0 if it is not written yet."""
        return self._files.get(file, ("", 0))[1]

    def too_many(self) -> list[str]:
        """Return the files that must go: too large ones, then an owner's least recently used ones, then anybody's."""
        most = min(self.limits.bytes, self.limits.owner_bytes)
        gone = [file for file, (_, nbytes) in self._files.items() if nbytes > most]
        for owner in {owner for owner, _ in self._files.values()}:
            own = {file: nbytes for file, (whose, nbytes) in self._files.items() if whose == owner}
            gone += _oldest({file: own[file] for file in own if file not in gone}, self.limits.owner_bytes)
        left = {file: nbytes for file, (_, nbytes) in self._files.items() if file not in gone}
        return [*gone, *_oldest(left, self.limits.bytes)]


def _oldest(files: dict[str, int], limit: int) -> list[str]:
    """Return the first files that must go for the others to have at most so many bytes.

    Args:
        files: the bytes of each, the least recently used first.
        limit: the most bytes.
    """
    total, gone = sum(files.values()), []
    for file, nbytes in files.items():
        if total <= limit:
            break
        gone.append(file)
        total -= nbytes
    return gone
