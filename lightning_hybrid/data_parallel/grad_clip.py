"""Gradient norms and clipping over all ranks of a model, each parameter counted once; detection of NaN and infinity.

`HybridStrategy` calls these functions for gradient clipping and `grad_norm()`. `trainer.gradient_functions` calls them
where the user's code calls torch's norm and clipping functions, and `trainer.debug.nonfinite_gradients` searches for
gradients that are not finite. torch's functions are not sufficient: each rank has only a part of the parameters, and
some parameters are on several ranks.

A rank *counts* a parameter if the gradient of its copy enters the norm. The functions with a `group` are collectives:
every rank of the group must call them.
"""

from __future__ import annotations

from collections.abc import Callable, Iterable, Sequence

import torch
import torch.distributed as dist
from torch import Tensor, nn
from torch.distributed import ProcessGroup
from torch.nn.utils import clip_grads_with_norm_

from lightning_hybrid.distributed.dtensor import local_gradient, local_view
from lightning_hybrid.torch_internals import foreach_norm


@torch.no_grad()
def total_norm(
    parameters: Iterable[nn.Parameter],
    norm_type: float = 2.0,
    *,
    group: ProcessGroup | None = None,
    counts: Callable[[nn.Parameter], bool] = lambda parameter: True,
    device: torch.device | None = None,
) -> Tensor:
    r"""Return the norm of the gradients of a model whose parameters are distributed over a group.

    .. math:: \lVert g \rVert_p = \bigl\lVert (\lVert g_1 \rVert_p, \ldots, \lVert g_n \rVert_p) \bigr\rVert_p

    The norm of a vector is the norm of the norms of its parts. Ranks gather these norms in one collective, and all
    ranks get bitwise equal results. (A sum of powers would not work for every ``norm_type``.) The host does not wait
    for the device.

    Args:
        parameters: This rank's parameters, possibly none. Every rank of the group must call this function.
        norm_type: The exponent p > 0, or ``float("inf")``.
        group: The ranks that together hold the model; ``None`` if this rank holds all of it.
        counts: Returns True if this rank counts a parameter. Exactly one copy of each parameter must be counted.
        device: The device for communication, required if a rank may have no gradient. Default: the first gradient's
            device.

    Returns:
        A float64 scalar on ``device``. The norm of each gradient is computed in float32 or higher precision.
    """
    # Each rank counts its shard of a sharded parameter.
    local = [local_gradient(parameter) for parameter in parameters if counts(parameter)]
    gradients = [gradient for gradient in local if gradient is not None and gradient.numel() > 0]
    if device is None:
        device = gradients[0].device if gradients else torch.device("cpu")
    norms = [each.to(device, torch.float64) for each in _norms(gradients, norm_type)]
    norm = _norm(torch.cat(norms) if norms else torch.zeros(1, dtype=torch.float64, device=device), norm_type)
    if group is None or group.size() == 1:
        return norm
    gathered = [torch.empty_like(norm) for _ in range(group.size())]
    dist.all_gather(gathered, norm, group=group)
    return _norm(torch.stack(gathered), norm_type)


@torch.no_grad()
def parameter_norms(
    parameters: Sequence[nn.Parameter],
    norm_type: float = 2.0,
    *,
    group: ProcessGroup | None = None,
    counts: Callable[[nn.Parameter], bool] = lambda parameter: True,
    device: torch.device | None = None,
) -> list[Tensor | None]:
    """Return the gradient norm of each parameter on every rank of a group, with one collective.

    Args:
        parameters: The parameters of the whole model, in the same order on every rank. A rank must not count parameters
            that it does not hold.
        norm_type: The exponent p > 0, or ``float("inf")``.
        group: The ranks that together hold the model; ``None`` if this rank holds all of it.
        counts: Returns True if this rank counts a parameter. Exactly one copy of each parameter must be counted.
        device: The device for communication; by default the CPU.

    Returns:
        One entry for each parameter: float64 scalars on ``device``; ``None`` for a parameter without a gradient on any
        rank.
    """
    # The norms, and 1 for each existing gradient.
    found = torch.zeros(2, len(parameters), dtype=torch.float64, device=device)
    for index, parameter in enumerate(parameters):
        gradient = local_gradient(parameter) if counts(parameter) else None
        if gradient is not None:
            found[1, index] = 1
            if gradient.numel():
                found[0, index] = _norms([gradient], norm_type)[0][0]
    gathered = [found]
    if group is not None and group.size() > 1:
        gathered = [torch.empty_like(found) for _ in range(group.size())]
        dist.all_gather(gathered, found, group=group)
    every = torch.stack(gathered)
    norms, has_gradient = torch.linalg.vector_norm(every[:, 0], norm_type, dim=0), every[:, 1].sum(0).tolist()
    return [norm if has else None for norm, has in zip(norms, has_gradient, strict=True)]


