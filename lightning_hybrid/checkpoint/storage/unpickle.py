"""Pickles of checkpoints, read where the classes of their objects are not there, or are not to be called.

A pickle names functions and calls them, and whoever wrote it chooses which. A harmless reader gives it those of which
tensors and plain containers are made, and a stand-in for every other name, which does nothing whatever is done to it.
"""

from __future__ import annotations

import importlib
import pickle
from collections.abc import Callable
from enum import EnumMeta
from pathlib import Path
from types import SimpleNamespace
from typing import Any, BinaryIO

import torch

from lightning_hybrid.distributed.pytree import TreePath, flatten_with_path
from lightning_hybrid.torch_internals import PICKLED, REBUILD, REBUILD_WITH_CLASS, REBUILD_WITH_STATE

_PLAIN = ("bool", "bytearray", "bytes", "complex", "dict", "float", "frozenset", "int", "list", "set", "str", "tuple")
_NAMES = {
    "__builtin__": _PLAIN,  # what Python 2 called it, and so do pickles of the second protocol, which torch writes
    "builtins": _PLAIN,
    "_codecs": ("encode",),  # bytes in these
    "collections": ("Counter", "OrderedDict", "defaultdict", "deque"),
    "lightning.fabric.utilities.data": ("AttributeDict",),
    "torch": ("Size", "Tensor", "device"),
    **PICKLED,
    "torch.distributed.checkpoint.metadata": (
        "BytesStorageMetadata",
        "ChunkStorageMetadata",
        "Metadata",
        "MetadataIndex",
        "StorageMeta",
        "TensorProperties",
        "TensorStorageMetadata",
        *PICKLED["torch.distributed.checkpoint.metadata"],
    ),
    "torch.nn.parameter": ("Buffer", "Parameter"),
    "torch.storage": ("TypedStorage", "UntypedStorage"),
}
_CONSTANTS = (torch.dtype, torch.layout, torch.memory_format, torch.qscheme)


def read_harmless(file: BinaryIO) -> Any:
    """What a pickle holds."""
    return _Unpickler(file).load()


def load_lenient(file: Path | BinaryIO, *, mmap: bool | None = None, trusted: bool = False) -> Any:
    """What a file holds that `torch.save` has written; its tensors are on the host.

    Args:
        file: The file.
        mmap: As for `torch.load`.
        trusted: Whether its objects are made where their classes are there; otherwise all of them have stand-ins.
    """
    module = SimpleNamespace(Unpickler=_TrustingUnpickler if trusted else _Unpickler, __name__="pickle")
    return torch.load(file, map_location="cpu", mmap=mmap, weights_only=False, pickle_module=module)


class _StandIn:
    """An object of a class that is not called, whatever its pickle does to it."""

    def __init__(self, *_: Any, **__: Any) -> None:
        pass

    __setstate__ = __setitem__ = append = extend = __init__

    def __call__(self, *_: Any, **__: Any) -> _StandIn:
        return self


class _Unpickler(pickle.Unpickler):
    def find_class(self, module: str, name: str) -> Any:
        if name in _NAMES.get(module, ()):
            found = importlib.import_module("builtins" if module == "__builtin__" else module)
            return getattr(found, name)
        if module == "torch" and isinstance(constant := getattr(torch, name, None), _CONSTANTS):
            return constant
        return _OWN.get((module, name)) or _stand_in(module, name)


class _Record(str):
    """The name of the record in which a storage is, in the place of what is made of it."""


class _RecordUnpickler(_Unpickler):
    def persistent_load(self, identity: Any) -> Any:
        """A storage: ``("storage", class, name of its record, device, number of elements)``."""
        return _Record(identity[2])

    def find_class(self, module: str, name: str) -> Any:
        return _record_among if name.startswith(REBUILD) else super().find_class(module, name)


def _record_among(*arguments: Any) -> Any:
    """The record among what a tensor is made of, or of which the tensor is that another one is made of."""
    flat = [each for one in arguments for each in (one if isinstance(one, tuple) else (one,))]
    return next((each for each in flat if isinstance(each, _Record)), None)


def record_names(file: BinaryIO) -> list[tuple[TreePath, str]]:
    """For the tensors of a pickle of `torch.save` the records that they are in.

    Args:
        file: The pickle alone.
    """
    return [
        (path, str(leaf)) for path, leaf in flatten_with_path(_RecordUnpickler(file).load()) if type(leaf) is _Record
    ]


class _TrustingUnpickler(pickle.Unpickler):
    def find_class(self, module: str, name: str) -> Any:
        try:
            return super().find_class(module, name)
        except (ImportError, AttributeError):
            return _stand_in(module, name)


def _stand_in(module: str, name: str) -> type:
    return type(name, (_StandIn,), {"__module__": module})


def _without_attributes(rebuild: Callable[..., Any], kind: Any, arguments: tuple[Any, ...], state: Any) -> Any:
    """Of a tensor of a class of its own, or with attributes, the tensor."""
    return rebuild(*arguments)


def _without_state(tensor: Any, requires_grad: bool, hooks: Any, state: Any) -> Any:
    """Of a parameter with attributes, the parameter."""
    return torch.nn.Parameter(tensor, requires_grad)


def _member(owner: Any, name: str) -> Any:
    """Of an enumeration, a member: Python 3.11.0 to 3.11.3 pickle one as ``getattr(ENUMERATION, NAME)``."""
    return owner[name] if isinstance(owner, EnumMeta) else _StandIn()


_OWN: dict[tuple[str, str], Callable[..., Any]] = {
    ("builtins", "getattr"): _member,
    ("__builtin__", "getattr"): _member,
    REBUILD_WITH_CLASS: _without_attributes,
    REBUILD_WITH_STATE: _without_state,
}
