"""`keepset calibrate`: statistics of a model, for methods that look at them."""

from __future__ import annotations

import shutil
import time
from collections.abc import Callable, Mapping
from dataclasses import dataclass
from functools import cache, reduce
from operator import or_
from pathlib import Path
from statistics import fmean
from typing import TYPE_CHECKING, Annotated

from typer import Option

from keepset.lab.cli.checks import check_length, check_tensor_file, check_whole
from keepset.lab.cli.console import counted, duration, load, note, progress, say
from keepset.lab.cli.options import Force, ModelOptions, takes_options
from keepset.lab.texts import read

if TYPE_CHECKING:
    from keepset.core.statistics import Statistics
    from keepset.lab.artefacts import Artefact


@dataclass(frozen=True, kw_only=True)
class CalibrateOptions(ModelOptions):
    """Options of `keepset calibrate`."""

    out: Annotated[Path, Option(help="The file to write, such as stats.safetensors.")]
    text: Annotated[
        list[Path] | None,
        Option(metavar="<path>", help="A UTF-8 text file; may be given several times. [default: essays]"),
    ] = None
    tokens: Annotated[int, Option(help="Tokens to measure at most.")] = 16384
    length: Annotated[int, Option(help="Tokens of a passage.")] = 1024
    seed: Annotated[int, Option(help="Seed of the order in which passages are drawn from the texts.")] = 0
    gate_steps: Annotated[
        int,
        Option(
            help="Training steps of the gates that find retrieval heads, for duo_attention; 0 leaves them out. A step "
            "trains on a text of 512 tokens, as DuoAttention's authors do, and costs about 4 forward passes."
        ),
    ] = 24
    teacher: Annotated[
        list[str] | None,
        Option(
            metavar="<recipe>",
            help="A recipe whose scores the networks of `distilled` learn, such as reread; may be given several times, "
            "for the mean of their logarithms. [default: no networks]",
        ),
    ] = None
    imports: Annotated[
        list[Path] | None,
        Option(
            "--import",
            metavar="<path>",
            help="A file or folder that others have published for this model: DuoAttention's patterns, "
            "Q-Filters, Expected Attention's or TriAttention's statistics. What it gives replaces what is measured; "
            "may be given several times. Reading a .pt file runs no code from it.",
        ),
    ] = None
    force: Force = False


@takes_options
def calibrate(options: CalibrateOptions) -> None:
    """Measure a model's statistics, which some methods need.

    qfilter, triattention and expected_attention(stats=...) need statistics of the model's queries over texts.

    duo_attention needs to know which heads retrieve. Gates between full and streaming attention are trained on
    passkeys that are hidden in the texts.

    distilled needs networks that were fitted to other methods' scores: --teacher reread --teacher prompt_queries. A
    teacher that is named three times counts three times. Take a --length that is as long as the texts that you
    compress, and --tokens 65536 or more. One passage of four is cut to a half or a quarter of that length. What each
    passage gave is kept in a folder beside the file until all is done, so an interrupted command can resume.

    Any coherent text will do, except the one that you evaluate on. A recipe names the file:
    qfilter(stats='stats.safetensors', keep=0.25). The file fits this model alone.
    """
    least = {"tokens": 16, "length": 16, "seed": 0, "gate_steps": 0}
    check_whole(2**63, **{name: (getattr(options, name), value) for name, value in least.items()})
    check_tensor_file(options.out, options.force)
    own_texts = [read(path) for path in options.text or []]

    from keepset.core.features.attention import SecondPass
    from keepset.core.statistics import save
    from keepset.lab.artefacts import read_artefact, with_artefact
    from keepset.lab.calibrate.corpus import SHORTEST, Corpus
    from keepset.lab.calibrate.distil import STEPS, cut_passages, parse_teachers, with_predictors
    from keepset.lab.calibrate.gates import with_gates
    from keepset.lab.calibrate.measure import measure
    from keepset.lab.corpus import default_texts, texts_to_fit

    teachers = parse_teachers(options.teacher or [])
    texts = own_texts or (texts_to_fit() if teachers else default_texts())
    loaded, tokenizer = load(options.source)
    check_length(loaded, "--length", options.length)
    artefacts = {path: read_artefact(path, loaded) for path in options.imports or []}
    corpus = Corpus.draw(tokenizer, texts, tokens=options.tokens, length=options.length, seed=options.seed)
    unfinished, began = options.out.with_name(f"{options.out.name}.unfinished"), time.monotonic()
    with progress() as bar:

        @cache
        def fit_line() -> Callable[..., None]:
            return counted(bar, "fit", STEPS)  # once it begins: until then "teacher" is what is under way

        def on_step() -> None:
            fit_line()()

        foretells = not (options.gate_steps or options.teacher)
        on_passage = counted(bar, "passages", len(corpus.passages), foretells=foretells)
        statistics = measure(loaded, corpus, on_passage)
        measuring = time.monotonic() - began
        for path, artefact in artefacts.items():
            statistics = with_artefact(statistics, artefact, path.name)
        if options.gate_steps and not statistics.retrieval:
            advance = counted(bar, "gates", options.gate_steps, foretells=not options.teacher)
            statistics = with_gates(statistics, loaded, tokenizer, corpus, steps=options.gate_steps, on_step=advance)
        if options.teacher:  # after the gates, which say where old facts are found
            passages = len(corpus.passages)
            needs = reduce(or_, (method.traits.needs for method in teachers))  # one prefill serves all teachers
            passes = 2.5 if needs.of(SecondPass) else 1.1
            share = sum(map(len, cut_passages(corpus))) / corpus.tokens
            seconds = measuring * passes * share
            note(f"{', '.join(options.teacher)} over {passages} passages: {duration(seconds)}; the fit comes after it.")
            statistics = with_predictors(
                statistics,
                loaded,
                corpus,
                options.teacher,
                folder=unfinished,
                on_passage=counted(bar, "teacher", passages, foretells=False),
                on_step=on_step,
            )
    save(statistics, options.out)
    shutil.rmtree(unfinished, ignore_errors=True)
    _note_artefacts(artefacts)
    _note_networks(statistics)
    if options.tokens - corpus.tokens >= SHORTEST:
        note(f"The texts had {corpus.tokens} tokens, fewer than the {options.tokens} asked for.")
    say(
        f"{options.out}: {len(statistics.layers)} layers of {statistics.provenance['model']['name']}, "
        f"measured over {corpus.tokens} tokens in {len(corpus.passages)} passages"
    )


def _note_artefacts(artefacts: Mapping[Path, Artefact]) -> None:
    """Say what each imported file has given, and what its authors advise."""
    for path, artefact in artefacts.items():
        note(f"{path.name} has the format of {artefact.format} and gives: {', '.join(artefact.gives)}.")
        if artefact.advice:
            note(f"{path.name}: {artefact.advice}.")


def _note_networks(statistics: Statistics) -> None:
    """Say how the networks of `distilled` rank entries of passages that they were not fitted to."""
    networks = statistics.provenance.get("predictors")
    if not networks or not networks["held_out"]:
        return
    for name, by_layer in networks["held_out"]["by_layer"].items():
        worst = min(by_layer, key=by_layer.__getitem__)
        note(
            f"On passages held out, {name}: {fmean(by_layer.values()):.2f} on average, and least in layer "
            f"{worst}, {by_layer[worst]:.2f}."
        )
