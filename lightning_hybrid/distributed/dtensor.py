"""Functions for sharded parameters (DTensors): a rank's shard, its gradient, the full tensor, and fixes of torch.

A parameter is a DTensor if tensor parallelism or ZeRO shards it. The other packages read and write such parameters
through these functions, so that they need no case for plain tensors, and no case for a version of torch. torch's own
methods are not used everywhere, because some of them are slow (`to_local`), lose attributes (`to`), or fail for tensors
in blocks (`full_tensor`).

Terms: A tensor is *in blocks* if it consists of several weights along one dimension, such as a packed QKV weight, and
each rank has a part of each block. The *replicas* are the data-parallel ranks; ZeRO shards parameters over them.
Reading full values is a collective: every rank of the tensor's mesh must call :func:`full_tensor` or
:func:`redistribute_grad`.
"""

from __future__ import annotations

from collections.abc import Callable, Iterator, Sequence
from contextlib import contextmanager
from dataclasses import replace
from functools import partial, partialmethod
from typing import Any, TypeVar

import torch
import torch.distributed as dist
from torch import Tensor, nn
from torch.distributed import ProcessGroup
from torch.distributed.device_mesh import DeviceMesh
from torch.distributed.tensor import DTensor, Replicate, Shard
from torch.distributed.tensor.placement_types import Placement

from lightning_hybrid.distributed.failure import WrongUseError
from lightning_hybrid.distributed.process_group import device_backends
from lightning_hybrid.distributed.replaced import replaced_attributes, replaced_entries
from lightning_hybrid.torch_internals import (
    BLOCKS_ARE_ORDER,
    PARAMETER_MARK,
    dtensor_costs,
    dtensor_handlers,
    dtensor_shard,
    dtensor_spec,
    read_number,
    set_dtensor_shard,
    strided_shard,
)

_F = TypeVar("_F", bound=Callable[..., Any])
REPLICAS = "data_parallel"  # the mesh axis of the replicas, last in each mesh over which ZeRO shards
EXPERTS = "expert_parallel"  # the mesh axis of the replicas with different experts, before `REPLICAS`
_OVER_REPLICAS = {REPLICAS, EXPERTS}


def copy_attributes(old: Tensor, new: Tensor) -> None:
    """Copy the attributes of a tensor to the tensor that replaces it.

    Users set them to choose the parameter groups of an optimizer, for example `no_weight_decay`.
    torch's own mark of a parameter is not copied, because the new tensor need not be a parameter.
    """
    vars(new).update({name: value for name, value in vars(old).items() if name != PARAMETER_MARK})


@contextmanager
def moving(module: nn.Module | None) -> Iterator[None]:
    """Keep the attributes of sharded parameters while their module is moved or converted, and detach their gradients.

    When torch moves a DTensor, or changes its dtype, it loses attributes such as `no_weight_decay`. torch also fails to
    replace a gradient that has a `grad_fn`, for example after a hook has multiplied it by the norm of its parameter.

    The attributes are not restored if the code inside raises an exception.

    Args:
        module: The module; with ``None``, nothing is done.
    """
    parameters = [] if module is None else [each for each in module.parameters() if isinstance(each, DTensor)]
    for parameter in parameters:
        if parameter.grad is not None and parameter.grad.grad_fn is not None:
            parameter.grad = parameter.grad.detach()
    marks = [dict(vars(parameter)) for parameter in parameters]
    yield
    for parameter, each in zip(parameters, marks, strict=True):
        vars(parameter).update(each)


def is_sharded(tensor: object) -> bool:
    """Return True if ranks hold different parts of this tensor."""
    return isinstance(tensor, DTensor) and any(not placement.is_replicate() for placement in tensor.placements)


def is_in_blocks(tensor: object) -> bool:
    """Return True if this tensor consists of blocks, such as a packed QKV weight, and each rank has a part of each."""
    return isinstance(tensor, DTensor) and _in_blocks(tensor.placements)


def _in_blocks(placements: Sequence[Placement]) -> bool:
    return any(getattr(placement, "split_factor", 1) > 1 for placement in placements)


def is_zero_sharded(tensor: object) -> bool:
    """Return True if the mesh of this tensor includes the replicas (ZeRO)."""
    return isinstance(tensor, DTensor) and (tensor.device_mesh.mesh_dim_names or ("",))[-1] == REPLICAS


