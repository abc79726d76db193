"""Initialization of tensors on the meta device, with values that do not depend on the layout.

`ModuleParallelizer` uses an :class:`Initialization` if a module has tensors on the meta device when it is sharded, and
`check` uses one in a single process. To initialize the full module on each rank and shard it afterwards would need the
memory of the full model in each process. To call `reset_parameters` of the local layers only would give other values
under each layout, because the layers draw from one random generator.

A *unit* in this file is a layer with its submodules, which is initialized at once; it need not be a unit of the
pipeline. A *frame* is a module that contains the body, which is the set of layers that the pipeline splits. A
*placeholder* replaces a tensor of another stage, and stays as it is.
"""

from __future__ import annotations

import zlib
from collections.abc import Callable, Collection, Iterator
from dataclasses import dataclass, field
from itertools import chain

import torch
from torch import Tensor, nn
from torch.distributed.tensor import DTensor, Replicate

from lightning_hybrid.distributed.dtensor import copy_attributes
from lightning_hybrid.distributed.module_names import named_tensors
from lightning_hybrid.distributed.random import RandomStreams, derive_seed, seed_generators
from lightning_hybrid.pipeline_parallel.placeholders import is_placeholder
from lightning_hybrid.torch_internals import RESET_METHOD, version_counter

_METHODS = ("reset_parameters", RESET_METHOD)  # names of the methods in layers of torch


@dataclass(eq=False)
class _Unit:
    """A layer with all its submodules, which are initialized together.

    Attributes:
        name: The dotted name of the layer.
        layer: The layer.
        is_frame: True if the layer contains the body. The unit then has only the layer's own tensors.
        is_done: True if the layer is initialized.
    """

    name: str
    layer: nn.Module
    is_frame: bool
    is_done: bool = False

    def modules(self) -> list[tuple[str, nn.Module]]:
        """Return the layer and its submodules by name, inner modules first."""
        if self.is_frame:
            return [(self.name, self.layer)]
        return list(self.layer.named_modules(prefix=self.name))[::-1]

    def tensors(self) -> Iterator[tuple[nn.Module, str, Tensor]]:
        """Yield the parameters and buffers of the unit, each with its module and attribute name."""
        for _, layer in self.modules():
            yield from ((layer, leaf, tensor) for leaf, tensor in _own_tensors(layer))


@dataclass(eq=False)
class _Fresh:
    """A tensor on the meta device that this rank must initialize.

    Attributes:
        tensor: The tensor, on the meta device.
        unit: The unit that initializes the tensor.
        names: The dotted names of the tensor. The first name is in the layer that determines the values.
        owners: The modules that have the tensor, each with its attribute name.
    """

    tensor: Tensor
    unit: _Unit
    names: list[str] = field(default_factory=list)
    owners: list[tuple[nn.Module, str]] = field(default_factory=list)

    def put(self, value: Tensor) -> None:
        """Replace the tensor in all its owners."""
        for layer, leaf in self.owners:
            setattr(layer, leaf, value)


