"""Options that several commands share, and groups of commands."""

import inspect
from collections.abc import Callable
from functools import wraps
from pathlib import Path
from typing import Annotated, Any

import typer
from typer import Option

from keepset.lab.embedded import Source

STANDARD_OUTPUT = Path("-")
"""The value of `--json -`, which means standard output."""

Model = Annotated[str | None, Option(help="A folder or a hub name. [default: a small embedded model]")]
Device = Annotated[
    str | None,
    Option(
        help="A device such as cuda, cuda:1 or cpu. auto is accelerate's device map: all GPUs, and the CPU for what "
        "they cannot hold. [default: the GPU if there is one]"
    ),
]
Dtype = Annotated[str | None, Option(help="float32, bfloat16 or float16. [default: as the model is stored]")]
Recipes = Annotated[str | None, Option(help="Recipes, separated by commas. [default: a selection]")]
OneText = Annotated[Path | None, Option(help="A UTF-8 text file; - for standard input. [default: an essay]")]
Images = Annotated[
    list[Path] | None,
    Option("--image", metavar="<path>", help="An image that goes before the text; may be given several times."),
]
Json = Annotated[
    Path | None,
    Option("--json", metavar="<path>", help="Write all figures to this file; - prints them instead of tables."),
]
Html = Annotated[Path | None, Option(metavar="<path>", help="Write the report to this file.")]
Force = Annotated[bool, Option("--force", help="Replace the file if it exists.")]
OutputTokens = Annotated[int, Option(help="The most tokens to generate.")]
Temperature = Annotated[float, Option(help="0 for greedy decoding.")]
SamplingSeed = Annotated[int, Option(help="Seed of sampling.")]


def takes_model(command: Callable[..., None]) -> Callable[..., None]:
    """Add --model, --device and --dtype to a command, which gets them as its parameter `model`.

    Scores that are NaN are errors while the command runs, so that it shows no choice that was made by them.
    """
    signature = inspect.signature(command, eval_str=True)
    options = [
        inspect.Parameter(name, inspect.Parameter.KEYWORD_ONLY, default=None, annotation=kind)
        for name, kind in (("model", Model), ("device", Device), ("dtype", Dtype))
    ]
    parameters = [parameter for parameter in signature.parameters.values() if parameter.name != "model"]

    @wraps(command)
    def called(
        model: str | None = None, device: str | None = None, dtype: str | None = None, **keyword_arguments: Any
    ) -> None:
        from keepset.core.select import nan_scores_refused

        with nan_scores_refused():
            command(model=Source(model, device, dtype), **keyword_arguments)

    called.__signature__ = signature.replace(parameters=[*parameters, *options])  # type: ignore[attr-defined]
    called.__annotations__ = {parameter.name: parameter.annotation for parameter in (*parameters, *options)}
    return called


def group(name: str, about: str) -> typer.Typer:
    """Make a group of commands."""
    commands = typer.Typer(name=name, help=about, no_args_is_help=True, rich_markup_mode=None, add_completion=False)
    commands.callback()(lambda: None)  # keeps the name where a group has a single command
    return commands
