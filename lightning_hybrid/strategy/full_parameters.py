"""Full parameters on every rank inside a context, like FSDP's `summon_full_params`.

`HybridStrategy.full_parameters` makes a :class:`FullParameters` for each context. `gather_module` does not serve in a
hook: it gives up the shards, so the run cannot continue after it. The parameters here are temporary, and the shards and
placeholders return at the end of the context.

A *placeholder* replaces a parameter of another stage on this rank. *Owners* of a parameter are the modules that
register it, each with the attribute name.
"""

from __future__ import annotations

from collections.abc import Callable, Iterator
from contextlib import AbstractContextManager, contextmanager
from typing import Any

import torch
import torch.distributed as dist
from torch import Tensor, nn

from lightning_hybrid.data_parallel.broadcast import broadcast_tensors
from lightning_hybrid.data_parallel.parameter_map import ParameterMap
from lightning_hybrid.data_parallel.zero.param import find_owners, full_parameter, set_parameter
from lightning_hybrid.distributed.agreement import agree, all_gather_values
from lightning_hybrid.distributed.dtensor import distribute_like, full_tensor, give_gradient, local_gradient, to_local
from lightning_hybrid.distributed.failure import WrongUseError
from lightning_hybrid.distributed.mesh import Mesh
from lightning_hybrid.distributed.messages.tree_broadcast import broadcast_object
from lightning_hybrid.pipeline_parallel.placeholders import is_placeholder

IN_STEP = (
    "`full_parameters` was entered in a step, after ZeRO had gathered the parameters of some layers. Enter it in a hook"
    " instead, such as `on_train_batch_end` or, with automatic optimization, `on_before_optimizer_step`. [LH419]"
)
NOT_DIVIDED = (
    "`full_parameters` was entered before the module was sharded, while its parameters were still complete on every"
    " rank. Enter it in `configure_optimizers` or a later hook. [LH420]"
)
_CALL_TEXT = (
    "A layer was called inside `with strategy.full_parameters(...)`. There, it has its full parameters, but its forward"
    " expects only the shards of this rank. Inside this context, only read or change parameters. Call layers outside"
    " the context. [LH421]"
)


