"""Logits whose classes are sharded over the tensor-parallel ranks, as a subclass of `Tensor`.

A language-model head with the style ``"vocab"`` (`layers.VocabParallelHead`) returns them to the user's step. The step
can do anything with logits: slices, masks, `view(-1, vocabulary)`, cross-entropy in any form. The functions of
`_ELEMENTWISE`, views, slices and masks of other dimensions than the classes run on the shards. For cross-entropy,
`log_softmax` and `argmax`, ranks send a few numbers per sample. For all other operations, the shards are gathered once,
and the result is an ordinary tensor. `StepContext` converts logits that leave the step with :func:`to_plain_tensors`.

"Vocabulary" and "classes" mean the same dimension. :class:`ShardedActivation` explains handlers and valid shards.
"""

from __future__ import annotations

from typing import Any

import torch.nn.functional as F
from torch import Tensor
from torch.distributed.tensor import DTensor

from lightning_hybrid.distributed.dtensor import full_tensor
from lightning_hybrid.distributed.pytree import flatten, unflatten
from lightning_hybrid.distributed.tensor_metadata import getters
from lightning_hybrid.tensor_parallel.cross_entropy import (
    argmax,
    cross_entropy,
    in_loss_precision,
    log_sum_exp,
    loss_arguments,
)
from lightning_hybrid.tensor_parallel.mappings import TensorGroup, copy_to_tp
from lightning_hybrid.tensor_parallel.sharded_activation import (
    Function,
    ShardedActivation,
    elementwise,
    functions,
    in_shares,
    plain,
    view,
)
from lightning_hybrid.tensor_parallel.sharding import Sharding, Shares
from lightning_hybrid.torch_internals import STACK_LEVEL


class VocabParallelLogits(ShardedActivation):
    """Logits, or their log-softmax, of shape ``(..., classes, ...)``. Each rank has a shard of the classes."""

    can_narrow = False  # the losses need shards of one size

    @classmethod
    def from_local(cls, shard: Tensor, group: TensorGroup) -> VocabParallelLogits:
        """Return logits from this rank's shard, in the graph of the shard.

        Args:
            shard: Shape ``(..., classes / T)``.
            group: The ranks that have the other shards.
        """
        dim = shard.ndim - 1
        return cls.wrap(shard, Sharding(dim, Shares(shard.shape[dim] * group.size, group, balanced=False)))

    def operand(self, tensor: Tensor, behind: int) -> Any:
        """Return a scalar without a gradient, or `NotImplemented`.

        The gradient of a scalar with a gradient would be a sum over the ranks.
        """
        return NotImplemented if tensor.ndim > 0 or tensor.requires_grad else tensor

    @staticmethod
    def to_plain(leaf: Any) -> Any:
        """Convert sharded logits and DTensors, such as the weight of the head, to ordinary tensors. A collective."""
        return full_tensor(plain(leaf))

    def __repr__(self, *, tensor_contents: Any = None) -> str:  # type: ignore[override]
        """Return a text with only this rank's values, so that one rank alone can print logits."""
        return f"VocabParallelLogits(shape={tuple(self.shape)}, class_dim={self.sharding.dim}, shard={self._local!r})"

    def __reduce_ex__(self, protocol: Any) -> Any:
        """Return the pickle of an ordinary tensor. All ranks must call it, because it can gather the shards."""
        return self.full_tensor().detach().__reduce_ex__(protocol)  # type: ignore[no-untyped-call]

    def __deepcopy__(self, memo: dict[int, Any]) -> Tensor:
        return self.full_tensor().detach().clone()


def to_plain_tensors(value: Any) -> Any:
    """Convert the sharded logits and DTensors in a tree of values to ordinary tensors. All ranks must call it.

    `StepContext` calls it with the results of the user's step and of stages.
    """
    if type(value) is Tensor:
        return value
    leaves, spec = flatten(value)
    kinds = (VocabParallelLogits, DTensor)
    if not any(isinstance(leaf, kinds) for leaf in leaves):
        return value
    to_plain = VocabParallelLogits.to_plain
    return unflatten([to_plain(leaf) if isinstance(leaf, kinds) else leaf for leaf in leaves], spec)


