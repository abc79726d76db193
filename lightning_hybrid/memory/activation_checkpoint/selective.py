"""Results that are kept while the rest is recomputed: products with weights, fused attention, sums over ranks.

torch's own `create_selective_checkpoint_contexts` keeps results likewise, but refuses a layer that changes one of them
in place (`nn.ReLU(inplace=True)` after a linear layer), would ask the other ranks for their sums again, and gives other
random numbers to what follows an attention that drops out by itself. Here a result that was changed is computed again,
sums are kept, and random streams go on where they were.
"""

from __future__ import annotations

from collections.abc import Callable, Iterator
from contextlib import AbstractContextManager, nullcontext
from itertools import zip_longest
from typing import Any

import torch
import torch.distributed as dist
from torch import Tensor

from lightning_hybrid.distributed.pytree import flatten, unflatten
from lightning_hybrid.distributed.random import set_torch_states, torch_states

Mode: Any
try:
    from torch.utils._python_dispatch import TorchDispatchMode as Mode
except ImportError:  # then nothing is kept, and all is recomputed
    Mode = None

__all__ = ["Kept"]

_PRODUCTS = frozenset(
    f"aten::{name}"
    for name in (
        *("mm", "addmm", "convolution", "_grouped_mm", "_scaled_mm", "_scaled_grouped_mm"),
        *("_scaled_dot_product_flash_attention", "_scaled_dot_product_flash_attention_for_cpu"),
        *("_scaled_dot_product_efficient_attention", "_scaled_dot_product_cudnn_attention"),
        *("_scaled_dot_product_fused_attention_overrideable", "_flash_attention_forward"),
        "_efficient_attention_forward",
    )
)
# With several products at once there are no weights in it, but the scores of an attention that is written out: they
# grow with the square of the length and are quickly made, so keeping them is what "selective" is to avoid.
_BATCHED = {"aten::bmm": 0, "aten::baddbmm": 1}  # which argument tells how many
_SUMS = frozenset(("c10d::allreduce_", "c10d::_reduce_scatter_base_"))
_ARRIVALS = frozenset(("aten::split", "aten::copy_"))  # with which gloo brings a sum to its place
_VIEWS = frozenset(("aten::view", "aten::_unsafe_view", "aten::detach", "aten::alias"))


class Kept:
    """What one call of a layer keeps for its recomputation.

    ::

        first      op op MM op op SUM op MM op       results of capitals are remembered
        again      op op .. op op ... op .. op       and given back, without computing

    Args:
        device: Where random numbers are drawn.
    """

    def __init__(self, device: torch.device) -> None:
        self._device = device
        self._results: list[_Result] = []
        self._saved: Any = None

    def first(self) -> AbstractContextManager[Any]:
        """Around the call of the layer."""
        return nullcontext() if Mode is None else _Remember(self._results, self._device)

    def save(self) -> None:
        """After the call, hand everything to autograd, whose hooks may take it elsewhere."""
        for result in self._results:
            result.is_lost |= result.is_changed
        for product, follower in zip_longest(self._results, self._results[1:]):
            # What a sum over ranks has used up is of use only together with the sum.
            product.is_lost |= product.is_used_up and (follower is None or follower.is_lost)
        tensors = [tensor for result in self._results for tensor in result.close()]
        if tensors:
            self._saved = _Save.apply(_ANCHOR, *tensors).grad_fn  # type: ignore[no-untyped-call]

    def again(self) -> AbstractContextManager[Any]:
        """Around the recomputation."""
        if Mode is None:
            return nullcontext()
        try:
            tensors = iter(() if self._saved is None else self._saved.saved_tensors)
        except RuntimeError:  # somebody has changed one of them since, or backward comes a second time
            return nullcontext()
        return _Give([result.opened(tensors) for result in self._results], self._device)


class _Result:
    """The result of one operation.

    Args:
        operation: The name of the operation.
        value: What it gave: a tensor, or a tuple with tensors.
        states: The states of torch's generators afterwards, if it draws.
    """

    def __init__(self, operation: str, value: Any, states: Any = None) -> None:
        self.operation = operation
        self.states = states
        self.is_lost = False
        self._leaves, self._spec = flatten(value)
        self._places = [place for place, leaf in enumerate(self._leaves) if isinstance(leaf, Tensor)]
        self._empty: tuple[torch.Size, tuple[int, ...], torch.dtype, torch.device] | None = None
        self.look()

    @property
    def tensors(self) -> list[Tensor]:
        """The tensors in it, until it is closed."""
        return [self._leaves[place] for place in self._places]

    def look(self) -> None:
        """From here on, what changes the tensors makes them useless."""
        self._versions = [tensor._version for tensor in self.tensors]

    def shares(self, tensor: Tensor) -> bool:
        """Whether a tensor has its memory."""
        place = _memory(tensor)
        return any(_memory(each) == place for each in self.tensors)

    @property
    def is_changed(self) -> bool:
        """Whether a tensor is not what it was."""
        return self._versions != [tensor._version for tensor in self.tensors]

    @property
    def is_used_up(self) -> bool:
        """Whether a sum over ranks has taken its memory: nobody looks at the values any more."""
        plain = [tensor for tensor in self.tensors if type(tensor) is Tensor and tensor.numel()]
        return any(not tensor.untyped_storage().size() for tensor in plain)

    def close(self) -> list[Tensor]:
        """The call is over: what is to be saved of it."""
        tensors = self.tensors
        if self.is_used_up:
            first = tensors[0]
            self._empty = first.shape, first.stride(), first.dtype, first.device
        for place in self._places:
            self._leaves[place] = None
        if self.is_lost or self._empty is not None:
            self._places = []
        return [tensor.detach() for tensor in tensors] if self._places else []

    def opened(self, tensors: Iterator[Tensor]) -> tuple[_Result, Callable[[], Any] | None]:
        """Itself, and what makes its value from what was saved; ``None`` if it must be computed."""
        if self.is_lost:
            return self, None
        if self._empty is not None:
            shape, stride, dtype, device = self._empty
            return self, lambda: torch.empty_strided(shape, stride, dtype=dtype, device=device)
        leaves = list(self._leaves)
        for place in self._places:
            leaves[place] = next(tensors)
        return self, lambda: unflatten(leaves, self._spec)


