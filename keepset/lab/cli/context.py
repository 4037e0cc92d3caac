"""`keepset context`: compress a text once, ask about it many times."""

import time
from collections.abc import Iterator, Sequence
from contextlib import contextmanager
from dataclasses import dataclass
from pathlib import Path
from typing import TYPE_CHECKING, Annotated, Any

from typer import Argument, Option

from keepset.defaults import ASKED_LATER, NETWORKS
from keepset.errors import KeepsetError
from keepset.lab.cli.checks import (
    check_fits_context,
    check_tensor_file,
    default_recipe,
    given_text,
    note_short,
    say_always,
)
from keepset.lab.cli.console import counted, load, megabytes, note, progress, say
from keepset.lab.cli.options import (
    Device,
    Dtype,
    Force,
    Images,
    ModelOptions,
    OutputTokens,
    SamplingSeed,
    Temperature,
    group,
    takes_options,
)
from keepset.lab.cli.streaming import Sampling, generate_streamed
from keepset.lab.embedded import EMBEDDED, Source
from keepset.lab.images import Pictured, read_images
from keepset.lab.texts import chat_parts, encode, read
from keepset.models import load_processor

if TYPE_CHECKING:
    from keepset.recipe import Recipe

context = group("context", "Compress a text once and ask about it many times.")


@dataclass(frozen=True, kw_only=True)
class BuildOptions(ModelOptions):
    """Options of `keepset context build`."""

    text: Annotated[Path, Option(help="A UTF-8 text file; - for standard input.")]
    out: Annotated[Path, Option(help="The file to write, such as report.safetensors.")]
    recipe: Annotated[
        str | None,
        Option(help=f"What to keep. [default: {NETWORKS} if there are networks for the model, else {ASKED_LATER}]"),
    ] = None
    image: Images = None
    force: Force = False


@context.command()
@takes_options
def build(options: BuildOptions) -> None:
    """Compress a text, and images before it, into a file.

    A model runs over the text, and its cache is compressed. The text is put where keepset generate --text puts it: in a
    user's message, before the question. With keepset serve --contexts any number of requests share the file, unless it
    has images. keepset context ask takes files with images, too.
    """
    from keepset.recipe import Recipe

    requested = None if options.recipe is None else Recipe.parse(options.recipe).require_budget()
    check_tensor_file(options.out, options.force)
    content, images = read(options.text), read_images(options.image)

    import torch

    from keepset.hf.cache import Cache
    from keepset.hf.model_support import check_logits
    from keepset.hf.recipe_notes import asks_the_end, warn_without_bos

    loaded, tokenizer = load(options.source)
    prompt = _prompt(loaded, tokenizer, content, images)
    ids = prompt.pop("input_ids")
    check_fits_context(loaded, ids.shape[1])
    parsed = default_recipe(loaded, options.source.called, ASKED_LATER) if requested is None else requested
    cache = Cache(loaded, parsed)
    warn_without_bos(parsed, tokenizer, ids[0].tolist())
    start = time.perf_counter()
    with torch.no_grad(), _layers_shown(loaded, parsed):
        check_logits(loaded(ids, **prompt, past_key_values=cache, logits_to_keep=1).logits)
    seconds = time.perf_counter() - start
    # An absolute path is found again from wherever the question is asked.
    path = Path(options.model) if options.model else None
    name = options.source.called if path is None or not path.exists() else str(path.resolve())
    frame = {} if images else _frame(tokenizer, ids[0].tolist())
    cache.save(options.out, force=options.force, model_name=name, **frame)
    kept = "nothing dropped yet"
    if cache.events:
        note_short(ids.shape[1], cache.events[-1].kept / cache.events[-1].entries)
        before, after = megabytes(cache.nbytes_counted_full), megabytes(cache.nbytes_counted)
        kept = f"{before} of keys and values in 16 bits before, {after} after ({cache.share:.1%})"
    say(
        f"{options.out}: {ids.shape[1]} tokens under {parsed} in {seconds:.1f} s; {kept}; "
        f"the file has {megabytes(options.out.stat().st_size)}"
    )
    say_always(parsed, loaded, ids.shape[1])
    if cache.events and (sentence := asks_the_end(parsed, ASKED_LATER)) is not None:
        note(sentence)


