"""Options that several commands share, and groups of commands."""

import inspect
from collections.abc import Callable
from dataclasses import MISSING, dataclass, fields
from functools import wraps
from pathlib import Path
from typing import Annotated, Any, get_type_hints

import typer
from typer import Option

from keepset.lab.embedded import Source

STANDARD_OUTPUT = Path("-")
"""The value of `--json -`, which means standard output."""

Model = Annotated[str | None, Option(help="A folder, a GGUF file or a hub name. [default: a small embedded model]")]
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
OutputTokens = Annotated[int, Option("--output-tokens", "--max-new-tokens", help="The most tokens to generate.")]
Temperature = Annotated[float, Option(help="0 for greedy decoding.")]
SamplingSeed = Annotated[int, Option(help="Seed of sampling.")]


@dataclass(frozen=True, kw_only=True)
class ModelOptions:
    """The options of a command that loads a model."""

    model: Model = None
    device: Device = None
    dtype: Dtype = None

    @property
    def source(self) -> Source:
        """The model to load."""
        return Source(self.model, self.device, self.dtype)


def takes_options(command: Callable[[Any], None]) -> Callable[..., None]:
    """Make options of the fields of a dataclass, which is a command's parameter.

    The types of fields say what the help shows. --model, --device and --dtype come last. Scores that are NaN are errors
    while a command with these runs, so that it shows no choice that was made by them.
    """
    (kind,) = (hint for name, hint in get_type_hints(command).items() if name != "return")
    hints = get_type_hints(kind, include_extras=True)
    of_model = {field.name for field in fields(ModelOptions)} if issubclass(kind, ModelOptions) else ()
    parameters = [
        inspect.Parameter(
            field.name,
            inspect.Parameter.KEYWORD_ONLY,
            default=inspect.Parameter.empty if field.default is MISSING else field.default,
            annotation=hints[field.name],
        )
        for field in sorted(fields(kind), key=lambda field: field.name in of_model)
    ]

    @wraps(command)
    def called(**given: Any) -> None:
        options = kind(**given)
        if not of_model:
            return command(options)
        from keepset.core.select import nan_scores_refused

        with nan_scores_refused():
            command(options)

    called.__signature__ = inspect.Signature(parameters)  # type: ignore[attr-defined]
    called.__annotations__ = {parameter.name: parameter.annotation for parameter in parameters}
    return called


def group(name: str, about: str) -> typer.Typer:
    """Make a group of commands.

    Args:
        name: the group's name.
        about: its help.
    """
    commands = typer.Typer(name=name, help=about, no_args_is_help=True, rich_markup_mode=None, add_completion=False)
    commands.callback()(lambda: None)  # keeps the name where a group has a single command
    return commands