def is_tensor_parallel(tensor: object) -> bool:
    """Return True if tensor-parallel ranks hold different parts of this tensor, whether or not replicas do."""
    if not isinstance(tensor, DTensor):
        return False
    axes = tensor.device_mesh.mesh_dim_names or ("",) * tensor.device_mesh.ndim
    return any(
        axis not in _OVER_REPLICAS and not placement.is_replicate()
        for axis, placement in zip(axes, tensor.placements, strict=True)
    )


def is_first_copy(tensor: Tensor) -> bool:
    """Return True if this rank is the first of the tensor-parallel ranks that hold the same part of a DTensor.

    Args:
        tensor: The DTensor. A plain tensor is an error.
    """
    assert isinstance(tensor, DTensor)
    coordinate = tensor.device_mesh.get_coordinate() or ()
    axes = tensor.device_mesh.mesh_dim_names or ("",) * tensor.device_mesh.ndim
    placements = zip(axes, tensor.placements, coordinate, strict=True)
    return all(
        rank == 0 for axis, placement, rank in placements if axis not in _OVER_REPLICAS and placement.is_replicate()
    )


def to_local(tensor: Tensor) -> Tensor:
    """Return this rank's shard of a tensor, or a plain tensor itself, without a graph. The memory is shared."""
    if not isinstance(tensor, DTensor):
        return tensor.detach()
    with torch.no_grad():
        return tensor.to_local()


def uncompiled(function: _F) -> _F:
    """Return a function at which a compiled layer (`layer.compile()`) has a graph break, so that it runs uncompiled.

    Functions that use DTensor parameters need this. dynamo cannot read a DTensor in blocks. For other DTensors it keeps
    references, because of which the module can no longer be moved.
    """
    left_out: _F = torch.compiler.disable(function)  # type: ignore[no-untyped-call]
    return left_out


def shard_of(parameter: Any) -> Any:
    """Return this rank's shard of a parameter, differentiably. Return ``None`` and plain tensors unchanged.

    The result is the same as `parameter.to_local()`. But `to_local` determines the placements of the parameter, and of
    each gradient, at every call, which takes as long as a small layer.
    """
    if not isinstance(parameter, DTensor):
        return parameter
    return _Shard.apply(parameter) if _is_direct(parameter) else parameter.to_local()  # type: ignore[no-untyped-call]


class _Shard(torch.autograd.Function):
    """A differentiable function from a DTensor to this rank's shard. Gradients get the placements of the DTensor."""

    @staticmethod
    def forward(ctx: Any, parameter: DTensor) -> Tensor:
        ctx.spec = dtensor_spec(parameter)
        return dtensor_shard(parameter).detach()

    @staticmethod
    def backward(ctx: Any, gradient: Tensor) -> DTensor:
        return _from_local(gradient, ctx.spec)


def _from_local(local: Tensor, spec: Any) -> DTensor:
    make: Any = DTensor
    made: DTensor = make(local, spec, requires_grad=False)
    return made


def _is_direct(parameter: DTensor) -> bool:
    """Return True if this version of torch can make a DTensor from a shard and a spec. Only the first call tries it."""
    if not _DIRECT:
        try:
            made = _from_local(dtensor_shard(parameter).detach(), dtensor_spec(parameter))
            _DIRECT.append(made.placements == parameter.placements and made.shape == parameter.shape)
        except Exception:  # private names or their meaning have changed
            _DIRECT.append(False)
    return _DIRECT[0]


_DIRECT: list[bool] = []  # the result of the first call of :func:`_is_direct`


@contextmanager
def whole_numbers() -> Iterator[None]:
    """Make `float(x)` and `x.item()` of a DTensor return its full value while entered, for example of `p.norm()`.

    torch itself reads only this rank's part of a sum. Reading is a collective of all ranks of the tensor. If this
    version of torch stores its handlers elsewhere, its own reading remains. Also, `numpy()` and `tolist()` of a sharded
    DTensor raise an error.

    Raises:
        WrongUseError: If an array or a list is made from a sharded DTensor while entered.
    """

    def read(name: str, tensor: DTensor, *args: Any, **kwargs: Any) -> Any:
        if all(placement.is_replicate() for placement in tensor.placements):
            return getattr(to_local(tensor), name)(*args, **kwargs)
        raise WrongUseError(
            f"`{name}` was called on a tensor that is sharded over ranks (by tensor parallelism or ZeRO). To read"
            " parameters, use `with self.trainer.strategy.full_parameters():` on every rank. To read gradients too,"
            " pass `gradients=True`. [LH402]"
        )

    methods = {name: partialmethod(partial(read, name)) for name in ("numpy", "tolist")}
    entries = {read_number: lambda _, args, __: full_tensor(args[0]).item()}
    with replaced_entries([(dtensor_handlers() or {}, entries)]), replaced_attributes(DTensor, **methods):
        yield


