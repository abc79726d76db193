"""Parameters that are sharded over ranks (DTensors), from the view of one rank: its shard, and the gradient of it."""

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
REPLICAS = "data_parallel"  # the axis, the last one where replicas shard a tensor


def copy_attributes(old: Tensor, new: Tensor) -> None:
    """Give a tensor the attributes of the one whose place it takes.

    They are the user's, such as `no_weight_decay`, by which optimizers' parameter groups are chosen. Only torch's own
    mark of a parameter stays behind: what takes the place need not be one.
    """
    vars(new).update({name: value for name, value in vars(old).items() if name != PARAMETER_MARK})


@contextmanager
def moving(module: nn.Module | None) -> Iterator[None]:
    """Around a move of a module: torch loses marks such as `no_weight_decay`, and cannot swap gradients in a graph.

    A gradient is in a graph where a hook has scaled it by the norm of its parameter.
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
    """Whether ranks hold different parts of this tensor."""
    return isinstance(tensor, DTensor) and any(not placement.is_replicate() for placement in tensor.placements)


def is_in_blocks(tensor: object) -> bool:
    """Whether ranks hold parts of each block of this tensor, as of a packed projection."""
    return isinstance(tensor, DTensor) and _in_blocks(tensor.placements)


def _in_blocks(placements: Sequence[Placement]) -> bool:
    return any(getattr(placement, "split_factor", 1) > 1 for placement in placements)


def is_zero_sharded(tensor: object) -> bool:
    """Whether replicas hold different parts of this tensor."""
    return isinstance(tensor, DTensor) and (tensor.device_mesh.mesh_dim_names or ("",))[-1] == REPLICAS


def is_tensor_parallel(tensor: object) -> bool:
    """Whether ranks that share a layer hold different parts of this tensor, whatever replicas do."""
    if not isinstance(tensor, DTensor):
        return False
    axes = tensor.device_mesh.mesh_dim_names or ("",) * tensor.device_mesh.ndim
    return any(
        axis != REPLICAS and not placement.is_replicate()
        for axis, placement in zip(axes, tensor.placements, strict=True)
    )


def is_first_copy(tensor: Tensor) -> bool:
    """Whether this rank is the first of the tensor-parallel ranks that hold the same part of this DTensor."""
    assert isinstance(tensor, DTensor)
    coordinate = tensor.device_mesh.get_coordinate() or ()
    axes = tensor.device_mesh.mesh_dim_names or ("",) * tensor.device_mesh.ndim
    placements = zip(axes, tensor.placements, coordinate, strict=True)
    return all(rank == 0 for axis, placement, rank in placements if axis != REPLICAS and placement.is_replicate())


def to_local(tensor: Tensor) -> Tensor:
    """What this rank holds of a tensor, sharing memory, without a graph; of a plain tensor, all."""
    if not isinstance(tensor, DTensor):
        return tensor.detach()
    with torch.no_grad():
        return tensor.to_local()


def uncompiled(function: _F) -> _F:
    """The same, which runs as it is where a compiled layer (`layer.compile()`) calls it, between compiled parts.

    What meets a parameter that is a DTensor does: dynamo cannot read one that falls into blocks, and of others keeps
    references for which their module cannot be moved any more.
    """
    left_out: _F = torch.compiler.disable(function)  # type: ignore[no-untyped-call]
    return left_out


def shard_of(parameter: Any) -> Any:
    """The shard of a parameter, in the graph; what is not sharded (or ``None``) as it is.

    The same as `parameter.to_local()`, which finds out anew each time, and for each gradient, how the parameter is
    sharded: that takes as long as a small layer.
    """
    if not isinstance(parameter, DTensor):
        return parameter
    return _Shard.apply(parameter) if _is_direct(parameter) else parameter.to_local()  # type: ignore[no-untyped-call]


class _Shard(torch.autograd.Function):
    """From a DTensor to this rank's shard; its gradient is sharded as it is."""

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
    """Whether this version of torch lets a DTensor be made from what it keeps to itself: tried at the first one."""
    if not _DIRECT:
        try:
            made = _from_local(dtensor_shard(parameter).detach(), dtensor_spec(parameter))
            _DIRECT.append(made.placements == parameter.placements and made.shape == parameter.shape)
        except Exception:  # names are other ones, or mean something else
            _DIRECT.append(False)
    return _DIRECT[0]


_DIRECT: list[bool] = []  # what was found, once it has been tried


