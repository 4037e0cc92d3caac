"""`keepset methods`: the list of methods, and a page on one method."""

import re
from typing import Annotated, Any

from typer import Argument

from keepset.cli.checks import check_writable
from keepset.cli.console import cell, output, say, show, table
from keepset.cli.options import Json
from keepset.errors import RecipeError

_SOURCE = re.compile(r"\s*\([^()]*\d{4}[^()]*\)")
"""The authors and number of a paper in the first sentence of a method's docstring."""


def methods(
    name: Annotated[
        str | None, Argument(metavar="[NAME]", help="A method to describe. [default: a list of all methods]")
    ] = None,
    json_file: Json = None,
) -> None:
    """List the methods, or describe one.

    The list says what each method keeps and needs. The description of one method has its parameters with their
    ranges, its paper and an example. With --plugin methods of your own are among them: keepset --plugin my_methods
    methods.
    """
    check_writable(json_file)

    from keepset.recipe import nearest
    from keepset.registry import METHODS, catalogue, find

    entries = catalogue()
    if name is None:
        output(entries, json_file, lambda: _print(entries))
        return
    kind = find(name)
    if kind is None:
        raise RecipeError(f"There is no method {name!r}{nearest(name, METHODS)}")
    (entry,) = (entry for entry in entries if entry["name"] == kind.name)
    output(entry, json_file, lambda: _print_one(entry, kind.__doc__ or ""))


def _print(entries: list[dict[str, Any]]) -> None:
    grid = table("method", "what it does", numbers=("always", "every", "vLLM", "passes"))
    for entry in entries:
        summary = _SOURCE.sub("", entry["summary"]).partition(": `")[0].rstrip(".").replace("`", "")
        always = f"{entry['sinks']} + {entry['recent']}" if entry["sinks"] or entry["recent"] else ""
        named = f"{entry['name']}(scorer)" if entry["family"] == "allocator" else entry["name"]
        served = (_word(entry[which]) for which in ("every", "vllm"))
        grid.add_row(cell(named), cell(summary), always, *served, str(entry["passes"]))
    show(grid)
    say(
        "always: how many of the first and of the newest tokens always stay; every: whether it can compress while "
        "decoding; passes: forward passes over the prompt. An allocator also has its scorer's needs. "
        "keepset methods NAME says more. keepset --plugin my_methods methods lists your own, too."
    )


def _print_one(entry: dict[str, Any], about: str) -> None:
    divides = entry["family"] == "allocator"
    # Join lines, except where a paragraph or an attribute begins.
    text = re.sub(r"\n +(?=\S)(?!\w+: )", " ", about.strip())
    say(re.sub(r"\n +", "\n", text))
    if entry["parameters"]:
        say("")
        grid = table("parameter", "range", numbers=("default",))
        for name, default in entry["parameters"].items():
            grid.add_row(name, entry["ranges"].get(name, "a method"), "" if default is None else repr(default))
        show(grid)
    budget = "bytes=0.25" if entry["needs_budget"] else ""
    call = ", ".join(filter(None, ["snapkv" if divides else "", budget]))
    example = f"{entry['name']}({call})" if call else entry["name"]
    facts = (
        f"looks at: {', '.join(entry['needs']) or 'keys, values'}",
        f"always stays: {_always(entry['sinks'], entry['recent'])}",
        f"compresses while decoding (every=): {_word(entry['every'])}; under vLLM: {_word(entry['vllm'])}; "
        f"passes over the prompt: {entry['passes']}",
        f"paper: {entry['paper']}",
        *([f"note: {entry['name']} {entry['advice']}"] if entry["advice"] else []),
        f'example: keepset compare --recipes "{example}"',
    )
    say("\n" + "\n".join(facts))


def _always(sinks: int, recent: int) -> str:
    named = [f"the {which} {count}" for which, count in (("first", sinks), ("newest", recent)) if count]
    return f"{' and '.join(named)} tokens" if named else "nothing"


def _word(true: bool) -> str:
    return "yes" if true else "no"
