"""Keepset's settings in a vLLM configuration, and the arguments with which vLLM serves a recipe."""

from __future__ import annotations

import json
import shlex
from collections.abc import Mapping
from pathlib import Path
from typing import TYPE_CHECKING, Any, NamedTuple

from keepset.defaults import ANSWERED_AT_ONCE
from keepset.errors import KeepsetError, RecipeError
from keepset.paged.eviction import one_table
from keepset.recipe import Recipe
from keepset.vllm.recipe_support import EngineLimits, cache_kind_of, nearest, one_rotation, served, table_per_head

if TYPE_CHECKING:
    from vllm.config import VllmConfig

KEY = "keepset"
"""The key of `additional_config` for the recipe's text, or true for the default."""

CONTEXTS = "keepset_contexts"
"""The key of `additional_config` for the folder of saved contexts, whose files requests name."""

SAVE_LIMIT = "keepset_save_bytes"
"""The key of `additional_config` for the bytes that each owner's requests may save; without it nothing is saved."""

CONVERSATIONS = "keepset_conversations"
"""The key of `additional_config` for the files of idle conversations: an object with the fields of `SpillSettings`."""

SIGNED = "keepset_signed"
"""The key of `additional_config` that says that a front end signs options; the engine then takes no others."""

CONNECTOR = {
    "kv_connector": "BlockCountConnector",
    "kv_role": "kv_both",
    "kv_connector_module_path": "keepset.vllm.connector",
}
"""The `kv_transfer_config` of recipes whose counts come from the data."""

CONTEXT_CONNECTOR = {
    "kv_connector": "ContextConnector",
    "kv_role": "kv_both",
    "kv_connector_module_path": "keepset.vllm.context_connector",
}
"""The `kv_transfer_config` of an engine with contexts."""

CONVERSATION_CONNECTOR = {
    "kv_connector": "ConversationConnector",
    "kv_role": "kv_both",
    "kv_connector_module_path": "keepset.vllm.conversation_connector",
}
"""The `kv_transfer_config` of recipes that compress conversations between turns."""

_WHOLE = "adakv(streaming_llm, keep=1.0)"
"""The recipe of an engine that only serves contexts: nothing is dropped, and each head has its own pages."""


class SpillSettings(NamedTuple):
    """Where conversations go that lose their pages.

    Attributes:
        folder: the folder of their files.
        bytes: the most bytes of all files.
        owner_bytes: the most bytes of one owner's files.
    """

    folder: str
    bytes: int
    owner_bytes: int


def connector_of(recipe: Recipe | None, contexts: object) -> dict[str, str]:
    """Return the `kv_transfer_config` of an engine.

    Args:
        recipe: its recipe; None if it only serves contexts.
        contexts: its folder of contexts; None if it has none.
    """
    if contexts is not None:
        return CONTEXT_CONNECTOR
    return CONVERSATION_CONNECTOR if recipe is not None and recipe.schedule.turns else CONNECTOR


def has_connector(config: VllmConfig, connector: dict[str, str]) -> bool:
    """Return whether a configuration has one of keepset's KV connectors.

    Args:
        config: vLLM's configuration.
        connector: the connector, as `connector_of` returns it.
    """
    transfer = config.kv_transfer_config
    return transfer is not None and transfer.kv_connector_module_path == connector["kv_connector_module_path"]


def _additional(config: VllmConfig | None) -> dict[str, Any]:
    """Return the `additional_config` of a configuration, or an empty dictionary."""
    additional = None if config is None else config.additional_config
    return additional if isinstance(additional, dict) else {}


def contexts_of(config: VllmConfig | None) -> Path | None:
    """Return the folder of saved contexts of a configuration, if it has one.

    Raises:
        KeepsetError: the configuration names something else.
    """
    additional = _additional(config)
    if CONTEXTS not in additional:
        return None
    folder = additional[CONTEXTS]
    if not isinstance(folder, str) or not Path(folder).is_dir():
        raise KeepsetError(f'additional_config["{CONTEXTS}"] is {folder!r}: give the folder of the saved contexts.')
    return Path(folder).resolve()


