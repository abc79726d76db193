"""A layer of any class some of whose parameters are sharded: its code runs on DTensors, and stays as it is."""

from __future__ import annotations

from collections.abc import Iterator, Mapping
from contextlib import contextmanager
from typing import Any

from torch import Tensor, nn
from torch.distributed.device_mesh import DeviceMesh
from torch.distributed.tensor import DTensor, Replicate, Shard

from lightning_hybrid.distributed.dtensor import full_tensor, is_zero_sharded, shard_of, uncompiled
from lightning_hybrid.distributed.pytree import flatten, unflatten
from lightning_hybrid.tensor_parallel.layers import ParallelLayer
from lightning_hybrid.tensor_parallel.layouts.layout import TENSOR


class PlacedLayer(ParallelLayer):
    """Plain tensors in, DTensors inside, plain tensors out.

    ::

        inputs, other parameters, buffers     B      every rank has all of them
        parameters that the plan names        S(d)
        what the code makes of them                  torch finds out, and redistributes where an operator needs it
        what it returns                       B      gathered, or summed

    Attributes:
        dims: The dimension that is divided of each sharded parameter, by its name.
    """

    dims: Mapping[str, int]

    @uncompiled
    def forward(self, *args: Any, **kwargs: Any) -> Any:
        """As the module does."""
        sharded = getattr(self, next(iter(self.dims)))
        mesh = sharded.device_mesh[TENSOR] if is_zero_sharded(sharded) else sharded.device_mesh
        leaves, spec = flatten((args, kwargs))
        args, kwargs = unflatten([_replicated(leaf, mesh) for leaf in leaves], spec)
        with self._placed(mesh):
            result = super().forward(*args, **kwargs)  # type: ignore[misc]
        leaves, spec = flatten(result)
        return unflatten([full_tensor(leaf) for leaf in leaves], spec)

    @contextmanager
    def _placed(self, mesh: DeviceMesh) -> Iterator[None]:
        """Inside, the code finds DTensors under the names of parameters and buffers."""
        assert isinstance(self, nn.Module)
        shown: list[tuple[nn.Module, str]] = []
        buffers: list[tuple[nn.Module, str, Tensor, Tensor]] = []
        for part in self.modules():
            for name, parameter in part._parameters.items():
                if parameter is None:
                    continue
                if part is self and name in self.dims:
                    placed = DTensor.from_local(shard_of(parameter), mesh, [Shard(self.dims[name])], run_check=False)
                else:
                    placed = _replicated(parameter, mesh)
                vars(part)[name] = placed  # found before what the module itself keeps under this name
                shown.append((part, name))
            for name, buffer in part._buffers.items():  # which its code may set anew, and read again
                if buffer is not None:
                    part._buffers[name] = shared = _replicated(buffer, mesh)
                    buffers.append((part, name, buffer, shared))
        made: list[tuple[nn.Module, str, Tensor | None]] = []
        try:
            yield
        finally:
            for part, name in shown:
                del vars(part)[name]
            for part, name, buffer, shared in buffers:
                value = part._buffers.get(name)
                if value is not shared:
                    made.append((part, name, value))
                part._buffers[name] = buffer  # in whose memory the other one lies
        for part, name, value in made:
            part._buffers[name] = full_tensor(value)


def _replicated(leaf: Any, mesh: DeviceMesh) -> Any:
    if not isinstance(leaf, Tensor) or isinstance(leaf, DTensor):
        return leaf
    return DTensor.from_local(leaf, mesh, [Replicate()], run_check=False)