class Initialization:
    """Initializes a module that was created under ``with torch.device("meta")``, layer by layer.

    Each layer sets its values in its `reset_parameters` (or `_reset_parameters`, as some layers of torch call it),
    inner layers first. Before each call, the generators are seeded with the global seed and the dotted name of the
    layer, so values do not depend on the other layers of this rank.

    While a layer is initialized, it is complete: tensors that must not change are replaced by substitutes. Therefore a
    tensor that already has values keeps them, and a placeholder stays a placeholder. The values of a tied tensor are
    determined by the layer with its first name. The caller can shard each layer after it was initialized, so that only
    one layer at a time takes its full memory: see :meth:`__call__`.

    Args:
        module: The full module, with placeholders for tensors of other stages.
        device: The device for the values.
        seed: The global seed, equal on all ranks.
        frames: The names of the modules that contain the body, which may be incomplete on a rank. Their own parameters
            are initialized, and their `reset_parameters` must not change other parameters.
        given: The names of tensors whose values are loaded later. These tensors get only memory.

    Raises:
        ValueError: If tensors on the meta device are neither parameters nor buffers.
    """

    def __init__(
        self,
        module: nn.Module,
        device: torch.device,
        seed: int,
        *,
        frames: Collection[str] = (),
        given: Collection[str] = (),
    ) -> None:
        self._module = module
        self._device = device
        self._seed = seed
        self._streams = RandomStreams(seed, 0, device)
        self._units = list(_units("", module, frames, set()))
        self._unit_of = {id(layer): unit for unit in self._units[::-1] for _, layer in unit.modules()}
        self._fresh: dict[int, _Fresh] = {}
        for unit in self._units:
            for owner, leaf, tensor in unit.tensors():
                if _is_missing(tensor):
                    fresh = self._fresh.setdefault(id(tensor), _Fresh(tensor, unit))
                    fresh.owners.append((owner, leaf))
        for name, tensor in named_tensors(module):
            if id(tensor) in self._fresh:
                self._fresh[id(tensor)].names.append(name)
        self._given = {key for key, fresh in self._fresh.items() if not set(given).isdisjoint(fresh.names)}
        if self._fresh:
            _check_attributes(module)

    def __call__(self, name: str) -> None:
        """Initialize a layer, and all layers in the same units.

        Args:
            name: The dotted name of the layer.

        Raises:
            ValueError: If a layer does not initialize one of its tensors, or a frame changes tensors of other modules.
        """
        for _, layer in self._module.get_submodule(name).named_modules():
            if id(layer) in self._unit_of:
                self._make(self._unit_of[id(layer)])

    def finish(self) -> None:
        """Initialize all remaining layers.

        Raises:
            ValueError: If a layer does not initialize one of its tensors, or a frame changes tensors of other modules.
        """
        for unit in self._units:
            self._make(unit)

    def _make(self, unit: _Unit) -> None:
        if unit.is_done:
            return
        unit.is_done = True
        keys = dict.fromkeys(id(tensor) for *_, tensor in unit.tensors())
        missing = [self._fresh[key] for key in keys if key in self._fresh]
        for fresh in missing:
            self._make(fresh.unit)  # the layer that determines the values of a tied tensor comes first
        of_unit = [fresh for fresh in missing if fresh.unit is unit]
        wanted = [fresh for fresh in of_unit if id(fresh.tensor) not in self._given]
        memory = (_memory(fresh.tensor, self._device) for fresh in of_unit)
        values = self._values(unit, of_unit, wanted) if wanted else list(memory)
        for fresh, value in zip(of_unit, values, strict=True):
            fresh.put(_like(fresh.tensor, value))

    def _values(self, unit: _Unit, of_unit: list[_Fresh], wanted: list[_Fresh]) -> list[Tensor]:
        """Return the values that the layers of a unit write into newly allocated memory."""
        originals = list(unit.tensors())
        memory = {id(tensor): tensor for *_, tensor in originals}
        memory = {key: _unset(tensor, self._device) for key, tensor in memory.items()}
        for layer, leaf, tensor in originals:
            setattr(layer, leaf, memory[id(tensor)])
        versions = {id(tensor): version_counter(tensor) for tensor in memory.values()}
        try:
            self._reset(unit)
            values = [getattr(*fresh.owners[0]) for fresh in of_unit]
        finally:
            for layer, leaf, tensor in originals:
                setattr(layer, leaf, tensor)
        for fresh, value in zip(of_unit, values, strict=True):
            untouched = versions.get(id(value)) == version_counter(value) and _is_unset(value)
            if fresh in wanted and (untouched or value.is_meta):
                raise ValueError(self._unset_text(fresh))
        return values

    def _reset(self, unit: _Unit) -> None:
        """Call the reset methods of a unit's layers.

        Raises:
            ValueError: If the unit is a frame, and changes tensors of other modules.
        """
        others = [] if not unit.is_frame else [(name, x, version_counter(x)) for name, x in named_tensors(self._module)]
        own = {id(tensor) for *_, tensor in unit.tensors()}
        for name, layer in unit.modules():
            method = _method(layer)
            if method is not None:
                with self._streams.isolated(), torch.no_grad(), self._device:
                    # The constant -2 distinguishes these seeds from the seeds of steps.
                    seed_generators(derive_seed(self._seed, -2, zlib.crc32(name.encode())), self._device)
                    method()
        changed = [name for name, x, version in others if id(x) not in own and version_counter(x) != version]
        if changed:
            raise ValueError(
                f"`{type(unit.layer).__name__}.{_name_of_method(unit.layer)}` changes {changed[0]!r}, which"
                f" belongs to another module. {unit.name or type(unit.layer).__name__!r} contains the body (the layers"
                " that the pipeline splits), and a rank can hold only a part of the body. In this method, set only"
                " parameters outside the body. Define `reset_parameters` in the layers themselves. [LH317]"
            )

    def _unset_text(self, fresh: _Fresh) -> str:
        owner, leaf = fresh.owners[0]
        kind = "parameter" if isinstance(fresh.tensor, nn.Parameter) else "buffer"
        method = _name_of_method(owner)
        why = f"its `{method}` does not set the {kind}" if method else "it has no method `reset_parameters`"
        return (
            f"{type(owner).__name__} cannot initialize the {kind} {fresh.names[0]!r}, which was created on the meta"
            f" device: {why}. In this class, define a method `reset_parameters(self)` that sets {leaf!r}, or"
            " create the layer on a real device: `with torch.device('cpu'):`. [LH315]"
        )


