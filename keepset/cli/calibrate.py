"""`keepset calibrate`: statistics of a model, for methods that look at them."""

from pathlib import Path
from typing import Annotated

from typer import Option

from keepset.cli.checks import check_tensor_file, check_whole
from keepset.cli.console import counted, load, note, progress, say
from keepset.cli.options import Force, takes_model
from keepset.errors import KeepsetError
from keepset.models import Source, context_length
from keepset.texts import read


@takes_model
def calibrate(
    model: Source,
    out: Annotated[Path, Option(help="The file to write, such as stats.safetensors.")],
    text: Annotated[
        list[Path] | None,
        Option(metavar="<path>", help="A UTF-8 text file; may be given several times. [default: essays]"),
    ] = None,
    tokens: Annotated[int, Option(help="Tokens to measure at most.")] = 16384,
    length: Annotated[int, Option(help="Tokens of a passage.")] = 1024,
    seed: Annotated[int, Option(help="Seed of the order in which passages are drawn from the texts.")] = 0,
    gate_steps: Annotated[
        int,
        Option(
            help="Training steps of the gates that find retrieval heads, for duo_attention; 0 leaves them out. A step "
            "trains on a text of 512 tokens, as DuoAttention's authors do, and costs about 4 forward passes."
        ),
    ] = 24,
    force: Force = False,
) -> None:
    """Measure a model's statistics, which some methods need.

    qfilter, triattention and expected_attention(stats=...) need statistics of the model's queries over texts.

    duo_attention needs to know which heads retrieve. Gates between full and streaming attention are trained on
    passkeys that are hidden in the texts.

    Any coherent text will do, except the one that you evaluate on. A recipe names the file:
    qfilter(stats='stats.safetensors', keep=0.25). The file fits this model alone.
    """
    check_whole(2**63, tokens=(tokens, 16), length=(length, 16), seed=(seed, 0), gate_steps=(gate_steps, 0))
    check_tensor_file(out, force)
    own_texts = [read(path) for path in text or []]

    from keepset.core.statistics import save
    from keepset.offline.calibrate.corpus import SHORTEST, Corpus
    from keepset.offline.calibrate.gates import with_gates
    from keepset.offline.calibrate.measure import measure
    from keepset.offline.corpus import default_texts

    texts = own_texts or default_texts()
    loaded, tokenizer = load(model)
    longest = context_length(loaded)
    if longest is not None and length > longest:
        raise KeepsetError(f"--length {length} is more than the model's context of {longest}: use {longest} or less.")
    corpus = Corpus.draw(tokenizer, texts, tokens=tokens, length=length, seed=seed)
    with progress() as bar:
        statistics = measure(loaded, corpus, counted(bar, "passages", len(corpus.passages)))
        if gate_steps:
            advance = counted(bar, "gates", gate_steps)
            statistics = with_gates(statistics, loaded, tokenizer, corpus, steps=gate_steps, on_step=advance)
    save(statistics, out)
    if tokens - corpus.tokens >= SHORTEST:
        note(f"The texts had {corpus.tokens} tokens, fewer than the {tokens} asked for.")
    say(
        f"{out}: {len(statistics.layers)} layers of {statistics.provenance['model']['name']}, "
        f"measured over {corpus.tokens} tokens in {len(corpus.passages)} passages",
    )
