"""`keepset diagnose`: how well what a method supposes holds on a text."""

from __future__ import annotations

import json
import math
from pathlib import Path
from typing import TYPE_CHECKING, Annotated, Any

import typer

from keepset.errors import KeepsetError

if TYPE_CHECKING:
    from keepset.bench.analysis.synthetic import Agreement

FIGURES = ("overlap", "usage", "needed", "correlation")
PAPER = {"overlap": 0.929, "usage": 0.594, "needed": 0.4, "correlation": 0.7759}

diagnose = typer.Typer(
    name="diagnose",
    help="Check what a method supposes.",
    no_args_is_help=True,
    rich_markup_mode=None,
    add_completion=False,
)


@diagnose.callback()
def _diagnose() -> None:
    """Check what a method supposes."""


@diagnose.command()
def gvote(
    recipe: Annotated[str, typer.Option(help="gvote with its parameters, such as 'gvote(future=1)'.")] = "gvote",
    text: Annotated[Path | None, typer.Option(help="A UTF-8 text file; an essay if none is given.")] = None,
    tokens: Annotated[int, typer.Option(help="Tokens of the text to use at most.")] = 1024,
    model: Annotated[str | None, typer.Option(help="A folder or a hub name; a small embedded model if none.")] = None,
    as_json: Annotated[bool, typer.Option("--json", help="Print JSON instead of a table.")] = False,
) -> None:
    """Compare the attention of gvote's synthetic queries with that of the next query.

    The text's last token is masked, queries are synthesized from those before it, and what they attend to is compared
    with what the last token's own query attends to (Figure 3 of the paper).
    """
    from keepset.methods.gvote import GVote
    from keepset.recipe import Recipe
    from keepset.texts import essay, read

    parsed = Recipe.parse(recipe)
    method = parsed.method
    if not isinstance(method, GVote):
        raise KeepsetError(f"--recipe {parsed} is not about synthetic queries: write gvote with its parameters.")
    if parsed != Recipe.of(method):
        raise KeepsetError(f"--recipe {parsed}: nothing is compressed here, so leave all but gvote's parameters out.")
    if tokens < method.skip + 3:
        raise KeepsetError(f"--tokens {tokens} is too few for {parsed}: use {method.skip + 3} or more.")
    source = essay() if text is None else read(text)

    from keepset.bench.analysis.synthetic import next_query
    from keepset.cli.console import load, progress
    from keepset.models import EMBEDDED

    loaded, tokenizer = load(model)
    ids = tokenizer(source, return_tensors="pt", verbose=False)["input_ids"][:, :tokens]
    config = loaded.config.get_text_config()
    longest = getattr(config, "max_position_embeddings", None)
    if longest is not None and ids.shape[1] > longest:
        raise KeepsetError(f"--tokens {tokens} is more than the model's context of {longest}: use {longest} or less.")
    with progress() as bar:
        layers = bar.add_task("layers of two prefills", total=2 * config.num_hidden_layers)
        found = next_query(loaded, method, ids, lambda: bar.advance(layers))
    told = _told(found)
    result = {"model": model or EMBEDDED, "recipe": str(parsed), "tokens": ids.shape[1], **told, "paper": PAPER}
    if as_json:
        print(json.dumps(result, indent=2))
    else:
        _print(result)


def _told(found: dict[int, Agreement]) -> dict[str, Any]:
    """Figures for JSON: of every layer and query head, and their means."""
    layers: list[dict[str, Any]] = [
        {"layer": layer, **{name: [_number(x) for x in getattr(each, name).tolist()] for name in FIGURES}}
        for layer, each in found.items()
    ]
    return {
        "layers": layers,
        "mean": {name: _mean([x for layer in layers for x in layer[name]]) for name in FIGURES},
    }


def _number(x: float) -> float | None:
    return None if math.isnan(x) else x


def _mean(numbers: list[float | None]) -> float | None:
    known = [x for x in numbers if x is not None]
    return sum(known) / len(known) if known else None


def _print(result: dict[str, Any]) -> None:
    """A row per layer, a digit per query head."""
    from rich.table import Table

    from keepset.cli.console import out, printable

    out.print(
        f"{printable(result['model'])}, {result['recipe']}: {result['tokens']} tokens, the last one masked.",
        markup=False,
        highlight=False,
    )
    table = Table(box=None, pad_edge=False, header_style="bold")
    table.add_column("layer", justify="right")
    for title in ("overlap", "usage"):
        table.add_column(title, justify="right", no_wrap=True)
        table.add_column("heads", overflow="fold")
    for title in ("needed", "correlation"):
        table.add_column(title, justify="right", no_wrap=True)
    for layer in result["layers"]:
        mean = {name: _shown(_mean(layer[name])) for name in FIGURES}
        table.add_row(
            str(layer["layer"]),
            mean["overlap"],
            _digits(layer["overlap"]),
            mean["usage"],
            _digits(layer["usage"]),
            mean["needed"],
            mean["correlation"],
        )
    for title, figures in (("mean", result["mean"]), ("paper", result["paper"])):
        shown = [_shown(figures[name]) for name in FIGURES]
        table.add_row(title, shown[0], "", shown[1], "", *shown[2:])
    out.print(table)
    out.print(
        "overlap: the next query's attention on what a synthetic query needs; usage: the share of entries that is; "
        "needed: the share that the next query needs itself; correlation: of its attention with the mean of the "
        "synthetic queries' (in the paper of one head). A digit is one head's tenths.",
        markup=False,
        highlight=False,
    )


def _shown(x: float | None) -> str:
    return "-" if x is None else f"{x:.3f}"


def _digits(shares: list[float]) -> str:
    return "".join(str(min(int(10 * share), 9)) for share in shares)