@contextmanager
def keeping_blocks() -> Iterator[None]:
    """Prevent torch from redistributing a packed projection whose mesh has three or more axes, while entered.

    Before the first operation of a kind, torch compares the costs of all placements to which it could redistribute the
    operands. For such blocks the comparison takes a minute.
    """
    costs, in_blocks = dtensor_costs(), strided_shard()
    if costs is None or in_blocks is None:  # private names have changed, so the comparison stays slow
        yield
        return
    find_cost: Callable[[Any, Any], float] = costs.redistribute_cost

    def cost(current: Any, target: Any) -> float:
        if len(current.placements) < 3 or not any(isinstance(each, in_blocks) for each in current.placements):
            return find_cost(current, target)
        return 0.0 if current.placements == target.placements else _DEAR

    with replaced_attributes(costs, redistribute_cost=cost):
        yield


_DEAR = 1e9  # more than any other cost


def local_gradient(parameter: Tensor) -> Tensor | None:
    """Return this rank's shard of a parameter's gradient; ``None`` without a gradient. The memory is shared."""
    gradient = parameter.grad
    return to_local(gradient) if isinstance(gradient, DTensor) else gradient


def give_gradient(parameter: Tensor, gradient: Tensor) -> None:
    """Set the gradient of a parameter from a tensor with the shape of this rank's shard."""
    if isinstance(parameter, DTensor):
        gradient = _like(gradient, parameter)
    parameter.grad = gradient


def local_view(parameter: Tensor) -> Tensor:
    """Return a plain tensor that shares memory and gradient with this rank's shard; a plain parameter itself."""
    if not isinstance(parameter, DTensor):
        return parameter
    view = to_local(parameter).detach()
    view.grad = local_gradient(parameter)
    return view


def redistribute_grad(parameter: Tensor) -> None:
    """Redistribute a gradient to the placements of its parameter.

    If the user shards layers with styles of torch, gradients may be partial sums or have other placements. The gradient
    of a plain parameter becomes a plain tensor. Every rank of the parameter's mesh must call this.
    """
    gradient = parameter.grad
    if not isinstance(gradient, DTensor):
        return
    if not isinstance(parameter, DTensor):
        parameter.grad = gradient.full_tensor()
    elif gradient.placements != parameter.placements:
        parameter.grad = gradient.redistribute(placements=parameter.placements)


def distribute_like(value: Any, parameter: Tensor) -> Any:
    """Return a full tensor sharded like a parameter of the same shape. Return any other value unchanged.

    Every rank must pass the full tensor, because nothing is communicated. The result holds this rank's shard in its own
    memory, because a view would keep the full tensor alive.
    """
    if not isinstance(parameter, DTensor) or not isinstance(value, Tensor) or isinstance(value, DTensor):
        return value
    if value.shape != parameter.shape:
        return value
    if is_zero_sharded(parameter) and isinstance(parameter.placements[-1], Shard):
        mesh, own = parameter.device_mesh, value.to(parameter.device)
        others = _without_replicas(parameter)
        if others:
            own = to_local(_distribute(own, mesh[tuple(others)], tuple(others.values())))
        for axis, placement in _over_replicas(parameter).items():
            shards, rank = own.chunk(mesh[axis].size(), placement.dim), mesh.get_local_rank(axis)
            own = shards[rank] if rank < len(shards) else own.narrow(placement.dim, 0, 0)
        return _like(_copied(own), parameter)
    shard = _distribute(value.to(parameter.device), parameter.device_mesh, parameter.placements)
    return from_shard(_copied(to_local(shard)), shard.device_mesh, shard.placements, value)


def _copied(tensor: Tensor) -> Tensor:
    return tensor.clone(memory_format=torch.contiguous_format)


