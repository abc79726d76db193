"""Results that are saved while the rest is recomputed: products with weights, fused attention, sums over ranks.

torch's own `create_selective_checkpoint_contexts` saves results likewise, but refuses a layer that changes one of them
in place (`nn.ReLU(inplace=True)` after a linear layer), would ask the other ranks for their sums again, and gives other
random numbers to what follows an attention that drops out by itself. Here a result that was changed is computed again,
sums are saved, and random streams go on where they were.
"""

from __future__ import annotations

from collections.abc import Callable, Iterator, Sequence
from contextlib import AbstractContextManager, nullcontext
from itertools import zip_longest
from typing import Any

import torch
import torch.distributed as dist
from torch import Tensor

from lightning_hybrid.distributed.pytree import flatten, unflatten
from lightning_hybrid.distributed.random import set_torch_states, torch_states
from lightning_hybrid.torch_internals import (
    FUSED_ATTENTIONS,
    REDUCE_SCATTER,
    SCALED_PRODUCTS,
    UNSAFE_VIEW,
    TorchDispatchMode,
    operator_name,
    operator_schema,
    storage_identity,
    version_counter,
)

_PRODUCTS = frozenset(f"aten::{name}" for name in ("mm", "addmm", "convolution", *SCALED_PRODUCTS, *FUSED_ATTENTIONS))
# With several products at once there are no weights in it, but the scores of an attention that is written out: they
# grow with the square of the length and are quickly made, so saving them is what "selective" is to avoid.
_BATCHED = {"aten::bmm": 0, "aten::baddbmm": 1}  # which argument tells how many
_SUMS = frozenset(("c10d::allreduce_", f"c10d::{REDUCE_SCATTER}"))
_GLOO_COPIES = frozenset(("aten::split", "aten::copy_"))  # with which gloo writes a sum to its output
_UNCOUNTED = f"aten::{UNSAFE_VIEW}"  # a view whose changes its base does not count: of linear layers in torch 2.15
_VIEWS = frozenset(("aten::view", _UNCOUNTED, "aten::detach", "aten::alias"))


