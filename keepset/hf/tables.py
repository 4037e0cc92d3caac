"""Compiled tables for a model that is there, and whether they are its own."""

from __future__ import annotations

import warnings
from weakref import WeakKeyDictionary

from transformers import PreTrainedModel

from keepset.core.tables import Tables, load
from keepset.hf.fingerprint import difference, fingerprint

_compared: WeakKeyDictionary[PreTrainedModel, set[Tables]] = WeakKeyDictionary()
"""What a model was compared with: to look at its weights for every cache would take longer than to make one."""


def tables_for(model: PreTrainedModel, layers: int, file: str) -> Tables:
    """The tables in a file; warns, once, where they were compiled for another model of the same shape.

    Where the shape differs, it is what maps them that says so (`Tables.fitted`).

    Raises:
        KeepsetError: the file holds none that this version can read.
    """
    tables = load(file)
    shape = layers, model.config.get_text_config(decoder=True).num_attention_heads
    compared = _compared.setdefault(model, set())
    if tables not in compared and tables.weights.shape[1:] == shape:
        compared.add(tables)
        known = tables.provenance.get("model")
        if differs := difference(known if isinstance(known, dict) else {}, fingerprint(model)):
            warnings.warn(
                f"The tables {file!r} were compiled for another model, whose {differs}: compile them for this one with "
                "`keepset compile`.",
                stacklevel=2,
            )
    return tables