def _distribute(value: Tensor, mesh: DeviceMesh, placements: Sequence[Placement]) -> DTensor:
    full = DTensor.from_local(value, mesh, [Replicate()] * mesh.ndim, run_check=False)
    try:
        return full.redistribute(placements=placements)
    except ValueError:  # torch 2.11 cannot make blocks
        if not _in_blocks(placements):
            raise
        return DTensor.from_local(_own_blocks(value, mesh, placements), mesh, placements, run_check=False)


def _own_blocks(value: Tensor, mesh: DeviceMesh, placements: Sequence[Placement]) -> Tensor:
    """Return this rank's shard of a full tensor, as a view if possible. Sharded dimensions must divide evenly."""
    for axis, placement in enumerate(placements):
        if placement.is_replicate():
            continue
        dim, blocks = placement.dim, getattr(placement, "split_factor", 1)  # type: ignore[attr-defined]
        blockwise = value.unflatten(dim, (blocks, -1))  # type: ignore[no-untyped-call]
        value = blockwise.chunk(mesh.size(axis), dim + 1)[mesh.get_local_rank(axis)].flatten(dim, dim + 1)
    return value


def _like(local: Tensor, tensor: DTensor) -> DTensor:
    """Return a DTensor with a local shard and the placements of another DTensor of the same shape."""
    if _is_direct(tensor):
        return _from_local(local, dtensor_spec(tensor))
    return from_shard(local, tensor.device_mesh, tensor.placements, tensor)


def from_shard(local: Tensor, mesh: DeviceMesh, placements: Sequence[Placement], full: Tensor) -> DTensor:
    """Return a DTensor made from this rank's shard.

    If several mesh axes shard the same dimension, they do so in the order of the axes. For example, tensor parallelism
    shards each block of a packed projection, and then ZeRO shards the rows of the result. For such a tensor torch by
    default assumes the opposite order, and `full_tensor()` fails. This function turns this default off.

    Args:
        local: The shard.
        mesh: The mesh.
        placements: The placement for each mesh axis.
        full: A tensor with the shape and strides of the full tensor; it may be on the meta device.
    """
    made = DTensor.from_local(local, mesh, placements, run_check=False, shape=full.shape, stride=full.stride())
    if not _is_direct(made) or not getattr(dtensor_spec(made), BLOCKS_ARE_ORDER, False):
        return made
    return _from_local(local, replace(dtensor_spec(made), **{BLOCKS_ARE_ORDER: False}))


def flatten_blocks(blockwise: DTensor, dim: int) -> Tensor:
    """Join a dimension of blocks with the next dimension, which is sharded, for example ``[3, d, e]`` to ``[3 d, e]``.

    Args:
        blockwise: The tensor.
        dim: The dimension of the blocks.
    """
    try:
        values: Tensor = blockwise.flatten(dim, dim + 1)  # torch determines the placements
    except RuntimeError:  # before 2.12, torch supports these placements but cannot determine them
        in_blocks = strided_shard()

        def joined(placement: Placement) -> Placement:
            if not isinstance(placement, Shard) or placement.dim <= dim:
                return placement
            if placement.dim > dim + 1 or blockwise.shape[dim] == 1:
                return Shard(placement.dim - 1)
            made: Placement = in_blocks(dim, split_factor=blockwise.shape[dim])
            return made

        local = to_local(blockwise).flatten(dim, dim + 1)
        full = torch.empty(blockwise.shape, device="meta").flatten(dim, dim + 1)
        values = from_shard(local, blockwise.device_mesh, [joined(each) for each in blockwise.placements], full)
    return values


def full_tensor(value: Any) -> Any:
    """Return the full values of a DTensor, by a collective of its mesh. Return any other value unchanged.

    Every rank of the mesh must call this. The result is on the device of the mesh.
    """
    if not isinstance(value, DTensor):
        return value
    there: Any = value.to(value.device_mesh.device_type)  # after a run, the shard may be on the host
    if not is_zero_sharded(value) or value.placements[-1].is_partial():
        return _gather(there)
    local = all_gather_zero(there)
    others = _without_replicas(value)
    if not others:
        return local
    return _gather(from_shard(local, value.device_mesh[tuple(others)], tuple(others.values()), value))


