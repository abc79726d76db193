"""Forwards of the user's step without side effects: no gradients, no random numbers, no changes to the module.

:class:`~.microbatch_comparison.MicrobatchComparison` runs such forwards, called *rehearsals*, in the first training
steps to compare losses of the same samples. A copy of the module would be simpler, but might not fit in memory, and
ZeRO and the pipeline refer to the tensors of the module itself.
"""

from __future__ import annotations

import io
from collections.abc import Callable, Iterable, Iterator
from contextlib import AbstractContextManager, contextmanager, redirect_stdout
from functools import cache
from typing import Any

import torch
from lightning.pytorch import LightningModule
from torch import Tensor, nn

from lightning_hybrid.data_parallel.zero.param_group import ParameterGroup
from lightning_hybrid.distributed.dtensor import to_local
from lightning_hybrid.distributed.modes import OperatorMode
from lightning_hybrid.distributed.random import GENERATORS
from lightning_hybrid.distributed.replaced import Preserved, replaced_attributes
from lightning_hybrid.pipeline_parallel.frame.operators import (
    BATCH_NORMS,
    computes_only,
    draws,
    memory_of,
    written_tensors,
)
from lightning_hybrid.pipeline_parallel.frame.stage_states import Copies, containers_in, find_owners
from lightning_hybrid.torch_internals import DisableTorchFunction, operator_schema

__all__ = ["GraphNeeded", "Untouched", "graph_without_values", "takes_from_iterators", "untouched_attributes"]

aten = torch.ops.aten
#: The value that replaces random floating-point numbers in a rehearsal.
_DRAWN = 0.5
#: Attributes of a module that belong to Lightning.
_LIGHTNINGS = frozenset({"_trainer", "_fabric"})


class Untouched:
    """A mode in which results depend only on inputs of operators, and in which the module's tensors are restored.

    ::

        dropout                     returns its input
        a single random number      is drawn, because the path of the step may depend on it
        other random numbers        are constants: 0.5, the lowest integer, or positions in order
        batch norm in training      normalizes with its running statistics, and does not change them
        a write to a tensor         first saves a copy, which `restore` writes back

    So a step computes the same loss each time, and its loss over a batch can be compared with its losses over parts of
    it.

    Args:
        tensors: Returns parameters, buffers and tensors in attributes. It is called at the start of the first run,
            because ZeRO moves these tensors at the start of a step.

    Attributes:
        has_drawn: True if random numbers without a constant replacement were drawn, which may belong to single samples.
    """

    def __init__(self, tensors: Callable[[], Iterable[Tensor]]) -> None:
        self._mode = OperatorMode(self._call)
        self._find, self._tensors = tensors, dict[int, Tensor]()
        self._before: dict[int, Tensor] = {}
        self.has_drawn = False

    @contextmanager
    def run(self, *, restores: bool = True) -> Iterator[None]:
        """Run operators under this mode.

        Args:
            restores: If True, the tensors are restored at the end. Otherwise, call :meth:`restore` later.
        """
        if not self._tensors:
            own = [to_local(tensor) for tensor in self._find() if not tensor.is_meta]
            self._tensors = {memory_of(tensor): tensor for tensor in own}
        try:
            with self._mode:
                yield
        finally:
            if restores:
                self.restore()

    def restore(self) -> None:
        """Restore the tensors that were written."""
        with torch.no_grad():
            for memory, value in self._before.items():
                if _has_memory(self._tensors[memory]):
                    self._tensors[memory].detach().copy_(value)
        self._before.clear()

    def former(self, tensor: Tensor) -> Tensor | None:
        """Return the copy of a tensor from before it was written; ``None`` if it was not written."""
        return self._before.get(memory_of(tensor))

    def _call(self, func: Any, args: Any, kwargs: dict[str, Any]) -> Any:
        """Run an operator or its replacement."""
        if computes_only(func):
            with DisableTorchFunction():
                return func(*args, **kwargs)
        for tensor in () if ParameterGroup.copies_out else written_tensors(func, args, kwargs):
            memory = memory_of(to_local(tensor))
            if memory in self._tensors and memory not in self._before and _has_memory(self._tensors[memory]):
                self._before[memory] = self._tensors[memory].detach().clone()
        with DisableTorchFunction():  # autograd may query tensors with functions that are not part of the step
            if func.overloadpacket in BATCH_NORMS and args[5]:
                return _normalize(func, args)
            return self._draw(func, args, kwargs) if draws(func, args, kwargs) else func(*args, **kwargs)

    def _draw(self, func: Any, args: Any, kwargs: dict[str, Any]) -> Any:
        packet = func.overloadpacket
        names = [argument.name for argument in operator_schema(func).arguments]
        if packet is aten.native_dropout:
            return args[0].clone(), torch.ones_like(args[0], dtype=torch.bool)
        if "dropout_p" in names:  # attention
            position = names.index("dropout_p")
            if position < len(args):
                args = (*args[:position], 0.0, *args[position + 1 :])
            else:
                kwargs = {**kwargs, "dropout_p": 0.0}
            return func(*args, **kwargs)
        if packet is aten.bernoulli:
            return (args[0] >= _DRAWN).to(args[0].dtype)
        if packet is aten.bernoulli_:
            probability = args[1] if len(args) > 1 else kwargs.get("p", _DRAWN)
            return args[0].copy_(probability >= _DRAWN if isinstance(probability, Tensor) else probability)
        result = func(*args, **kwargs)
        if packet is aten.randperm:
            return torch.arange(len(result), dtype=result.dtype, device=result.device)
        if isinstance(result, Tensor) and result.ndim == 0:
            return result
        if not isinstance(result, Tensor) or result.numel() == 1 or packet is aten.multinomial:
            self.has_drawn = True
            return result
        if result.is_floating_point():
            return result.fill_(_DRAWN)
        return result.fill_(args[names.index("low")] if "low" in names else 0)


