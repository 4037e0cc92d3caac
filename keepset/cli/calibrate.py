"""`keepset calibrate`: statistics of a model, for methods that look at them."""

from __future__ import annotations

from pathlib import Path
from typing import Annotated

import typer

from keepset.errors import KeepsetError


def calibrate(
    out: Annotated[Path, typer.Option(help="The file to write, such as stats.safetensors.")],
    model: Annotated[str | None, typer.Option(help="A folder or a hub name; a small embedded model if none.")] = None,
    text: Annotated[
        list[Path] | None,
        typer.Option(metavar="<path>", help="A UTF-8 text file, as often as you like; essays if none."),
    ] = None,
    tokens: Annotated[int, typer.Option(help="Tokens to measure at most.")] = 16384,
    length: Annotated[int, typer.Option(help="Tokens of a passage.")] = 1024,
    seed: Annotated[int, typer.Option(help="Of the order in which passages are drawn from the texts.")] = 0,
    gate_steps: Annotated[
        int,
        typer.Option(
            help="Steps in which gates find retrieval heads, for duo_attention; 0 leaves that out. A step is a text of "
            "512 tokens, trained on as DuoAttention's authors do, and costs about 4 forward passes over it."
        ),
    ] = 24,
    force: Annotated[bool, typer.Option("--force", help="Replace the file if it exists.")] = False,
) -> None:
    """Measure a model's queries over texts, for qfilter, triattention and expected_attention(stats=...).

    And which of its heads retrieve, for duo_attention: gates between full and streaming attention are trained on
    passkeys that are hidden in those texts.

    Any coherent text will do; it should not be the one that you evaluate on. A recipe names the file:
    qfilter(stats='stats.safetensors', keep=0.25). It fits this model alone.
    """
    from keepset.cli.console import check_out, err, load, printable, progress
    from keepset.cli.console import out as results
    from keepset.texts import read

    for name, value, least in (
        ("--tokens", tokens, 16),
        ("--length", length, 16),
        ("--seed", seed, 0),
        ("--gate-steps", gate_steps, 0),
    ):
        if not least <= value < 2**63:
            raise KeepsetError(f"{name} {value} is out of range: use a whole number from {least} to {2**63 - 1}.")
    check_out(out, force)
    given = [read(path) for path in text or []]

    from keepset.core.statistics import save
    from keepset.offline.calibrate.corpus import SHORTEST, Corpus, default_texts
    from keepset.offline.calibrate.gates import with_gates
    from keepset.offline.calibrate.measure import measure

    texts = given or default_texts()
    loaded, tokenizer = load(model)
    longest = getattr(loaded.config.get_text_config(), "max_position_embeddings", None)
    if longest is not None and length > longest:
        raise KeepsetError(f"--length {length} is more than the model's context of {longest}: use {longest} or less.")
    corpus = Corpus.draw(tokenizer, texts, tokens=tokens, length=length, seed=seed)
    with progress() as bar:
        passages = bar.add_task("passages", total=len(corpus.passages))
        statistics = measure(loaded, corpus, lambda: bar.advance(passages))
        if gate_steps:
            steps = bar.add_task("gates", total=gate_steps)
            statistics = with_gates(
                statistics, loaded, tokenizer, corpus, steps=gate_steps, on_step=lambda: bar.advance(steps)
            )
    save(statistics, out)
    if tokens - corpus.tokens >= SHORTEST:
        err.print(f"The texts had {corpus.tokens} tokens, fewer than the {tokens} asked for.", highlight=False)
    results.print(
        printable(
            f"{out}: {len(statistics.layers)} layers of {statistics.provenance['model']['name']}, "
            f"measured over {corpus.tokens} tokens in {len(corpus.passages)} passages"
        ),
        markup=False,
        highlight=False,
        soft_wrap=True,
    )
