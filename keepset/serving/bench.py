"""Plain vLLM and vLLM with a recipe under the same load, one after the other."""

from __future__ import annotations

from collections.abc import Callable, Sequence
from contextlib import AbstractContextManager, nullcontext
from dataclasses import dataclass
from typing import Any

from keepset.errors import KeepsetError
from keepset.recipe import Recipe
from keepset.serving.command import command
from keepset.serving.load import Load
from keepset.serving.measure import Round, Served, check_fits, measure, served, to_json
from keepset.serving.server import Server, free_port
from keepset.serving.summary import summary
from keepset.serving.workload import Source, prompts, source

_OURS = ("--host", "--port", "--uds", "--api-key", "--root-path", "--ssl-keyfile", "--ssl-certfile", "--headless")


@dataclass
class Measured:
    """A server and what it did.

    Attributes:
        name: what to call it.
        recipe: the recipe's text; None if it had none or it is not known.
        command: how it was started; None if it ran already.
        rounds: everything that was written down.
    """

    name: str
    recipe: str | None
    command: list[str] | None
    rounds: list[Round]

    def to_json(self) -> dict[str, Any]:
        """The figures, then everything behind them."""
        return {
            "name": self.name,
            "recipe": self.recipe,
            "command": self.command,
            "summary": summary(self.rounds),
            "rounds": to_json(self.rounds),
        }


@dataclass
class Watcher:
    """Who is told how far it has come; each returns a context around what it names.

    Attributes:
        starting: a server starts; gets its name.
        loading: a load of so many requests begins; gives what to call after each.
    """

    starting: Callable[[str], AbstractContextManager[Any]] = lambda name: nullcontext()
    loading: Callable[[str, int], AbstractContextManager[Callable[[], None]]] = lambda name, total: nullcontext(
        lambda: None
    )


def check_options(options: Sequence[str]) -> None:
    """Refuses options under which the load could not reach the server.

    Raises:
        KeepsetError: there is one among them.
    """
    if options and not options[0].startswith("-"):
        raise KeepsetError(f"{options[0]!r} is no option for vLLM: write MODEL, then --, then options.")
    for word in options:
        name = word.split("=", 1)[0].replace("_", "-")
        if name in _OURS:
            raise KeepsetError(f"{name} is not for the benchmark: its servers listen on a free port of 127.0.0.1.")


def tokens_of(folder: str) -> Source:
    """What prompts for the model in that folder, or of that hub name, are cut from.

    Raises:
        KeepsetError: it has no tokenizer.
    """
    from transformers import AutoTokenizer

    try:
        tokenizer = AutoTokenizer.from_pretrained(folder, trust_remote_code=False)
    except (OSError, ValueError, ImportError, KeyError, TypeError, AttributeError) as error:
        raise KeepsetError(
            f"The tokenizer of {folder!r} cannot be loaded: give MODEL, a folder or a name on the Hugging Face Hub."
        ) from error
    return source(tokenizer)


class Bench:
    """Puts one load on servers, one after the other; each gets the same prompts."""

    def __init__(self, load: Load, tokens: Source, watcher: Watcher) -> None:
        self._load, self._watcher = load, watcher
        self._prompts = prompts(tokens, load)

    def running(self, url: str, model: Served) -> Measured:
        """Measure a server that runs already."""
        check_fits(self._load, model)
        return Measured("server", None, None, self._measure("server", url, model))

    def started(
        self, name: str, model: str | None, recipe: Recipe | None, options: Sequence[str], patience: float
    ) -> Measured:
        """Start a server, measure it, stop it.

        Raises:
            ServerError: it did not start or did not last.
            KeepsetError: the load does not fit it.
        """
        port = free_port()
        words = command(model, recipe, options, forced=("--host", "127.0.0.1", "--port", str(port)))
        with Server(words, port) as server:
            with self._watcher.starting(name):
                server.wait(patience)
            serves = served(server.url)
            check_fits(self._load, serves)
            rounds = self._measure(name, server.url, serves)
            server.check()
        return Measured(name, None if recipe is None else str(recipe), words, rounds)

    def _measure(self, name: str, url: str, model: Served) -> list[Round]:
        with self._watcher.loading(name, self._load.rounds * self._load.requests) as on_reply:
            return measure(url, model.name, self._load, self._prompts, on_reply)
