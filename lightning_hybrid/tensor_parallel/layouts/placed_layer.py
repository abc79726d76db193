"""A layer of any class with sharded parameters or buffers. Its unchanged code runs on DTensors.

A plan entry such as ``"layer.weight": "S(0)"`` (a layout) gives the module of the parameter the internal style
``"layout"``, and `Plan.apply` changes its class to :class:`PlacedLayer`. Layers with a style compute on plain shards
instead, which is faster, but supports only the classes of `layers`.
"""

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
    """A layer whose inputs and outputs are plain tensors, and whose code computes with DTensors.

    ::

        inputs, other parameters, other buffers      B       every rank has the full tensor
        parameters and buffers named in the plan     S(d)
        intermediate results                                 torch finds the placements, and redistributes if needed
        outputs                                      B       gathered or summed

    Attributes:
        layout_dims: The split dimension of each sharded parameter and buffer of the layer itself, by name. Parameters
            and buffers of its submodules are replicated.
        layout_mesh: The tensor-parallel axis.
    """

    layout_dims: Mapping[str, int]
    layout_mesh: DeviceMesh

    @uncompiled
    def forward(self, *args: Any, **kwargs: Any) -> Any:
        """Run the module. All ranks must call it: operators on DTensors communicate, and outputs are gathered.

        Buffers that the code has replaced are stored again, as shards if the plan splits them.
        """
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
        """Yield the dictionaries in which the code finds parameters and buffers, with the DTensors by name.

        Args:
            buffers: Is filled with the DTensor of each buffer, by module and name. The code may replace the buffer.
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
            yield vars(part), shown  # attributes of the module are found before its parameters
            for name, buffer in part._buffers.items():
                if buffer is not None:
                    kept = self._kept(part, name, buffer) if part is self and name in self.layout_dims else buffer
                    part._buffers[name] = kept
                    buffers[part, name] = _replicated(kept, self.layout_mesh)  # shares the memory
            yield part._buffers, {name: buffers[part, name] for name in part._buffers if (part, name) in buffers}

    def _kept(self, part: Any, name: str, value: Any) -> Any:
        """Return a buffer as it is stored between calls: this rank's shard if the plan splits it, else the full tensor.

        The user's code can replace a buffer with a tensor that is not sharded, or that has a shape that cannot be
        split. A tensor that cannot be split is stored as a full tensor.
        """
        dim = self.layout_dims.get(name) if part is self and isinstance(value, Tensor) else None
        if dim is None or value.ndim <= dim or value.shape[dim] % self.layout_mesh.size():
            return full_tensor(value)
        placed = _replicated(value, self.layout_mesh)
        if placed.placements == (Shard(dim),):
            return placed
        return placed.redistribute(placements=[Shard(dim)]).clone()  # a view would keep the memory of the full tensor


def _replicated(leaf: Any, mesh: DeviceMesh) -> Any:
    if not isinstance(leaf, Tensor) or isinstance(leaf, DTensor):
        return leaf
    return DTensor.from_local(leaf, mesh, [Replicate()], run_check=False)
