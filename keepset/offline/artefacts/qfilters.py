"""Q-Filters' directions (arXiv:2503.02812), as its authors' `QFilters.save_pretrained` writes them: safetensors.

The only tensor is `q_filters`, `[layers, kv_heads, head_dim]`. The published directions point away from most queries:
the authors' `make_filters.py` negates them, and their cache keeps the keys with the smallest products. In keepset they
point along the queries, so the sign is turned.
"""

from __future__ import annotations

from keepset.offline.artefacts.artefact import Artefact, Found


def read(found: Found) -> Artefact | None:
    """Return the directions; None if what was found is something else."""
    if set(found.tensors) != {"q_filters"}:
        return None
    return Artefact("Q-Filters", fields={"direction": -found.tensors["q_filters"].float()})