def lacks_values(module: nn.Module) -> bool:
    """Return True if a module has tensors on the meta device that are not placeholders."""
    return any(_is_missing(tensor) for _, tensor in named_tensors(module))


def _is_missing(tensor: Tensor) -> bool:
    return tensor.is_meta and not is_placeholder(tensor)


def _units(name: str, layer: nn.Module, frames: Collection[str], seen: set[int]) -> Iterator[_Unit]:
    """Yield the outermost layers with tensors or a reset method. A module with the body follows its children."""
    if id(layer) in seen:
        return
    seen.add(id(layer))
    if name not in frames and (_method(layer) or any(True for _ in _own_tensors(layer))):
        yield _Unit(name, layer, is_frame=False)
        return
    for child_name, child in layer.named_children():
        yield from _units(f"{name}.{child_name}" if name else child_name, child, frames, seen)
    if name in frames:
        yield _Unit(name, layer, is_frame=True)


def _own_tensors(layer: nn.Module) -> Iterator[tuple[str, Tensor]]:
    tensors = chain(layer._parameters.items(), layer._buffers.items())
    return ((leaf, tensor) for leaf, tensor in tensors if tensor is not None)


def _method(layer: nn.Module) -> Callable[[], None] | None:
    method: Callable[[], None] | None = getattr(layer, _name_of_method(layer) or "", None)
    return method


def _name_of_method(layer: nn.Module) -> str | None:
    return next((name for name in _METHODS if callable(getattr(layer, name, None))), None)


def _memory(tensor: Tensor, device: torch.device) -> Tensor:
    """Return memory for the full tensor, with arbitrary values."""
    if isinstance(tensor, DTensor):
        memory = torch.empty(tensor.shape, dtype=tensor.dtype, device=device)
    else:
        memory = torch.empty_like(tensor.detach(), device=device)
    return nn.Parameter(memory, tensor.requires_grad) if isinstance(tensor, nn.Parameter) else memory


def _unset(tensor: Tensor, device: torch.device) -> Tensor:
    """Return memory for the full tensor, filled with NaN if its dtype allows, to detect values that were not set."""
    memory = _memory(tensor, device)
    if memory.dtype.is_floating_point or memory.dtype.is_complex:
        memory.detach().fill_(torch.nan)
    return memory


def _is_unset(tensor: Tensor) -> bool:
    """Return True if a tensor has the values of :func:`_unset`. Callers check first that its version is unchanged."""
    if tensor.dtype.is_floating_point or tensor.dtype.is_complex:
        return bool(tensor.isnan().any())
    return True


def _like(tensor: Tensor, value: Tensor) -> Tensor:
    """Return a value as the replacement of a tensor: sharded in the same way, and with the same extra attributes."""
    if isinstance(tensor, DTensor):
        whole = DTensor.from_local(
            value.detach(), tensor.device_mesh, [Replicate()] * tensor.device_mesh.ndim, run_check=False
        )
        # The shard is cloned, because a view would keep the full tensor in memory.
        value = whole.redistribute(placements=tensor.placements).clone()
        if isinstance(tensor, nn.Parameter):
            value = nn.Parameter(value, tensor.requires_grad)
    copy_attributes(tensor, value)
    return value


def _check_attributes(module: nn.Module) -> None:
    for name, layer in module.named_modules():
        for attribute, value in vars(layer).items():
            if isinstance(value, Tensor) and _is_missing(value):
                raise ValueError(
                    f"{f'{name}.{attribute}' if name else attribute!r} was created on the meta device, but is neither a"
                    f" parameter nor a buffer of {type(layer).__name__}, so it cannot be initialized. Create it on a"
                    " real device: `with torch.device('cpu'):`. Do the same with all metrics. [LH316]"
                )
