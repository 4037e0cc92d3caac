"""Options that several commands have, and groups of commands."""

import inspect
from collections.abc import Callable
from functools import wraps
from pathlib import Path
from typing import Annotated, Any

import typer
from typer import Option

from keepset.core.nan_scores import nan_scores_refused
from keepset.models import Source

STANDARD_OUTPUT = Path("-")
"""What `--json -` names."""

Model = Annotated[str | None, Option(help="A folder or a hub name; a small embedded model if none.")]
Device = Annotated[
    str | None,
    Option(
        help="Such as cuda, cuda:1 or cpu; auto is accelerate's device map, over all GPUs and what they cannot hold on "
        "the CPU. The GPU if none, where there is one."
    ),
]
Dtype = Annotated[str | None, Option(help="float32, bfloat16 or float16; as the model is stored if none.")]
Recipes = Annotated[str | None, Option(help="Recipes, separated by commas; a choice if none.")]
GenerationRecipe = Annotated[str, Option(help="What to keep, such as 'snapkv(keep=0.25)'.")]
OneText = Annotated[Path | None, Option(help="A UTF-8 text file; an essay if none is given.")]
Json = Annotated[
    Path | None,
    Option("--json", metavar="<path>", help="Write all figures to this file; - prints them in place of tables."),
]
Html = Annotated[Path | None, Option(metavar="<path>", help="Write the report to this file.")]
Force = Annotated[bool, Option("--force", help="Replace the file if it exists.")]
OutputTokens = Annotated[int, Option(help="Tokens to generate at most.")]
Minutes = Annotated[
    float | None, Option(help="Stop after so many minutes, with what is known then; none if not given.")
]
Temperature = Annotated[float, Option(help="0 for greedy decoding.")]
SamplingSeed = Annotated[int, Option(help="For sampling.")]


def takes_model(command: Callable[..., None]) -> Callable[..., None]:
    """The command with --model, --device and --dtype after all others, which are its parameter `model`.

    What it shows of a recipe is of no choice by scores that are NaN.
    """
    signature = inspect.signature(command, eval_str=True)
    options = [
        inspect.Parameter(name, inspect.Parameter.KEYWORD_ONLY, default=None, annotation=kind)
        for name, kind in (("model", Model), ("device", Device), ("dtype", Dtype))
    ]
    own = [parameter for parameter in signature.parameters.values() if parameter.name != "model"]

    @wraps(command)
    def called(model: str | None = None, device: str | None = None, dtype: str | None = None, **others: Any) -> None:
        with nan_scores_refused():
            command(model=Source(model, device, dtype), **others)

    called.__signature__ = signature.replace(parameters=[*own, *options])  # type: ignore[attr-defined]
    called.__annotations__ = {parameter.name: parameter.annotation for parameter in (*own, *options)}
    return called


def group(name: str, about: str) -> typer.Typer:
    """Commands under one name; the callback keeps the name where a group has a single command."""
    commands = typer.Typer(name=name, help=about, no_args_is_help=True, rich_markup_mode=None, add_completion=False)
    commands.callback()(lambda: None)
    return commands
