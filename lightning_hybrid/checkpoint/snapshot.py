"""A copy of a checkpoint that training does not change, for writing it in the background."""

from __future__ import annotations

import copy
from collections.abc import Collection
from typing import Any

from torch import Tensor
from torch.nn import Parameter

from lightning_hybrid.distributed.pytree import flatten_with_path
from lightning_hybrid.distributed.tensor_bytes import to_host

_COLLECTED = ("state_dict", "optimizer_states")


def snapshot(checkpoint: dict[str, Any], live: Collection[Tensor] | None = None) -> dict[str, Any]:
    """A checkpoint with containers and tensors of its own, these on the host; what is tied stays tied.

    Args:
        checkpoint: The checkpoint.
        live: The tensors that training changes, if the others of the model and its optimizers are copies already;
            ``None`` if they are not.
    """
    changing = None if live is None else {tensor.untyped_storage().data_ptr() for tensor in live}
    copies: dict[Any, Tensor] = {}
    memo: dict[int, Any] = {}
    for path, leaf in flatten_with_path(checkpoint):
        if not isinstance(leaf, Tensor) or leaf.is_meta:
            continue
        if changing is not None and path[0] in _COLLECTED and leaf.untyped_storage().data_ptr() not in changing:
            memo[id(leaf)] = leaf
            continue
        key = _memory_of(leaf)
        if key not in copies:
            copies[key] = to_host(leaf)
        memo[id(leaf)] = copies[key]
    return copy.deepcopy(checkpoint, memo)


def _memory_of(tensor: Tensor) -> Any:
    if type(tensor) not in (Tensor, Parameter):
        return id(tensor)
    return tensor.device, tensor.data_ptr(), tensor.dtype, tensor.shape, tensor.stride()
