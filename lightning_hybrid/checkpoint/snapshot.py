"""A copy of a checkpoint that training does not change, so that it can be written in the background.

`Checkpointer.save` makes it with `async_save`: on every rank for a directory, on global rank 0 for a file. A deep copy
would not do: it would stay on the device, copy one tensor twice if it has two names, and wait for the device.
"""

from __future__ import annotations

import copy
from collections.abc import Callable, Collection
from typing import Any

import torch
from torch import Tensor
from torch.nn import Parameter

from lightning_hybrid.distributed.pytree import flatten_with_path

_COLLECTED = ("state_dict", "optimizer_states")  # the entries in which `live` matters


def snapshot(
    checkpoint: dict[str, Any], live: Collection[Tensor] | None = None
) -> tuple[dict[str, Any], Callable[[], None]]:
    """Return a copy of a checkpoint with its own containers, and its own tensors on the host.

    A tensor that occurs twice is copied once. Tensors without values, on the meta device, are kept.

    A CUDA device copies its tensors into page-locked memory while the host continues. Later training steps, which
    change the tensors, run after the copies in the order of the device. ::

        host      snapshot  step  step ...
        device    .......copies | step ...
        writer                  '-- writes: it waits for the copies

    Args:
        checkpoint: The checkpoint.
        live: The local tensors that training changes, if all other tensors in the state dict and in the optimizer
            states are copies already, because they were gathered. Only live tensors are then copied there. ``None`` to
            copy all tensors.

    Returns:
        The copy, and a function that waits until the device has made the copies.
    """
    changing = None if live is None else {tensor.untyped_storage().data_ptr() for tensor in live}
    copies: dict[Any, Tensor] = {}
    on_cuda: set[torch.device] = set()
    memo: dict[int, Any] = {}
    for path, leaf in flatten_with_path(checkpoint):
        if not isinstance(leaf, Tensor) or leaf.is_meta:
            continue
        if changing is not None and path[0] in _COLLECTED and leaf.untyped_storage().data_ptr() not in changing:
            memo[id(leaf)] = leaf
            continue
        key = _memory_of(leaf)
        if key not in copies:
            is_cuda = leaf.device.type == "cuda"
            on_cuda |= {leaf.device} if is_cuda else set()
            copies[key] = leaf.detach().to("cpu", copy=True, non_blocking=is_cuda)
        memo[id(leaf)] = copies[key]
    events: list[Any] = [torch.cuda.current_stream(device).record_event() for device in on_cuda]

    def wait() -> None:
        for event in events:
            event.synchronize()

    return copy.deepcopy(checkpoint, memo), wait


def _memory_of(tensor: Tensor) -> Any:
    if type(tensor) not in (Tensor, Parameter):
        return id(tensor)
    return tensor.device, tensor.data_ptr(), tensor.dtype, tensor.shape, tensor.stride()
