"""Bytes of tensors that are alive, counted by their storages."""

from __future__ import annotations

import weakref
from typing import Any

from torch import Tensor
from torch.distributed.tensor import DTensor
from torch.utils._python_dispatch import TorchDispatchMode
from torch.utils._pytree import tree_iter


class LiveTensors(TorchDispatchMode):
    """While it is entered, knows every storage that an operation has made or touched, and the most that was alive.

    Storages may grow and shrink: they are asked for their size after every operation.
    """

    def __init__(self) -> None:
        super().__init__()
        self._storages: weakref.WeakSet[Any] = weakref.WeakSet()
        self.peak = 0

    def add(self, tree: Any) -> None:
        """Count what was there before."""
        for leaf in tree_iter(tree):
            if isinstance(leaf, DTensor):
                leaf = leaf._local_tensor
            if isinstance(leaf, Tensor) and not leaf.is_meta:
                self._storages.add(leaf.untyped_storage())

    def now(self) -> int:
        """Bytes that are alive."""
        return sum(storage.nbytes() for storage in self._storages)

    def __torch_dispatch__(self, func: Any, types: Any, args: Any = (), kwargs: Any = None) -> Any:
        """Run an operation and look at what it made."""
        result = func(*args, **(kwargs or {}))
        self.add((args, kwargs, result))
        self.peak = max(self.peak, self.now())
        return result
