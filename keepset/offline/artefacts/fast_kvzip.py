"""Fast KVzip's gates (arXiv:2601.17668), as its authors' `optim.py` saves them: a `.pt` file for each model.

The file is a dictionary. `module` is a list with the state of each layer's gate; training curves beside it are left
out. Gates without base keys, which the authors' program can train but not load, are refused.
"""

from __future__ import annotations

from collections.abc import Mapping

from torch import Tensor

from keepset.core.hidden_predictor import HiddenGate
from keepset.offline.artefacts.artefact import Artefact, Found

_FIELDS = {
    "q_proj.weight": "query_weight",
    "q_proj.bias": "query_bias",
    "k_proj.weight": "key_weight",
    "q_norm.weight": "query_norm",
    "k_norm.weight": "key_norm",
    "k_base": "base",
    "b": "offset",
}


def read(found: Found) -> Artefact | None:
    """Return Fast KVzip's gates; None if what was found is something else.

    Raises:
        ValueError: if a gate is damaged or has no base keys.
    """
    if not isinstance(found.unpickled, dict) or not isinstance(states := found.unpickled.get("module"), list):
        return None
    return Artefact("Fast KVzip", modules=[_gate(state) for state in states])


def _gate(state: Mapping[str, Tensor]) -> HiddenGate:
    if not isinstance(state, Mapping) or set(state) != set(_FIELDS):
        raise ValueError("not the state of a gate")
    fields = {_FIELDS[name]: tensor for name, tensor in state.items()}
    # Both have an axis of length 1 for the tokens.
    if fields["base"].ndim != 4 or fields["offset"].ndim != 3:
        raise ValueError("base keys or offsets have another shape")
    return HiddenGate.of({**fields, "base": fields["base"].squeeze(1), "offset": fields["offset"].squeeze(1)})