def by_head(config: VllmConfig, recipe: Recipe) -> bool:
    """Return whether each head has its own pages: heads of the recipe or of contexts may keep different numbers.

    Args:
        config: vLLM's configuration.
        recipe: its recipe.
    """
    return table_per_head(recipe.method.traits) or recipe.schedule.turns or contexts_of(config) is not None


def save_limit_of(config: VllmConfig) -> int | None:
    """Return how many bytes an owner's saved contexts may have; None if nothing is saved.

    Raises:
        KeepsetError: the configuration gives no number of bytes, or no folder to save to.
    """
    additional = _additional(config)
    if SAVE_LIMIT not in additional:
        return None
    limit = additional[SAVE_LIMIT]
    if not isinstance(limit, int) or isinstance(limit, bool) or limit < 1:
        raise KeepsetError(f'additional_config["{SAVE_LIMIT}"] is {limit!r}: give a number of bytes.')
    if contexts_of(config) is None:
        raise KeepsetError(f'There is no folder to save to: give additional_config["{CONTEXTS}"], too.')
    return limit


def spills_of(config: VllmConfig | None) -> SpillSettings | None:
    """Return where a configuration's conversations go that lose their pages; None if they are lost.

    Raises:
        KeepsetError: the configuration names no folder, or no numbers of bytes.
    """
    value = _additional(config).get(CONVERSATIONS)
    if value is None:
        return None
    if not isinstance(value, dict) or value.keys() != set(SpillSettings._fields):
        raise KeepsetError(
            f'additional_config["{CONVERSATIONS}"] is {value!r}: give an object with '
            f"{', '.join(SpillSettings._fields)}."
        )
    spills = SpillSettings(**value)
    if not isinstance(spills.folder, str) or not Path(spills.folder).is_dir():
        raise KeepsetError(
            f'additional_config["{CONVERSATIONS}"] has the folder {spills.folder!r}: give one that is there.'
        )
    if not all(type(limit) is int and limit > 0 for limit in spills[1:]):
        raise KeepsetError(
            f'additional_config["{CONVERSATIONS}"] has limits of {spills.bytes!r} and {spills.owner_bytes!r}: give '
            "numbers of bytes."
        )
    return spills


def is_signed(config: VllmConfig) -> bool:
    """Return whether requests reach this engine through a front end that signs their options.

    Raises:
        KeepsetError: the configuration says neither true nor false.
    """
    value = _additional(config).get(SIGNED, False)
    if not isinstance(value, bool):
        raise KeepsetError(f'additional_config["{SIGNED}"] is {value!r}: give true or false.')
    return value


def is_compressed(config: VllmConfig) -> bool:
    """Return whether a configuration has a recipe for requests without a context."""
    return KEY in _additional(config)


def limits_of(config: VllmConfig) -> EngineLimits:
    """Return the facts that decide which recipes an engine serves. vLLM does not change them while it starts."""
    parallel, model = config.parallel_config, config.model_config
    return EngineLimits(
        several_gpus=parallel.tensor_parallel_size * parallel.pipeline_parallel_size > 1,
        drafts=config.speculative_config is not None,
        ahead=bool(config.scheduler_config.async_scheduling),
        cache_dtype=config.cache_config.cache_dtype,
        connector=has_connector(config, CONNECTOR) or has_connector(config, CONVERSATION_CONNECTOR),
        contexts=contexts_of(config) is not None,
        latents=model.use_mla,
        one_rotation=one_rotation(model.hf_text_config.to_dict()) and not model.using_transformers_backend(),
    )


def recipe_of(config: VllmConfig | None) -> Recipe | None:
    """Return the recipe of a configuration; None if it has neither recipe nor contexts, and vLLM uses its own classes.

    Raises:
        KeepsetError: the recipe cannot be used.
    """
    additional = _additional(config)
    if contexts_of(config) is None and KEY not in additional:
        return None
    text = additional.get(KEY, _WHOLE)
    if text is True and config is not None:
        return nearest(Recipe.parse(ANSWERED_AT_ONCE), limits_of(config))[0]
    if not isinstance(text, str):
        raise RecipeError(
            f'additional_config["{KEY}"] is {text!r}: give a recipe\'s text, such as "snapkv(keep=0.25)", or true for '
            "the default."
        )
    return served(Recipe.parse(text).require_budget())


