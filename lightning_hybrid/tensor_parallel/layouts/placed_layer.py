"""A layer of any class with sharded parameters or buffers: its code runs on DTensors, and stays as it is."""

from __future__ import annotations

from collections.abc import Iterator, Mapping
from contextlib import contextmanager
from typing import Any

from torch import Tensor, nn
from torch.distributed.device_mesh import DeviceMesh
from torch.distributed.tensor import DTensor, Replicate, Shard

from lightning_hybrid.distributed.dtensor import full_tensor, shard_of, uncompiled
from lightning_hybrid.distributed.pytree import flatten, unflatten
from lightning_hybrid.tensor_parallel.layers import ParallelLayer


class PlacedLayer(ParallelLayer):
    """Plain tensors in, DTensors inside, plain tensors out.

    ::

        inputs, other parameters, other buffers     B      every rank has all of them
        parameters, buffers that the plan names     S(d)
        what the code makes of them                        torch finds out, and redistributes where an operator needs it
        what it returns                             B      gathered, or summed

    Attributes:
        layout_dims: The dimension that is divided of each sharded parameter and buffer, by its name.
        layout_mesh: The axis of ranks that share the layer.
    """

    layout_dims: Mapping[str, int]
    layout_mesh: DeviceMesh

    @uncompiled
    def forward(self, *args: Any, **kwargs: Any) -> Any:
        """As the module does."""
        leaves, spec = flatten((args, kwargs))
        args, kwargs = unflatten([_replicated(leaf, self.layout_mesh) for leaf in leaves], spec)
        with self._placed():
            result = super().forward(*args, **kwargs)  # type: ignore[misc]
        leaves, spec = flatten(result)
        return unflatten([full_tensor(leaf) for leaf in leaves], spec)

    @contextmanager
    def _placed(self) -> Iterator[None]:
        """Inside, the code finds DTensors under the names of parameters and buffers."""
        assert isinstance(self, nn.Module)
        shown: list[tuple[nn.Module, str]] = []
        buffers: list[tuple[nn.Module, str, Tensor, Tensor]] = []
        for part in self.modules():
            for name, parameter in part._parameters.items():
                if parameter is None:
                    continue
                if part is self and name in self.layout_dims:
                    placements = [Shard(self.layout_dims[name])]
                    placed = DTensor.from_local(shard_of(parameter), self.layout_mesh, placements, run_check=False)
                else:
                    placed = _replicated(parameter, self.layout_mesh)
                vars(part)[name] = placed  # found before what the module itself keeps under this name
                shown.append((part, name))
            for name, buffer in part._buffers.items():  # which its code may set anew, and read again
                if buffer is not None:
                    kept = self._kept(part, name, buffer) if part is self and name in self.layout_dims else buffer
                    part._buffers[name] = shared = _replicated(kept, self.layout_mesh)
                    buffers.append((part, name, kept, shared))
        made: list[tuple[nn.Module, str, Tensor | None]] = []
        try:
            yield
        finally:
            for part, name in shown:
                del vars(part)[name]
            for part, name, kept, shared in buffers:
                value = part._buffers.get(name)
                if value is not shared:
                    made.append((part, name, value))
                part._buffers[name] = kept  # in whose memory the other one lies
        for part, name, value in made:
            part._buffers[name] = self._kept(part, name, value)

    def _kept(self, part: Any, name: str, value: Any) -> Any:
        """A buffer as it lies between calls: this rank's part of one that the plan divides, else all of it.

        Where the user's code puts a tensor in its place, that may be whole, or have a shape that cannot be divided.
        """
        dim = self.layout_dims.get(name) if part is self and isinstance(value, Tensor) else None
        if dim is None or value.ndim <= dim or value.shape[dim] % self.layout_mesh.size():
            return full_tensor(value)
        placed = _replicated(value, self.layout_mesh)
        if placed.placements == (Shard(dim),):
            return placed
        return placed.redistribute(placements=[Shard(dim)]).clone()  # not a view, which keeps the memory of all of it


def _replicated(leaf: Any, mesh: DeviceMesh) -> Any:
    if not isinstance(leaf, Tensor) or isinstance(leaf, DTensor):
        return leaf
    return DTensor.from_local(leaf, mesh, [Replicate()], run_check=False)
