"""`keepset diagnose`: how well a method's assumptions hold on a text."""

import math
from typing import Annotated, Any

from typer import Option

from keepset.bench.report.table import Column, Table, decimals
from keepset.cli.checks import check_length, check_writable
from keepset.cli.console import counted, load, output, progress, say, show_table
from keepset.cli.options import Json, OneText, group, takes_model
from keepset.embedded import Source
from keepset.errors import KeepsetError, RecipeError
from keepset.texts import essay, read

FIGURES = ("overlap", "usage", "needed", "correlation")

diagnose = group("diagnose", "Check what a method assumes.")


@diagnose.command()
@takes_model
def gvote(
    model: Source,
    recipe: Annotated[str, Option(help="gvote with its parameters, such as 'gvote(future=1)'.")] = "gvote",
    text: OneText = None,
    prompt_tokens: Annotated[int, Option(help="Tokens of the text to use at most.")] = 1024,
    json_file: Json = None,
) -> None:
    """Compare gvote's synthetic queries with the next query.

    The text's last token is masked, queries are synthesized from those before it, and what they attend to is compared
    with what the last token's own query attends to (Figure 3 of the paper).
    """
    from keepset.methods.gvote import GVote
    from keepset.recipe import Recipe

    parsed = Recipe.parse(recipe)
    method = parsed.method
    if not isinstance(method, GVote):
        raise RecipeError(f"--recipe {parsed} has no synthetic queries: write gvote with its parameters.")
    if parsed != Recipe.of(method):
        raise RecipeError(f"--recipe {parsed}: nothing is compressed here, so leave all but gvote's parameters out.")
    if prompt_tokens < method.skip + 3:
        raise KeepsetError(f"--prompt-tokens {prompt_tokens} is too few for {parsed}: use {method.skip + 3} or more.")
    source = essay() if text is None else read(text)
    check_writable(json_file)

    from keepset.bench.analysis.synthetic import next_query
    from keepset.bench.papers.catalogue import entry_of

    loaded, tokenizer = load(model)
    ids = tokenizer(source, return_tensors="pt", verbose=False)["input_ids"][:, :prompt_tokens].to(loaded.device)
    check_length(loaded, "--prompt-tokens", ids.shape[1])
    with progress() as bar:
        layers = loaded.config.get_text_config().num_hidden_layers
        agreements = next_query(loaded, method, ids, counted(bar, "layers of two prefills", 2 * layers))
    (paper,) = entry_of("gvote-figure-3").published.values()
    rows: list[dict[str, Any]] = [
        {"layer": layer, **{name: _numbers(getattr(each, name)) for name in FIGURES}}
        for layer, each in agreements.items()
    ]
    result = {
        "model": model.called,
        "recipe": str(parsed),
        "tokens": ids.shape[1],
        "layers": rows,
        "mean": {name: _mean([x for row in rows for x in row[name]]) for name in FIGURES},
        "paper": {key.metric: figure for key, figure in paper.items()},
    }
    output(result, json_file, lambda: _print(result))


def _numbers(values: Any) -> list[float | None]:
    return [None if math.isnan(x) else x for x in values.tolist()]


def _mean(numbers: list[float | None]) -> float | None:
    known = [x for x in numbers if x is not None]
    return sum(known) / len(known) if known else None


def _print(result: dict[str, Any]) -> None:
    """Print a row per layer, with a digit per query head."""
    say(f"{result['model']}, {result['recipe']}: {result['tokens']} tokens, the last one masked.")
    table = Table("layer", _columns())
    for row in result["layers"]:
        table.add(str(row["layer"]), {name: (_mean(row[name]), row[name]) for name in FIGURES})
    for title in ("mean", "paper"):
        table.add(title, {name: (result[title][name], []) for name in FIGURES})
    show_table(table)
    say(
        "overlap: the next query's attention on the entries that a synthetic query needs; usage: these entries' share "
        "of all; needed: the share that the next query itself needs; correlation: of its attention and the synthetic "
        "queries' mean (in the paper for one head). A digit is one head's tenths."
    )


def _columns() -> list[Column]:
    """Return the columns of means and, for overlap and usage, of a digit per query head."""
    columns = []
    for name in FIGURES:
        columns.append(Column(name, lambda row, name=name: row[name][0], decimals(3)))
        if name in ("overlap", "usage"):
            columns.append(Column("by head", lambda row, name=name: row[name][1] or None, _digits, rank=1))
    return columns


def _digits(shares: list[float]) -> str:
    """Return each head's tenths as a digit."""
    return "".join(str(min(int(10 * share), 9)) for share in shares)