# -- functions that compute on shards ----------------------------------------------------------------------------------

_ELEMENTWISE = (
    *("float", "double", "half", "bfloat16", "clone", "tanh", "clamp", "clip"),
    *("neg", "add", "sub", "mul", "div", "true_divide"),
    *("__neg__", "__add__", "__radd__", "__sub__", "__mul__", "__rmul__", "__truediv__"),
)
VocabParallelLogits.implements(*functions(*_ELEMENTWISE))(elementwise)


@VocabParallelLogits.implements(*functions("detach"))
def _detach(func: Function, args: Any, kwargs: Any) -> Any:
    (logits,) = args
    if not in_shares(logits):
        return NotImplemented
    return view(func, logits, (), kwargs, logits.local.detach(), logits.sharding)


@VocabParallelLogits.implements(Tensor.to)
def _to(func: Function, args: Any, kwargs: Any) -> Any:
    """Handle casts on shards.

    A copy gathers the classes. Code that copies logits reads their values, and later readers use the same gathered
    tensor.
    """
    return NotImplemented if kwargs.get("copy") else elementwise(func, args, kwargs)


@VocabParallelLogits.implements(*getters("data"))
def _data(func: Function, args: Any, kwargs: Any) -> Any:
    """Handle `data` on the gathered tensor.

    torch does not count writes into it, so the shards are not valid any more.
    """
    args[0].mark_written()
    return NotImplemented


@VocabParallelLogits.implements(*functions("log_softmax"))
def _log_softmax(func: Function, args: Any, kwargs: Any) -> Any:
    logits, *others = args
    given = _named(("dim", STACK_LEVEL, "dtype") if func is F.log_softmax else ("dim", "dtype"), others, kwargs)
    if given.keys() - {"dim", STACK_LEVEL, "dtype"} or not _are_classes(logits, given.get("dim")):
        return NotImplemented
    dtype, sharding, group = given.get("dtype"), logits.sharding, logits.group
    shard = in_loss_precision(logits.local if dtype is None else logits.local.to(dtype))
    # All ranks subtract the same number from their own classes, so the gradient of this number is a sum over the ranks.
    return logits.wrap(shard - copy_to_tp(log_sum_exp(shard, sharding.dim, group), group), sharding)


@VocabParallelLogits.implements(F.cross_entropy, F.nll_loss)
def _loss_of_classes(func: Function, args: Any, kwargs: Any) -> Any:
    """Handle `cross_entropy` of logits, and `nll_loss` of the results of `log_softmax`. The target must be plain."""
    scores, target, options = loss_arguments(*args, **kwargs)
    dim = 0 if scores.ndim == 1 else 1  # the dimension in which torch's losses expect classes
    is_plain = not isinstance(target, VocabParallelLogits) and not target.requires_grad
    if not _are_classes(scores, dim) or not is_plain or options.keys() & {"size_average", "reduce"}:
        return NotImplemented
    are_logits = func is F.cross_entropy
    shard = in_loss_precision(scores.local) if are_logits else scores.local
    return cross_entropy(shard, target, dim, scores.group, are_logits=are_logits, **options)


@VocabParallelLogits.implements(*functions("argmax"))
def _argmax(func: Function, args: Any, kwargs: Any) -> Any:
    logits, *others = args
    given = _named(("dim", "keepdim"), others, kwargs)
    if given.keys() - {"dim", "keepdim"} or not _are_classes(logits, given.get("dim")):
        return NotImplemented
    return argmax(logits.local.detach(), logits.sharding.dim, given.get("keepdim", False), logits.group)


def _named(names: tuple[str, ...], others: Any, kwargs: Any) -> dict[str, Any]:
    """Return arguments by their names in torch, which also accepts the names of NumPy."""
    of_numpy = {"axis": "dim", "keepdims": "keepdim"}
    return dict(zip(names, others, strict=False)) | {of_numpy.get(key, key): value for key, value in kwargs.items()}


def _are_classes(logits: Any, dim: Any) -> bool:
    """Return True if the shards are valid and a dimension contains only classes."""
    if not in_shares(logits) or not isinstance(dim, int):
        return False
    return bool(logits.sharding.is_simple and dim % logits.ndim == logits.sharding.dim)
