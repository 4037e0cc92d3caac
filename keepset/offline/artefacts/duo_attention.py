"""DuoAttention's patterns (arXiv:2410.10819): `full_attention_heads.tsv`, and the training's options in `config.json`.

A row of the table is a layer, a column a KV head, a number the gate; gates are clipped to 0 to 1, as in the authors'
program. Their config says with how many sinks and recent tokens the gates were trained.
"""

from __future__ import annotations

import torch

from keepset.offline.artefacts.artefact import Artefact, Found

TABLE = "full_attention_heads.tsv"


def read(found: Found) -> Artefact | None:
    """Return the gates; None if what was found is something else.

    Raises:
        ValueError: if the table has rows of different lengths.
    """
    if not found.table:
        return None
    if len({len(row) for row in found.table}) != 1:
        raise ValueError("rows of different lengths")
    gates = torch.tensor(found.table, dtype=torch.float64)
    names = {"sinks": "sink_size", "recent": "recent_size"}
    sizes = {name: found.config[field] for name, field in names.items() if type(found.config.get(field)) is int}
    options = ", ".join(f"{name}={size}" for name, size in sizes.items())
    advice = f"the gates were trained with duo_attention({options})" if sizes else ""
    # NaN stays, and is refused.
    return Artefact("DuoAttention", retrieval=gates.clamp(0, 1).float(), made=sizes, advice=advice)