def _gather(tensor: DTensor) -> Tensor:
    """Return the full values of a DTensor by torch's `full_tensor`."""
    kind = tensor.device_mesh.device_type
    if kind != "cpu" and device_backends(tensor.device_mesh.get_group(0)).get(kind) == "gloo":
        # With device tensors, gloo crashes (SIGSEGV, torch 2.11). It seems to read device memory as host memory.
        on_host: Any = tensor.cpu()
        return _gather_there(on_host).to(tensor.device)
    return _gather_there(tensor)


def _gather_there(tensor: DTensor) -> Tensor:
    try:
        return tensor.full_tensor()
    except ValueError:  # in torch 2.11, operations restore the default that `from_shard` turns off
        if not _in_blocks(tensor.placements) or (tensor.requires_grad and torch.is_grad_enabled()):
            raise
        spec = replace(dtensor_spec(tensor), **{BLOCKS_ARE_ORDER: False})
        return _from_local(to_local(tensor), spec).full_tensor()


def _placements(tensor: DTensor) -> dict[str, Placement]:
    """Return the placements of a tensor by the name of the mesh axis."""
    return dict(zip(tensor.device_mesh.mesh_dim_names or (), tensor.placements, strict=True))


def _over_replicas(tensor: DTensor) -> dict[str, Shard]:
    """Return the axes over which replicas shard a tensor, from the outermost on, with the placements."""
    return {
        axis: placement
        for axis, placement in _placements(tensor).items()
        if axis in _OVER_REPLICAS and isinstance(placement, Shard)
    }


def _without_replicas(tensor: DTensor) -> dict[str, Placement]:
    """Return the axes of a tensor that are not axes of replicas, with the placements."""
    return {axis: placement for axis, placement in _placements(tensor).items() if axis not in _OVER_REPLICAS}


def all_gather_zero(value: Any) -> Tensor:
    """Return the tensor that this rank would hold if replicas did not shard it; all replicas must call this.

    Shards are gathered with their sizes. torch's `full_tensor` would derive the sizes from the full shape, but replicas
    shard the rows of a tensor-parallel shard, which may have fewer rows.
    """
    mesh = value.device_mesh
    local = to_local(value.to(mesh.device_type))
    for axis, placement in reversed(_over_replicas(value).items()):
        local = _gather_shards(local, placement.dim, mesh.get_group(axis))
    return local


def _gather_shards(local: Tensor, dim: int, group: ProcessGroup) -> Tensor:
    """Return the shards of all ranks of a group, of any sizes, concatenated along a dimension."""
    size = torch.tensor([local.shape[dim]], device=local.device)
    sizes = torch.cat(_all_gather(size, group)).tolist()
    missing = list(local.shape)
    missing[dim] = max(sizes) - local.shape[dim]
    shards = _all_gather(torch.cat([local, local.new_empty(missing)], dim).contiguous(), group)
    return torch.cat([shard.narrow(dim, 0, size) for shard, size in zip(shards, sizes, strict=True)], dim)


def _all_gather(tensor: Tensor, group: ProcessGroup) -> list[Tensor]:
    tensors = [torch.empty_like(tensor) for _ in range(group.size())]
    dist.all_gather(tensors, tensor, group=group)
    return tensors


def put_local(parameter: Any, local: Tensor) -> bool:
    """Replace the memory of this rank's shard by another tensor with the same values, which may be on another device.

    Args:
        parameter: A DTensor.
        local: The other tensor.

    Returns:
        True if the memory was replaced; False, without an effect, if the shape differs from the shape of the shard, or
        if this version of torch does not support it.
    """
    if not _is_direct(parameter) or dtensor_shard(parameter).shape != local.shape:
        return False
    set_dtensor_shard(parameter, local)
    return True


def put_data(parameter: Any, local: Tensor) -> None:
    """Replace this rank's shard by a tensor of another dtype or on another device. The parameter object stays the same.

    Raises:
        RuntimeError: If the parameter is a DTensor, and this version of torch does not support that.
    """
    if not isinstance(parameter, DTensor):
        parameter.data = local
        return
    if not _is_direct(parameter):
        raise RuntimeError(
            f"torch {torch.__version__} cannot change the dtype of a sharded parameter in place. [LH135]"
        )
    spec = dtensor_spec(parameter)
    spec = replace(spec, tensor_meta=spec.tensor_meta._replace(dtype=local.dtype))
    parameter.data = _from_local(local, spec)  # sets the dtype; the next line sets private attributes
    set_dtensor_shard(parameter, local, spec)
