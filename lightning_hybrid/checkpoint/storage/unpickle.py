"""Reading pickles of checkpoints without the classes of their objects, or without calling these classes.

A pickle can call any function that its author has chosen. A harmless reader provides only the functions that construct
tensors and plain containers. It replaces every other name by a dummy class without any effects.

`storage.dcp` reads the index of a directory with :func:`read_harmless`. `inspect` and `export` read files with
:func:`load_lenient`, because the user's classes may not be installed. `storage.checksums` finds the names of damaged
tensors with :func:`record_names`. torch's ``weights_only=True`` also runs no code, but raises an error at the first
unknown class, so it cannot read such files.
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
    "__builtin__": _PLAIN,  # Python 2's name, which is also used in pickles with protocol 2, as torch writes them
    "builtins": _PLAIN,
    "_codecs": ("encode",),  # encodes bytes in these pickles
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
    """Return the content of a pickle without running code of other classes."""
    return _Unpickler(file).load()


def load_lenient(file: Path | BinaryIO, *, mmap: bool | None = None, trusted: bool = False) -> Any:
    """Return the content of a `torch.save` file, with tensors on the host.

    Args:
        file: The file.
        mmap: As for `torch.load`.
        mmap: As for `torch.load`.
        trusted: If True, objects are constructed if their classes exist. Otherwise, all objects other than tensors and
            plain containers are replaced by dummies, and no code of the file runs.
    """
    module = SimpleNamespace(Unpickler=_TrustingUnpickler if trusted else _Unpickler, __name__="pickle")
    return torch.load(file, map_location="cpu", mmap=mmap, weights_only=False, pickle_module=module)


class _StandIn:
    """A dummy for an object whose class is not called; its pickle can do anything to it without effect."""

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
    """The name of the record with a storage, used in place of the tensors with this storage."""


class _RecordUnpickler(_Unpickler):
    def persistent_load(self, identity: Any) -> Any:
        """Return the record of a storage: ``("storage", class, name of its record, device, number of elements)``."""
        return _Record(identity[2])

    def find_class(self, module: str, name: str) -> Any:
        return _record_among if name.startswith(REBUILD) else super().find_class(module, name)


def _record_among(*arguments: Any) -> Any:
    """Return the record in the arguments from which a tensor is rebuilt, including the arguments of an inner tensor."""
    flat = [each for one in arguments for each in (one if isinstance(one, tuple) else (one,))]
    return next((each for each in flat if isinstance(each, _Record)), None)


def record_names(file: BinaryIO) -> list[tuple[TreePath, str]]:
    """Return the path and the record name of each tensor in a pickle of `torch.save`.

    Args:
        file: The pickle only, without the records.
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
    """Rebuild a tensor with its own class or attributes as a plain tensor."""
    return rebuild(*arguments)


def _without_state(tensor: Any, requires_grad: bool, hooks: Any, state: Any) -> Any:
    """Rebuild a parameter with attributes as a plain parameter."""
    return torch.nn.Parameter(tensor, requires_grad)


def _member(owner: Any, name: str) -> Any:
    """Return a member of an enumeration, which Python 3.11.0 to 3.11.3 pickle as ``getattr(ENUMERATION, NAME)``."""
    return owner[name] if isinstance(owner, EnumMeta) else _StandIn()


_OWN: dict[tuple[str, str], Callable[..., Any]] = {
    ("builtins", "getattr"): _member,
    ("__builtin__", "getattr"): _member,
    REBUILD_WITH_CLASS: _without_attributes,
    REBUILD_WITH_STATE: _without_state,
}
