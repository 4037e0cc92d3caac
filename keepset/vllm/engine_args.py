"""`engine_args` and `serve_options`: the arguments with which vLLM serves a recipe."""

from __future__ import annotations

import json
import shlex
from collections.abc import Mapping
from pathlib import Path
from typing import Any

from keepset.defaults import ANSWERED_AT_ONCE
from keepset.errors import KeepsetError
from keepset.paged.eviction_schedule import one_table
from keepset.recipe import Recipe
from keepset.vllm.recipe_support import cache_kind_of, served
from keepset.vllm.settings import CONNECTOR, CONTEXT_CONNECTOR, CONTEXTS, KEY, SAVE_LIMIT


def engine_args(
    recipe: Recipe | str | None = None, *, contexts: Path | str | None = None, save_bytes: int = 0
) -> dict[str, Any]:
    """Return the arguments of `vllm.LLM` with which it serves a recipe: `LLM(model, **engine_args("knorm(keep=0.5)"))`.

    Args:
        recipe: the recipe of every request. If None, an engine with a folder of contexts serves only contexts; another
            takes the default of `keepset.defaults`, without steps that it cannot serve, and its log names the result.
        contexts: the folder of saved contexts, whose files requests name; None for no folder.
        save_bytes: bytes that each owner's requests may save in that folder.

    Raises:
        KeepsetError: the recipe is invalid or names no budget, or there is no such folder.
    """
    is_default = recipe is None and contexts is None
    named = ANSWERED_AT_ONCE if is_default else recipe
    parsed = Recipe.parse(named) if isinstance(named, str) else named
    args: dict[str, Any] = {"additional_config": _additional(parsed, contexts, save_bytes)}
    if is_default:
        args["additional_config"][KEY] = True
    args["kv_transfer_config"] = dict(CONNECTOR if contexts is None else CONTEXT_CONNECTOR)
    if parsed is None:
        return args
    parsed = served(parsed)
    if contexts is None and not one_table(parsed):
        args["enable_prefix_caching"] = False
    if parsed.method.traits.needs.hidden_states:
        args["enforce_eager"] = True
    if (kind := cache_kind_of(parsed.method.traits)) is not None:
        args["kv_cache_dtype"] = kind
    return args


def serve_options(
    recipe: Recipe | str | None = None, *, contexts: Path | str | None = None, save_bytes: int = 0
) -> str:
    """Return the arguments of `engine_args` as options of `vllm serve`, quoted for a shell."""
    return shlex.join(as_words(engine_args(recipe, contexts=contexts, save_bytes=save_bytes)))


def as_words(args: Mapping[str, Any]) -> list[str]:
    """Return arguments of `vllm.LLM` as words of vLLM's command line.

    Args:
        args: names and values: booleans, texts, numbers and JSON objects.
    """
    words = []
    for name, value in args.items():
        option = name.replace("_", "-")
        if isinstance(value, bool):
            words.append(f"--{option}" if value else f"--no-{option}")
        else:
            words += [f"--{option}", json.dumps(value) if isinstance(value, dict) else str(value)]
    return words


def _additional(recipe: Recipe | None, contexts: Path | str | None, save_bytes: int) -> dict[str, Any]:
    """Return the settings under keepset's keys of `additional_config`."""
    additional: dict[str, Any] = {}
    if recipe is not None:
        additional[KEY] = str(recipe.require_budget())
    if contexts is not None:
        if not Path(contexts).is_dir():
            raise KeepsetError(f"There is no folder {str(contexts)!r}: make it, and put contexts there at any time.")
        additional[CONTEXTS] = str(Path(contexts).resolve())
    if save_bytes:
        if contexts is None:
            raise KeepsetError("save_bytes needs a folder of contexts: name the folder, too.")
        additional[SAVE_LIMIT] = save_bytes
    return additional
