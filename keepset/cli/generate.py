"""`keepset generate`: one prompt under a recipe, streamed."""

from __future__ import annotations

from pathlib import Path
from typing import Annotated

import typer


def generate(
    prompt: Annotated[str, typer.Argument(help="What to say to the model.")],
    recipe: Annotated[str, typer.Option(help="What to keep, such as 'snapkv(keep=0.25)'.")] = "glance(keep=0.25)",
    text: Annotated[Path | None, typer.Option(help="A UTF-8 text file that goes before the prompt.")] = None,
    question: Annotated[
        str | None, typer.Option(help="What will be asked: methods with a second pass keep what it looks at.")
    ] = None,
    model: Annotated[str | None, typer.Option(help="A folder or a hub name; a small embedded model if none.")] = None,
    max_new_tokens: Annotated[int, typer.Option(help="Tokens to generate at most.")] = 200,
    temperature: Annotated[float, typer.Option(help="0 for greedy decoding.")] = 0.0,
    seed: Annotated[int, typer.Option(help="For sampling.")] = 0,
    compare_full: Annotated[bool, typer.Option(help="Generate with the full cache too, and compare.")] = False,
) -> None:
    """Generate from one prompt under a recipe; at the end bytes and speed."""
    from keepset.cli.console import check_said, load, out
    from keepset.cli.sampling import Sampling, check_fit
    from keepset.cli.streaming import Generation
    from keepset.recipe import Recipe
    from keepset.texts import chat_parts, read

    parsed = Recipe.parse(recipe).require_budget()
    check_said("The prompt", prompt)
    if question is not None:
        check_said("The question", question)
    sampling = Sampling(max_new_tokens, temperature, seed)
    before = "" if text is None else read(text)

    from keepset.hf.cache import Cache

    loaded, tokenizer = load(model)
    ids = tokenizer("".join(chat_parts(tokenizer, before, prompt)), add_special_tokens=False, return_tensors="pt")
    length = ids["input_ids"].shape[1]
    check_fit(loaded, length, sampling.tokens)

    run = Generation(loaded, tokenizer, ids, sampling)
    task = None if question is None else tokenizer(question, add_special_tokens=False, return_tensors="pt").input_ids
    cache = Cache(loaded, parsed, task_tokens=task)
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
