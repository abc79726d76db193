"""Plain attributes and buffers in which a module keeps results: which have changed, and how they travel."""

from __future__ import annotations

import functools
import hashlib
import io
import pickle
import weakref
from collections import defaultdict, deque
from collections.abc import Iterable
from typing import Any

import numpy as np
import torch
from lightning.pytorch import LightningModule
from torch import Tensor, nn
from torchmetrics import Metric, MetricCollection, MetricTracker

from lightning_hybrid.distributed.pytree import flatten, map_leaves

__all__ = [
    "assign",
    "assign_scalars",
    "attribute",
    "digest",
    "mark_attributes",
    "pack",
    "pack_scalars",
    "scalars",
    "unpack",
]

_IMMUTABLE = (bool, int, float, complex, str, bytes, type(None))
_EXACT = 2**53  # the integers up to here are numbers of float64
_SCALARS = frozenset([bool, int, float, str, type(None)])
_PLAIN = (*_IMMUTABLE, Tensor, list, tuple, dict, set, deque, np.ndarray)

_METRICS = (Metric, MetricCollection, MetricTracker)


def mark_attributes(module: LightningModule, layers: Iterable[nn.Module] = ()) -> dict[str, Any]:
    """A mark of each plain attribute, private ones too, and of each buffer; equal marks mean that nothing has changed.

    Those of submodules count (a loss that keeps a history). Attributes that refer to parts of the module (a list of
    layers, of parameters) are no data of their own.

    Args:
        module: The user's module.
        layers: Layers of the body, which stay out of it: each stage has its own. So do metrics, which are exchanged
            when they compute.

    Returns:
        Marks by dotted name.
    """
    parts = {id(tensor) for tensor in (*module.parameters(), *module.buffers())}
    apart: set[nn.Module] = {part for part in module.modules() if isinstance(part, _METRICS)} | set(layers)
    found = {}
    for path, part in module.named_modules(memo=apart):
        prefix = f"{path}." if path else ""
        for name, value in vars(part).items():
            if not isinstance(value, _PLAIN) or name in _lightnings():
                continue
            leaves, spec = flatten(value)
            if any(isinstance(leaf, (nn.Module, nn.Parameter)) or id(leaf) in parts for leaf in leaves):
                continue
            marks = [_mark(leaf) for leaf in leaves]
            if not any(mark is None for mark in marks):
                found[prefix + name] = spec, marks
        for name, buffer in part.named_buffers(recurse=False):
            if not buffer.is_meta:
                found[prefix + name] = _mark(buffer)
    return found


def attribute(module: nn.Module, name: str) -> Any:
    """The attribute or buffer of this dotted name."""
    path, _, leaf = name.rpartition(".")
    return getattr(module.get_submodule(path), leaf)


def scalars(module: LightningModule) -> dict[str, Any]:
    """The plain attributes of one value: numbers, text, ``None``.

    Args:
        module: The user's module.
    """
    known = _lightnings()
    return {name: value for name, value in vars(module).items() if type(value) in _SCALARS and name not in known}


def pack_scalars(before: dict[str, Any], now: dict[str, Any]) -> dict[Any, Any]:
    """What has changed, as a tree: numbers as tensors of float64, which travel with others in one message.

    Args:
        before: What :func:`scalars` said at first.
        now: What it says now.

    Returns:
        Values by name and class.
    """
    return {
        (name, type(value)): _packed_scalar(value)
        for name, value in now.items()
        if name not in before or before[name] is not value
    }


def _packed_scalar(value: Any) -> Any:
    if value is None:
        return ()
    exact = not isinstance(value, str) and (isinstance(value, float) or abs(value) <= _EXACT)
    return torch.tensor(value, dtype=torch.float64) if exact else value


def assign_scalars(module: LightningModule, packed: dict[Any, Any]) -> None:
    """Set what :func:`pack_scalars` has packed.

    Args:
        module: The user's module.
        packed: Of another rank.
    """
    for (name, kind), value in packed.items():
        vars(module)[name] = None if kind is type(None) else kind(value)


