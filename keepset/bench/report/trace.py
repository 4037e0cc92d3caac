"""The HTML page of `keepset trace`: a generation's events to look through."""

from collections.abc import Sequence
from dataclasses import dataclass
from typing import Any

from torch import Tensor

from keepset.bench.report.compare import pack
from keepset.bench.report.page import assemble

Head = tuple[Tensor, Tensor, Tensor]
"""One head's mass of every entry, the ends of its segments, and their quotas."""


@dataclass(frozen=True, eq=False)
class Drawn:
    """What the page draws of one run.

    Attributes:
        tokens: the text of each token, the prompt's first.
        kept: for each event a boolean `[layers, kv_heads, length]`: which tokens of the text so far it kept.
        segments: for each event and layer its heads' segments; an empty list where the method tells none.
    """

    tokens: Sequence[str]
    kept: Sequence[Tensor]
    segments: Sequence[Sequence[Sequence[Head]]]


def render(trace: dict[str, Any], runs: Sequence[Drawn], layers: Sequence[int]) -> str:
    """The page as one self-contained HTML text.

    Args:
        trace: what `keepset trace --json` prints.
        runs: the same runs, in the same order.
        layers: which layers of the model are drawn.
    """
    drawn = [
        {
            "tokens": list(run.tokens),
            "events": [
                {"kept": pack(kept), "segments": [[_head(head) for head in heads] for heads in layers_of]}
                for kept, layers_of in zip(run.kept, run.segments, strict=True)
            ],
        }
        for run in runs
    ]
    return assemble("trace", "keepset trace", {"trace": trace, "drawn": drawn, "layers": list(layers)})


def _head(head: Head) -> dict[str, Any]:
    mass, ends, quotas = head
    # Four digits are more than a curve shows.
    return {"mass": [float(f"{x:.3e}") for x in mass.tolist()], "ends": ends.tolist(), "quotas": quotas.tolist()}
