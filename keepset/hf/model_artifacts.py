"""Statistics and compiled tables of a loaded model, checked to be of that very model."""

from __future__ import annotations

from weakref import WeakKeyDictionary

from transformers import PreTrainedModel

from keepset.core import statistics, tables
from keepset.core.statistics import Statistics
from keepset.core.tables import Tables
from keepset.errors import KeepsetError
from keepset.hf.fingerprint import has_other_weights, sample_of

_own: WeakKeyDictionary[PreTrainedModel, set[Statistics | Tables]] = WeakKeyDictionary()
"""What each model was compared with already: comparing weights for every cache takes longer than making the cache."""


def head_dim_of(model: PreTrainedModel) -> int:
    """Return the size of a key; a configuration may leave it to be derived."""
    config = model.config.get_text_config(decoder=True)
    return getattr(config, "head_dim", None) or config.hidden_size // config.num_attention_heads


def statistics_for(model: PreTrainedModel, layers: tuple[int, ...], file: str) -> Statistics:
    """Return the statistics in a file, or those that are offered for the model.

    Args:
        model: that they are to be of.
        layers: indices of the layers that are compressed.
        file: where they are; "" for those that are offered.

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
    """Return the tables in a file.

    Args:
        model: that they are to be of.
        layers: number of layers that are compressed.
        file: where they are.

    Raises:
        KeepsetError: the file holds none that this version can read, or those of another model.
    """
    compiled = tables.load(file)
    compiled.check(layers, model.config.get_text_config(decoder=True).num_attention_heads)
    _check_own(model, compiled, f"The tables {file!r}", "Make them for this one with keepset compile.")
    return compiled


def _check_own(model: PreTrainedModel, made: Statistics | Tables, named: str, advice: str) -> None:
    """Check that statistics or tables were made of this very model. Older files that do not tell weights are taken.

    Args:
        model: to compare with.
        made: what was made.
        named: its name, as the beginning of a sentence.
        advice: what to do if it is of another model, as a sentence.

    Raises:
        KeepsetError: it is of a model with other weights.
    """
    own = _own.setdefault(model, set())
    if made in own:
        return
    if has_other_weights(model, sample_of(made)):
        raise KeepsetError(f"{named} are of another model of this shape, with other weights. {advice}")
    own.add(made)
