"""Statistics and compiled tables for a model that is there, and whether they are its own."""

from __future__ import annotations

from weakref import WeakKeyDictionary

from transformers import PreTrainedModel

from keepset.core import statistics, tables
from keepset.core.statistics import Statistics
from keepset.core.tables import Tables
from keepset.errors import KeepsetError
from keepset.hf.fingerprint import has_other_weights, sample_of

_own: WeakKeyDictionary[PreTrainedModel, set[Statistics | Tables]] = WeakKeyDictionary()
"""What a model was compared with: to look at its weights for every cache would take longer than to make one."""


def head_dim_of(model: PreTrainedModel) -> int:
    """Numbers of a key; configurations may leave them to be derived."""
    config = model.config.get_text_config(decoder=True)
    return getattr(config, "head_dim", None) or config.hidden_size // config.num_attention_heads


def statistics_for(model: PreTrainedModel, layers: tuple[int, ...], file: str) -> Statistics:
    """The statistics in a file, or those that are offered for the model where none is named.

    Raises:
        KeepsetError: there are none, or they are of another model.
    """
    measured = statistics.load(file, model.config.name_or_path or "")
    config = model.config.get_text_config(decoder=True)
    kv_heads = getattr(config, "num_key_value_heads", None) or config.num_attention_heads
    if layers:
        measured.check(layers, kv_heads, head_dim_of(model))
    _check_own(model, measured, f"The statistics {measured.name!r}", "Make them for this one with keepset calibrate.")
    return measured


def tables_for(model: PreTrainedModel, layers: int, file: str) -> Tables:
    """The tables in a file.

    Raises:
        KeepsetError: it holds none that this version can read, or those of another model.
    """
    compiled = tables.load(file)
    compiled.check(layers, model.config.get_text_config(decoder=True).num_attention_heads)
    _check_own(model, compiled, f"The tables {file!r}", "Make them for this one with keepset compile.")
    return compiled


def _check_own(model: PreTrainedModel, made: Statistics | Tables, named: str, advice: str) -> None:
    """Files that say nothing of weights, as older ones, are taken as they are."""
    own = _own.setdefault(model, set())
    if made in own:
        return
    if has_other_weights(model, sample_of(made)):
        raise KeepsetError(f"{named} are of another model of this shape, with other weights. {advice}")
    own.add(made)
