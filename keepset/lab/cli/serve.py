"""`keepset serve`: vLLM's server with a recipe."""

import os
import shlex
import sys
from pathlib import Path
from typing import Annotated

from typer import Argument, Option

from keepset.lab.cli.checks import say_of_all_prompts
from keepset.lab.cli.console import note


def serve(
    words: Annotated[
        list[str] | None,
        Argument(
            metavar="MODEL [VLLM OPTIONS]",
            help="A folder or a hub name, a small embedded model if none; then options of `vllm serve`.",
        ),
    ] = None,
    recipe: Annotated[
        str | None,
        Option(
            help="A recipe, such as 'snapkv(keep=512, every=256)'. [default: as in keepset generate, without what the "
            "server cannot serve; with --contexts none]"
        ),
    ] = None,
    contexts: Annotated[
        Path | None,
        Option(
            help="A folder with files of keepset context build, which requests can name. With turns=True in the "
            "recipe: the folder for conversations that lose their pages."
        ),
    ] = None,
    save_bytes: Annotated[
        int,
        Option(
            min=0,
            help="Bytes of contexts that each API key's requests may save in that folder. With turns=True: bytes of "
            "all conversations there; the least recently used are deleted first.",
        ),
    ] = 0,
    conversation_bytes: Annotated[
        int, Option(min=0, help="With turns=True: bytes of one API key's conversations there; 0: no limit of its own.")
    ] = 0,
) -> None:
    """Serve a model with vLLM and a recipe.

    The server is OpenAI-compatible. It can also serve saved contexts, or only these. This process runs `vllm serve`,
    which gets every option that is not keepset's own, and ends with it. It listens on 127.0.0.1 unless --host says
    otherwise. The model comes before vLLM's options. For plain vLLM run `vllm serve` itself.
    """
    from keepset.lab.embedded import EMBEDDED, folder_of, name_statistics
    from keepset.recipe import Recipe
    from keepset.serving.command import command, default_for, precision_of, split, supervised, without_secrets
    from keepset.serving.start_checks import (
        block_size_hint,
        check_installed,
        check_model,
        check_port,
        check_recipe,
        compile_hint,
        limit_cpu_pool,
    )
    from keepset.vllm.request_options import SIGNING_KEY, new_key

    parsed = None if recipe is None else Recipe.parse(recipe).require_budget()
    named, options = split(words or [])
    check_installed()
    model = folder_of(named)
    check_model(model)
    why = None
    if parsed is None and contexts is None:
        parsed, why = default_for(model, named or EMBEDDED, options)
    parsed = name_statistics(parsed, named)
    check_recipe(parsed, model)
    talks = parsed is not None and parsed.schedule.turns
    if (precision := precision_of(None if talks else contexts, options)) is not None:
        options = ["--dtype", precision, *options]
    served_name = None if model == named else EMBEDDED
    limits = {"save_bytes": save_bytes, "conversation_bytes": conversation_bytes}
    line = command(model, parsed, options, served_name=served_name, contexts=contexts, **limits)
    check_port(options)
    of_files = None if precision is None else f"The server computes in {precision}, as its contexts were built."
    hints = block_size_hint(parsed, options), limit_cpu_pool(options), compile_hint(line)
    if why is not None:
        note(why)
    if parsed is not None:
        say_of_all_prompts(parsed)
    for sentence in (shlex.join(without_secrets(line)), of_files, *hints):
        if sentence is not None:
            note(sentence)
    os.environ[SIGNING_KEY] = new_key()
    sys.stdout.flush()
    sys.stderr.flush()
    line = supervised(line, options)
    os.execvp(line[0], line)