@contextmanager
def whole_numbers() -> Iterator[None]:
    """Inside, a number that is read from a DTensor, as by `float(p.norm())`, is that of all its ranks.

    Torch reads this rank's part of a sum. All ranks that share the tensor must read it. Arrays are refused with what to
    use. In a version of torch that keeps its handlers elsewhere, numbers stay what they are.

    Raises:
        WrongUseError: If an array or a list is made from a DTensor that ranks share.
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
    """Inside, blocks of a packed projection over three axes stay as they are.

    Before the first operation of a kind torch compares the costs of all layouts that its operands may be brought into.
    Of such blocks that takes it a minute.
    """
    costs, in_blocks = dtensor_costs(), strided_shard()
    if costs is None or in_blocks is None:  # then torch takes its time
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
    """What this rank holds of a parameter's gradient, sharing memory."""
    gradient = parameter.grad
    return to_local(gradient) if isinstance(gradient, DTensor) else gradient


def give_gradient(parameter: Tensor, gradient: Tensor) -> None:
    """Make a tensor of the shape of this rank's shard the parameter's gradient."""
    if isinstance(parameter, DTensor):
        gradient = _like(gradient, parameter)
    parameter.grad = gradient


def local_view(parameter: Tensor) -> Tensor:
    """A plain tensor whose memory, and whose gradient's memory, are those of this rank's shard."""
    if not isinstance(parameter, DTensor):
        return parameter
    view = to_local(parameter).detach()
    view.grad = local_gradient(parameter)
    return view


def redistribute_grad(parameter: Tensor) -> None:
    """Give the gradient the placements of its parameter.

    Layers that the user has sharded with styles of torch may leave partial sums, or gradients sharded another way.
    Every rank of the parameter's mesh must call this.
    """
    gradient = parameter.grad
    if not isinstance(gradient, DTensor):
        return
    if not isinstance(parameter, DTensor):
        parameter.grad = gradient.full_tensor()
    elif gradient.placements != parameter.placements:
        parameter.grad = gradient.redistribute(placements=parameter.placements)


def distribute_like(value: Any, parameter: Tensor) -> Any:
    """A full tensor sharded as a parameter of the same shape is; anything else as it is.

    Every rank has the full tensor, and keeps its shard, in memory of its own: a view would keep all of it.
    """
    if not isinstance(parameter, DTensor) or not isinstance(value, Tensor) or isinstance(value, DTensor):
        return value
    if value.shape != parameter.shape:
        return value
    if is_zero_sharded(parameter) and isinstance(placement := parameter.placements[-1], Shard):
        part: Any = value.to(parameter.device)
        if parameter.device_mesh.ndim > 1:
            part = _distribute(part, _without_replicas(parameter), parameter.placements[:-1]).to_local()
        shards = part.chunk(parameter.device_mesh.size(-1), placement.dim)
        rank = parameter.device_mesh.get_local_rank(REPLICAS)
        own = shards[rank] if rank < len(shards) else part.narrow(placement.dim, 0, 0)
        return _like(_copied(own), parameter)
    shard = _distribute(value.to(parameter.device), parameter.device_mesh, parameter.placements)
    return from_shard(_copied(to_local(shard)), shard.device_mesh, shard.placements, value)


def _copied(tensor: Tensor) -> Tensor:
    return tensor.clone(memory_format=torch.contiguous_format)


def _distribute(value: Tensor, mesh: DeviceMesh, placements: Sequence[Placement]) -> DTensor:
    full = DTensor.from_local(value, mesh, [Replicate()] * mesh.ndim, run_check=False)
    try:
        return full.redistribute(placements=placements)
    except ValueError:  # torch 2.11 does not make blocks
        if not _in_blocks(placements):
            raise
        return DTensor.from_local(_own_blocks(value, mesh, placements), mesh, placements, run_check=False)


def _own_blocks(value: Tensor, mesh: DeviceMesh, placements: Sequence[Placement]) -> Tensor:
    """What this rank has of a full tensor, a view where that can be; dimensions are divided evenly."""
    for axis, placement in enumerate(placements):
        if placement.is_replicate():
            continue
        dim, blocks = placement.dim, getattr(placement, "split_factor", 1)  # type: ignore[attr-defined]
        blockwise = value.unflatten(dim, (blocks, -1))  # type: ignore[no-untyped-call]
        value = blockwise.chunk(mesh.size(axis), dim + 1)[mesh.get_local_rank(axis)].flatten(dim, dim + 1)
    return value


