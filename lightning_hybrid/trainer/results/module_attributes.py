"""Plain attributes and buffers in which a module stores results: detecting changes, and sending values.

`StepContext` sends numbers and texts with the results of each step (:func:`scalars` to :func:`assign_scalars`).
:class:`~.epoch_sync.EpochSync` sends all other values between epochs (:func:`attribute_versions` to :func:`assign`). A
*version* of a value is compared instead of a copy, because copies of all attributes would take time and memory.
"""

from __future__ import annotations

import hashlib
import io
import pickle
import weakref
from collections import defaultdict, deque
from collections.abc import Callable, Iterable
from typing import Any

import numpy as np
import torch
from lightning.pytorch import LightningModule
from torch import Tensor, nn
from torch.distributed.tensor import DTensor
from torchmetrics import Metric, MetricCollection, MetricTracker

from lightning_hybrid.distributed.dtensor import distribute_like, full_tensor, to_local
from lightning_hybrid.distributed.pytree import flatten, map_leaves
from lightning_hybrid.distributed.tensor_bytes import to_host
from lightning_hybrid.pipeline_parallel.placeholders import sending_placeholders
from lightning_hybrid.torch_internals import version_counter
from lightning_hybrid.trainer.lightning_internals import lightning_attributes

_IMMUTABLE = (bool, int, float, complex, str, bytes, type(None))
_EXACT = 2**53  # float64 represents integers up to this number exactly
_SCALARS = frozenset([bool, int, float, str, type(None)])
_PLAIN = (*_IMMUTABLE, Tensor, list, tuple, dict, set, deque, np.ndarray)

_METRICS = (Metric, MetricCollection, MetricTracker)


def attribute_versions(module: LightningModule, layers: Iterable[nn.Module] = ()) -> dict[str, Any]:
    """Return a version of each plain attribute, also private ones, and each buffer. Equal versions mean no change.

    Submodules are included (a loss may have a history). Attributes that refer to parts of the module, such as lists of
    layers or parameters, are excluded, and so are values that cannot be pickled, attributes that belong to Lightning,
    and placeholders.

    Args:
        module: The user's module.
        layers: Layers of the body. They are excluded, because each stage has its own layers. Metrics are also excluded,
            because their results are exchanged when they compute.

    Returns:
        Versions by dotted name.
    """
    parts = {id(tensor) for tensor in (*module.parameters(), *module.buffers())}
    excluded: set[nn.Module] = {part for part in module.modules() if isinstance(part, _METRICS)} | set(layers)
    found: dict[str, Any] = {}
    lightning = lightning_attributes()
    for path, part in module.named_modules(memo=excluded):
        prefix = f"{path}." if path else ""
        for name, value in vars(part).items():
            if name in lightning:
                continue
            if type(value) in _SCALARS:  # nearly all values, so an early exit halves the time
                found[prefix + name] = type(value), value
                continue
            if not isinstance(value, _PLAIN):
                continue
            leaves, spec = flatten(value)
            if any(isinstance(leaf, (nn.Module, nn.Parameter)) or id(leaf) in parts for leaf in leaves):
                continue
            versions = [_version_of(leaf) for leaf in leaves]
            if not any(version is None for version in versions):
                found[prefix + name] = spec, versions
        for name, buffer in part.named_buffers(recurse=False):
            if not buffer.is_meta:
                found[prefix + name] = _version_of(buffer)
    return found


def scalars(module: LightningModule) -> dict[str, Any]:
    """Return the plain attributes of the module itself with a single value: numbers, text, ``None``; by name.

    Args:
        module: The user's module.
    """
    excluded = lightning_attributes()
    return {name: value for name, value in vars(module).items() if type(value) in _SCALARS and name not in excluded}


