"""`keepset bench latency`: time to the first token, tokens per second and memory, by length of the prompt."""

from pathlib import Path
from typing import Annotated, Any

from typer import Exit, Option

from keepset.cli.checks import check_fits_context, check_least, check_measured, check_writable, parse_whole
from keepset.cli.console import counted, interruptible, load, output, progress, say, show_table
from keepset.cli.options import Json, takes_model
from keepset.errors import KeepsetError
from keepset.models import Source
from keepset.texts import essay, read


@takes_model
def latency(
    model: Source,
    recipes: Annotated[str, Option(help="Recipes with their budgets, separated by commas.")] = (
        "snapkv(bytes=0.25), adakv(snapkv, bytes=0.25)"
    ),
    prompt_tokens: Annotated[str, Option(help="Lengths of prompts, separated by commas.")] = "1024,4096",
    output_tokens: Annotated[int, Option(help="Tokens to generate.")] = 64,
    rounds: Annotated[int, Option(help="How often each recipe is measured.")] = 3,
    text: Annotated[Path | None, Option(help="A UTF-8 text file for the prompts; essays if none is given.")] = None,
    json_file: Json = None,
) -> None:
    """Measure one request at a time, beside the full cache.

    Recipes and the full cache take turns. Every round generates the same number of tokens from the same prompt,
    greedily. Ctrl-C shows what is done.
    """
    from keepset.recipe import Recipe

    parsed = [recipe.require_budget() for recipe in Recipe.parse_list(recipes)]
    lengths = sorted(parse_whole(prompt_tokens, "prompt-tokens"))
    check_least(1, prompt_tokens=lengths[0], output_tokens=output_tokens, rounds=rounds)
    check_writable(json_file)

    from keepset.bench.latency import Timing
    from keepset.bench.latency import latency as measure
    from keepset.offline.corpus import default_texts

    loaded, tokenizer = load(model)
    check_measured(loaded, parsed)
    check_fits_context(loaded, lengths[-1], output_tokens)
    whole = "\n\n".join([essay(), *default_texts()]) if text is None else read(text)
    ids = tokenizer(whole, return_tensors="pt", verbose=False)["input_ids"].to(loaded.device)
    if ids.shape[1] < lengths[-1]:
        raise KeepsetError(f"The text has {ids.shape[1]} tokens, fewer than {lengths[-1]}: give a longer --text.")
    prompts = [ids[:, :length] for length in lengths]
    timings: list[Timing] = []
    with interruptible() as ending, progress() as bar:
        advance = counted(bar, "generations", len(lengths) * (len(parsed) + 1) * (rounds + 1))
        for timings in measure(loaded, prompts, parsed, output_tokens, rounds):  # noqa: B007
            advance()
    rows = [timing.to_json() for timing in timings if timing.rounds or timing.error]
    if not rows:
        raise KeyboardInterrupt
    result = {
        "model": model.called,
        "device": str(loaded.device),
        "dtype": str(loaded.dtype).removeprefix("torch."),
        "rounds": rounds,
        "output_tokens": output_tokens,
        "rows": rows,
    }
    output(result, json_file, lambda: _print(result))
    ending.say("before the last round")
    if any(timing.error for timing in timings):
        raise Exit(1)


def _print(result: dict[str, Any]) -> None:
    """Print the medians of every recipe at every length, and what they show."""
    from keepset.bench.report.latency import conclusion, table

    say(
        f"{result['model']} on {result['device']}, {result['dtype']}: {result['output_tokens']} tokens "
        f"after the prompt, medians of {result['rounds']} rounds."
    )
    show_table(table(result["rows"]))
    if sentence := conclusion(result["rows"]):
        say(sentence)
