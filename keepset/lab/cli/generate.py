"""`keepset generate`: one prompt under a recipe, streamed."""

from dataclasses import dataclass
from pathlib import Path
from typing import Annotated

from typer import Argument, Option

from keepset.defaults import ANSWERED_AT_ONCE, NETWORKS
from keepset.lab.cli.checks import check_fits_context, default_recipe, given_text, note_short, say_always
from keepset.lab.cli.console import load, note, say
from keepset.lab.cli.options import Images, ModelOptions, OutputTokens, SamplingSeed, Temperature, takes_options
from keepset.lab.cli.streaming import Sampling, generate_streamed
from keepset.lab.images import message_inputs, read_images
from keepset.lab.texts import read


@dataclass(frozen=True, kw_only=True)
class GenerateOptions(ModelOptions):
    """Options of `keepset generate`."""

    prompt: Annotated[str, Argument(metavar="PROMPT", help="What to say to the model; - for standard input.")]
    recipe: Annotated[
        str | None,
        Option(
            help=f"What to keep. [default: {NETWORKS} if there are networks for the model, else {ANSWERED_AT_ONCE}]"
        ),
    ] = None
    text: Annotated[Path | None, Option(help="A UTF-8 text file before the prompt; - for standard input.")] = None
    image: Images = None
    question: Annotated[
        str | None, Option(help="A question that will be asked. Methods with a second pass keep what it looks at.")
    ] = None
    output_tokens: OutputTokens = 200
    temperature: Temperature = 0.0
    seed: SamplingSeed = 0
    compare_full: Annotated[bool, Option("--compare-full", help="Generate with the full cache too.")] = False


@takes_options
def generate(options: GenerateOptions) -> None:
    """Answer one prompt under a recipe.

    The answer goes to standard output while it is generated. Bytes and speed follow on standard error.
    """
    from keepset.recipe import Recipe

    requested = None if options.recipe is None else Recipe.parse(options.recipe).require_budget()
    prompt, question = given_text("The prompt", options.prompt), given_text("The question", options.question)
    sampling = Sampling(options.output_tokens, options.temperature, options.seed)
    before, images = "" if options.text is None else read(options.text), read_images(options.image)

    from transformers import DynamicCache

    from keepset.hf.cache import Cache
    from keepset.hf.recipe_notes import warn_without_bos

    loaded, tokenizer = load(options.source)
    inputs = message_inputs(loaded, tokenizer, before, prompt, images)
    length = inputs["input_ids"].shape[1]
    check_fits_context(loaded, length, sampling.tokens)
    task = None if question is None else tokenizer(question, add_special_tokens=False, return_tensors="pt").input_ids
    parsed = default_recipe(loaded, options.source.called, ANSWERED_AT_ONCE) if requested is None else requested
    cache = Cache(loaded, parsed, task_tokens=task)
    warn_without_bos(parsed, tokenizer, inputs["input_ids"][0].tolist())
    ids, summary = generate_streamed(loaded, tokenizer, inputs, cache, sampling)
    at_end = next((event for event in cache.events if event.length == length), None)
    kept = 1.0 if at_end is None else at_end.kept / at_end.entries
    later = sum(event.length > length for event in cache.events)
    again = "" if parsed.schedule.every is None else f", compressed {later} times while decoding"
    note(f"{parsed}: kept {kept:.1%} of {length} prompt tokens{again}; {summary}")
    note_short(length, kept)
    say_always(parsed, loaded, length)
    if options.compare_full:
        say("\nThe full cache:")
        full = DynamicCache(config=loaded.config)
        ids_full, summary = generate_streamed(loaded, tokenizer, inputs, full, sampling)
        pairs = enumerate(zip(ids, ids_full, strict=False))
        first_difference = next((i for i, (a, b) in pairs if a != b), min(len(ids), len(ids_full)))
        note(f"full cache: {summary}")
        same = ids == ids_full
        note("The two texts are the same." if same else f"The two texts differ from token {first_difference} on.")
