"""The contexts that an engine serves: files of a folder, found again at every request that names one."""

from __future__ import annotations

import os
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any

import torch
from jaxtyping import Int
from torch import Tensor
from vllm.config import VllmConfig

from keepset.core.observation import BIAS
from keepset.errors import KeepsetError
from keepset.hf import saved
from keepset.hf.fingerprint import difference, make
from keepset.paged.contexts import ContextPlacement
from keepset.vllm.settings import KEY

SUFFIX = ".safetensors"
"""Of the files; a context's name is its file's without it."""


@dataclass(frozen=True)
class Context:
    """A file that requests of this engine can begin with.

    Attributes:
        name, path: of the file.
        digest: of what it holds.
        recipe: under which it was compressed.
        counts: entries of every head.
        placement: in the blocks of a request.
    """

    name: str
    path: Path
    digest: str
    recipe: str
    counts: Int[Tensor, "layers kv_heads"] = field(repr=False)
    placement: ContextPlacement


class ContextLibrary:
    """Looks into a folder. A file is opened again once it has changed; its entries are read by who loads it.

    Args:
        folder: of the files.
        config: the engine's.
        layers: indices of the model's attention layers.
        kv_heads: of each, in one process.
        block_size: tokens of a block.
    """

    def __init__(
        self, folder: Path, config: VllmConfig, layers: tuple[int, ...], kv_heads: int, block_size: int
    ) -> None:
        self._folder, self._layers, self._block_size = folder, layers, block_size
        model = config.model_config
        self._make = make(model.architecture, model.hf_text_config, torch_dtype(model.dtype))
        self._longest = model.max_model_len
        self._ranks, self._kv_heads = config.parallel_config.tensor_parallel_size, kv_heads
        self._known: dict[str, tuple[tuple[int, ...], Context]] = {}

    def named(self, name: str) -> Context:
        """The context of this name.

        Raises:
            KeepsetError: there is none, or it cannot be served here; says why.
        """
        path = self._folder / f"{name}{SUFFIX}"
        # A name is no path: nothing outside of the folder can be named.
        if not name or Path(name).name != name or not path.is_file():
            raise KeepsetError(f"There is no context {name!r} on this server; {self._others()}.")
        stat = os.stat(path)
        version = stat.st_mtime_ns, stat.st_size, stat.st_ino
        if name not in self._known or self._known[name][0] != version:
            self._known[name] = version, self._opened(name, path)
        return self._known[name][1]

    def _others(self) -> str:
        names = sorted(path.name.removesuffix(SUFFIX) for path in self._folder.glob(f"*{SUFFIX}"))
        return f"it has {', '.join(names[:10])}{' and others' if len(names) > 10 else ''}" if names else "it has none"

    def _opened(self, name: str, path: Path) -> Context:
        contents = saved.contents(path)
        if differs := difference({**self._make, **contents.fingerprint}, self._make):
            raise KeepsetError(f"Context {name!r} is of another model, whose {differs}: build it with this one.")
        reasons = {
            f"has {contents.requests} requests": contents.requests != 1,
            "has padding": contents.padded,
            "adds biases to attention (give its match biases=False)": BIAS in contents.columns,
            "would be compressed further while it is asked (leave its every= out)": contents.goes_on,
            f"has {contents.header.tokens} tokens, and this server takes {self._longest} with question and answer": (
                contents.header.tokens + 2 > self._longest
            ),
        }
        for reason, applies in reasons.items():
            if applies:
                raise KeepsetError(f"Context {name!r} cannot be served: it {reason}.")
        if tuple(contents.counts) != self._layers:
            raise KeepsetError(f"Context {name!r} cannot be served: it is not of all layers of this model.")
        counts = torch.cat([contents.counts[layer] for layer in self._layers])
        if counts.shape[1] != self._ranks * self._kv_heads:
            raise KeepsetError(
                f"Context {name!r} cannot be served: its layers have {counts.shape[1]} KV heads, which "
                f"{self._ranks} processes with {self._kv_heads} each do not divide."
            )
        placement = ContextPlacement.of(counts, contents.header.tokens, self._block_size, self._ranks)
        return Context(name, path, contents.digest, contents.header.recipe, counts, placement)


def torch_dtype(dtype: Any) -> torch.dtype:
    """vLLM's name of a precision, or the precision itself."""
    return dtype if isinstance(dtype, torch.dtype) else getattr(torch, str(dtype))


def context_named_by(extra: dict[str, Any] | None) -> str | None:
    """What a request's `extra_args` say of a context: its name; None where they name none.

    Raises:
        KeepsetError: they say something else.
    """
    wishes = (extra or {}).get(KEY)
    if wishes is None:
        return None
    if not isinstance(wishes, dict) or list(wishes) != ["context"] or not isinstance(wishes["context"], str):
        raise KeepsetError(f'{KEY} is {wishes!r}: give {{"context": NAME}}, or leave it out.')
    return wishes["context"]
