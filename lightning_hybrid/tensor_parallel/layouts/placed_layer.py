"""A layer of any class with sharded parameters or buffers: its code runs on DTensors, and stays as it is."""

from __future__ import annotations

from collections.abc import Iterator, Mapping
from typing import Any

from torch import Tensor, nn
from torch.distributed.device_mesh import DeviceMesh
from torch.distributed.tensor import DTensor, Replicate, Shard

from lightning_hybrid.distributed.dtensor import full_tensor, shard_of, uncompiled
from lightning_hybrid.distributed.pytree import flatten, unflatten
from lightning_hybrid.distributed.replaced import replaced_entries
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
        buffers: dict[tuple[nn.Module, str], Any] = {}
        with replaced_entries(self._placed(buffers)):
            result = super().forward(*args, **kwargs)  # type: ignore[misc]
            made = {(part, name): part._buffers.get(name) for part, name in buffers}
        for (part, name), value in made.items():
            if value is not buffers[part, name]:
                part._buffers[name] = self._kept(part, name, value)
        leaves, spec = flatten(result)
        return unflatten([full_tensor(leaf) for leaf in leaves], spec)

    def _placed(self, buffers: dict[tuple[nn.Module, str], Any]) -> Iterator[tuple[dict[str, Any], dict[str, Any]]]:
        """Yield the tables in which the code finds parameters and buffers, with DTensors under their names.

        Args:
            buffers: Gets the DTensor of each buffer, by its module and name: the code may put another in its place.
        """
        assert isinstance(self, nn.Module)
        for part in self.modules():
            shown: dict[str, Any] = {}
            for name, parameter in part._parameters.items():
                if parameter is None:
                    continue
                if part is self and name in self.layout_dims:
                    placements = [Shard(self.layout_dims[name])]
                    shown[name] = DTensor.from_local(shard_of(parameter), self.layout_mesh, placements, run_check=False)
                else:
                    shown[name] = _replicated(parameter, self.layout_mesh)
            yield vars(part), shown  # found before what the module itself keeps under this name
            for name, buffer in part._buffers.items():
                if buffer is not None:
                    kept = self._kept(part, name, buffer) if part is self and name in self.layout_dims else buffer
                    part._buffers[name] = kept
                    buffers[part, name] = _replicated(kept, self.layout_mesh)  # in whose memory it lies
            yield part._buffers, {name: buffers[part, name] for name in part._buffers if (part, name) in buffers}

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