class FullParameters:
    """The parameters of a part of the module, which are complete on every rank inside :meth:`opened`.

    Creating this object, entering its context and, with `writes`, leaving the context are collectives of all ranks. All
    ranks must pass the same part.

    Args:
        root: The user's module, sharded.
        part: The module whose parameters are gathered: ``root`` or a submodule.
        parameters: The places of the module's tensors.
        mesh: The device mesh.
        device: The device of the full parameters.
        gradients: If True, the full parameters have full gradients; otherwise their ``grad`` is ``None``.

    Raises:
        ValueError: If the part has parameters that the module does not have; on every rank.
    """

    def __init__(
        self,
        root: nn.Module,
        part: nn.Module,
        parameters: ParameterMap,
        mesh: Mesh,
        device: torch.device,
        *,
        gradients: bool,
    ) -> None:
        self._part, self._mesh, self._device, self._has_gradients = part, mesh, device, gradients
        self._owners = find_owners(root)
        agree(self._check)
        names = {id(parameter): name for name, parameter in root.named_parameters()}
        first = parameters.parameter_owners()
        self._stages = {parameter: first[names[id(parameter)]] for parameter in part.parameters()}
        self._full: dict[nn.Parameter, nn.Parameter] = {}

    def _check(self) -> None:
        for name, parameter in self._part.named_parameters():
            if id(parameter) not in self._owners:
                raise ValueError(
                    f"`full_parameters` received a {type(self._part).__name__} whose parameter {name!r} does not belong"
                    " to the LightningModule. Pass a submodule of the LightningModule, or pass no module to gather all"
                    " parameters. [LH417]"
                )

    @contextmanager
    def opened(
        self, masters: Callable[[], AbstractContextManager[None]], *, writes: bool, refuses_calls: bool
    ) -> Iterator[None]:
        """Replace parameters by full parameters inside the context.

        ``masters`` returns a context in which parameters have their float32 master weights, if they have any. If
        ``writes`` is True, the values and gradients of global rank 0 are written back to all ranks, unless an exception
        leaves the context. If ``refuses_calls`` is True, calls of layers inside the context raise an error.

        Raises:
            WrongUseError: If a layer is called, or a parameter is replaced, inside the context.
        """
        with masters():
            self._gather()
        layers = self._part.modules() if refuses_calls else ()
        handles = [layer.register_forward_pre_hook(_refuse_call, prepend=True) for layer in layers]
        try:
            yield
            self._check_places()
        finally:
            for handle in handles:
                handle.remove()
            for parameter in self._full:
                set_parameter(parameter, self._owners[id(parameter)])
        if writes:
            with masters():
                self._write()

    @torch.no_grad()
    def _gather(self) -> None:
        dtypes = self._dtypes()
        by_stage: dict[int, list[Tensor]] = {}
        for (parameter, stage), (dtype, grad_dtype) in zip(self._stages.items(), dtypes, strict=True):
            full = self._full[parameter] = full_parameter(self._whole(parameter, parameter, dtype), parameter)
            by_stage.setdefault(stage, []).append(full)
            if grad_dtype is not None:
                gradient = self._whole(parameter.grad, parameter, grad_dtype)
                if grad_dtype != dtype:
                    full.grad_dtype = grad_dtype
                full.grad = gradient
                by_stage[stage].append(gradient)
        if self._mesh.sizes.pipeline > 1:
            for stage, tensors in by_stage.items():
                broadcast_tensors(tensors, self._mesh.model_group, self._mesh.model_group_rank(stage, 0))
        for parameter, full in self._full.items():
            set_parameter(full, self._owners[id(parameter)])

    def _dtypes(self) -> list[tuple[torch.dtype, torch.dtype | None]]:
        """Return the dtype of each parameter and of its gradient (``None`` without a gradient), as on its owner."""
        own = [
            None
            if is_placeholder(each)
            else (each.dtype, None if each.grad is None or not self._has_gradients else each.grad.dtype)
            for each in self._stages
        ]
        if self._mesh.sizes.pipeline == 1:
            return own  # type: ignore[return-value]
        told = all_gather_values(own, self._mesh.control_group)
        return [told[self._mesh.model_group_rank(stage, 0)][index] for index, stage in enumerate(self._stages.values())]

    def _whole(self, tensor: Tensor | None, parameter: nn.Parameter, dtype: torch.dtype) -> Tensor:
        """Return a full parameter or gradient in new memory; with arbitrary values if this rank has none."""
        if tensor is None or is_placeholder(tensor):
            return torch.empty(parameter.shape, dtype=dtype, device=self._device)
        full: Tensor = full_tensor(tensor.detach()).to(self._device)
        return full.clone(memory_format=torch.contiguous_format)

    @torch.no_grad()
    def _write(self) -> None:
        """Copy the values of rank 0's full parameters, and of their full gradients, to the shards of all ranks."""
        world = dist.group.WORLD
        assert world is not None
        broadcast_tensors((full.data for full in self._full.values()), world)
        for parameter, full in self._full.items():
            if not is_placeholder(parameter):
                to_local(parameter).copy_(to_local(distribute_like(full.detach(), parameter)))
        if not self._has_gradients:
            return
        own = [None if full.grad is None else full.grad.dtype for full in self._full.values()]
        for (parameter, full), dtype in zip(self._full.items(), broadcast_object(own, 0, world), strict=True):
            if dtype is None:
                parameter.grad = None
                continue
            gradient = torch.empty_like(full, dtype=dtype) if full.grad is None else full.grad.to(dtype)
            broadcast_tensors([gradient], world)
            if is_placeholder(parameter):
                continue
            shard, held = to_local(distribute_like(gradient, parameter)), local_gradient(parameter)
            if held is None:
                give_gradient(parameter, shard)
            else:
                held.copy_(shard)

    def _check_places(self) -> None:
        for parameter, full in self._full.items():
            for layer, name in self._owners[id(parameter)]:
                if layer._parameters.get(name) is not full:
                    raise WrongUseError(
                        f"`{type(layer).__name__}.{name}` was replaced inside `with strategy.full_parameters(...)`."
                        f" Change its values in place instead, for example with `{name}.copy_(...)` under"
                        " `torch.no_grad()`. [LH418]"
                    )


def _refuse_call(*_: Any) -> None:
    raise WrongUseError(_CALL_TEXT)
