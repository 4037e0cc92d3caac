"""`keepset generate`: one prompt under a recipe, streamed."""

from __future__ import annotations

import time
from dataclasses import dataclass
from pathlib import Path
from typing import Annotated, Any

import typer

from keepset.errors import KeepsetError


def generate(
    prompt: Annotated[str, typer.Argument(help="What to say to the model.")],
    recipe: Annotated[str, typer.Option(help="What to keep, such as 'snapkv(keep=0.25)'.")] = "snapkv(keep=0.25)",
    text: Annotated[Path | None, typer.Option(help="A UTF-8 text file that goes before the prompt.")] = None,
    model: Annotated[str | None, typer.Option(help="A folder or a hub name; a small embedded model if none.")] = None,
    max_new_tokens: Annotated[int, typer.Option(help="Tokens to generate at most.")] = 200,
    temperature: Annotated[float, typer.Option(help="0 for greedy decoding.")] = 0.0,
    seed: Annotated[int, typer.Option(help="For sampling.")] = 0,
    compare_full: Annotated[bool, typer.Option(help="Generate with the full cache too, and compare.")] = False,
) -> None:
    """Generate from one prompt under a recipe; at the end bytes and speed."""
    from keepset.cli.console import check_said, load, out
    from keepset.recipe import Recipe
    from keepset.texts import chat_parts, read

    parsed = Recipe.parse(recipe).require_budget()
    check_said("The prompt", prompt)
    if max_new_tokens < 1:
        raise KeepsetError(f"--max-new-tokens {max_new_tokens} is not a number of tokens: use an integer from 1.")
    # Divided by less, logits overflow.
    if not (temperature == 0 or 0.01 <= temperature <= 100):
        raise KeepsetError(f"--temperature {temperature} is out of range: use 0 for greedy decoding, or 0.01 to 100.")
    if not 0 <= seed < 2**63:
        raise KeepsetError(f"--seed {seed} is out of range: use an integer from 0 to {2**63 - 1}.")
    before = "" if text is None else read(text)

    from keepset.hf.cache import Cache

    loaded, tokenizer = load(model)
    ids = tokenizer("".join(chat_parts(tokenizer, before, prompt)), add_special_tokens=False, return_tensors="pt")
    length = ids["input_ids"].shape[1]
    longest = getattr(loaded.config.get_text_config(), "max_position_embeddings", None)
    if longest is not None and length + max_new_tokens > longest:
        raise KeepsetError(
            f"{length} tokens of prompt and {max_new_tokens} new ones do not fit the model's context of {longest}: "
            "give a shorter text."
        )
    sampling: dict[str, Any] = {"do_sample": temperature > 0, "max_new_tokens": max_new_tokens}
    if temperature > 0:
        sampling["temperature"] = temperature

    run = _Run(loaded, tokenizer, ids, sampling, seed)
    cache = Cache(loaded, parsed)
    ours = run(cache, show=True)
    at_end = next((event for event in cache.events if event.length == length), None)
    kept = 1.0 if at_end is None else at_end.kept / at_end.entries
    later = sum(event.length > length for event in cache.events)
    again = "" if parsed.schedule.every is None else f", compressed {later} times while decoding"
    out.print(
        f"\n{parsed}: kept {kept:.1%} of {length} prompt tokens{again}; {ours.summary()}",
        markup=False,
        highlight=False,
    )
    if compare_full:
        from transformers import DynamicCache

        full = run(DynamicCache(config=loaded.config), show=False)
        same = next((i for i, (a, b) in enumerate(zip(ours.ids, full.ids, strict=False)) if a != b), None)
        out.print(f"full cache: {full.summary()}", markup=False, highlight=False)
        out.print(
            "The two texts are the same."
            if ours.ids == full.ids
            else f"The two texts differ from token {same or 0} on.",
            markup=False,
            highlight=False,
        )


@dataclass
class _Result:
    ids: list[int]
    first_seconds: float
    rest_seconds: float
    nbytes: int

    def summary(self) -> str:
        from keepset.cli.console import megabytes

        speed = (len(self.ids) - 1) / self.rest_seconds if len(self.ids) > 1 else float("nan")
        return (
            f"{megabytes(self.nbytes)} of KV cache at the end, first token after {self.first_seconds:.2f} s, "
            f"{len(self.ids)} tokens, {speed:.1f} tokens/s"
        )


class _Run:
    """One generation after another from the same prompt."""

    def __init__(self, model: Any, tokenizer: Any, inputs: Any, sampling: dict[str, Any], seed: int) -> None:
        self._model, self._tokenizer, self._inputs = model, tokenizer, inputs
        self._sampling, self._seed = sampling, seed

    def __call__(self, cache: Any, show: bool) -> _Result:
        import torch

        streamer = _Streamer(self._tokenizer, show)
        torch.manual_seed(self._seed)
        start = time.perf_counter()
        with torch.no_grad():
            self._model.generate(**self._inputs, past_key_values=cache, streamer=streamer, **self._sampling)
        stop = time.perf_counter()
        nbytes = getattr(cache, "nbytes", None)
        if nbytes is None:
            nbytes = sum(layer.keys.nbytes + layer.values.nbytes for layer in cache.layers)
        first = streamer.first or stop
        return _Result(streamer.ids, first - start, stop - first, nbytes)


class _Streamer:
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
        from keepset.cli.console import printable

        if not self._show:
            return
        text = self._tokenizer.decode(self.ids, skip_special_tokens=True)
        # The last character may be half of one until its next token comes.
        if not final and text.endswith("\N{REPLACEMENT CHARACTER}"):
            return
        print(printable(text[len(self._printed) :]), end="", flush=True)
        self._printed = text
