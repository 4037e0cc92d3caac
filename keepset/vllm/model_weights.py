"""`ModelWeights`: whether a model's weights were changed since vLLM loaded them.

vLLM gives its connectors no model. A PyTorch hook finds the modules while the model is built.
"""

from __future__ import annotations

import hashlib
from weakref import WeakKeyDictionary, finalize

from torch import nn
from torch.nn.modules.module import register_module_module_registration_hook

from keepset.contexts.weights import update


class ModelWeights:
    """The weights of the models that are built from now on, until `begin` is first called."""

    def __init__(self) -> None:
        parents = self._parents = WeakKeyDictionary[nn.Module, None]()
        self._first = ""

        def registered(module: nn.Module, name: str, child: nn.Module | None) -> None:
            parents[module] = None

        self._stop = finalize(self, register_module_module_registration_hook(registered).remove)

    def begin(self) -> None:
        """Note that the model is built, and what its weights are."""
        self._stop()
        self._first = self._first or self._digest()

    def change(self) -> str:
        """Return a digest of the weights if they were changed since `begin`; "" if not."""
        digest = self._digest()
        return "" if digest == self._first else digest

    def _digest(self) -> str:
        parents, digest = list(self._parents), hashlib.sha256()
        inner = {id(module) for parent in parents for module in parent.modules() if module is not parent}
        for root in (parent for parent in parents if id(parent) not in inner):
            for name, weight in root.named_parameters():
                digest.update(f"{name} ".encode())
                update(digest, weight)
        return digest.hexdigest()
