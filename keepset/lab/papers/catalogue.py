"""All tables and figures, read from the papers' YAML files. docs/reproduce.md describes an entry's fields."""

import difflib
from collections.abc import Callable, Iterator, Mapping, Sequence
from functools import cache, partial
from importlib.resources import files
from itertools import product
from typing import Any

import yaml

from keepset.errors import KeepsetError
from keepset.lab.papers.entry import Entry, FigureKey, MeasuredFigure, Sweep
from keepset.lab.papers.measurements import MEASUREMENTS
from keepset.recipe import Schedule

PAPERS = ("ams", "kvcompose", "gvote", "compilerkv")


@cache
def entries() -> dict[str, Entry]:
    """Return all entries by id, paper by paper."""
    texts = [files(__package__).joinpath(f"{paper}.yaml").read_text("utf-8") for paper in PAPERS]
    return {entry.name: entry for text in texts for entry in read_entries(text)}


def entry_of(name: str) -> Entry:
    """Return the entry of this id.

    Raises:
        KeepsetError: if there is none; the sentence names similar ones.
    """
    by_name = entries()
    if name not in by_name:
        close = difflib.get_close_matches(name, by_name, n=3, cutoff=0.5)
        near = f"did you mean {', '.join(map(repr, close))}?" if close else "`keepset reproduce list` shows all."
        raise KeepsetError(f"There is no table or figure {name!r}; {near}")
    return by_name[name]


def read_entries(text: str) -> list[Entry]:
    """Return the entries of one paper's YAML file."""
    paper = yaml.load(text, getattr(yaml, "CSafeLoader", yaml.SafeLoader))  # the C loader takes a tenth of the time
    return [_entry(name, fields, paper) for name, fields in paper["entries"].items()]


def _entry(name: str, fields: Mapping[str, Any], paper: Mapping[str, Any]) -> Entry:
    models, note, measure = tuple(fields.get("models", paper["models"])), fields.get("note", ""), fields.get("measure")
    return Entry(
        name=name,
        source=f"{paper['paper']}, {name.removeprefix(paper['paper'].lower())[1:].replace('-', ' ').title()}",
        title=fields["title"],
        models=models,
        sweeps=tuple(sweep for description in fields.get("sweeps", ()) for sweep in _sweeps(description, paper)),
        measure=_measure(**measure) if measure else None,
        takes=measure["takes"] if measure else "",
        published=_published(fields.get("published", ()), models),
        note=note if isinstance(note, str) else " ".join(note),
    )


def _sweeps(data: Mapping[str, Any], paper: Mapping[str, Any]) -> Iterator[Sweep]:
    """Yield the sweep of each mode, with the mode in its names; or a single sweep if there are no modes.

    Args:
        data: a sweep in the file.
        paper: the whole file, with what its sweeps share.
    """
    fields = {**paper.get("settings", {}), **data}
    schedule, methods, modes = Schedule(**fields.pop("schedule", {})), fields.pop("methods"), fields.pop("modes", None)
    if isinstance(methods, list):
        methods = {method: paper["recipes"][method] for method in methods}
    settings: dict[str, Any] = {
        name: tuple(value) if isinstance(value, list) else value for name, value in fields.items()
    }
    make = partial(Sweep, methods=methods, schedule=schedule, **settings)
    if modes is None:
        yield make()
    else:
        yield from (make(mode=mode, name=mode, suffix=f", {mode}") for mode in modes)


def _measure(function: str, takes: str, **settings: Any) -> Callable[..., list[MeasuredFigure]]:
    return partial(MEASUREMENTS[function], **settings)


def _published(blocks: Sequence[Mapping[str, Any]], models: Sequence[str]) -> dict[str, dict[FigureKey, float]]:
    """Return the paper's figures by model.

    Args:
        blocks: the paper's tables. One has a row of figures for each method: for every model, task, metric and budget,
            the last changing fastest. Rows of `full` have no budget. A metric has a scale, by which the paper's figures
            are divided to get keepset's units.
        models: the models of blocks that name none.
    """
    published: dict[str, dict[FigureKey, float]] = {}
    for block in blocks:
        columns = list(product(block.get("models", models), block["tasks"], block["metrics"]))
        rows = [(method, [None], figures) for method, figures in block.get("full", {}).items()]
        rows += [(method, block.get("keeps", [None]), figures) for method, figures in block.get("values", {}).items()]
        assert all(len(figures) == len(columns) * len(keeps) for _, keeps, figures in rows), rows
        for column, (model, task, metric) in enumerate(columns):
            for method, keeps, figures in rows:
                for keep, figure in zip(keeps, figures[column * len(keeps) :], strict=False):
                    if figure is not None:
                        # 56.7 / 100 is 0.567...01 in binary.
                        value = round(figure / block["metrics"][metric], 10)
                        published.setdefault(model, {})[FigureKey(task, method, keep, metric)] = value
    return published