@torch.no_grad()
def clip_by_total_norm(
    parameters: Iterable[nn.Parameter],
    max_norm: float,
    norm_type: float = 2.0,
    *,
    group: ProcessGroup | None = None,
    counts: Callable[[nn.Parameter], bool] = lambda parameter: True,
    device: torch.device | None = None,
) -> Tensor:
    """Scale this rank's gradients in place, so that the norm over the group is at most ``max_norm``.

    Every rank of the group must call this.

    Args:
        parameters: This rank's parameters, counted or not, because every copy of a parameter is scaled.
        max_norm: The largest norm.
        norm_type: The exponent p > 0, or ``float("inf")``.
        group: The ranks that together hold the model; ``None`` if this rank holds all of it.
        counts: Returns True if this rank counts a parameter. Exactly one copy of each parameter must be counted.
        device: The device for communication, required if a rank may have no gradient. Default: the first gradient's
            device.

    Returns:
        The norm before clipping, as in :func:`total_norm`.
    """
    parameters = list(parameters)
    norm = total_norm(parameters, norm_type, group=group, counts=counts, device=device)
    # One call per dtype, with a norm of that dtype, for two reasons: `foreach` is fast only then, and copies of a
    # parameter are scaled by the same factor, whatever else their ranks hold. For half precision, the norm is float32,
    # because a half-precision factor would be inaccurate.
    for dtype in dict.fromkeys(parameter.dtype for parameter in parameters):
        alike = [local_view(parameter) for parameter in parameters if parameter.dtype == dtype]
        clip_grads_with_norm_(alike, max_norm, norm.to(_norm_dtype(dtype)))
    return norm


@torch.no_grad()
def find_nonfinite(parameters: Iterable[nn.Parameter]) -> list[tuple[list[nn.Parameter], Tensor]]:
    """Find the gradients of this rank that are not finite, on their device, so that the host does not wait.

    The test uses sums, because a sum is not finite if a summand is not. A search for the maximum takes 30 times as long
    on a CPU.

    Args:
        parameters: This rank's parameters. Sparse gradients are skipped. A sharded parameter counts with the gradient
            of its shard.

    Returns:
        For each device and dtype, the parameters with a gradient, and a flag for each of them, in a bool tensor on the
        device: True if the gradient is not finite.
    """
    alike: dict[tuple[torch.device, torch.dtype], tuple[list[nn.Parameter], list[Tensor]]] = {}
    for parameter in parameters:
        gradient = local_gradient(parameter)
        if gradient is not None and gradient.numel() > 0 and gradient.layout is torch.strided:
            of_kind = alike.setdefault((gradient.device, gradient.dtype), ([], []))
            of_kind[0].append(parameter)
            of_kind[1].append(gradient)
    return [(owners, ~_sums(gradients).isfinite()) for owners, gradients in alike.values()]


def _sums(gradients: Sequence[Tensor]) -> Tensor:
    """Return the sum of each gradient, or of its absolute values; all gradients have one device and dtype."""
    if gradients[0].device.type != "cpu" or gradients[0].dtype.is_complex:
        return torch.cat(_norms(gradients, 1.0))  # one kernel; on a CPU, it takes ten times as long as sums
    return torch.stack([gradient.sum(dtype=_norm_dtype(gradient.dtype)) for gradient in gradients])


def _norm_dtype(dtype: torch.dtype) -> torch.dtype:
    """Return the dtype for norms, which is at least float32, because squares of float16 numbers overflow."""
    return torch.float64 if dtype in (torch.float64, torch.complex128) else torch.float32


def _norms(gradients: Sequence[Tensor], norm_type: float) -> list[Tensor]:
    """Return the norms of the gradients, in one tensor for each device and dtype."""
    # This uses one kernel for many tensors, if torch has it. `get_total_norm` does, too, but rounds to the gradients'
    # dtype.
    norms: list[Tensor] = []
    for device, dtype in dict.fromkeys((gradient.device, gradient.dtype) for gradient in gradients):
        alike = [gradient for gradient in gradients if gradient.device == device and gradient.dtype == dtype]
        if dtype.is_complex:
            alike = [gradient.abs() for gradient in alike]
        if foreach_norm is not None:
            each = foreach_norm(alike, norm_type, dtype=_norm_dtype(dtype))
        else:
            each = [torch.linalg.vector_norm(gradient, norm_type, dtype=_norm_dtype(dtype)) for gradient in alike]
        norms.append(torch.stack(list(each)))
    return norms


def _norm(values: Tensor, norm_type: float) -> Tensor:
    norm: Tensor = torch.linalg.vector_norm(values, norm_type)
    return norm
