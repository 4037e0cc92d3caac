"""Sampling options, and generation that is printed as it comes."""

import time
from dataclasses import dataclass
from typing import Any, Self

from keepset.errors import KeepsetError
from keepset.lab.cli.checks import check_least, check_whole
from keepset.lab.cli.console import beating, megabytes
from keepset.lab.cli.grid import sanitize
from keepset.lab.texts import TextStreamer

_SHOWN = 50_000
"""The fewest bytes that show in a figure of megabytes."""


@dataclass(frozen=True)
class Sampling:
    """How many tokens are generated, and how: greedily at temperature 0, else drawn by the seed.

    Raises:
        KeepsetError: an option is out of range.
    """

    tokens: int
    temperature: float = 0.0
    seed: int = 0

    def __post_init__(self) -> None:
        check_least(1, output_tokens=self.tokens)
        # Logits that are divided by less overflow.
        if not (self.temperature == 0 or 0.01 <= self.temperature <= 100):
            raise KeepsetError(
                f"--temperature {self.temperature} is out of range: use 0 for greedy decoding, or 0.01 to 100."
            )
        check_whole(2**63, seed=(self.seed, 0))

    @property
    def options(self) -> dict[str, Any]:
        """Return the options for `model.generate`."""
        options: dict[str, Any] = {"do_sample": self.temperature > 0, "max_new_tokens": self.tokens}
        return {**options, "temperature": self.temperature} if self.temperature > 0 else options


def generate_streamed(model: Any, tokenizer: Any, inputs: Any, cache: Any, sampling: Sampling) -> tuple[list[int], str]:
    """Generate on a cache, and print the text while it is generated.

    Args:
        model: the model.
        tokenizer: the model's tokenizer.
        inputs: the model's inputs, with the prompt's token ids.
        cache: any cache of transformers', empty or with the tokens before the prompt.
        sampling: how many tokens are generated, and how.
    """
    import torch
    from transformers import LogitsProcessorList

    from keepset.lab.generation import Checked
    from keepset.lab.memory import dynamic_nbytes

    torch.manual_seed(sampling.seed)
    start = time.perf_counter()
    options = {**sampling.options, "logits_processor": LogitsProcessorList([Checked()])}
    with (
        Streamer(tokenizer) as streamer,
        torch.no_grad(),
        beating(lambda: "reading the prompt" if streamer.first is None else ""),
    ):
        model.generate(**inputs, past_key_values=cache, streamer=streamer, **options)
    stop = time.perf_counter()
    nbytes = cache.nbytes if hasattr(cache, "nbytes") else dynamic_nbytes(cache)
    first, count = streamer.first or stop, len(streamer.ids)
    speed = (count - 1) / (stop - first) if count > 1 else float("nan")
    spare_bytes = nbytes - cache.nbytes_entries if hasattr(cache, "nbytes_entries") else 0
    free = f", {megabytes(spare_bytes)} of it for tokens to come and the next event" if spare_bytes >= _SHOWN else ""
    return streamer.ids, (
        f"{megabytes(nbytes)} of KV cache at the end{free}, first token after {first - start:.2f} s, "
        f"{count} tokens, {speed:.1f} tokens/s"
    )


class Streamer(TextStreamer):
    """Prints text as soon as it can be decoded. The end of the block ends its line, also where Ctrl-C cuts it short."""

    def __init__(self, tokenizer: Any) -> None:
        super().__init__(tokenizer, lambda text: print(sanitize(text), end="", flush=True))

    def __enter__(self) -> Self:
        return self

    def __exit__(self, *_: object) -> None:
        if self.ids:
            print(flush=True)