@functools.cache
def _lightnings() -> frozenset[str]:
    """What every module has."""
    return frozenset([*vars(LightningModule()), "_log_hyperparams", "_hparams", "_hparams_initial", "_hparams_name"])


class _TensorMark:
    """A tensor is the same if it is the same object and nobody has written to it: its numbers are not read."""

    def __init__(self, tensor: Tensor) -> None:
        self._reference = weakref.ref(tensor)  # a mark keeps nothing alive
        self._version = tensor._version

    def __eq__(self, other: object) -> bool:
        if not isinstance(other, _TensorMark):
            return False
        tensor = self._reference()
        return tensor is not None and tensor is other._reference() and self._version == other._version

    __hash__ = None  # type: ignore[assignment]


def _mark(leaf: Any) -> Any:
    """``None`` for what cannot travel."""
    if isinstance(leaf, Tensor) and not leaf.is_inference():  # those have no version
        return _TensorMark(leaf)
    return (type(leaf), leaf) if isinstance(leaf, _IMMUTABLE) else digest(pack(leaf))


def pack(value: Any) -> bytes | None:
    """A value as bytes, without graphs; ``None`` if it cannot travel."""
    buffer = io.BytesIO()
    try:
        torch.save(map_leaves(_to_host, value), buffer)
    except (pickle.PicklingError, TypeError, AttributeError, NotImplementedError, RuntimeError):
        return None
    return buffer.getvalue()


def unpack(packed: bytes, device: torch.device) -> Any:
    """The inverse of :func:`pack`.

    Args:
        packed: Of another rank of this job.
        device: Where tensors shall be.
    """

    def placed(leaf: Any) -> Any:
        if isinstance(leaf, deque):
            return deque([map_leaves(placed, entry) for entry in leaf], leaf.maxlen)
        return leaf.to(device) if isinstance(leaf, Tensor) else leaf

    return map_leaves(placed, torch.load(io.BytesIO(packed), weights_only=False))


def _to_host(leaf: Any) -> Any:
    if isinstance(leaf, deque):
        return deque([map_leaves(_to_host, entry) for entry in leaf], leaf.maxlen)
    # A copy: a view would take all of its storage along.
    return leaf.detach().to("cpu", copy=True) if isinstance(leaf, Tensor) and not leaf.is_meta else leaf


def digest(packed: bytes | None) -> bytes | None:
    """A fingerprint of what :func:`pack` made."""
    return None if packed is None else hashlib.blake2b(packed, digest_size=16).digest()


def assign(module: nn.Module, name: str, value: Any) -> None:
    """Set an attribute or a buffer by its dotted name.

    Buffers, lists, dictionaries and deques stay the objects that they are, as others may hold them too; placeholders
    stay what they are.
    """
    path, _, name = name.rpartition(".")
    module = module.get_submodule(path)
    if name in module._buffers:
        _assign_buffer(module, name, value)
        return
    present = vars(module).get(name)
    _restore_factories(value, present)
    if type(present) is not type(value) or not isinstance(value, (list, dict, deque)):
        vars(module)[name] = value
        return
    assert isinstance(present, (list, dict, deque))
    present.clear()
    present.update(value) if isinstance(present, dict) else present.extend(value)


def _restore_factories(value: Any, present: Any) -> None:
    """What a `defaultdict` makes new entries with need not travel: the one that is there knows, or what it makes."""
    if not (isinstance(value, dict) and isinstance(present, dict)):
        return
    factory = getattr(present, "default_factory", None)
    if isinstance(value, defaultdict):
        value.default_factory = factory
    for key, entry in value.items():
        if isinstance(entry, dict):
            _restore_factories(entry, present[key] if key in present else factory and factory())


def _assign_buffer(module: nn.Module, name: str, value: Tensor) -> None:
    present = module._buffers[name]
    if present is None or (not present.is_meta and (present.shape, present.dtype) != (value.shape, value.dtype)):
        module._buffers[name] = value
    elif not present.is_meta:
        with torch.no_grad():
            present.copy_(value)
