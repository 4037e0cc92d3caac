"""`keepset reproduce`: measures the tables and figures of papers, each by one command."""

from __future__ import annotations

from collections.abc import Iterator, Sequence
from contextlib import contextmanager, suppress
from dataclasses import asdict, dataclass
from pathlib import Path
from typing import TYPE_CHECKING, Annotated, Any

from typer import Argument, Exit, Option

from keepset.errors import KeepsetError
from keepset.lab.cli.checks import check_least, check_writable, parse_whole
from keepset.lab.cli.console import load, note, output, say, show_table, status
from keepset.lab.cli.options import Device, Dtype, Json, SamplingSeed, takes_options
from keepset.lab.cli.streaming import Sampling
from keepset.lab.cli.sweep import check_ray, say_lost, sweep_grid
from keepset.lab.embedded import EMBEDDED, Source
from keepset.lab.report.table import Column, Table
from keepset.lab.sweep.prompts import Asking

if TYPE_CHECKING:
    from keepset.lab.papers.entry import Entry, MeasuredFigure, PaperOptions, Sweep
    from keepset.lab.sweep.sweep import Cost

_LIST = "list"
_EMBEDDED = "embedded"


@dataclass(frozen=True, kw_only=True)
class ReproduceOptions:
    """Options of `keepset reproduce`."""

    entry: Annotated[str, Argument(metavar="ENTRY", help="A table or figure, such as ams-table-1; list shows all.")] = (
        _LIST
    )
    model: Annotated[
        str | None,
        Option(help=f"A folder or a hub name, or {_EMBEDDED} for the small embedded one; the paper's if not given."),
    ] = None
    device: Device = None
    dtype: Dtype = None
    limit: Annotated[int | None, Option(help="Examples of each task; the paper's if not given.")] = None
    seed: SamplingSeed = 0
    output_tokens: Annotated[
        int | None,
        Option("--output-tokens", "--max-new-tokens", help="Tokens of an answer at most; the paper's if not given."),
    ] = None
    prompt_tokens: Annotated[
        str | None,
        Option(help="Tokens of prompts, separated by commas, for tasks made to a length; the paper's if not given."),
    ] = None
    data: Annotated[Path | None, Option(help="A folder with the tasks' data, used in place of the hub.")] = None
    stats: Annotated[
        Path | None, Option(help="The model's statistics, from `keepset calibrate`, for recipes that need them.")
    ] = None
    tables: Annotated[
        Path | None, Option(help="The model's tables, from `keepset compile`, for recipes that need them.")
    ] = None
    out: Annotated[Path, Option(help="A folder for the sweeps' files, new or begun before.")] = Path("reproduced")
    ray: Annotated[bool, Option("--ray", help="Measure on the workers of a Ray cluster.")] = False
    json_file: Json = None


@takes_options
def reproduce(options: ReproduceOptions) -> None:
    """Repeat tables and figures of papers.

    The command measures what a table or figure shows, and prints the paper's own figures beside. Models, recipes,
    budgets, intervals, tasks, lengths, and answers are the paper's unless an option says otherwise. A note says first
    how much there is to do. The same command resumes after a stop.
    """
    check_least(1, limit=options.limit, output_tokens=options.output_tokens)
    Sampling(1, 0.0, options.seed)
    lengths = () if options.prompt_tokens is None else tuple(parse_whole(options.prompt_tokens, "prompt-tokens"))
    check_ray(options.ray)
    check_writable(options.json_file)

    from keepset.lab.papers.catalogue import entries, entry_of
    from keepset.lab.papers.entry import AVERAGE, PaperOptions
    from keepset.lab.papers.figures import averages_over_models

    if options.entry == _LIST:
        return _print_list(list(entries().values()), options.json_file)
    chosen = entry_of(options.entry)
    given = {"stats": options.stats, "tables": options.tables}
    files = {name: path.resolve() for name, path in given.items() if path is not None}
    paper_options = PaperOptions(options.limit, options.seed, options.output_tokens, lengths, options.data, files)
    results, measured, failed = [], [], False
    names = chosen.models if options.model is None else (options.model,)
    with _folder(options.out):
        for name in names:
            try:
                source = Source(None if name == _EMBEDDED else name, options.device, options.dtype)
                rows, lost = _run(chosen, source, paper_options, options.out, options.ray)
            except KeepsetError as error:
                if len(names) == 1:
                    raise
                note(f"{name}: {error}")  # the other models can be measured all the same
                failed = True
                continue
            failed = failed or lost or any(row.failed for row in rows)
            measured.append(rows)
            results.append(_result(chosen, source.called, rows))
    if options.model is None and len(measured) == len(names) and AVERAGE in chosen.published:
        averages = averages_over_models(chosen.published[AVERAGE], measured)
        results.append(_result(chosen, AVERAGE, averages))
    output(results, options.json_file, lambda: _print(chosen, results))
    if failed:
        raise Exit(1)


