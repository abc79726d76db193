"""A forward of the user's step that leaves no trace: no gradients, no random numbers, nothing written."""

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
#: What a draw of floating-point numbers gives in a rehearsal.
_DRAWN = 0.5
#: Attributes of a module that Lightning owns.
_LIGHTNINGS = frozenset({"_trainer", "_fabric"})


class Untouched:
    """Operators whose results depend on their inputs alone, and that leave the module's tensors as they were.

    ::

        dropout                     the identity
        a single number             as drawn: a path may depend on it
        other draws                 constants: 0.5, the lowest integer, positions in their order
        batch norm in training      normalizes by its running statistics, which stay
        a write to a tensor         keeps a copy before the first one, which `restore` puts back

    So a step gives the same loss each time, and its loss over a batch is comparable with those over the parts of it.

    Args:
        tensors: Returns parameters, buffers and tensors in attributes; called in the first run, as ZeRO moves those
            when a step begins.

    Attributes:
        has_drawn: Whether something has been drawn that has no constant in its place, and may be one of a sample.
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
            restores: Whether the tensors are as they were at the end.
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
        """Put back the tensors that were written."""
        with torch.no_grad():
            for memory, value in self._before.items():
                if _has_memory(self._tensors[memory]):
                    self._tensors[memory].detach().copy_(value)
        self._before.clear()

    def former(self, tensor: Tensor) -> Tensor | None:
        """Return a copy of a tensor from before it was written; ``None`` if it was not."""
        return self._before.get(memory_of(tensor))

    def _call(self, func: Any, args: Any, kwargs: dict[str, Any]) -> Any:
        """Run an operator, or what stands for it."""
        if computes_only(func):
            with DisableTorchFunction():
                return func(*args, **kwargs)
        for tensor in () if ParameterGroup.copies_out else written_tensors(func, args, kwargs):
            memory = memory_of(to_local(tensor))
            if memory in self._tensors and memory not in self._before and _has_memory(self._tensors[memory]):
                self._before[memory] = self._tensors[memory].detach().clone()
        with DisableTorchFunction():  # what autograd asks of a tensor is not an operator of the step
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
    """Return whether a tensor has its memory: ZeRO frees that of unsharded parameters, and gathers them again."""
    return tensor.untyped_storage().nbytes() >= tensor.numel() * tensor.element_size()


def _normalize(func: Any, args: Any) -> Any:
    """Normalize by running statistics, by mean 0 and variance 1 where there are none; instances by their own."""
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
    """Let a step change attributes, containers, states of metrics and generators, and put them back at the end.

    What the step prints is not shown, and the Trainer does not stop on its behalf. Numbers in tensors are the business
    of :class:`Untouched`. `SyncBatchNorm`, whose statistics are no operator, uses its running ones.

    Args:
        module: The user's module.
        tensors: Gets the tensors in attributes, which are not copied: they may be as large as the host's memory.

    Yields:
        A context for each of several runs of the step: all begin with equal generators, and with equal attributes
        unless they are entered with ``restores=False``.
    """

    def keep(tensor: Tensor) -> Tensor:
        tensors.append(tensor)
        return tensor

    owners, copies, trainer = list(find_owners([module]).values()), Copies(), module.trainer
    attributes = [(vars(owner), name, value) for owner in owners for name, value in vars(owner).items()]
    generators = [value for _, _, value in attributes if isinstance(value, GENERATORS)]
    empty = [value for _, _, value in attributes if isinstance(value, dict) and not value]  # a dozen in each module

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


class GraphNeeded(Exception):  # noqa: N818  # it is no error, but asks for another run
    """The step computes gradients itself, for which autograd must save tensors."""


@contextmanager
def graph_without_values(keeps: Callable[[], bool]) -> Iterator[None]:
    """Let autograd record operators without saving their tensors: a forward then holds no activations.

    Whether results need gradients is as always, which a step may ask for.

    Args:
        keeps: Whether tensors that autograd saves now are kept.

    Raises:
        GraphNeeded: If a gradient is computed inside that needs a tensor which was not kept.
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
        if "saved tensor hooks" not in str(error):  # transforms of `torch.func` refuse hooks
            raise
        raise GraphNeeded from error


def takes_from_iterators(module: nn.Module) -> bool:
    """Return whether the module has an iterator as an attribute: what a rehearsal took from it would be gone."""
    held = (value for owner in find_owners([module]).values() for value in vars(owner).values())
    return any(hasattr(type(value), "__next__") and not isinstance(value, io.IOBase) for value in held)
