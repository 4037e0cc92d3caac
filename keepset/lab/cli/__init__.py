"""The command line: `keepset`."""

import errno
import os
import sys
import warnings
from typing import Annotated, Any

import typer
from typer import Exit, Option
from typer.core import TyperGroup

from keepset import __version__
from keepset.errors import KeepsetError
from keepset.lab.cli.calibrate import calibrate
from keepset.lab.cli.chat import chat
from keepset.lab.cli.compare import compare, demo
from keepset.lab.cli.compile import compile
from keepset.lab.cli.console import note, say, say_starting, unsay_starting
from keepset.lab.cli.context import context as context_commands
from keepset.lab.cli.eval import evaluate
from keepset.lab.cli.generate import generate
from keepset.lab.cli.grid import sanitize
from keepset.lab.cli.latency import latency
from keepset.lab.cli.methods import methods
from keepset.lab.cli.options import group
from keepset.lab.cli.reproduce import reproduce
from keepset.lab.cli.results import results
from keepset.lab.cli.serve import serve
from keepset.lab.cli.templates import templates
from keepset.lab.cli.tune import tune
from keepset.lab.cli.ui import ui

SECTIONS = {
    "Commands to begin with": ("demo", "ui", "methods"),
    "Commands that compress": ("generate", "chat", "context", "serve"),
    "Commands that compare recipes on your text": ("compare", "tune"),
    "Commands that measure": ("eval", "results", "bench", "reproduce"),
    "Commands that prepare a model": ("calibrate", "compile", "templates"),
}
"""The commands as the help lists them, by headings."""


class Commands(TyperGroup):
    """All commands. The help lists them under headings, and Ctrl-C ends each of them with a note."""

    def parse_args(self, ctx: Any, args: list[str]) -> list[str]:
        """Read `keepset help COMMAND` as `keepset COMMAND --help`."""
        return super().parse_args(ctx, [*args[1:], "--help"] if args[:1] == ["help"] else args)

    def format_commands(self, ctx: Any, formatter: Any) -> None:
        """Write each heading with its commands and what they do."""
        width = max(len(name) for names in SECTIONS.values() for name in names)
        for heading, names in SECTIONS.items():
            rows = [(f"{name:{width}}", self.commands[name].get_short_help_str(formatter.width)) for name in names]
            with formatter.section(heading):
                formatter.write_dl(rows)

    def invoke(self, ctx: Any) -> Any:
        """Run the command; Ctrl-C ends it with exit code 130."""
        try:
            return super().invoke(ctx)
        except KeyboardInterrupt:
            note("interrupted")
            raise Exit(130) from None


app = typer.Typer(
    cls=Commands,
    no_args_is_help=True,
    pretty_exceptions_enable=False,
    rich_markup_mode=None,
    context_settings={"help_option_names": ["-h", "--help"]},
)


@app.callback(invoke_without_command=True)
def options(
    version: Annotated[
        bool, Option("--version", "-V", is_eager=True, help="Say which version this is, and end.")
    ] = False,
    plugin: Annotated[
        list[str] | None,
        Option(metavar="<module>", help="A Python module with methods of your own; may be given several times."),
    ] = None,
) -> None:
    """Choose which entries of a language model's KV cache to keep, and free the rest."""
    if version:
        say(f"keepset {__version__}")
        raise Exit
    if plugin:
        from keepset.registry import add  # which imports torch

        for module in plugin:
            add(module)
    say_starting()


for command in (demo, ui, compare, generate, chat, tune, methods):
    app.command()(command)
app.command("eval")(evaluate)
app.command()(results)
# Options that are not keepset's own go on to vLLM, -h and what begins so as well.
app.command(
    context_settings={"allow_extra_args": True, "ignore_unknown_options": True, "help_option_names": ["--help"]}
)(serve)
for command in (calibrate, compile, reproduce, templates):
    app.command()(command)
app.add_typer(context_commands)
bench = group("bench", "Measure how fast recipes are.")
bench.command()(latency)
app.add_typer(bench)


def main() -> None:
    """Run the command line. Bad input ends it with one sentence on standard error and exit code 2."""
    # Show a warning without the place in the code that it comes from.
    warnings.showwarning = lambda message, *_, **__: note(str(message))
    try:
        app()
    except KeepsetError as error:
        unsay_starting()
        print(f"keepset: {sanitize(' '.join(str(error).splitlines()))}", file=sys.stderr)
        sys.exit(2)
    except OSError as error:
        if error.errno not in _SENTENCES:
            raise
        unsay_starting()
        print(f"keepset: {_SENTENCES[error.errno]}", file=sys.stderr)
        sys.exit(2)
    except KeyboardInterrupt:
        sys.exit(130)
    finally:
        unsay_starting()
        _flush()


_SENTENCES = {
    errno.ENAMETOOLONG: "The name of a file or folder is longer than this system allows: shorten it.",
    errno.ENOSPC: "There is no room for the output: make some, or write to another place.",
}


def _flush() -> None:
    """Write what waits for standard output. Python would do so later, and print a trace-back if there is no room."""
    try:
        sys.stdout.flush()
    except OSError as error:
        os.dup2(os.open(os.devnull, os.O_WRONLY), sys.stdout.fileno())
        if error.errno in _SENTENCES:
            print(f"keepset: {_SENTENCES[error.errno]}", file=sys.stderr)
            sys.exit(2)
