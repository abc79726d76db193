"""Gathering of a module: every rank gets the full module from the pipeline stages and tensor-parallel shards.

`AttachedModule` calls these functions after a run, if `gather_module_on_teardown` requires it, or when the user calls
`strategy.gather_module`. `ModuleParallelizer.undo` calls :func:`gather_module`, after ZeRO has restored full
parameters. Saving and loading a checkpoint would be simpler, but would lose tied parameters, and the objects to which
optimizers and callbacks refer.

A *placeholder* replaces a tensor of another stage on this rank. The *owner* of a tensor is the pipeline rank whose
values are used. A *plan* states how tensor parallelism shards each layer.
"""

from __future__ import annotations

from typing import Any

import torch
import torch.distributed as dist
from lightning.pytorch import LightningModule
from torch import Tensor, nn
from torch.distributed.tensor import DTensor

from lightning_hybrid.data_parallel.parameter_map import ParameterMap
from lightning_hybrid.data_parallel.zero.param import is_shard
from lightning_hybrid.distributed.agreement import agree, all_gather_values
from lightning_hybrid.distributed.dtensor import copy_attributes, is_tensor_parallel, to_local
from lightning_hybrid.distributed.mesh import Mesh
from lightning_hybrid.distributed.messages.tree_broadcast import broadcast_object
from lightning_hybrid.distributed.module_names import named_tensors
from lightning_hybrid.distributed.tensor_bytes import as_bytes
from lightning_hybrid.error_codes.entry import without_code
from lightning_hybrid.memory.host import available_memory
from lightning_hybrid.pipeline_parallel.placeholders import is_placeholder, remove_placeholder_hooks
from lightning_hybrid.pipeline_parallel.stage_map import StageMap
from lightning_hybrid.tensor_parallel.plan import Plan
from lightning_hybrid.tensor_parallel.shard import unshard
from lightning_hybrid.tensor_parallel.styles import ParamSplit


def check_gathering(module: LightningModule, plan: Plan | None) -> None:
    """Check that all tensor-parallel shards of a module were made by styles of this package. Not a collective.

    Args:
        module: The user's module.
        plan: The tensor-parallel plan; ``None`` without tensor parallelism.

    Raises:
        ValueError: If a parameter was sharded by a torch style or by the user.
    """
    known = set(plan.param_splits()) if plan else set()
    others = [*(plan.torch_styles if plan else ())]
    others += [
        name
        for name, parameter in module.named_parameters(remove_duplicate=False)
        if name not in known and (is_tensor_parallel if is_shard(parameter) else _is_dtensor)(parameter)
    ]
    if others:
        raise ValueError(
            f"{type(module).__name__} cannot be gathered: {others[0]!r} was sharded by a torch parallel style or in"
            " `configure_model`, so the original layer is unknown. Save a checkpoint and load it into a new module, or"
            " shard the layer with a style name in `tensor_parallel_plan`. [LH328]"
        )


#: A node must have memory for this many copies of the module in each of its processes, because users copy and save it.
_TIMES = 3

AFTER_ERROR = (
    "The run ended with an error, so the ranks could not gather the module. Load the last checkpoint into a new module:"
    " `Model.load_from_checkpoint(path)`. This does not require the other ranks."
)
NOT_ASKED = (
    "The module stays sharded because gather_module_on_teardown=False. To gather the module, call"
    " `trainer.strategy.gather_module()` on every rank."
)


def why_not_gathered(module: LightningModule, plan: Plan | None, mesh: Mesh) -> tuple[str | None, bool]:
    """Return why a module stays sharded after a run. All ranks must call this.

    Args:
        module: The user's module, sharded.
        plan: The tensor-parallel plan; ``None`` without tensor parallelism.
        mesh: The device mesh.

    Returns:
        The reason as sentences, or ``None`` if the module is to be gathered; and True if it can be gathered. The result
        is the same on all ranks.
    """
    try:
        check_gathering(module, plan)
        own: tuple[str | None, bool] = _lack_of_memory(module, mesh), True
    except ValueError as error:
        own = without_code(error), False
    told: list[tuple[str | None, bool]] = all_gather_values(own, mesh.decision_group)
    return min(told, key=lambda each: (each[1], each[0] is None))


def _lack_of_memory(module: LightningModule, mesh: Mesh) -> str | None:
    tensors = {id(tensor): tensor for _, tensor in named_tensors(module)}.values()
    size = sum(tensor.numel() * tensor.dtype.itemsize for tensor in tensors)
    processes, available = mesh.hosts.count(mesh.hosts[dist.get_rank()]), available_memory()
    if available >= _TIMES * size * processes:
        return None
    return (
        f"{type(module).__name__} stays sharded after this run, because the node has too little free memory to gather"
        f" it (gather_module_on_teardown='auto'). The full module takes {size / 2**20:,.0f} MiB. Each of the"
        f" {processes} processes on the node needs {_TIMES} times this amount, but only {available / 2**20:,.0f} MiB"
        " are free. To save the full model, call `trainer.save_checkpoint(path, weights_only=True)` on every rank. To"
        " gather the module anyway, call `trainer.strategy.gather_module()` on every rank."
    )