def _has_memory(tensor: Tensor) -> bool:
    """Return True if the memory of a tensor is allocated. ZeRO frees unsharded parameters, and gathers them again."""
    return tensor.untyped_storage().nbytes() >= tensor.numel() * tensor.element_size()


def _normalize(func: Any, args: Any) -> Any:
    """Normalize by running statistics, or by mean 0 and variance 1 without them; instance norm runs unchanged."""
    x, weight, bias, mean, variance, _, momentum, eps, *_ = args
    if mean is None:
        if x.shape[0] == 1:  # instance norm: a batch norm of (1, samples x channels, ...)
            return func(*args)
        mean, variance = x.new_zeros(x.shape[1]), x.new_ones(x.shape[1])
    result = aten.native_batch_norm(x, weight, bias, mean, variance, False, momentum, eps)
    return result if len(operator_schema(func).returns) == 3 else (*result, x.new_empty(0, dtype=torch.uint8))


@contextmanager
def untouched_attributes(
    module: LightningModule, tensors: list[Tensor]
) -> Iterator[Callable[..., AbstractContextManager[None]]]:
    """Restore attributes, containers, metric states and generators that a step changes, at the end of the context.

    The output of prints is discarded, and the step cannot stop the Trainer. Values of tensors are restored by
    :class:`Untouched`. `SyncBatchNorm`, whose statistics are not computed by an operator, uses its running statistics.

    Args:
        module: The user's module.
        tensors: Receives the tensors in attributes. These are not copied, because they may fill the host's memory.

    Yields:
        A function that makes a context for one of several runs of the step. All runs start with equal generators, and
        with equal attributes unless the context is made with ``restores=False``.
    """

    def keep(tensor: Tensor) -> Tensor:
        tensors.append(tensor)
        return tensor

    owners, copies, trainer = list(find_owners([module]).values()), Copies(), module.trainer
    attributes = [(vars(owner), name, value) for owner in owners for name, value in vars(owner).items()]
    generators = [value for _, _, value in attributes if isinstance(value, GENERATORS)]
    # Each module has about a dozen of these.
    empty = [value for _, _, value in attributes if isinstance(value, dict) and not value]

    @cache
    def before() -> Preserved:
        return Preserved(owners, containers=containers_in(owners), generators=generators)

    @contextmanager
    def one_run(*, restores: bool = True) -> Iterator[None]:
        held = before() if restores else Preserved(generators=generators)
        stops = replaced_attributes(trainer, should_stop=trainer.should_stop)
        with held, stops, redirect_stdout(io.StringIO()):
            yield

    with Preserved(owners, containers=empty):
        for table, name, value in attributes:
            if name not in _LIGHTNINGS and not (isinstance(value, dict) and not value):
                table[name] = copies(value, keep)
        for owner in owners:
            if isinstance(owner, nn.SyncBatchNorm) and owner.track_running_stats:
                owner.training = False
        yield one_run


class GraphNeeded(Exception):  # noqa: N818  # not an error, but a request for another run
    """Raised if the step computes gradients itself, for which autograd must save tensors."""


@contextmanager
def graph_without_values(keeps: Callable[[], bool]) -> Iterator[None]:
    """Let autograd record operators without saving their tensors, so that a forward keeps no activations.

    Results require gradients as usual, because a step may check this.

    Args:
        keeps: Returns True if tensors that autograd saves now are kept.

    Raises:
        GraphNeeded: If a gradient is computed with tensors that were not kept, or a transform of `torch.func` is used.
    """

    def pack(tensor: Tensor) -> Tensor | None:
        return tensor.detach() if keeps() else None

    def unpack(saved: Tensor | None) -> Tensor:
        if saved is None:
            raise GraphNeeded
        return saved

    try:
        with torch.autograd.graph.saved_tensors_hooks(pack, unpack):
            yield
    except RuntimeError as error:
        if "saved tensor hooks" not in str(error):  # transforms of `torch.func` do not allow hooks
            raise
        raise GraphNeeded from error


def takes_from_iterators(module: nn.Module) -> bool:
    """Return True if an attribute of the module is an iterator: values that a rehearsal takes from it would be lost."""
    held = (value for owner in find_owners([module]).values() for value in vars(owner).values())
    return any(hasattr(type(value), "__next__") and not isinstance(value, io.IOBase) for value in held)
