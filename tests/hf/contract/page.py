"""The page of documentation that says which models keepset compresses under transformers."""

from __future__ import annotations

import re
from collections import defaultdict
from collections.abc import Iterable, Mapping
from pathlib import Path

import transformers

from tests.hf.contract.builds import IMAGE_TEXT, KINDS, NOT_BUILT
from tests.hf.contract.check import OK, Row

PAGE = Path(__file__).parents[3] / "docs/models.md"

_OPENING = """# Models

After this page you know whether keepset compresses your model under transformers, and with which methods. Search it
for the model's type: `model_type` in its `config.json`. What vLLM serves is [another list](compatibility.md).

`python -m tests.hf.contract --write` writes the page, with transformers {version}. It makes a tiny model with random
weights of each of the {number} types that transformers maps to causal or image-text models, and checks on a text:

- with `keep=1.0` the model says the tokens that it says with transformers' own cache;
- it goes on from a prompt with several tokens at once as it does after the whole text;
- after compression, once and with `every=`, its logits are those of the model run without a cache, with what was
  dropped hidden by a mask;
- methods of each kind (keys, a window of queries, moments of queries, a second pass, hidden states), `match` and
  `quantized` run, or refuse in a sentence.

With images in the prompt seven types are tested ([images](guide.md#images)): `gemma3`, `glm4v`, `idefics3`, `llava`,
`qwen2_5_vl`, `qwen2_vl` and `qwen3_vl`. Where the tokens of an image see each other (`gemma3`, `gemma4_unified`),
methods count attention to earlier tokens alone.
"""


_SOME_LAYERS = """## Some layers, every method

Sliding windows, chunks and recurrent states are bounded by themselves and stay as they are. The layers that cache the
whole text are compressed, and every method runs. The columns count the layers of the type's usual configuration; where
that does not mix them, a model's own `config.json` tells. Only the compressed layers save memory.
"""
_COLUMNS = "type", "layers that are compressed", "layers"


def types_in(page: str) -> list[str]:
    """Return the types that a page lists, each as often as it does."""
    tables = [line for line in page.splitlines() if line.startswith("| `")]
    return [cell for line in tables for cell in line.split("|")[1].replace("`", " ").replace(",", " ").split()]


def page(rows: Mapping[str, Row]) -> str:
    """Return the page's text."""
    opening = _OPENING.format(version=transformers.__version__, number=len(KINDS))
    whole = {kind for kind, row in rows.items() if not (row.refused or row.findings or _refusals(row))}
    dense = {kind for kind in whole if rows[kind].compressed == rows[kind].layers}
    refused = {kind: row.refused for kind, row in rows.items() if row.refused and not row.findings}
    nothing = {kind for kind, reason in refused.items() if "no layer that caches the whole text" in reason}
    reasons = {kind: _generic(why) for kind, why in refused.items() if kind not in nothing}
    partly = {kind for kind, row in rows.items() if not row.refused and not row.findings and _refusals(row)}
    parts = [
        opening,
        "## Every layer, every method\n\nAll layers are compressed, and every method runs.\n",
        _lists({"texts": dense - IMAGE_TEXT.keys(), "images and texts": dense & IMAGE_TEXT.keys()}),
        _SOME_LAYERS,
        _table(_COLUMNS, [(f"`{kind}`", *_counts(rows[kind])) for kind in sorted(whole - dense)]),
    ]
    if partly:
        lines = [
            (f"`{kind}`", *_counts(rows[kind]), f"{', '.join(names)}: {reason}")
            for kind in sorted(partly)
            for reason, names in _refusals(rows[kind]).items()
        ]
        parts += ["## Some methods\n", _table((*_COLUMNS, "what is refused"), lines)]
    parts += [
        "## Nothing to compress\n\nIn their usual configuration these have only sliding windows or states of a fixed\n"
        "size. A model of such a type whose `config.json` has no `sliding_window` is compressed.\n",
        _lists({"": nothing}),
        "## Refused\n\nkeepset refuses these in the sentence that stands beside them.\n",
        _lists(_inverted(reasons)),
    ]
    found = [
        (f"`{kind}`", f"{', '.join(names)}: {_safe(finding)}")
        for kind, row in sorted(rows.items())
        for finding, names in _inverted(row.findings).items()
    ]
    if found:
        parts += ["## Not right yet\n", _table(("type", "check and what happens"), found)]
    parts += [
        "## Not checked\n\nNo tiny model of these is made, or it does not run by itself.\n",
        _lists(_inverted(NOT_BUILT)),
    ]
    return "\n".join(parts)


def _counts(row: Row) -> tuple[str, str]:
    compressed, layers = row.usual
    is_told = 0 < compressed < layers or row.compressed == row.layers
    return str(compressed) if is_told else "as configured", str(layers)


def _refusals(row: Row) -> dict[str, list[str]]:
    """Return the checks that keepset refuses, by its sentences."""
    return _inverted({name: said for name, said in row.says.items() if said != OK})


def _inverted(reasons: Mapping[str, str]) -> dict[str, list[str]]:
    names = defaultdict(list)
    for name, reason in reasons.items():
        names[reason].append(name)
    return dict(names)


def _generic(sentence: str) -> str:
    """Return a sentence without the names of one model's classes."""
    first, _, remainder = sentence.partition(" ")
    return f"The model {remainder}" if re.search("[a-z][A-Z]", first) else sentence


def _lists(groups: Mapping[str, Iterable[str]]) -> str:
    """Return a table with a line for each group."""
    lines = [(", ".join(f"`{kind}`" for kind in sorted(kinds)), name) for name, kinds in groups.items() if kinds]
    return _table(("types", ""), lines)


def _table(heads: tuple[str, ...], lines: Iterable[tuple[str, ...]]) -> str:
    rows = [heads, ("---",) * len(heads), *lines]
    return "\n".join(f"| {' | '.join(row)} |" for row in rows) + "\n"


def _safe(text: str) -> str:
    return text.replace("|", "\\\\|")
