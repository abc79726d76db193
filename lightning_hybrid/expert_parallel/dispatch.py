"""Hooks that send each token to the ranks of its experts, and return the results.

`ModuleParallelizer` hooks the modules with experts when a run starts. The modules compute unchanged: a rank calls its
module with the tokens of all ranks of the group that chose one of its experts. Hooks are used instead of a replaced
forward, because the module may be called at any time of a run, also outside of a step.
"""

from __future__ import annotations

from collections.abc import Iterable, Sequence
from typing import Any, NamedTuple

import torch
from torch import Tensor, nn
from torch.utils.hooks import RemovableHandle

from lightning_hybrid.data_parallel.zero.param import is_shard
from lightning_hybrid.data_parallel.zero.zero import OwnHook, ZeroParameters
from lightning_hybrid.distributed.process_group import GroupRef
from lightning_hybrid.expert_parallel.exchange import Routes
from lightning_hybrid.tensor_parallel.experts import Tokens, connected


class _Sent(NamedTuple):
    """The tokens of one call that are on their way.

    Attributes:
        routes: The numbers of rows; ``None`` if nothing was sent.
        order: The order in which this rank has sent the rows of its tokens, ``(tokens * k,)``.
        shape: The number of this rank's tokens, and k.
        received: The tensors that this rank has received.
    """

    routes: Routes | None
    order: Tensor
    shape: torch.Size
    received: tuple[Tensor, ...]


class TokenDispatch:
    """The exchange of tokens around the forward of one module with experts.

    A *row* is a token for one of its experts. With 4 experts over 2 ranks, on rank 0::

        tokens  experts           rows for rank 0: a0 b1     received: a0 b1 and the rows of rank 1 for experts 0 and 1
        a       0, 3       ---->  rows for rank 1: a3 b2     module on these rows, with local experts 0 and 1
        b       1, 2       <----  results to their ranks     sum over the rows of each token

    A row is its hidden state, its expert and its weight, and the module receives rows as tokens with one expert each
    (k = 1). A rank sends each row once, so on average ``k (e - 1) / e`` rows per token leave a rank of a group of e
    ranks. The sum over a group of gradients of an expert is complete on the rank of the expert.

    A call with other parameters sends nothing: a trace or a dry run replaces the parameters of the run, and may run on
    one rank alone. Its results have the right shapes.

    Args:
        module: The module.
        parameters: The names and the values with which the module computes in a run.
        group: The ranks over which the experts are sharded.
    """

    def __init__(self, module: nn.Module, parameters: dict[str, nn.Parameter], group: GroupRef) -> None:
        self._parameters, self._group = parameters, group
        self._num_experts: int = module.num_experts  # type: ignore[assignment]
        self._num_local = self._num_experts // group().size()
        self._calls: list[_Sent] = []

    def before(self, module: nn.Module, args: tuple[Any, ...], kwargs: dict[str, Any]) -> tuple[Any, Any]:
        """Replace the tokens of this rank by the tokens of its experts."""
        hidden, index, weights, others = Tokens.of(module, args, kwargs)
        if all(module._parameters[name] is parameter for name, parameter in self._parameters.items()):
            hidden, index, weights = self._send(hidden, index, weights)
        else:
            self._calls.append(_Sent(None, index, index.shape, ()))
            index = index % self._num_local
        module.num_experts = self._num_local  # type: ignore[assignment]
        return (hidden, index, weights), others

    def after(self, module: nn.Module, args: Any, output: Any) -> Any:
        """Return the results of this rank's tokens."""
        module.num_experts = self._num_experts  # type: ignore[assignment]
        sent = self._calls.pop() if self._calls else None  # there is none if the tokens could not be sent
        if sent is None or sent.routes is None or output is None:  # the output is `None` after an exception
            return output
        if not sent.routes.num_received:
            output = connected(output, [*sent.received, *self._parameters.values()])
        (rows,) = sent.routes.back.exchange(output)
        # Not `index_add`, which saves the rows for backward and is not deterministic on CUDA.
        return rows[sent.order.argsort()].view(*sent.shape, *rows.shape[1:]).sum(1)

    def _send(self, hidden: Tensor, index: Tensor, weights: Tensor) -> tuple[Tensor, ...]:
        num_ranks, k = self._num_experts // self._num_local, index.shape[1]
        flat = index.reshape(-1)
        rank, order = flat.div(self._num_local, rounding_mode="floor").sort(stable=True)
        ends = torch.arange(num_ranks + 1, device=rank.device)
        routes = Routes.of(self._group, torch.searchsorted(rank, ends).diff())  # `bincount` would wait for the device
        local = (flat % self._num_local)[order].to(torch.int32)
        received = routes.exchange(hidden[order.div(k, rounding_mode="floor")], local, weights.reshape(-1)[order])
        self._calls.append(_Sent(routes, order, index.shape, (received[0], received[2])))
        rows, local, weight = received
        return rows, local.to(index.dtype).unsqueeze(1), weight.unsqueeze(1)


def dispatch_tokens(
    module: nn.Module, parameters: dict[str, nn.Parameter], group: GroupRef
) -> Sequence[RemovableHandle]:
    """Send the tokens of a module with experts to the ranks of the experts, until the returned hooks are removed.

    Args:
        module: The module.
        parameters: The names and the values with which the module computes in a run.
        group: The ranks over which the experts are sharded.
    """
    dispatch = TokenDispatch(module, parameters, group)
    return (
        module.register_forward_pre_hook(OwnHook(dispatch.before, runs_in_traces=True), with_kwargs=True),
        module.register_forward_hook(OwnHook(dispatch.after, runs_in_traces=True), always_call=True, prepend=True),
    )


def hook_experts(experts: Iterable[nn.Module], zero: ZeroParameters, group: GroupRef) -> None:
    """Send tokens to the ranks of their experts until the end of a run.

    Args:
        experts: The modules with experts; modules on other stages have placeholders as parameters.
        zero: Has the parameters with which the modules compute.
        group: The ranks over which the experts are sharded.
    """
    for module in experts:
        parameters = {
            name: zero.parameters[id(shard)].unsharded for name, shard in module._parameters.items() if is_shard(shard)
        }
        if parameters:
            zero.add_hooks(dispatch_tokens(module, parameters, group))
