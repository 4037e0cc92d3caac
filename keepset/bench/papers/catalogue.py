"""All tables and figures, read from the papers' YAML files. docs/reproduce.md says what an entry holds."""

import difflib
from collections.abc import Callable, Iterator, Mapping, Sequence
from functools import cache, partial
from importlib.resources import files
from inspect import signature
from itertools import product
from typing import Any

import yaml

from keepset.bench.papers.entry import Entry, FigureKey, MeasuredFigure, Sweep
from keepset.bench.papers.measurements import MEASUREMENTS
from keepset.errors import KeepsetError
from keepset.recipe import Schedule

PAPERS = ("ams", "kvcompose", "gvote", "compilerkv")

_Kinds = Mapping[str, type | tuple[type, ...]]
_NAMES = {
    str: "a text",
    bool: "true or false",
    int: "a whole number",
    float: "a number",
    list: "a list",
    dict: "a mapping",
}

_FILE: _Kinds = {"paper": str, "models": list, "recipes": dict, "settings": dict, "entries": dict}
_ENTRY: _Kinds = {"title": str, "models": list, "note": (str, list), "sweeps": list, "measure": dict, "published": list}
_SWEEP: _Kinds = {
    **dict.fromkeys(("tasks", "keeps", "always", "metrics", "lengths", "by", "modes"), list),
    **dict.fromkeys(("full", "average", "name", "file", "suffix", "solved_by", "missed_by"), str),
    **dict.fromkeys(("schedule", "answer_tokens", "differences"), dict),
    "methods": (list, dict),
    "limit": int,
    "sample": float,
    "alone": bool,
}
_SCHEDULE: _Kinds = {"prefill": bool, "every": int}
_PUBLISHED: _Kinds = {"models": list, "tasks": list, "keeps": list, "metrics": dict, "full": dict, "values": dict}


@cache
def entries() -> dict[str, Entry]:
    """Return all entries by id, paper by paper.

    Raises:
        KeepsetError: if a file is not as it should be.
    """
    found: dict[str, Entry] = {}
    for paper in PAPERS:
        file = files(__package__).joinpath(f"{paper}.yaml")
        found |= {entry.name: entry for entry in read_entries(file.read_text("utf-8"), file.name)}
    return found


def entry_of(name: str) -> Entry:
    """Return the entry of this id.

    Raises:
        KeepsetError: if there is none; the sentence names those that are spelled nearly so.
    """
    known = entries()
    if name not in known:
        close = difflib.get_close_matches(name, known, n=3, cutoff=0.5)
        near = f"did you mean {', '.join(map(repr, close))}?" if close else "`keepset reproduce list` shows all."
        raise KeepsetError(f"There is no table or figure {name!r}; {near}")
    return known[name]


def read_entries(text: str, file: str) -> list[Entry]:
    """Return the entries of one paper.

    Args:
        text: the YAML file.
        file: its name, for messages.

    Raises:
        KeepsetError: if the text is not YAML, or if a field is unknown, missing or of another kind.
    """
    try:
        data = yaml.load(text, getattr(yaml, "CSafeLoader", yaml.SafeLoader))  # the one in C takes a tenth of the time
    except yaml.YAMLError as error:
        raise KeepsetError(f"{file} is not YAML: {' '.join(str(error).split())}.") from None
    data = _checked(file, data, _FILE, needed=("paper", "models", "entries"))
    return [_entry(f"{file}, {name}", name, fields, data) for name, fields in data["entries"].items()]


def _entry(place: str, name: str, fields: Any, paper: Mapping[str, Any]) -> Entry:
    fields = _checked(place, fields, _ENTRY, needed=("title",))
    prefix = f"{paper['paper'].lower()}-"
    if not name.startswith(prefix) or bool(fields.get("sweeps")) == bool(fields.get("measure")):
        raise KeepsetError(f"{place} must have an id that begins with {prefix!r}, and either 'sweeps' or 'measure'.")
    models, note = tuple(fields.get("models", paper["models"])), fields.get("note", "")
    measure = fields.get("measure", {})
    return Entry(
        name=name,
        source=f"{paper['paper']}, {name.removeprefix(prefix).replace('-', ' ').title()}",
        title=fields["title"],
        models=models,
        sweeps=tuple(
            sweep
            for number, each in enumerate(fields.get("sweeps", ()), 1)
            for sweep in _sweeps(f"{place}, sweep {number}", each, paper)
        ),
        measure=_measure(place, **measure) if measure else None,
        takes=measure.get("takes", ""),
        published=_published(place, fields.get("published", ()), models),
        note=note if isinstance(note, str) else " ".join(note),
    )