def _prompt(model: Any, tokenizer: Any, text: str, images: Sequence[Any]) -> dict[str, Any]:
    if images:
        return Pictured(model, load_processor(model), images).prompt(text)
    prompt, _ = chat_parts(tokenizer, text, "")
    ids = tokenizer(prompt, add_special_tokens=False, return_tensors="pt", verbose=False)["input_ids"]
    return {"input_ids": ids.to(model.device)}


def _frame(tokenizer: Any, tokens: list[int]) -> dict[str, Any]:
    """Return what a server has to know of a text's tokens to find the text at the beginning of a message."""
    opening = encode(tokenizer, chat_parts(tokenizer, "", "")[0])
    if not tokenizer.chat_template or tokens[: len(opening)] != opening:
        return {"token_ids": tokens}
    between, word = chat_parts(tokenizer, "", "A")[1].split("A")[0], encode(tokenizer, "A")
    return {"token_ids": tokens, "opening": len(opening), "joint": encode(tokenizer, f"{between}A")[: -len(word)]}


@context.command()
def ask(
    file: Annotated[Path, Argument(metavar="FILE", help="A file that keepset context build has written.")],
    question: Annotated[str, Argument(metavar="QUESTION", help="What to ask about the text; - for standard input.")],
    model: Annotated[str | None, Option(help="Where the model is, if not where the file says.")] = None,
    device: Device = None,
    dtype: Dtype = None,
    output_tokens: OutputTokens = 200,
    temperature: Temperature = 0.0,
    seed: SamplingSeed = 0,
) -> None:
    """Answer a question about a compressed text.

    The file is not changed.
    """
    question = given_text("The question", question)
    sampling = Sampling(output_tokens, temperature, seed)

    from keepset.contexts import file as context_files
    from keepset.hf.cache import Cache

    header = context_files.header(file)
    name = header.model if model is None else model
    if model is None and name != EMBEDDED and (not name or Path(name).is_absolute()) and not Path(name).exists():
        raise KeepsetError(f"{str(file)!r} is of the model {name!r}, which is not there: give its place with --model.")
    loaded, tokenizer = load(Source(None if name == EMBEDDED else name, device, dtype))
    _, question_part = chat_parts(tokenizer, "", question)
    ids = tokenizer(question_part, add_special_tokens=False, return_tensors="pt")["input_ids"].to(loaded.device)
    check_fits_context(loaded, header.tokens + ids.shape[1], sampling.tokens)
    inputs = Cache.load(file, loaded).ask(ids)
    cache = inputs.pop("past_key_values")
    _, summary = generate_streamed(loaded, tokenizer, inputs, cache, sampling)
    note(f"{header.recipe}: {header.tokens} tokens of context, {ids.shape[1]} of question; {summary}")


@contextmanager
def _layers_shown(model: Any, recipe: "Recipe") -> Iterator[None]:
    """Show how many layers a forward under a recipe has come through, within the block."""
    from keepset.core.features.attention import SecondPass

    layers = [module for module in model.modules() if isinstance(getattr(module, "layer_idx", None), int)]
    with progress() as bar:
        # Inside the last layer a second pass comes through all layers once more, or several times.
        advance = counted(bar, "layers", len(layers), foretells=not recipe.method.traits.needs.of(SecondPass))

        def on_layer(*_: object) -> None:
            (line,) = bar.tasks
            if line.completed == line.total:
                bar.update(line.id, total=line.total + len(layers))
            advance()

        handles = [layer.register_forward_hook(on_layer) for layer in layers]
        try:
            yield
        finally:
            for handle in handles:
                handle.remove()