class _Remember(Mode or object):  # type: ignore[misc]
    """Remembers results.

    Args:
        results: They are added here.
        device: Where random numbers are drawn.
    """

    def __init__(self, results: list[_Result], device: torch.device) -> None:
        super().__init__()
        self._results = results
        self._device = device
        self._newest: _Result | None = None  # a product that nothing has used yet
        self._summed: list[_Result] = []

    def __torch_dispatch__(self, func: Any, types: Any, args: Any = (), kwargs: Any = None) -> Any:
        """Run the operation, and remember its result if it is to be kept."""
        name = func._schema.name
        for result in self._summed:
            result.look()  # autograd has noted, after it was done, that the sum changed its input
        if name not in _ARRIVALS:
            self._summed = []
        out = func(*args, **(kwargs or {}))
        if _is_kept(func, args):
            states = torch_states(self._device) if torch.Tag.nondeterministic_seeded in func.tags else None
            self._newest = _Result(name, out, states=states)
            self._results.append(self._newest)
        elif name.startswith("c10d::"):
            self._communicated(name, args)
        elif name not in _VIEWS:
            self._newest = None
        return out

    def _communicated(self, name: str, args: Any) -> None:
        """Between ranks something was sent into the first argument, without telling autograd."""
        newest, self._newest = self._newest, None
        targets = [leaf for leaf in flatten(args[0])[0] if isinstance(leaf, Tensor)]
        in_place = name in _SUMS and newest is not None and all(newest.shares(target) for target in targets)
        for result in self._results:
            # A product that was summed where it is, and for nothing else, is kept as the sum.
            if not (in_place and result is newest) and any(result.shares(target) for target in targets):
                result.is_lost = True
        if name in _SUMS:
            made = _Result(name, targets)
            self._results.append(made)
            self._summed = [made, newest] if in_place and newest is not None else [made]


class _Give(Mode or object):  # type: ignore[misc]
    """Gives results back.

    Args:
        given: The results, in their order, and what makes the value of each.
        device: Where random numbers are drawn.
    """

    def __init__(self, given: list[tuple[_Result, Callable[[], Any] | None]], device: torch.device) -> None:
        super().__init__()
        self._given = iter(given)
        self._device = device

    def __torch_dispatch__(self, func: Any, types: Any, args: Any = (), kwargs: Any = None) -> Any:
        """Give the result of the operation if it was kept, else run it."""
        name = func._schema.name
        if not _is_kept(func, args) and name not in _SUMS:
            return func(*args, **(kwargs or {}))
        result, make = next(self._given, (None, None))
        if result is None or result.operation != name:
            raise RuntimeError(
                f"A layer does something else when it is run again in backward: {name} instead of"
                f" {'nothing more' if result is None else result.operation}. With recompute='selective' it must do the"
                " same for the same input and random numbers. Leave it out: recompute=[...] with the names of others."
            )
        if make is None:
            return func(*args, **(kwargs or {}))
        if result.states is not None:
            set_torch_states(result.states, self._device)
        if name not in _SUMS:
            return make()
        targets = [leaf for leaf in flatten(args[0])[0] if isinstance(leaf, Tensor)]
        for target, value in zip(targets, make(), strict=True):
            if _memory(target) != _memory(value):
                target.copy_(value)
        return args[0], _DONE.boxed()


def _is_kept(func: Any, args: Any) -> bool:
    name = func._schema.name
    place = _BATCHED.get(name)
    chosen = name in _PRODUCTS if place is None else args[place].shape[0] == 1
    return chosen and not func._schema.is_mutable  # with `out=` it has to be run


def _memory(tensor: Tensor) -> int:
    place: int = tensor.untyped_storage()._cdata
    return place


class _Save(torch.autograd.Function):
    """Where autograd keeps tensors for somebody else."""

    @staticmethod
    def forward(ctx: Any, anchor: Tensor, *tensors: Tensor) -> Tensor:
        ctx.save_for_backward(*tensors)
        return torch.empty(0, device="cpu")

    @staticmethod
    def backward(ctx: Any, gradient: Tensor) -> None:
        raise AssertionError("nothing depends on it")


class _Done(dist.Work):
    """The handle of a sum over ranks that need not be made."""

    def wait(self, timeout: Any = None) -> bool:
        return True


_DONE = _Done()
_ANCHOR = torch.empty(0, device="cpu", requires_grad=True)
