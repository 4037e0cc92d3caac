"""Measures kvpress, and plain transformers of its environment as its full cache."""

from collections.abc import Callable
from typing import Any

from kvpress import (
    AdaKVPress,
    ExpectedAttentionPress,
    KnormPress,
    KVComposePress,
    KVzipPress,
    ObservedAttentionPress,
    PyramidKVPress,
    SnapKVPress,
    StreamingLLMPress,
    TOVAPress,
)
from measure import Setting, Side, Start
from serve import serve
from transformers import DynamicCache

# keepset's method names, and functions that make the equivalent press for a share of entries to drop.
PRESSES: dict[str, Callable[[float], Any]] = {
    "streaming_llm": StreamingLLMPress,
    "knorm": KnormPress,
    "tova": TOVAPress,
    "snapkv": SnapKVPress,
    "expected_attention": lambda dropped: ExpectedAttentionPress(dropped, epsilon=0.01),
    "h2o": ObservedAttentionPress,
    "kvcompose": lambda dropped: KVComposePress(compression_ratio=dropped),
    "pyramid(snapkv)": PyramidKVPress,
    "adakv(snapkv)": lambda dropped: AdaKVPress(SnapKVPress(dropped)),
    "kvzip": KVzipPress,
}
NEEDS_EAGER = {"h2o"}


class Kvpress(Side):
    def start(self, setting: Setting) -> Start:
        if setting.method not in PRESSES:
            raise ValueError(f"kvpress has no {setting.method!r}; known: {', '.join(PRESSES)}")
        model = self.model_for(setting.method, "eager" if setting.method in NEEDS_EAGER else "sdpa")
        press = PRESSES[setting.method](1 - setting.keep)
        return Start(model, DynamicCache(), press(model))


if __name__ == "__main__":
    serve(Kvpress, ("kvpress", "transformers", "torch"))
