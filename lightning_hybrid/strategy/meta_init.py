"""Values for what was made on the meta device: the same ones whatever this rank holds of the module."""

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

_METHODS = ("reset_parameters", RESET_METHOD)  # the names in layers of torch


@dataclass(eq=False)
class _Unit:
    """What gets its values at once: a layer with all that is in it.

    Attributes:
        name: Its dotted name.
        layer: The layer.
        is_frame: Whether it holds the body: then it is only what the layer has itself.
        is_done: Whether it has its values.
    """

    name: str
    layer: nn.Module
    is_frame: bool
    is_done: bool = False

    def modules(self) -> list[tuple[str, nn.Module]]:
        """The layers in it by name, from the inside out."""
        if self.is_frame:
            return [(self.name, self.layer)]
        return list(self.layer.named_modules(prefix=self.name))[::-1]

    def tensors(self) -> Iterator[tuple[nn.Module, str, Tensor]]:
        """Parameters and buffers, with their owners."""
        for _, layer in self.modules():
            yield from ((layer, leaf, tensor) for leaf, tensor in _own_tensors(layer))


@dataclass(eq=False)
class _Fresh:
    """A tensor without values that belongs on this rank.

    Attributes:
        tensor: It, on the meta device.
        names: Its dotted names; the first one is in the layer that decides about its values.
        owners: The layers that have it, and what they call it.
        unit: Where its values are made.
    """

    tensor: Tensor
    unit: _Unit
    names: list[str] = field(default_factory=list)
    owners: list[tuple[nn.Module, str]] = field(default_factory=list)

    def put(self, value: Tensor) -> None:
        """Replace it wherever it is."""
        for layer, leaf in self.owners:
            setattr(layer, leaf, value)


class Initialization:
    """Brings to life what was made under ``with torch.device("meta")``, layer by layer.

    The values are those that each layer's own `reset_parameters` makes, or `_reset_parameters` as some layers of torch
    call it, first of what is in a layer and then of the layer. Before each call the generators are seeded from the
    global seed and the dotted name of the layer, so values do not depend on what else this rank holds.

    A layer is made whole, and what of it is not missing gets a substitute meanwhile: a tensor that has values keeps
    them, one that lives elsewhere stays there, and of a tied one the layer with the first name decides. What must not
    be whole for longer, because it is divided, can be divided after each layer: see :meth:`__call__`.

    Args:
        module: The whole module, with placeholders for what lives elsewhere.
        device: Where values are made.
        seed: The global seed, equal on all ranks.
        frames: The names of the modules that hold the body, which no rank need have whole. Their own parameters are
            made, and their `reset_parameters` may change no others.
        given: Names of tensors whose values come from elsewhere: these get memory only.

    Raises:
        ValueError: If there are tensors on the meta device that are neither parameters nor buffers.
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
        """Give values to a layer, and to all that is made with it.

        Args:
            name: The dotted name of the layer.

        Raises:
            ValueError: If something has got no values.
        """
        for _, layer in self._module.get_submodule(name).named_modules():
            if id(layer) in self._unit_of:
                self._make(self._unit_of[id(layer)])

    def finish(self) -> None:
        """Give values to all that has none yet.

        Raises:
            ValueError: If something has got no values.
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
            self._make(fresh.unit)  # of what is tied, the layer that decides comes first
        of_unit = [fresh for fresh in missing if fresh.unit is unit]
        wanted = [fresh for fresh in of_unit if id(fresh.tensor) not in self._given]
        memory = (_memory(fresh.tensor, self._device) for fresh in of_unit)
        values = self._values(unit, of_unit, wanted) if wanted else list(memory)
        for fresh, value in zip(of_unit, values, strict=True):
            fresh.put(_like(fresh.tensor, value))

    def _values(self, unit: _Unit, of_unit: list[_Fresh], wanted: list[_Fresh]) -> list[Tensor]:
        """What the layers of a unit make of memory of their own."""
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
        """Let the layers of a unit make their values."""
        others = [] if not unit.is_frame else [(name, x, version_counter(x)) for name, x in named_tensors(self._module)]
        own = {id(tensor) for *_, tensor in unit.tensors()}
        for name, layer in unit.modules():
            method = _method(layer)
            if method is not None:
                with self._streams.isolated(), torch.no_grad(), self._device:
                    # The constant keeps this apart from the seeds of steps.
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
    """Whether there are tensors that were made on the meta device, and do not live elsewhere."""
    return any(_is_missing(tensor) for _, tensor in named_tensors(module))


def _is_missing(tensor: Tensor) -> bool:
    return tensor.is_meta and not is_placeholder(tensor)


def _units(name: str, layer: nn.Module, frames: Collection[str], seen: set[int]) -> Iterator[_Unit]:
    """The outermost layers that have tensors or a way to set some; what holds the body comes after that."""
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
    """A whole tensor like this one; its values mean nothing."""
    if isinstance(tensor, DTensor):
        memory = torch.empty(tensor.shape, dtype=tensor.dtype, device=device)
    else:
        memory = torch.empty_like(tensor.detach(), device=device)
    return nn.Parameter(memory, tensor.requires_grad) if isinstance(tensor, nn.Parameter) else memory


def _unset(tensor: Tensor, device: torch.device) -> Tensor:
    """The same, full of a value by which it can be seen that nobody has set it."""
    memory = _memory(tensor, device)
    if memory.dtype.is_floating_point or memory.dtype.is_complex:
        memory.detach().fill_(torch.nan)
    return memory


def _is_unset(tensor: Tensor) -> bool:
    """Whether there is what :func:`_unset` has left; to be asked if torch has not seen that it was changed."""
    if tensor.dtype.is_floating_point or tensor.dtype.is_complex:
        return bool(tensor.isnan().any())
    return True


def _like(tensor: Tensor, value: Tensor) -> Tensor:
    """A value in the place of a tensor: divided as that is, with its marks."""
    if isinstance(tensor, DTensor):
        whole = DTensor.from_local(
            value.detach(), tensor.device_mesh, [Replicate()] * tensor.device_mesh.ndim, run_check=False
        )
        value = whole.redistribute(placements=tensor.placements).clone()  # else a part keeps the whole alive
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