@contextmanager
def _folder(path: Path) -> Iterator[None]:
    """Make the folder, and remove it afterwards if nothing was written to it."""
    try:
        path.mkdir(parents=True, exist_ok=True)
    except OSError as error:
        raise KeepsetError(
            f"{str(path)!r} is no folder to write to ({error.strerror}): name another with --out."
        ) from None
    try:
        yield
    finally:
        with suppress(OSError):  # it is not empty
            path.rmdir()


def _run(
    entry: Entry, source: Source, options: PaperOptions, out: Path, ray: bool
) -> tuple[list[MeasuredFigure], bool]:
    rows: list[MeasuredFigure] = []
    lost = False
    for sweep in entry.sweeps:
        words = [sweep.file or entry.name, sweep.name, Path(source.called).name]
        path = out / f"{'-'.join(filter(None, words))}.jsonl"
        figures, incomplete = _sweep(sweep, source, options, path, ray)
        rows, lost = rows + figures, lost or incomplete
    if entry.measure is not None:
        note(f"{entry.takes}, unless options say otherwise")
        with status(entry.title):
            rows += entry.measure(*load(source), options)
    return rows, lost


def _sweep(
    sweep: Sweep, source: Source, options: PaperOptions, path: Path, ray: bool
) -> tuple[list[MeasuredFigure], bool]:
    from keepset.lab.papers.entry import count_idle, grid_of
    from keepset.lab.papers.figures import figures_of

    grid = grid_of(sweep, options)

    def foretell(cost: Cost) -> None:
        note(f"{cost}; figures go to {str(path)!r}")
        for task, recipes in count_idle(grid).items():
            note(f"{task}: its answers end before {recipes} of the recipes drop anything: give more --output-tokens")

    check_writable(path)
    asking = Asking(sweep.mode, alone=sweep.alone)
    # Recipes that need no file are worth measuring without those that need one.
    cells, lost = sweep_grid(path, grid, source, asking, ray, foretell, complete=False)
    say_lost(lost)
    return figures_of(sweep, cells, options.files), bool(lost)


def _result(entry: Entry, model: str, rows: Sequence[MeasuredFigure]) -> dict[str, Any]:
    """Return the measured figures beside the paper's.

    The paper's are those of the same model, or else of the first model that the paper has figures of.

    Args:
        entry: the table or figure.
        model: the model that was measured.
        rows: the measured figures. Those that were not measured, because of other data or options, come after them.
    """
    from keepset.lab.papers.entry import MeasuredFigure

    paper_model = model if model in entry.published else next(iter(entry.published), None)
    paper = entry.published.get(paper_model or "", {})
    unmeasured = [MeasuredFigure(key, None, 0) for key in paper if key not in {row.key for row in rows}]
    figures = [{**row.key._asdict(), **asdict(row), "paper": paper.get(row.key)} for row in (*rows, *unmeasured)]
    for figure in figures:
        del figure["key"]
    return {"entry": entry.name, "model": model, "paper_model": paper_model, "rows": figures}


def _print_list(entries: Sequence[Entry], json_file: Path | None) -> None:
    def print_table() -> None:
        columns = [
            Column("shows", lambda entry: entry.title, is_text=True),
            Column(
                "models",
                lambda entry: "\n".join(model.rpartition("/")[2] for model in entry.models),
                rank=1,
                is_text=True,
            ),
            Column("state", lambda entry: entry.state, rank=2, is_text=True),
        ]
        table = Table("entry", columns)
        for entry in entries:
            table.add(entry.name, entry)
        show_table(table)
        say(
            "\nData come from the hub, or from a folder with --data; entries that name no data need none. "
            f"--model {_EMBEDDED} tries any entry out, though its scores mean nothing."
        )

    names = ("name", "source", "title", "models", "data", "state", "note")
    output([{name: getattr(entry, name) for name in names} for entry in entries], json_file, print_table)


def _print(entry: Entry, results: Sequence[dict[str, Any]]) -> None:
    from keepset.lab.papers.entry import AVERAGE
    from keepset.lab.papers.figures import table_of

    for result in results:
        scope = "Average over the models" if result["model"] == AVERAGE else f"Model: {result['model']}"
        say(f"{entry.source}: {entry.title}. {scope}.")
        if result["model"] == EMBEDDED:
            say("This model is far too small for these tasks: its scores mean nothing.")
        if result["paper_model"] not in (None, result["model"]):
            say(f"The paper's figures are of {result['paper_model']}.")
        if entry.note:
            say(entry.note)
        measured = [row for row in result["rows"] if row["examples"]]
        show_table(table_of(measured))
        if unmeasured := len(result["rows"]) - len(measured):
            say(f"Figures of the paper that were not measured, because of the data or the options: {unmeasured}.")
