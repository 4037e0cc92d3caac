"""`keepset methods`: the list of methods, and a page on one method."""

import re
from typing import Annotated, Any

from typer import Argument

from keepset.errors import RecipeError
from keepset.lab.cli.checks import check_writable
from keepset.lab.cli.console import output, say, show_table
from keepset.lab.cli.options import Json
from keepset.lab.report.table import Column, Table, yes

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
    table = Table("method", [Column("what it does", _summary, is_text=True), *_COLUMNS])
    for entry in entries:
        table.add(f"{entry['name']}(scorer)" if entry["family"] == "allocator" else entry["name"], entry)
    show_table(table)
    say(
        "always: how many of the first and of the newest tokens always stay; every: whether it can compress while "
        "decoding; passes: forward passes over the prompt. An allocator also has its scorer's needs. "
        "keepset methods NAME says more. keepset --plugin my_methods methods lists your own, too."
    )


def _summary(entry: dict[str, Any]) -> str:
    return _SOURCE.sub("", entry["summary"]).partition(": `")[0].rstrip(".").replace("`", "")


_COLUMNS = [
    Column("always", lambda each: f"{each['sinks']} + {each['recent']}" if each["sinks"] or each["recent"] else None),
    Column("every", lambda entry: entry["every"], yes),
    Column("vLLM", lambda entry: entry["vllm"], yes),
    Column("passes", lambda entry: entry["passes"]),
]


def _print_one(entry: dict[str, Any], about: str) -> None:
    divides = entry["family"] == "allocator"
    # Join lines, except where a paragraph or an attribute begins.
    text = re.sub(r"\n +(?=\S)(?!\w+: )", " ", about.strip())
    say(re.sub(r"\n +", "\n", text))
    if entry["parameters"]:
        say("")
        ranges = Column("range", lambda name: entry["ranges"].get(name, "a method"), is_text=True)
        table = Table("parameter", [ranges, Column("default", entry["parameters"].get, repr)])
        for name in entry["parameters"]:
            table.add(name, name)
        show_table(table)
    budget = "bytes=0.25" if entry["needs_budget"] else ""
    call = ", ".join(filter(None, ["snapkv" if divides else "", budget]))
    example = f"{entry['name']}({call})" if call else entry["name"]
    facts = (
        f"looks at: {', '.join(entry['needs']) or 'keys, values'}",
        f"always stays: {_always(entry['sinks'], entry['recent'])}",
        f"compresses while decoding (every=): {yes(entry['every'])}; under vLLM: {yes(entry['vllm'])}; "
        f"passes over the prompt: {entry['passes']}",
        f"paper: {entry['paper']}",
        *([f"note: {entry['name']} {entry['advice']}"] if entry["advice"] else []),
        f'example: keepset compare --recipes "{example}"',
    )
    say("\n" + "\n".join(facts))


def _always(sinks: int, recent: int) -> str:
    named = [f"the {which} {count}" for which, count in (("first", sinks), ("newest", recent)) if count]
    return f"{' and '.join(named)} tokens" if named else "nothing"
