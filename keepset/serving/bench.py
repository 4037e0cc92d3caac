"""Plain vLLM and vLLM with a recipe under the same load, one after the other."""

from __future__ import annotations

from collections.abc import Callable, Sequence
from contextlib import AbstractContextManager
from typing import Any

from keepset.errors import KeepsetError
from keepset.recipe import Recipe
from keepset.serving.command import command
from keepset.serving.load import Load
from keepset.serving.measure import ServedModel, check_fits, measure, served_model, to_json
from keepset.serving.server import Server, free_port
from keepset.serving.summary import summary
from keepset.serving.workload import TokenSource, essay_tokens, prompts

_RESERVED = ("--host", "--port", "--uds", "--api-key", "--root-path", "--ssl-keyfile", "--ssl-certfile", "--headless")


def check_options(options: Sequence[str]) -> None:
    """Refuses options under which the load could not reach the server."""
    if options and not options[0].startswith("-"):
        raise KeepsetError(f"{options[0]!r} is no option for vLLM: write MODEL, then --, then options.")
    for word in options:
        name = word.split("=", 1)[0].replace("_", "-")
        if name in _RESERVED:
            raise KeepsetError(f"{name} is not for the benchmark: its servers listen on a free port of 127.0.0.1.")


def token_source(folder: str) -> TokenSource:
    """What prompts for the model in that folder, or of that hub name, are cut from; it must have a tokenizer."""
    from transformers import AutoTokenizer

    try:
        tokenizer = AutoTokenizer.from_pretrained(folder, trust_remote_code=False)
    except (OSError, ValueError, ImportError, KeyError, TypeError, AttributeError) as error:
        raise KeepsetError(
            f"The tokenizer of {folder!r} cannot be loaded: give MODEL, a folder or a name on the Hugging Face Hub."
        ) from error
    return essay_tokens(tokenizer)


class Bench:
    """Puts one load on servers, one after the other; each gets the same prompts.

    Args:
        load: what they are put under.
        tokens: what its prompts are cut from.
        starting: `starting(server)` is a context around the start of a server.
        loading: `loading(server, requests)` is one around its load, and gives what to call after each request.
    """

    def __init__(
        self,
        load: Load,
        tokens: TokenSource,
        starting: Callable[[str], AbstractContextManager[Any]],
        loading: Callable[[str, int], AbstractContextManager[Callable[[], None]]],
    ) -> None:
        self._load, self._starting, self._loading = load, starting, loading
        self._prompts = prompts(tokens, load)

    def measure_started(
        self, name: str, model: str | None, recipe: Recipe | None, options: Sequence[str], start_timeout: float
    ) -> dict[str, Any]:
        """Start a server, measure it, stop it; a `ServerError` where it did not start or did not last."""
        port = free_port()
        words = command(model, recipe, options, forced=("--host", "127.0.0.1", "--port", str(port)))
        with Server(words, port) as server:
            with self._starting(name):
                server.wait(start_timeout)
            result = self.measure_running(server.url, served_model(server.url), name, recipe, words)
            server.check()
        return result

    def measure_running(
        self, url: str, model: ServedModel, name: str = "server", recipe: Recipe | None = None,
        words: list[str] | None = None,
    ) -> dict[str, Any]:  # fmt: skip
        """Measure a server that runs: the figures, then everything behind them, and how it was started, if here."""
        check_fits(self._load, model)
        with self._loading(name, self._load.rounds * self._load.requests) as on_reply:
            rounds = measure(url, model.name, self._load, self._prompts, on_reply)
        return {
            "name": name,
            "recipe": None if recipe is None else str(recipe),
            "command": words,
            "summary": summary(rounds),
            "rounds": to_json(rounds),
        }