def _like(local: Tensor, tensor: DTensor) -> DTensor:
    """A tensor that is sharded as another one of the same shape is."""
    if _is_direct(tensor):
        return _from_local(local, dtensor_spec(tensor))
    return from_shard(local, tensor.device_mesh, tensor.placements, tensor)


def from_shard(local: Tensor, mesh: DeviceMesh, placements: Sequence[Placement], full: Tensor) -> DTensor:
    """A DTensor of this rank's shard, with the shape and strides of another tensor, which may be on the meta device.

    Its dimensions are divided in the order of the mesh's axes. Where torch finds blocks (of a packed projection, over
    the tensor-parallel ranks) before another shard of the same dimension (the rows of a replica) it would take them for
    a sign of another order, and `full_tensor()` would fail.
    """
    made = DTensor.from_local(local, mesh, placements, run_check=False, shape=full.shape, stride=full.stride())
    if not _is_direct(made) or not getattr(dtensor_spec(made), BLOCKS_ARE_ORDER, False):
        return made
    return _from_local(local, replace(dtensor_spec(made), **{BLOCKS_ARE_ORDER: False}))


def flatten_blocks(blockwise: DTensor, dim: int) -> Tensor:
    """Join a dimension of blocks with the one behind it, of which ranks have parts.

    Args:
        blockwise: The tensor.
        dim: The dimension of the blocks.
    """
    try:
        values: Tensor = blockwise.flatten(dim, dim + 1)  # torch itself finds out the placement
    except RuntimeError:  # not before torch 2.12, which has it all the same
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
    """All of a tensor that is sharded: a collective; anything else as it is."""
    if not isinstance(value, DTensor):
        return value
    there: Any = value.to(value.device_mesh.device_type)  # after a run it may lie on the host
    if not is_zero_sharded(value) or value.placements[-1].is_partial():
        return _gather(there)
    local = all_gather_zero(there)
    if value.device_mesh.ndim == 1:
        return local
    return _gather(from_shard(local, _without_replicas(value), value.placements[:-1], value))


def _gather(tensor: DTensor) -> Tensor:
    """All of a tensor, by torch's rules."""
    kind = tensor.device_mesh.device_type
    if kind != "cpu" and device_backends(tensor.device_mesh.get_group(0)).get(kind) == "gloo":
        # With tensors of a device both ranks ended (SIGSEGV, torch 2.11): it seems that gloo reads them as the host's.
        on_host: Any = tensor.cpu()
        return _gather_there(on_host).to(tensor.device)
    return _gather_there(tensor)


def _gather_there(tensor: DTensor) -> Tensor:
    try:
        return tensor.full_tensor()
    except ValueError:  # torch 2.11 forgets with every operation that blocks are no order
        if not _in_blocks(tensor.placements) or (tensor.requires_grad and torch.is_grad_enabled()):
            raise
        spec = replace(dtensor_spec(tensor), **{BLOCKS_ARE_ORDER: False})
        return _from_local(to_local(tensor), spec).full_tensor()


def _without_replicas(tensor: DTensor) -> DeviceMesh:
    """The axes over which a tensor is sharded beside the replicas."""
    names = tensor.device_mesh.mesh_dim_names or ()
    return tensor.device_mesh[names[:-1]]


def all_gather_zero(value: Any) -> Tensor:
    """What this rank would have if replicas had not sharded a tensor: a collective of the replicas.

    By our own rule of who has which rows: torch's does not know that a layer's part of them may be any.
    """
    mesh, placement = value.device_mesh, value.placements[-1]
    local = to_local(value.to(mesh.device_type))
    if not isinstance(placement, Shard):
        return local
    dim, group = placement.dim, mesh.get_group(REPLICAS)
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
    """Let this rank's shard lie elsewhere, with the same values.

    Returns:
        Whether this version of torch allows it.
    """
    if not _is_direct(parameter) or dtensor_shard(parameter).shape != local.shape:
        return False
    set_dtensor_shard(parameter, local)
    return True


def put_data(parameter: Any, local: Tensor) -> None:
    """Let a tensor of another dtype be what this rank holds of a parameter, which stays the same object.

    Raises:
        RuntimeError: If this version of torch does not allow it.
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
    parameter.data = _from_local(local, spec)  # the dtype; what torch keeps beside it follows
    set_dtensor_shard(parameter, local, spec)
