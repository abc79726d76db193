"""Gradient norm and clipping over the model group, each parameter counted once; and what is not finite on a rank."""

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
    r"""The norm of the gradients of a model whose parameters are spread over a group.

    .. math:: \lVert g \rVert_p = \bigl\lVert (\lVert g_1 \rVert_p, \ldots, \lVert g_n \rVert_p) \bigr\rVert_p

    The norm of a vector is the norm of the norms of its pieces. Ranks exchange theirs in one collective (gathered, not
    summed as powers, so that every ``norm_type`` takes the same way), and all of them get the same bits. The host does
    not wait for the device.

    Args:
        parameters: This rank's parameters; none is fine, but every rank of the group must call.
        norm_type: The exponent p > 0, or ``float("inf")``.
        group: The ranks that together hold the model; ``None`` if this one holds all of it.
        counts: Whether this rank counts a parameter. Of copies of a parameter, one must be counted.
        device: Where ranks communicate; needed where a rank may have no gradient. Default: where the first gradient is.

    Returns:
        A float64 scalar on ``device``. Norms of single gradients are taken in float32 at least.
    """
    # Of a sharded parameter each rank counts its shard.
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
    """Return the gradient norm of each parameter, on every rank of a group, by one collective.

    Args:
        parameters: The parameters of the whole model, in the same order on every rank; a rank does not count those it
            does not hold.
        norm_type: The exponent p > 0, or ``float("inf")``.
        group: The ranks that together hold the model; ``None`` if this one holds all of it.
        counts: Whether this rank counts a parameter. Of copies of a parameter, one must be counted.
        device: Where ranks communicate; needed where a rank may have no gradient.

    Returns:
        Scalars in float64 on ``device``; ``None`` for a parameter without a gradient on any rank.
    """
    found = torch.zeros(2, len(parameters), dtype=torch.float64, device=device)  # norms, and whether there is one
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
    """Scales this rank's gradients, in place, such that the norm over the group is at most ``max_norm``.

    Args:
        parameters: This rank's parameters, counted or not: every copy of a parameter is scaled.
        max_norm: The largest norm.
        norm_type: The exponent p > 0, or ``float("inf")``.
        group: The ranks that together hold the model; ``None`` if this one holds all of it.
        counts: Whether this rank counts a parameter.
        device: Where ranks communicate; needed where a rank may have no gradient. Default: where the first gradient is.

    Returns:
        The norm before clipping, as :func:`total_norm` gives it.
    """
    parameters = list(parameters)
    norm = total_norm(parameters, norm_type, group=group, counts=counts, device=device)
    # One call per dtype, with a norm of that dtype: `foreach` is fast only then, and copies of one parameter are scaled
    # by the same factor whatever else their ranks hold. Half precision would spoil the factor; float32 it is there.
    for dtype in dict.fromkeys(parameter.dtype for parameter in parameters):
        alike = [local_view(parameter) for parameter in parameters if parameter.dtype == dtype]
        clip_grads_with_norm_(alike, max_norm, norm.to(_norm_dtype(dtype)))
    return norm


@torch.no_grad()
def find_nonfinite(parameters: Iterable[nn.Parameter]) -> list[tuple[list[nn.Parameter], Tensor]]:
    """Find out which gradients of this rank are not finite, on their device: the host does not wait.

    The sum of the magnitudes tells it: to look for the largest one takes ten times as long on a CPU.

    Args:
        parameters: This rank's parameters. Sparse gradients are passed over.

    Returns:
        For each device and dtype the parameters that have a gradient, and a flag for each: a bool tensor on the device.
    """
    alike: dict[tuple[torch.device, torch.dtype], tuple[list[nn.Parameter], list[Tensor]]] = {}
    for parameter in parameters:
        gradient = local_gradient(parameter)
        if gradient is not None and gradient.numel() > 0 and gradient.layout is torch.strided:
            of_kind = alike.setdefault((gradient.device, gradient.dtype), ([], []))
            of_kind[0].append(parameter)
            of_kind[1].append(gradient)
    return [(owners, ~torch.cat(_norms(gradients, 1.0)).isfinite()) for owners, gradients in alike.values()]


def _norm_dtype(dtype: torch.dtype) -> torch.dtype:
    """The dtype to take norms in: at least float32, because squares of float16 overflow."""
    return torch.float64 if dtype in (torch.float64, torch.complex128) else torch.float32


def _norms(gradients: Sequence[Tensor], norm_type: float) -> list[Tensor]:
    """The norms of the gradients of each device and dtype, one tensor for each."""
    # One kernel for many tensors, where torch has it; `get_total_norm` uses it too but rounds to the gradients' dtype.
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
