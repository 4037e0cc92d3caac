"""How much is allocated at most while something runs, counted tensor by tensor."""

from __future__ import annotations

from typing import Any

from torch import Tensor
from torch.multiprocessing.reductions import StorageWeakRef
from torch.utils._python_dispatch import TorchDispatchMode
from torch.utils._pytree import tree_leaves


class Peak(TorchDispatchMode):
    """Counts what operators answer with while it is active, and not what they take and give back inside.

    Attributes:
        nbytes: the most that was there at a time.
    """

    def __init__(self) -> None:
        super().__init__()
        self._made: dict[int, tuple[StorageWeakRef, int]] = {}
        self.nbytes = 0

    def __torch_dispatch__(self, function: Any, types: Any, args: Any = (), kwargs: Any = None) -> Any:
        output = function(*args, **(kwargs or {}))
        given = {_storage(leaf).cdata for leaf in tree_leaves((args, kwargs)) if isinstance(leaf, Tensor)}
        self._made = {place: one for place, one in self._made.items() if not one[0].expired()}
        for leaf in tree_leaves(output):
            if isinstance(leaf, Tensor) and (storage := _storage(leaf)).cdata not in given:
                self._made[storage.cdata] = storage, leaf.untyped_storage().nbytes()
        self.nbytes = max(self.nbytes, sum(size for _, size in self._made.values()))
        return output


def _storage(tensor: Tensor) -> StorageWeakRef:
    return StorageWeakRef(tensor.untyped_storage())
