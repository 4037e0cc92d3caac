"""Checks before vLLM starts, which takes a minute and would give its errors in two hundred lines."""

from __future__ import annotations

import os
import socket
from collections.abc import Sequence
from pathlib import Path

import torch

from keepset.core import statistics, tables
from keepset.core.features.runtime_features import ModelStatistics, ModelTables
from keepset.errors import KeepsetError, UnsupportedEngineError
from keepset.hf.fingerprint import sample_of, stores_other_weights
from keepset.models import check_name
from keepset.recipe import Recipe
from keepset.serving.command import option
from keepset.vllm.recipe_support import objections

_POOL = "VLLM_CPU_KVCACHE_SPACE"
_GIB = 2**30
_MOST_GIB = 4
"""The most GiB of a CPU's KV cache if nobody asks for more. vLLM itself takes nearly all memory."""
_PORT = 8000


def check_recipe(recipe: Recipe | None, folder: str) -> None:
    """Refuse a recipe that vLLM cannot serve, or whose files cannot be read or are of another model.

    Args:
        recipe: the recipe; None for plain vLLM.
        folder: the model's folder, or its name on the hub.
    """
    if recipe is None:
        return
    needs = recipe.method.traits.needs
    samples = {each.file: sample_of(tables.load(each.file)) for each in needs.of(ModelTables)}
    samples |= {each.file: sample_of(statistics.load(each.file)) for each in needs.of(ModelStatistics)}
    for sentence in objections(recipe):
        raise UnsupportedEngineError(f"keepset cannot serve {recipe}: {sentence}")
    for file, sampled in samples.items():
        if Path(folder).is_dir() and stores_other_weights(Path(folder), sampled):
            raise KeepsetError(
                f"{file!r} was made for another model than {folder!r}: make it for this one with keepset calibrate or "
                "keepset compile."
            )


def check_model(folder: str) -> None:
    """Refuse what is neither a model's folder nor a hub name, and on a CPU weights that do not fit free memory."""
    check_name(folder)
    if not Path(folder).is_dir():
        return
    weights = sum(file.stat().st_size for file in Path(folder).glob("*.safetensors"))
    if not torch.accelerator.is_available() and weights > _memory():
        raise KeepsetError(
            f"The weights in {folder!r} take {weights / 1e6:.0f} MB, and {_memory() / 1e6:.0f} MB of memory are free: "
            "free some, or serve a smaller model."
        )


def check_port(options: Sequence[str]) -> None:
    """Refuse a port that is in use."""
    given, host = option(options, "--port"), option(options, "--host") or "127.0.0.1"
    port = given or str(_PORT)
    if not port.isdecimal() or not 0 <= int(port) < 2**16:
        raise KeepsetError(f"--port {port} is no port: use a number from 1 to {2**16 - 1}.")
    with socket.socket(socket.AF_INET6 if ":" in host else socket.AF_INET) as probe:
        probe.setsockopt(socket.SOL_SOCKET, socket.SO_REUSEADDR, 1)
        try:
            probe.bind((host, int(port)))
        except OSError as error:
            raise KeepsetError(f"--port {port} of {host} cannot be had ({error.strerror}): give another.") from None


def limit_cpu_pool(options: Sequence[str]) -> str | None:
    """Limit a CPU's KV cache, in the environment, unless its size is given.

    Args:
        options: of `vllm serve`.

    Returns:
        A sentence that says so; None if nothing was limited.
    """
    asked = [option(options, name) for name in ("--gpu-memory-utilization", "--kv-cache-memory-bytes")]
    if any(asked) or _POOL in os.environ or torch.accelerator.is_available():
        return None
    space = max(1, min(_MOST_GIB, int(_memory() / 4 / _GIB)))
    os.environ[_POOL] = str(space)
    megabytes = space * _GIB / 1e6
    return f"The KV cache gets {megabytes:.0f} MB; the environment variable {_POOL} asks for more, in GiB."


def _memory() -> int:
    """Return the bytes of memory that are free or only cache files."""
    try:
        lines = Path("/proc/meminfo").read_text(encoding="ascii").splitlines()
        return next(int(line.split()[1]) * 1024 for line in lines if line.startswith("MemAvailable:"))
    except (OSError, StopIteration):
        return os.sysconf("SC_PHYS_PAGES") * os.sysconf("SC_PAGE_SIZE")