def engine_args(
    recipe: Recipe | str | None = None,
    *,
    contexts: Path | str | None = None,
    save_bytes: int = 0,
    conversation_bytes: int = 0,
) -> dict[str, Any]:
    """Return the arguments of `vllm.LLM` with which it serves a recipe: `LLM(model, **engine_args("knorm(keep=0.5)"))`.

    Args:
        recipe: the recipe of every request. If None, an engine with a folder of contexts serves only contexts; another
            takes the default of `keepset.defaults`, without steps that it cannot serve, and its log names the result.
        contexts: the folder of saved contexts, whose files requests name; None for no folder. With `turns=True` in the
            recipe, the folder of conversations that lose their pages.
        save_bytes: bytes that each owner's requests may save in that folder; with `turns=True`, bytes of all
            conversations there.
        conversation_bytes: with `turns=True`, bytes of one owner's conversations there; 0 for no other limit.

    Raises:
        KeepsetError: the recipe is invalid or names no budget, there is no such folder, or it has no limit.
    """
    is_default = recipe is None and contexts is None
    named = ANSWERED_AT_ONCE if is_default else recipe
    parsed = Recipe.parse(named) if isinstance(named, str) else named
    args: dict[str, Any] = {
        "additional_config": _additional_config(parsed, contexts, save_bytes, conversation_bytes),
    }
    if parsed is not None and parsed.schedule.turns:
        contexts = None
    if is_default:
        args["additional_config"][KEY] = True
    args["kv_transfer_config"] = dict(connector_of(parsed, contexts))
    if parsed is None:
        return args
    parsed = served(parsed)
    if contexts is None and (parsed.schedule.turns or not one_table(parsed)):
        args["enable_prefix_caching"] = False
    if parsed.method.traits.needs.hidden_states:
        args["enforce_eager"] = True
    if (kind := cache_kind_of(parsed.method.traits)) is not None:
        args["kv_cache_dtype"] = kind
    return args


def serve_options(
    recipe: Recipe | str | None = None,
    *,
    contexts: Path | str | None = None,
    save_bytes: int = 0,
    conversation_bytes: int = 0,
) -> str:
    """Return the arguments of `engine_args` as options of `vllm serve`, quoted for a shell.

    Args:
        recipe: the recipe or its text; None means the same as for `engine_args`.
        contexts, save_bytes, conversation_bytes: as for `engine_args`.
    """
    return shlex.join(
        as_words(engine_args(recipe, contexts=contexts, save_bytes=save_bytes, conversation_bytes=conversation_bytes))
    )


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


def _additional_config(
    recipe: Recipe | None, contexts: Path | str | None, save_bytes: int, conversation_bytes: int
) -> dict[str, Any]:
    """Return the settings under keepset's keys of `additional_config`.

    Args:
        recipe: the recipe; None for no compression.
        contexts, save_bytes, conversation_bytes: as for `engine_args`.
    """
    talks = recipe is not None and recipe.schedule.turns
    additional: dict[str, Any] = {}
    if recipe is not None:
        additional[KEY] = str(recipe.require_budget())
    if contexts is not None:
        if not Path(contexts).is_dir():
            raise KeepsetError(f"There is no folder {str(contexts)!r}: make it, and put contexts there at any time.")
        if talks and not save_bytes:
            raise KeepsetError(
                "With turns=True the folder keeps conversations that lose their pages: say by save_bytes "
                "(--save-bytes) how many bytes they may take in all."
            )
        folder = str(Path(contexts).resolve())
        if talks:
            additional[CONVERSATIONS] = SpillSettings(folder, save_bytes, conversation_bytes or save_bytes)._asdict()
        else:
            additional[CONTEXTS] = folder
    if conversation_bytes and not (talks and contexts is not None):
        raise KeepsetError(
            "conversation_bytes (--conversation-bytes) limits the files of conversations: give turns=True in the "
            "recipe, and their folder."
        )
    if save_bytes and not (talks and contexts is not None):
        if contexts is None:
            raise KeepsetError("save_bytes needs a folder of contexts: name the folder, too.")
        additional[SAVE_LIMIT] = save_bytes
    return additional
