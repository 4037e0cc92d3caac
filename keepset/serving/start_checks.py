"""Checks before a vLLM server starts, because vLLM itself takes a minute to report an error."""

import importlib.metadata
import importlib.util
import os
import socket
from collections.abc import Sequence
from pathlib import Path

import psutil
import torch

from keepset import models
from keepset.contexts.fingerprint import sample_of, stores_other_weights
from keepset.core import tables
from keepset.core.features.runtime_features import ModelStatistics, ModelTables
from keepset.errors import KeepsetError, UnsupportedEngineError, installation
from keepset.recipe import Recipe
from keepset.serving.command import has_option, option
from keepset.vllm.recipe_support import objections

_SMALL = 256
_POOL = "VLLM_CPU_KVCACHE_SPACE"
_GIB = 2**30
_MOST_GIB = 4
"""The default limit of a CPU's KV cache in GiB. vLLM itself would take nearly all memory."""
_PORT = 8000


def check_installed() -> None:
    """Refuse a vLLM that is not installed, or would not load keepset's plug-in.

    Raises:
        UnsupportedEngineError: vLLM is not installed, or does not load keepset's plug-in.
    """
    if importlib.util.find_spec("vllm") is None:
        raise UnsupportedEngineError(f"vLLM is not installed: run {installation('vllm')}.")
    plugins = importlib.metadata.entry_points(group="vllm.general_plugins")
    ours = {plugin.name for plugin in plugins if plugin.module.split(".")[0] == "keepset"}
    if not ours:
        raise UnsupportedEngineError("vLLM would not find keepset's plug-in: install keepset again.")
    allowed = os.environ.get("VLLM_PLUGINS")
    if allowed is not None and ours.isdisjoint(allowed.split(",")):
        raise UnsupportedEngineError(
            f"VLLM_PLUGINS={allowed!r} keeps vLLM from loading keepset's plug-in: add {min(ours)!r} to it, or unset it."
        )


def check_recipe(recipe: Recipe | None, folder: str) -> None:
    """Refuse a recipe that vLLM cannot serve, or whose files cannot be read or belong to another model.

    Args:
        recipe: the recipe; None for no compression.
        folder: the model's folder; if it is a name on the Hub instead, weights are not compared.

    Raises:
        UnsupportedEngineError: vLLM cannot serve the recipe.
        KeepsetError: a file that it names cannot be read, or belongs to another model.
    """
    if recipe is None:
        return
    needs = recipe.method.traits.needs
    samples = {need.file: sample_of(tables.load(need.file)) for need in needs.of(ModelTables)}
    samples |= {need.file: sample_of(need.load()) for need in needs.of(ModelStatistics)}
    for sentence in objections(recipe):
        raise UnsupportedEngineError(f"keepset cannot serve {recipe}: {sentence}")
    for file, sampled in samples.items():
        if Path(folder).is_dir() and stores_other_weights(Path(folder), sampled):
            raise KeepsetError(
                f"{file!r} was made for another model than {folder!r}: make it for this one with keepset calibrate or "
                "keepset compile."
            )


def check_model(folder: str) -> None:
    """Refuse a name that is neither a model's folder nor a hub name, and on a CPU weights that do not fit free memory.

    Raises:
        KeepsetError: it is neither, or its weights do not fit.
    """
    models.check_name(folder)
    if not Path(folder).is_dir():
        return
    weights = sum(file.stat().st_size for file in Path(folder).glob("*.safetensors"))
    free = psutil.virtual_memory().available
    if not torch.accelerator.is_available() and weights > free:
        raise KeepsetError(
            f"The weights in {folder!r} take {weights / 1e6:.0f} MB, and {free / 1e6:.0f} MB of memory are free: "
            "free some, or serve a smaller model."
        )


def check_port(options: Sequence[str]) -> None:
    """Raise `KeepsetError` if vLLM's options name a port that is not a number or in use."""
    port_option, host = option(options, "--port"), option(options, "--host") or "127.0.0.1"
    port = port_option or str(_PORT)
    if not port.isdecimal() or not 0 <= int(port) < 2**16:
        raise KeepsetError(f"--port {port} is no port: use a number from 1 to {2**16 - 1}.")
    with socket.socket(socket.AF_INET6 if ":" in host else socket.AF_INET) as probe:
        probe.setsockopt(socket.SOL_SOCKET, socket.SO_REUSEADDR, 1)
        try:
            probe.bind((host, int(port)))
        except OSError as error:
            raise KeepsetError(f"--port {port} of {host} is not available ({error.strerror}): give another.") from None


def limit_cpu_pool(options: Sequence[str]) -> str | None:
    """Limit a CPU's KV cache by the environment, unless its size is given; return a sentence that says so."""
    limits = [option(options, name) for name in ("--gpu-memory-utilization", "--kv-cache-memory-bytes")]
    if any(limits) or _POOL in os.environ or torch.accelerator.is_available():
        return None
    space = max(1, min(_MOST_GIB, int(psutil.virtual_memory().available / 4 / _GIB)))
    os.environ[_POOL] = str(space)
    megabytes = space * _GIB / 1e6
    return f"The KV cache gets {megabytes:.0f} MB; the environment variable {_POOL} sets another size in GiB."


def block_size_hint(recipe: Recipe | None, options: Sequence[str]) -> str | None:
    """Return advice for a recipe that keeps few entries in the large blocks that vLLM uses on a CPU, or None.

    Args:
        recipe: the recipe; None for no compression.
        options: the words of the options of `vllm serve`.
    """
    keep = None if recipe is None else recipe.budget.keep
    few = isinstance(keep, int) and keep < _SMALL
    if not few or has_option(options, "--block-size") or torch.accelerator.is_available():
        return None
    return f"keep={keep} is small for the blocks of 128 tokens that vLLM uses on a CPU: add --block-size 32."


def compile_hint(options: Sequence[str]) -> str | None:
    """Return a sentence that says why the first start takes minutes; None if nothing is compiled."""
    if has_option(options, "--enforce-eager"):
        return None
    return (
        "The first start with a model and options takes minutes, because vLLM compiles the model for them; later "
        "starts reuse the result. With --enforce-eager nothing is compiled, but answers are slower."
    )
