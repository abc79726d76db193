"""Selective checkpointing: products with weights, fused attention and sums over ranks are not recomputed.

`ActivationCheckpointing` makes one :class:`SavedResults` for each call of a layer; `tuning.dry_run.noted_checkpoints`
does the same to estimate its memory. An *operation* is an operator of torch, such as ``aten::mm``, as a dispatch mode
receives it. A *sum* is an all-reduce or reduce-scatter over ranks.

torch's `create_selective_checkpoint_contexts` also saves results, with three differences. It refuses a layer that
changes a saved result in place (`nn.ReLU(inplace=True)` after a linear layer); here, this result is recomputed. It
repeats all-reduces, for which other ranks would have to call them again; here, sums are saved. After an attention with
dropout, it draws other random numbers; here, the random streams continue from the same states.
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
# Batched products of several matrices have no weights. They are the scores of attention without a fused kernel, which
# are fast to compute, but grow with the square of the sequence length. "selective" is meant to avoid saving them. A
# batch of one matrix is saved, like an ordinary product.
_BATCHED = {"aten::bmm": 0, "aten::baddbmm": 1}  # the position of the argument with the batch dimension
_SUMS = frozenset(("c10d::allreduce_", f"c10d::{REDUCE_SCATTER}"))
_GLOO_COPIES = frozenset(("aten::split", "aten::copy_"))  # gloo writes a sum to its output with these
# The base does not count changes of this view, which linear layers return in torch 2.15.
_UNCOUNTED = f"aten::{UNSAFE_VIEW}"
_VIEWS = frozenset(("aten::view", _UNCOUNTED, "aten::detach", "aten::alias"))


class SavedResults:
    """The results that one call of a layer saves for its recomputation.

    ::

        record      op op MM op op SUM op MM op       results in capitals are saved
        replay      op op .. op op ... op .. op       and returned without computing them

    Args:
        device: The device on which random numbers are drawn.
        enabled: If True, save results.
    """

    def __init__(self, device: torch.device, *, enabled: bool) -> None:
        self._device = device
        self._enabled = enabled and TorchDispatchMode is not None  # otherwise everything is recomputed
        self._results: list[_Result] = []
        self._saved: Any = None

    def record(self) -> AbstractContextManager[Any]:
        """Return a context for the call of the layer."""
        return _RecordMode(self._results, self._device) if self._enabled else nullcontext()

    def save(self) -> None:
        """Pass the results to autograd after the call, so that saved-tensor hooks, such as offloading, see them."""
        for result in self._results:
            result.is_lost |= result.is_changed
        for product, follower in zip_longest(self._results, self._results[1:]):
            # The freed input of a sum is usable only if the sum is saved too.
            product.is_lost |= product.is_freed and (follower is None or follower.is_lost)
        tensors = [tensor for result in self._results for tensor in result.pack()]
        if tensors:
            self._saved = save_tensors(tensors)

    def replay(self) -> AbstractContextManager[Any]:
        """Return a context for the recomputation. If a saved tensor is no longer valid, everything is recomputed."""
        if not self._enabled:
            return nullcontext()
        try:
            tensors = iter(() if self._saved is None else self._saved.grad_fn.saved_tensors)
        except RuntimeError:  # a tensor was changed in the meantime, or backward runs a second time
            return nullcontext()
        return _ReplayMode([(result, result.unpack(tensors)) for result in self._results], self._device)


class _Result:
    """The result of one operation.

    Args:
        operation: The name of the operation.
        value: The result: a tensor, or a tuple with tensors.
        states: The states of torch's generators after the operation, if it draws random numbers.

    Attributes:
        is_lost: True if the result cannot be saved, and must be recomputed.
    """

    def __init__(self, operation: str, value: Any, states: Any = None) -> None:
        self.operation = operation
        self.states = states
        self.is_lost = False
        self._leaves, self._spec = flatten(value)
        self._positions = [position for position, leaf in enumerate(self._leaves) if isinstance(leaf, Tensor)]
        self._freed: tuple[torch.Size, tuple[int, ...], torch.dtype, torch.device] | None = None
        self._shape: torch.Size | None = None  # the shape of a product that was replaced by its view
        self._bases: list[Tensor] = []  # tensors that were replaced by their views
        self.note_versions()

    @property
    def tensors(self) -> list[Tensor]:
        """The tensors in the result, until :meth:`pack`."""
        return [self._leaves[position] for position in self._positions]

    def note_versions(self) -> None:
        """Store the current versions of the tensors. Later changes make the result useless."""
        self._versions = [version_counter(tensor) for tensor in (*self.tensors, *self._bases)]

    def view_as(self, view: Tensor) -> None:
        """Replace the only tensor of the result by its view, which has its own version counter, and which is used."""
        (position,) = self._positions
        self._bases.append(self._leaves[position])
        self._shape = self._leaves[position].shape if self._shape is None else self._shape
        self._leaves[position] = view
        self.note_versions()

    def shares(self, tensor: Tensor) -> bool:
        """Return True if a tensor has the same memory as the result."""
        return any(_address(own) == _address(tensor) for own in self.tensors)

    @property
    def is_changed(self) -> bool:
        """True if a tensor was changed after :meth:`note_versions`."""
        return self._versions != [version_counter(tensor) for tensor in (*self.tensors, *self._bases)]

    @property
    def is_freed(self) -> bool:
        """True if a sum over ranks has freed the memory of the result, whose values are no longer needed."""
        plain = [tensor for tensor in self.tensors if type(tensor) is Tensor and tensor.numel()]
        return any(not tensor.untyped_storage().size() for tensor in plain)

    def pack(self) -> list[Tensor]:
        """Return the tensors to save, and drop the references to them."""
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
        """Return a function that returns the result from saved tensors; ``None`` if the result must be recomputed."""
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
    """Mode that records the results of operations.

    Args:
        results: The list to which results are added.
        device: The device on which random numbers are drawn.
    """

    def __init__(self, results: list[_Result], device: torch.device) -> None:
        super().__init__()
        self._results = results
        self._device = device
        self._latest: _Result | None = None  # a product that no operation has used yet
        self._summed: list[_Result] = []

    def __torch_dispatch__(self, func: Any, types: Any, args: Any = (), kwargs: Any = None) -> Any:
        """Run the operation, and record its result if it is to be saved."""
        name = operator_name(func)
        for result in self._summed:
            result.note_versions()  # autograd increases the input's version only after the sum
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
        """Record a sum over ranks, and mark results that a collective has overwritten without notifying autograd."""
        latest, self._latest = self._latest, None
        targets = [leaf for leaf in flatten(args[0])[0] if isinstance(leaf, Tensor)]
        in_place = name in _SUMS and latest is not None and all(latest.shares(target) for target in targets)
        for result in self._results:
            # If a product was summed in place and has no other use, the sum is saved instead.
            if not (in_place and result is latest) and any(result.shares(target) for target in targets):
                result.is_lost = True
        if name in _SUMS:
            total = _Result(name, targets)
            self._results.append(total)
            self._summed = [total, latest] if in_place and latest is not None else [total]


class _ReplayMode(TorchDispatchMode or object):  # type: ignore[misc]
    """Mode that returns saved results instead of running operations.

    Args:
        results: The results in the order of their operations, each with a function that returns its value; ``None``
            instead of the function if the operation must run again.
        device: The device on which random numbers are drawn.
    """

    def __init__(self, results: list[tuple[_Result, Callable[[], Any] | None]], device: torch.device) -> None:
        super().__init__()
        self._results = iter(results)
        self._device = device

    def __torch_dispatch__(self, func: Any, types: Any, args: Any = (), kwargs: Any = None) -> Any:
        """Return the result of the operation if it was saved; otherwise run the operation.

        Raises:
            RuntimeError: If the layer runs other operations than in forward.
        """
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
    return chosen and not operator_schema(func).is_mutable  # operations with `out=` must run


def _address(tensor: Tensor) -> int:
    return storage_identity(tensor.untyped_storage())


def save_tensors(tensors: Sequence[Tensor]) -> Tensor:
    """Make autograd save tensors until the returned tensor is freed. Without a reference to it, torch 2.11 frees them.

    Args:
        tensors: The tensors, without a graph.
    """
    saved: Tensor = _Save.apply(_ANCHOR, *tensors)  # type: ignore[no-untyped-call]
    return saved


class _Save(torch.autograd.Function):
    """An autograd function that only saves tensors."""

    @staticmethod
    def forward(ctx: Any, anchor: Tensor, *tensors: Tensor) -> Tensor:
        ctx.save_for_backward(*tensors)
        return torch.empty(0, device="cpu")

    @staticmethod
    def backward(ctx: Any, gradient: Tensor) -> None:
        raise AssertionError("this backward must never run")


class _Done(dist.Work):
    """The handle of a collective that is skipped."""

    def wait(self, timeout: Any = None) -> bool:
        return True


_DONE = _Done()
_ANCHOR = torch.empty(0, device="cpu", requires_grad=True)