class SavedResults:
    """What one call of a layer saves for its recomputation.

    ::

        record      op op MM op op SUM op MM op       results of capitals are saved
        replay      op op .. op op ... op .. op       and returned, without computing

    Args:
        device: Where random numbers are drawn.
        enabled: Whether anything is saved.
    """

    def __init__(self, device: torch.device, *, enabled: bool) -> None:
        self._device = device
        self._enabled = enabled and TorchDispatchMode is not None  # else all is recomputed
        self._results: list[_Result] = []
        self._saved: Any = None

    def record(self) -> AbstractContextManager[Any]:
        """Around the call of the layer."""
        return _RecordMode(self._results, self._device) if self._enabled else nullcontext()

    def save(self) -> None:
        """After the call, hand everything to autograd, whose hooks may take it elsewhere."""
        for result in self._results:
            result.is_lost |= result.is_changed
        for product, follower in zip_longest(self._results, self._results[1:]):
            # What a sum over ranks has freed is of use only together with the sum.
            product.is_lost |= product.is_freed and (follower is None or follower.is_lost)
        tensors = [tensor for result in self._results for tensor in result.pack()]
        if tensors:
            self._saved = save_tensors(tensors)

    def replay(self) -> AbstractContextManager[Any]:
        """Around the recomputation."""
        if not self._enabled:
            return nullcontext()
        try:
            tensors = iter(() if self._saved is None else self._saved.grad_fn.saved_tensors)
        except RuntimeError:  # somebody has changed one of them since, or backward comes a second time
            return nullcontext()
        return _ReplayMode([(result, result.unpack(tensors)) for result in self._results], self._device)


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
        self._positions = [position for position, leaf in enumerate(self._leaves) if isinstance(leaf, Tensor)]
        self._freed: tuple[torch.Size, tuple[int, ...], torch.dtype, torch.device] | None = None
        self._shape: torch.Size | None = None  # of a product for which its view stands
        self._bases: list[Tensor] = []  # for which views stand
        self.note_versions()

    @property
    def tensors(self) -> list[Tensor]:
        """The tensors in it, until it is closed."""
        return [self._leaves[position] for position in self._positions]

    def note_versions(self) -> None:
        """From here on, what changes the tensors makes them useless."""
        self._versions = [version_counter(tensor) for tensor in (*self.tensors, *self._bases)]

    def view_as(self, view: Tensor) -> None:
        """Now a view stands for the one tensor in it: it is what is used, and counts its changes for itself."""
        (position,) = self._positions
        self._bases.append(self._leaves[position])
        self._shape = self._leaves[position].shape if self._shape is None else self._shape
        self._leaves[position] = view
        self.note_versions()

    def shares(self, tensor: Tensor) -> bool:
        """Whether a tensor has its memory."""
        return any(_address(own) == _address(tensor) for own in self.tensors)

    @property
    def is_changed(self) -> bool:
        """Whether a tensor is not what it was."""
        return self._versions != [version_counter(tensor) for tensor in (*self.tensors, *self._bases)]

    @property
    def is_freed(self) -> bool:
        """Whether a sum over ranks has freed its memory: nobody reads the values any more."""
        plain = [tensor for tensor in self.tensors if type(tensor) is Tensor and tensor.numel()]
        return any(not tensor.untyped_storage().size() for tensor in plain)

    def pack(self) -> list[Tensor]:
        """The call is over: what is to be saved of it."""
        tensors = self.tensors
        self._bases.clear()
        if self.is_freed:
            first = tensors[0] if self._shape is None else tensors[0].view(self._shape)
            self._freed = first.shape, first.stride(), first.dtype, first.device
        for position in self._positions:
            self._leaves[position] = None
        if self.is_lost or self._freed is not None:
            self._positions = []
        return [tensor.detach() for tensor in tensors] if self._positions else []

    def unpack(self, tensors: Iterator[Tensor]) -> Callable[[], Any] | None:
        """What makes its value from what was saved; ``None`` if it must be computed."""
        if self.is_lost:
            return None
        if self._freed is not None:
            shape, stride, dtype, device = self._freed
            return lambda: torch.empty_strided(shape, stride, dtype=dtype, device=device)
        leaves = list(self._leaves)
        for position in self._positions:
            tensor = next(tensors)
            leaves[position] = tensor if self._shape is None else tensor.view(self._shape)
        return lambda: unflatten(leaves, self._spec)


class _RecordMode(TorchDispatchMode or object):  # type: ignore[misc]
    """Records results.

    Args:
        results: They are added here.
        device: Where random numbers are drawn.
    """

    def __init__(self, results: list[_Result], device: torch.device) -> None:
        super().__init__()
        self._results = results
        self._device = device
        self._latest: _Result | None = None  # a product that nothing has used yet
        self._summed: list[_Result] = []

    def __torch_dispatch__(self, func: Any, types: Any, args: Any = (), kwargs: Any = None) -> Any:
        """Run the operation, and record its result if it is to be saved."""
        name = operator_name(func)
        for result in self._summed:
            result.note_versions()  # autograd has noted, after it was done, that the sum changed its input
        if name not in _GLOO_COPIES:
            self._summed = []
        out = func(*args, **(kwargs or {}))
        if _is_saved(func, args):
            states = torch_states(self._device) if torch.Tag.nondeterministic_seeded in func.tags else None
            self._latest = _Result(name, out, states=states)
            self._results.append(self._latest)
        elif name.startswith("c10d::"):
            self._record_collective(name, args)
        elif name == _UNCOUNTED and self._latest is not None and self._latest.shares(args[0]):
            self._latest.is_lost |= len(self._latest.tensors) > 1 or out.dtype != self._latest.tensors[0].dtype
            if not self._latest.is_lost:
                self._latest.view_as(out)
        elif name not in _VIEWS:
            self._latest = None
        return out

    def _record_collective(self, name: str, args: Any) -> None:
        """A collective has written to its first argument, which autograd does not notice."""
        latest, self._latest = self._latest, None
        targets = [leaf for leaf in flatten(args[0])[0] if isinstance(leaf, Tensor)]
        in_place = name in _SUMS and latest is not None and all(latest.shares(target) for target in targets)
        for result in self._results:
            # A product that was summed in place, and for nothing else, is saved as the sum.
            if not (in_place and result is latest) and any(result.shares(target) for target in targets):
                result.is_lost = True
        if name in _SUMS:
            total = _Result(name, targets)
            self._results.append(total)
            self._summed = [total, latest] if in_place and latest is not None else [total]


