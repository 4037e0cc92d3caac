"""`Traits`: the properties of a method that a runtime has to know before the method runs."""

from __future__ import annotations

from dataclasses import dataclass, field
from itertools import pairwise

from keepset.core.feature import Needs
from keepset.core.features.runtime_features import EntryBiases
from keepset.core.keep_set import Layout

FULL_BYTES = 2
"""Bytes of a number in a full 16-bit cache, of which `Budget.bytes` is a share."""

COLUMN_BYTES = 4
"""Bytes of a number that an entry has beside key and value: its position, and each of `state_names`."""


@dataclass(frozen=True)
class Traits:
    """The properties of a method that a runtime has to know before the method runs.

    Attributes:
        needs: features to collect beyond keys, values and positions.
        sinks: first tokens that always stay, unless the recipe gives another number.
        recent: newest tokens that always stay, unless the recipe gives another number.
        state_names: names of the numbers per entry that `Method.remember` returns. Paged runtimes store no others.
        equal_heads: whether all KV heads of a layer keep the same number of entries.
        equal_layers: whether all layers keep the same number of entries.
        across_layers: whether the method chooses for all layers together, once the last one has been observed.
        counts_from_data: whether the number of entries that a layer keeps depends on keys, values or queries.
        counts_from_files: whether that number depends on files of measurements, which schedulers do not load.
        needs_budget: whether a recipe must say how much to keep.
        prefill_only: names of the steps that do nothing at events after the prompt.
        layer_groups: into how many groups of neighbouring layers a method divides them, so that the layers of each keep
            equally many entries; 0 if it does not.
        memory_factor: about how many numbers per entry the method computes at a time. At an event a paged runtime
            shows fewer entries together by this factor.
        key_bits: bits of a number of a stored key.
        value_bits: bits of a number of a stored value.
        extra_bytes: bytes that an entry stores beside key, value, position and `state_names`, such as scales.
    """

    needs: Needs = field(default_factory=Needs)
    sinks: int = 0
    recent: int = 0
    state_names: tuple[str, ...] = ()
    equal_heads: bool = True
    equal_layers: bool = True
    across_layers: bool = False
    counts_from_data: bool = False
    counts_from_files: bool = False
    needs_budget: bool = True
    prefill_only: tuple[str, ...] = ()
    layer_groups: int = 0
    memory_factor: int = 1
    key_bits: int = 16
    value_bits: int = 16
    extra_bytes: int = 0

    def entry_bytes(self, key_size: int, value_size: int) -> int:
        """Return the bytes that `Budget.bytes` counts for one stored entry of one KV head.

        This is what the transformers runtime allocates for a model of 16 bits: key, value, position, the method's own
        numbers and `extra_bytes`. It is counted for models of every type and under every runtime, so that the same
        recipe keeps the same entries everywhere. Paged runtimes allocate less if no event follows (no position), and a
        model of 32 bits takes more.

        Args:
            key_size, value_size: numbers of a key and of a value.
        """
        return self.layer_bytes(key_size, value_size) + COLUMN_BYTES * len(self.state_names)

    def layer_bytes(self, key_size: int, value_size: int) -> int:
        """Return the bytes of one entry without the method's own numbers; a residual adds as many.

        Args:
            key_size, value_size: numbers of a key and of a value.
        """
        stored = -(-self.key_bits * key_size // 8) + -(-self.value_bits * value_size // 8)
        return stored + self.extra_bytes + COLUMN_BYTES

    @property
    def layout(self) -> Layout:
        """Return the dimensions in which numbers of kept entries may differ."""
        if not self.equal_heads:
            return Layout.HEAD_RAGGED
        return Layout.DENSE if self.equal_layers else Layout.LAYER_RAGGED

    @property
    def fixed_total(self) -> bool:
        """Return whether lengths and budget alone decide how many entries a layer keeps (the sum of its quotas).

        A paged runtime then frees pages without asking what was kept.
        """
        return not (self.counts_from_data or self.counts_from_files)

    @property
    def count_known_on_host(self) -> bool:
        """Return whether lengths, budget and files decide how many entries a layer keeps (the sum of its quotas).

        A runtime that has the files then knows the number without waiting for a device.
        """
        return not (self.counts_from_data or self.across_layers)

    @property
    def biased(self) -> bool:
        """Return whether attention adds a bias by the method to each entry's logits (`observation.bias`)."""
        return bool(self.needs.of(EntryBiases))


def combine(outer: Traits, inner: Traits) -> Traits:
    """Return the traits of a method together with those of the method inside it.

    Args:
        outer: of an allocator or post-processor.
        inner: of the method inside it.
    """
    return Traits(
        needs=inner.needs | outer.needs,
        sinks=max(inner.sinks, outer.sinks),
        recent=max(inner.recent, outer.recent),
        state_names=(*inner.state_names, *outer.state_names),
        equal_heads=inner.equal_heads and outer.equal_heads,
        equal_layers=inner.equal_layers and outer.equal_layers,
        across_layers=inner.across_layers or outer.across_layers,
        counts_from_data=inner.counts_from_data or outer.counts_from_data,
        counts_from_files=inner.counts_from_files or outer.counts_from_files,
        needs_budget=inner.needs_budget or outer.needs_budget,
        prefill_only=(*outer.prefill_only, *inner.prefill_only),
        layer_groups=max(inner.layer_groups, outer.layer_groups),
        memory_factor=max(inner.memory_factor, outer.memory_factor),
        key_bits=min(inner.key_bits, outer.key_bits),
        value_bits=min(inner.value_bits, outer.value_bits),
        extra_bytes=inner.extra_bytes + outer.extra_bytes,
    )


def neighbours(layers: int, groups: int) -> list[range]:
    """Return groups of neighbouring layers, as equal as can be, by the layers' places.

    Args:
        layers: the number of layers.
        groups: the number of groups.
    """
    firsts = [-(-group * layers // groups) for group in range(groups + 1)]
    return [range(first, end) for first, end in pairwise(firsts) if first < end]