def _is_dtensor(tensor: object) -> bool:
    return isinstance(tensor, DTensor)


class RefusedStep:
    """The training step and the evaluation step of a run after its module was gathered: each call raises an error.

    Attributes:
        has_gradients: As for the training steps; always False.
    """

    has_gradients = False

    def __call__(self, *arguments: Any, **options: Any) -> Any:
        """Raise an error.

        Raises:
            RuntimeError: Always.
        """
        raise RuntimeError(
            "`strategy.gather_module()` was called during the run, which cannot continue with the full module. Call it"
            " after the run. The next run shards the module again. [LH329]"
        )

    backward = __call__


@torch.no_grad()
def gather_module(module: LightningModule, parameters: ParameterMap, plan: Plan | None) -> None:
    """Give every rank all values as ordinary parameters and buffers, and restore the original classes of layers.

    All ranks must call this. Tensors are gathered one by one, so the extra memory is one tensor. Tied parameters, extra
    attributes, `requires_grad`, and tensor objects that are complete on this rank are kept.

    Args:
        module: The user's module, sharded by stages and tensor parallelism, but not by ZeRO.
        parameters: The places of its tensors.
        plan: The tensor-parallel plan; ``None`` without tensor parallelism.

    Raises:
        ValueError: If a layer was not sharded by a plan of this package; on every rank.
    """
    agree(lambda: check_gathering(module, plan))
    stage_map, mesh = parameters.stage_map, parameters.mesh
    tensors, first = parameters.tensors(), parameters.first_names()
    owners = parameters.owners(tensors)
    divisions = plan.param_splits() if plan else {}
    names: dict[str, list[str]] = {}
    for name in owners:
        names.setdefault(first[name], []).append(name)
    buffers: dict[int, tuple[Tensor, Tensor]] = {}  # by placeholder, so that tied buffers stay tied
    for several in names.values():
        tensor = tensors[several[0]]
        division = next((divisions[name] for name in several if name in divisions), None)
        holders = set().union(*(stage_map.ranks_of(name) for name in several))
        is_everywhere = division is None and len(holders) == mesh.sizes.pipeline
        if is_everywhere and isinstance(tensor, nn.Parameter):
            continue
        value = _full_value(tensor, division, owners[several[0]], mesh)
        if division is None and not is_placeholder(tensor):
            if not isinstance(tensor, nn.Parameter):
                tensor.copy_(value)  # ranks may have different values in this buffer; the owner's values are used
            continue
        value = value.to(module.device)
        if isinstance(tensor, nn.Parameter):
            value = nn.Parameter(value, tensor.requires_grad)
            copy_attributes(tensor, value)
        else:
            _, value = buffers.setdefault(id(tensor), (tensor, value))
        for name in several:
            owner, _, leaf = name.rpartition(".")
            setattr(module.get_submodule(owner), leaf, value)
    if mesh.sizes.pipeline > 1:
        _share_extra_states(module, stage_map, mesh)
    if plan is not None:
        plan.undo(module)
    remove_placeholder_hooks(module)


def _full_value(tensor: Tensor, division: ParamSplit | None, stage: int, mesh: Mesh) -> Tensor:
    """Return a full tensor on the host, with the values of its owner.

    Args:
        tensor: The tensor, its shard, or its placeholder.
        division: The split of the parameter over the tensor-parallel ranks; ``None`` if it is not split.
        stage: The pipeline rank that owns the tensor.
        mesh: The device mesh.
    """
    sources = [mesh.model_group_rank(stage, rank) for rank in range(mesh.sizes.tensor)]
    if division is None:
        return _received(tensor, list(tensor.shape), sources[0], mesh)
    shape = division.local_shape(tensor.shape, mesh.sizes.tensor)
    return unshard([_received(tensor, shape, source, mesh) for source in sources], division)


def _received(tensor: Tensor, shape: list[int], source: int, mesh: Mesh) -> Tensor:
    """Return the local values of one rank of the model group, on the host: its shard or the full tensor."""
    group = mesh.control_group
    if group.rank() == source:
        value = to_local(tensor).cpu().contiguous()
    else:
        value = torch.empty(shape, dtype=tensor.dtype, device="cpu")
    if value.numel():
        dist.broadcast(as_bytes(value), group=group, group_src=source)
    return value


def _share_extra_states(module: nn.Module, stage_map: StageMap, mesh: Mesh) -> None:
    """Send the extra states of layers (`get_extra_state`) from the last stage that has run them to the other stages."""
    for name, layer in module.named_modules():
        if type(layer).get_extra_state is nn.Module.get_extra_state:
            continue
        ranks = stage_map.ranks_of(name)
        state = layer.get_extra_state() if mesh.pipeline_rank in ranks else None
        state = broadcast_object(state, mesh.model_group_rank(max(ranks), 0), mesh.control_group)
        if mesh.pipeline_rank not in ranks:
            layer.set_extra_state(state)