def _sweeps(place: str, data: Any, paper: Mapping[str, Any]) -> Iterator[Sweep]:
    """Yield the sweep of each mode, with the mode in its names; or the only one if it names no modes."""
    fields = _checked(place, data, _SWEEP)
    fields = _checked(place, paper.get("settings", {}) | fields, _SWEEP, needed=("tasks", "methods"))
    schedule = Schedule(**_checked(f"{place}, schedule", fields.pop("schedule", {}), _SCHEDULE))
    methods, modes, recipes = fields.pop("methods"), fields.pop("modes", None), paper.get("recipes", {})
    if isinstance(methods, list):
        if unknown := [method for method in methods if method not in recipes]:
            raise KeepsetError(f"{place} names {unknown[0]!r}, which is not among the file's recipes.")
        methods = {method: recipes[method] for method in methods}
    settings: dict[str, Any] = {
        name: tuple(value) if isinstance(value, list) else value for name, value in fields.items()
    }
    make = partial(Sweep, methods=methods, schedule=schedule, **settings)
    if modes is None:
        yield make()
    else:
        yield from (make(mode=mode, name=mode, suffix=f", {mode}") for mode in modes)


def _measure(place: str, function: str = "", takes: str = "", **settings: Any) -> Callable[..., list[MeasuredFigure]]:
    """Return the registered function with the entry's settings."""
    if function not in MEASUREMENTS:
        raise KeepsetError(f"{place}: there is no function {function!r}; use one of {', '.join(MEASUREMENTS)}.")
    measure = partial(MEASUREMENTS[function], **settings)
    try:
        signature(measure).bind(None, None, None)
    except (TypeError, ValueError) as error:
        raise KeepsetError(f"{place}: the settings do not suit {function!r} ({error}).") from None
    return measure


def _published(place: str, blocks: Sequence[Any], models: Sequence[str]) -> dict[str, dict[FigureKey, float]]:
    """Return the paper's figures by model.

    A block has a row of figures for each method: of every model, task, metric and budget, the last changing fastest.
    Rows of `full` have no budget. A metric comes with its scale: the figures are so many times what is measured here.
    """
    published: dict[str, dict[FigureKey, float]] = {}
    for number, data in enumerate(blocks, 1):
        where = f"{place}, published {number}"
        block = _checked(where, data, _PUBLISHED, needed=("tasks", "metrics"))
        columns = list(product(block.get("models", models), block["tasks"], block["metrics"]))
        rows = [(method, [None], figures) for method, figures in block.get("full", {}).items()]
        rows += [(method, block.get("keeps", [None]), figures) for method, figures in block.get("values", {}).items()]
        for method, keeps, figures in rows:
            if len(figures) != len(columns) * len(keeps):
                raise KeepsetError(f"{where}: {method!r} has {len(figures)} figures for {len(columns) * len(keeps)}.")
        for column, (model, task, metric) in enumerate(columns):
            for method, keeps, figures in rows:
                for keep, figure in zip(keeps, figures[column * len(keeps) :], strict=False):
                    if figure is not None:
                        # 56.7 / 100 is 0.567...01 in binary.
                        value = round(figure / block["metrics"][metric], 10)
                        published.setdefault(model, {})[FigureKey(task, method, keep, metric)] = value
    return published


def _checked(place: str, data: Any, kinds: _Kinds, needed: Sequence[str] = ()) -> dict[str, Any]:
    """Return the fields, if each of them is known and of its kind, and if those that are needed are there."""
    if not isinstance(data, dict):
        raise KeepsetError(f"{place} must have fields: {', '.join(kinds)}.")
    for name, value in data.items():
        if name not in kinds:
            raise KeepsetError(f"{place} has an unknown field {name!r}: use {', '.join(kinds)}.")
        if not isinstance(value, kinds[name]):
            raise KeepsetError(f"{place} has {name}={value!r}, which must be {_kind(kinds[name])}.")
    if missing := [name for name in needed if name not in data]:
        raise KeepsetError(f"{place} lacks the field {missing[0]!r}.")
    return dict(data)


def _kind(kinds: type | tuple[type, ...]) -> str:
    return " or ".join(_NAMES[each] for each in (kinds if isinstance(kinds, tuple) else (kinds,)))
