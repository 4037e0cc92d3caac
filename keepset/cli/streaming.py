"""A generation that is printed as it comes, and what it took."""

from __future__ import annotations

import time
from dataclasses import dataclass
from typing import Any

from keepset.cli.console import megabytes, sanitize
from keepset.cli.sampling import Sampling


@dataclass
class Generated:
    """What a generation took.

    Attributes:
        ids: of the new tokens.
        nbytes: of the cache at the end.
    """

    ids: list[int]
    first_seconds: float
    rest_seconds: float
    nbytes: int

    def summary(self) -> str:
        """For a person."""
        speed = (len(self.ids) - 1) / self.rest_seconds if len(self.ids) > 1 else float("nan")
        return (
            f"{megabytes(self.nbytes)} of KV cache at the end, first token after {self.first_seconds:.2f} s, "
            f"{len(self.ids)} tokens, {speed:.1f} tokens/s"
        )


def generate_streamed(
    model: Any, tokenizer: Any, inputs: Any, cache: Any, sampling: Sampling, show: bool = True
) -> Generated:
    """Generates on this cache, and shows the text or not."""
    import torch

    streamer = Streamer(tokenizer, show)
    torch.manual_seed(sampling.seed)
    start = time.perf_counter()
    with torch.no_grad():
        model.generate(**inputs, past_key_values=cache, streamer=streamer, **sampling.options)
    stop = time.perf_counter()
    nbytes = getattr(cache, "nbytes", None)
    if nbytes is None:
        from keepset.bench.memory import dynamic_nbytes

        nbytes = dynamic_nbytes(cache)
    first = streamer.first or stop
    return Generated(streamer.ids, first - start, stop - first, nbytes)


class Streamer:
    """Prints text as soon as it can be decoded; the prompt, which comes first, is left out."""

    def __init__(self, tokenizer: Any, show: bool) -> None:
        self._tokenizer, self._show = tokenizer, show
        self._prompt_seen, self._printed = False, ""
        self.ids: list[int] = []
        self.first: float | None = None

    def put(self, value: Any) -> None:
        """Takes the prompt, then one token after another."""
        if not self._prompt_seen:
            self._prompt_seen = True
            return
        self.first = self.first or time.perf_counter()
        self.ids += value.flatten().tolist()
        self._print(final=False)

    def end(self) -> None:
        """Prints what is left."""
        self._print(final=True)

    def _print(self, final: bool) -> None:
        if not self._show:
            return
        text = self._tokenizer.decode(self.ids, skip_special_tokens=True)
        # The last character may be half of one until its next token comes.
        if not final and text.endswith("\N{REPLACEMENT CHARACTER}"):
            return
        print(sanitize(text[len(self._printed) :]), end="", flush=True)
        self._printed = text
