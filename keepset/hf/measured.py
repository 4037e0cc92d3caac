"""Statistics and compiled tables for a model that is there, and whether they are its own."""

from __future__ import annotations

import warnings
from weakref import WeakKeyDictionary

from transformers import PreTrainedModel

from keepset.core import statistics, tables
from keepset.core.statistics import Statistics
from keepset.core.tables import Tables
from keepset.hf.fingerprint import difference, fingerprint

_compared: WeakKeyDictionary[PreTrainedModel, set[Tables]] = WeakKeyDictionary()
"""What a model was compared with: to look at its weights for every cache would take longer than to make one."""


def statistics_for(model: PreTrainedModel, layers: tuple[int, ...], file: str) -> Statistics:
    """The statistics in a file, or those that are offered for the model where none is named.

    Raises:
        KeepsetError: there are none, or they are of a model of another shape.
    """
    measured = statistics.load(file, model.config.name_or_path or "")
    config = model.config.get_text_config(decoder=True)
    head_dim = getattr(config, "head_dim", None) or config.hidden_size // config.num_attention_heads
    kv_heads = getattr(config, "num_key_value_heads", None) or config.num_attention_heads
    if layers:
        measured.layer(layers[0], layers, kv_heads, head_dim)
    return measured


def tables_for(model: PreTrainedModel, layers: int, file: str) -> Tables:
    """The tables in a file; warns, once, where they were compiled for another model of the same shape.

    Where the shape differs, it is what maps them that says so (`Tables.fitted`).

    Raises:
        KeepsetError: the file holds none that this version can read.
    """
    compiled = tables.load(file)
    shape = layers, model.config.get_text_config(decoder=True).num_attention_heads
    compared = _compared.setdefault(model, set())
    if compiled not in compared and compiled.weights.shape[1:] == shape:
        compared.add(compiled)
        known = compiled.provenance.get("model")
        if differs := difference(known if isinstance(known, dict) else {}, fingerprint(model)):
            warnings.warn(
                f"The tables {file!r} were compiled for another model, whose {differs}: compile them for this one with "
                "`keepset compile`.",
                stacklevel=2,
            )
    return compiled