class _ReplayMode(TorchDispatchMode or object):  # type: ignore[misc]
    """Returns saved results.

    Args:
        results: The results, in their order, and what makes the value of each.
        device: Where random numbers are drawn.
    """

    def __init__(self, results: list[tuple[_Result, Callable[[], Any] | None]], device: torch.device) -> None:
        super().__init__()
        self._results = iter(results)
        self._device = device

    def __torch_dispatch__(self, func: Any, types: Any, args: Any = (), kwargs: Any = None) -> Any:
        """Return the result of the operation if it was saved, else run it."""
        name = operator_name(func)
        if not _is_saved(func, args) and name not in _SUMS:
            return func(*args, **(kwargs or {}))
        result, make = next(self._results, (None, None))
        if result is None or result.operation != name:
            raise RuntimeError(
                f"When a layer was recomputed in backward, it ran different operations than in forward: {name} instead"
                f" of {'no further operation' if result is None else result.operation}. With recompute='selective', a"
                " layer must run the same operations every time it receives the same input and random numbers. To"
                " exclude this layer from recomputation, list only the other layers in recompute=[...]. [LH441]"
            )
        if make is None:
            return func(*args, **(kwargs or {}))
        if result.states is not None:
            set_torch_states(result.states, self._device)
        if name not in _SUMS:
            return make()
        targets = [leaf for leaf in flatten(args[0])[0] if isinstance(leaf, Tensor)]
        for target, value in zip(targets, make(), strict=True):
            if _address(target) != _address(value):
                target.copy_(value)
        return args[0], _DONE.boxed()


def _is_saved(func: Any, args: Any) -> bool:
    name = operator_name(func)
    position = _BATCHED.get(name)
    chosen = name in _PRODUCTS if position is None else args[position].shape[0] == 1
    return chosen and not operator_schema(func).is_mutable  # with `out=` it has to be run


def _address(tensor: Tensor) -> int:
    return storage_identity(tensor.untyped_storage())


def save_tensors(tensors: Sequence[Tensor]) -> Tensor:
    """Let autograd save tensors until the returned tensor is freed; without a reference to it torch 2.11 frees them.

    Args:
        tensors: Without a graph.
    """
    saved: Tensor = _Save.apply(_ANCHOR, *tensors)  # type: ignore[no-untyped-call]
    return saved


class _Save(torch.autograd.Function):
    """Lets autograd save tensors on somebody else's behalf."""

    @staticmethod
    def forward(ctx: Any, anchor: Tensor, *tensors: Tensor) -> Tensor:
        ctx.save_for_backward(*tensors)
        return torch.empty(0, device="cpu")

    @staticmethod
    def backward(ctx: Any, gradient: Tensor) -> None:
        raise AssertionError("this backward must never run")


class _Done(dist.Work):
    """The handle of a sum over ranks that need not be made."""

    def wait(self, timeout: Any = None) -> bool:
        return True


_DONE = _Done()
_ANCHOR = torch.empty(0, device="cpu", requires_grad=True)
