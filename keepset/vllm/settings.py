"""What a vLLM configuration says about keepset."""

from __future__ import annotations

from typing import TYPE_CHECKING

from keepset.errors import RecipeError
from keepset.recipe import Recipe

if TYPE_CHECKING:
    from vllm.config import VllmConfig

KEY = "keepset"
"""Where `additional_config` holds the recipe's text."""

CONNECTOR = {
    "kv_connector": "BlockCountConnector",
    "kv_role": "kv_both",
    "kv_connector_module_path": "keepset.vllm.connector",
}
"""The `kv_transfer_config` of recipes whose counts come from the data."""


def recipe_of(config: VllmConfig | None) -> Recipe | None:
    """The recipe of a configuration; None where it has none, and everything stays vLLM's own.

    Raises:
        KeepsetError: there is one, and it cannot be used.
    """
    additional = None if config is None else config.additional_config
    if not isinstance(additional, dict) or KEY not in additional:
        return None
    text = additional[KEY]
    if not isinstance(text, str):
        raise RecipeError(
            f'additional_config["{KEY}"] is {text!r}: give a recipe\'s text, such as "snapkv(keep=0.25)".'
        )
    return Recipe.parse(text).require_budget()