def pack_scalars(before: dict[str, Any], now: dict[str, Any]) -> dict[Any, Any]:
    """Return the changed values as a tree. Numbers are float64 tensors on the host, which are sent in one message.

    Args:
        before: An earlier result of :func:`scalars`.
        now: The current result of :func:`scalars`.

    Returns:
        The changed values by name and class.
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
    """Set the attributes that :func:`pack_scalars` has packed.

    Args:
        module: The user's module.
        packed: The packed attributes of another rank.
    """
    for (name, kind), value in packed.items():
        vars(module)[name] = None if kind is type(None) else kind(value)


class _TensorVersion:
    """The version of a tensor, equal for the same object without a write in between. Values are not read."""

    def __init__(self, tensor: Tensor) -> None:
        self._reference = weakref.ref(tensor)  # a version must not keep the tensor alive
        self._version = version_counter(tensor)

    def __eq__(self, other: object) -> bool:
        if not isinstance(other, _TensorVersion):
            return False
        tensor = self._reference()
        return tensor is not None and tensor is other._reference() and self._version == other._version

    __hash__ = None  # type: ignore[assignment]


def _version_of(leaf: Any) -> Any:
    """Return the version of a leaf; ``None`` if it cannot be pickled."""
    if isinstance(leaf, Tensor) and not leaf.is_inference():  # inference tensors have no version
        return _TensorVersion(leaf)
    return (type(leaf), leaf) if isinstance(leaf, _IMMUTABLE) else digest(pack(leaf))


def pack(value: Any) -> bytes | None:
    """Return a value as bytes, with tensors on the host and without graphs; ``None`` if it cannot be pickled."""
    buffer = io.BytesIO()
    try:
        with sending_placeholders():
            torch.save(_map(_copied, value), buffer)
    except (pickle.PicklingError, TypeError, AttributeError, NotImplementedError, RuntimeError):
        return None
    return buffer.getvalue()


def pack_attribute(module: nn.Module, name: str, *, whole: bool = False) -> bytes | None:
    """Return the attribute or buffer with this dotted name, packed by :func:`pack`.

    Args:
        module: The user's module.
        name: The name.
        whole: If True, a sharded buffer is gathered, which is a collective of its ranks; otherwise the local shard is
            packed.
    """
    path, _, leaf = name.rpartition(".")
    value = getattr(module.get_submodule(path), leaf)
    if isinstance(value, DTensor):
        value = full_tensor(value) if whole else to_local(value)
    return pack(value)


def unpack(packed: bytes, device: torch.device) -> Any:
    """Return the value that :func:`pack` has packed.

    Args:
        packed: The bytes from another rank of this job.
        device: The device for tensors.
    """
    value = torch.load(io.BytesIO(packed), weights_only=False)
    return _map(lambda leaf: leaf.to(device) if isinstance(leaf, Tensor) else leaf, value)


def _map(function: Callable[[Any], Any], value: Any) -> Any:
    """Apply `map_leaves`, which treats deques as leaves, also to the entries of deques."""
    if isinstance(value, deque):
        return deque([_map(function, entry) for entry in value], value.maxlen)
    return map_leaves(lambda leaf: _map(function, leaf) if isinstance(leaf, deque) else function(leaf), value)


def _copied(leaf: Any) -> Any:
    """Return a copy of a leaf, because pickling a view would include its whole storage."""
    return leaf if isinstance(leaf, Tensor) and leaf.is_meta else to_host(leaf)


def digest(packed: bytes | None) -> bytes | None:
    """Return a hash of the result of :func:`pack`."""
    return None if packed is None else hashlib.blake2b(packed, digest_size=16).digest()


def assign(module: nn.Module, name: str, value: Any) -> None:
    """Set an attribute or a buffer by its dotted name.

    Buffers, lists, dictionaries and deques are changed in place, because other objects may refer to them, unless their
    type, shape or dtype differs. Placeholders are not changed.

    Args:
        module: The user's module.
        name: The name.
        value: The new value. For a sharded buffer, the full tensor.
    """
    path, _, name = name.rpartition(".")
    module = module.get_submodule(path)
    if name in module._buffers:
        _assign_buffer(module, name, value)
        return
    present: Any = vars(module).get(name)
    _restore_factories(value, present)
    if type(present) is not type(value) or not isinstance(present, (list, dict, deque)):
        vars(module)[name] = value
        return
    present.clear()
    present.update(value) if isinstance(present, dict) else present.extend(value)


def _restore_factories(value: Any, present: Any) -> None:
    """Restore the factories of `defaultdict` values, which are not sent, from the present value."""
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
            present.copy_(distribute_like(value, present))
