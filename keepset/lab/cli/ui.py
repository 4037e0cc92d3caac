"""`keepset ui`: a playground in the browser."""

from __future__ import annotations

from contextlib import suppress
from dataclasses import dataclass
from typing import Annotated, Any

from typer import Option

from keepset.defaults import default_for_chats
from keepset.errors import KeepsetError
from keepset.lab.cli.checks import offered_recipes, say_networks
from keepset.lab.cli.console import load, note, say
from keepset.lab.cli.options import ModelOptions, takes_options
from keepset.lab.texts import NEEDLE, essay, insert
from keepset.models import load_processor

_CHARACTERS = 2400
"""Characters of the essay that the page opens with."""


@dataclass(frozen=True, kw_only=True)
class UiOptions(ModelOptions):
    """Options of `keepset ui`."""

    port: Annotated[int, Option(help="Port on 127.0.0.1; 0 for any free one.")] = 8765


@takes_options
def ui(options: UiOptions) -> None:
    """Open a playground in the browser.

    A page on this machine shows what a recipe keeps of a text, and of an image before it if the model looks at images,
    and what the full and the compressed cache answer. It is also a chat like that of keepset chat. One run at a time;
    Ctrl-C ends it.
    """
    if not 0 <= options.port < 2**16:
        raise KeepsetError(f"--port {options.port} is out of range: use a number from 0 to {2**16 - 1}.")

    from keepset.lab.ui.playground import IMAGE_BYTES, Playground
    from keepset.lab.ui.server import HOST, PlaygroundServer

    loaded, tokenizer = load(options.source)
    recipes = [str(recipe) for recipe in offered_recipes(loaded)]
    processor = _processor(loaded)
    playground = Playground(loaded, tokenizer, options.source.name, processor)
    try:
        text, question = insert(essay()[:_CHARACTERS], NEEDLE, 0.5), NEEDLE.question
    except KeepsetError:  # the essays are not installed: the page begins empty
        text = question = ""
    methods = [name for name in _methods(loaded) if name not in recipes]
    facts = {
        "model": options.source.called,
        "text": text,
        "question": question,
        "recipes": recipes,
        "methods": methods,
        "image": 0 if processor is None else IMAGE_BYTES,
        "chat": default_for_chats(loaded.config.name_or_path or ""),
    }
    with PlaygroundServer(options.port, playground, facts) as server:
        say(f"http://{HOST}:{server.port}")
        say_networks(loaded, options.source.called)
        note("Ctrl-C ends it.")
        server.serve_forever()


def _processor(model: Any) -> Any:
    """Return what makes a model's inputs of images; None for one that looks at none, or whose processor is missing."""
    from keepset.hf.hooks import image_token_ids

    if image_token_ids(model.config):
        try:
            return load_processor(model)
        except KeepsetError as error:  # the playground takes texts all the same
            note(str(error))
    return None


def _methods(model: Any) -> list[str]:
    """Return the names of all methods that this model can run by their defaults, without those of allocators."""
    from keepset.core.method import Allocator
    from keepset.hf.cache import Cache
    from keepset.recipe import Recipe
    from keepset.registry import METHODS

    names = []
    for name, kind in METHODS.items():
        if issubclass(kind, Allocator):
            continue
        with suppress(KeepsetError):  # such as a method whose networks nobody has made for this model
            recipe = Recipe.parse(name)
            recipe = recipe.with_budget(bytes=0.25) if recipe.method.traits.needs_budget else recipe
            Cache(model, recipe).stop_watching()
            names.append(name)
    return names
