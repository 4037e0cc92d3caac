"""`keepset generate`: one prompt under a recipe, streamed."""

from pathlib import Path
from typing import Annotated

from typer import Argument, Option

from keepset.cli.checks import check_fits_context, check_text
from keepset.cli.console import load, say
from keepset.cli.options import GenerationRecipe, MaxNewTokens, SamplingSeed, Temperature, takes_model
from keepset.cli.streaming import Sampling, generate_streamed
from keepset.models import Source
from keepset.texts import chat_parts, read


@takes_model
def generate(
    model: Source,
    prompt: Annotated[str, Argument(help="What to say to the model.")],
    recipe: GenerationRecipe = "glance(keep=0.25)",
    text: Annotated[Path | None, Option(help="A UTF-8 text file that goes before the prompt.")] = None,
    question: Annotated[
        str | None, Option(help="What will be asked: methods with a second pass keep what it looks at.")
    ] = None,
    max_new_tokens: MaxNewTokens = 200,
    temperature: Temperature = 0.0,
    seed: SamplingSeed = 0,
    compare_full: Annotated[bool, Option(help="Generate with the full cache too, and compare.")] = False,
) -> None:
    """Generate from one prompt under a recipe; at the end bytes and speed."""
    from keepset.recipe import Recipe

    parsed = Recipe.parse(recipe).require_budget()
    check_text("The prompt", prompt)
    check_text("The question", question)
    sampling = Sampling(max_new_tokens, temperature, seed)
    before = "" if text is None else read(text)

    from transformers import DynamicCache

    from keepset.hf.cache import Cache

    loaded, tokenizer = load(model)
    inputs = tokenizer("".join(chat_parts(tokenizer, before, prompt)), add_special_tokens=False, return_tensors="pt")
    inputs = inputs.to(loaded.device)
    length = inputs["input_ids"].shape[1]
    check_fits_context(loaded, length, sampling.tokens)
    task = None if question is None else tokenizer(question, add_special_tokens=False, return_tensors="pt").input_ids
    cache = Cache(loaded, parsed, task_tokens=task)
    ids, summary = generate_streamed(loaded, tokenizer, inputs, cache, sampling)
    at_end = next((event for event in cache.events if event.length == length), None)
    kept = 1.0 if at_end is None else at_end.kept / at_end.entries
    later = sum(event.length > length for event in cache.events)
    again = "" if parsed.schedule.every is None else f", compressed {later} times while decoding"
    say(f"\n{parsed}: kept {kept:.1%} of {length} prompt tokens{again}; {summary}")
    if compare_full:
        full = DynamicCache(config=loaded.config)
        ids_full, summary = generate_streamed(loaded, tokenizer, inputs, full, sampling, show=False)
        pairs = enumerate(zip(ids, ids_full, strict=False))
        first_difference = next((i for i, (a, b) in pairs if a != b), 0)
        say(f"full cache: {summary}")
        same = ids == ids_full
        say("The two texts are the same." if same else f"The two texts differ from token {first_difference} on.")
