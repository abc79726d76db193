"""Traces of one forward of a module: operations and messages, or times, by label.

`Recorder` makes a :class:`Trace` with a :class:`TraceRecorder` for each microbatch size, and a :class:`Timing` with a
:class:`StepTimer` if forwards are timed. `ModuleProfile` reads them, and extrapolates with :func:`value_at` and
:func:`value_between` to other microbatch sizes, because the step cannot run with every size of a search.

A *label* is the position of a layer in the body, which has the layers that a pipeline splits, or a text for code
outside the layers (:mod:`~.saved_tensors`).
"""

from __future__ import annotations

from collections import defaultdict
from collections.abc import Callable, Hashable, Iterator, Sequence
from contextlib import ExitStack, contextmanager
from dataclasses import dataclass
from functools import cached_property
from itertools import pairwise
from time import perf_counter
from typing import Any

import torch.distributed as dist
from torch import Tensor, nn
from torch.nn.modules.module import register_module_forward_hook, register_module_forward_pre_hook

from lightning_hybrid.distributed.dtensor import to_local
from lightning_hybrid.distributed.pytree import flatten
from lightning_hybrid.memory.account import SavedTensorMeter
from lightning_hybrid.pipeline_parallel.body import Body
from lightning_hybrid.tensor_parallel.context_parallel.division import sequence_dim_of
from lightning_hybrid.tensor_parallel.context_parallel.sharded_sequence import ShardedSequence
from lightning_hybrid.tensor_parallel.experts import Tokens
from lightning_hybrid.tensor_parallel.layers import ParallelLayer
from lightning_hybrid.tuning.dry_run.operations import Counts, OperationCounter
from lightning_hybrid.tuning.dry_run.saved_tensors import Saved


@dataclass(frozen=True)
class Trace:
    """A trace of one forward with a microbatch, as one rank without a pipeline runs it.

    Attributes:
        samples: The number of samples in the microbatch.
        counts: Operations and messages, by label.
        saved: The tensors that are saved for the backward, by kind of recomputation of the layers: False,
            ``"selective"`` or True.
        outputs: The bytes that each layer of the body returns on this rank, by position.
        length: The number of positions of the longest sequence that a layer of the body receives; 0 without sequences.
    """

    samples: int
    counts: Counts
    saved: dict[bool | str, Saved]
    outputs: dict[Hashable, int]
    length: int

    @cached_property
    def first_alike(self) -> dict[Hashable, Hashable]:
        """Map each label to the first label with the same operations and messages.

        A layer is never mapped to code outside the layers. Layers that were repeated instead of run have the same
        records as the layer that they repeat.
        """
        firsts: dict[Hashable, Hashable] = {}
        return {
            label: firsts.setdefault((isinstance(label, int), *map(tuple, self.counts.of(label))), label)
            for label in self.saved[False]
        }


@dataclass(frozen=True)
class Timing:
    """The times of a forward on this machine.

    Attributes:
        samples: The number of samples in the microbatch.
        seconds: The times in seconds, by label.
    """

    samples: int
    seconds: dict[Hashable, float]


def value_at(samples: int, traces: Sequence[Trace], values: Sequence[float]) -> float:
    """Extrapolate the values of two traces, or of one trace and 0, linearly to a number of samples.

    Args:
        samples: The number of samples.
        traces: One or two traces, with different numbers of samples.
        values: A value of each trace.

    Returns:
        The value, but not less than 0.
    """
    first = traces[0]
    if len(traces) == 1:
        return values[0] * samples / first.samples
    slope = (values[0] - values[1]) / (first.samples - traces[1].samples)
    return max(0.0, values[0] + slope * (samples - first.samples))


def value_between(samples: int, points: Sequence[tuple[int, float]]) -> float:
    """Interpolate values linearly to a number of samples.

    Above the largest point, the value is proportional to the samples. Below the smallest point, it is constant.

    Args:
        samples: The number of samples.
        points: Samples and values, from the largest to the smallest number of samples.
    """
    if samples >= points[0][0]:
        return points[0][1] * samples / points[0][0]
    for (high, above), (low, below) in pairwise(points):
        if samples >= low:
            return below + (above - below) * (samples - low) / (high - low)
    return points[-1][1]


class TraceRecorder:
    """A recorder of the operations, messages, inputs and outputs of a step.

    Each entry makes a new counter, so that a step that is tried again is not counted twice.

    Args:
        body: The layers whose inputs and outputs are recorded; ``None`` if the module has no layers.
        context_group: The context-parallel group; ``None`` if there is none.
        blocks: The layers that sum gradients of vectors, such as biases, over the ranks of a tensor-parallel grid.
        experts: The modules with experts.

    Attributes:
        counter: The counter of operations and messages, after the first entry.
        outputs: The bytes that each layer returns on this rank, by position.
        length: The number of positions of the longest sequence that a layer receives; 0 without sequences.
    """

    counter: OperationCounter

    def __init__(
        self,
        body: Body | None,
        context_group: dist.ProcessGroup | None,
        blocks: Sequence[ParallelLayer] = (),
        experts: Sequence[nn.Module] = (),
    ) -> None:
        self._body, self._context_group, self._blocks, self._experts = body, context_group, blocks, experts
        self.outputs: dict[Hashable, int] = {}
        self.length = 0

    @contextmanager
    def __call__(self, meter: SavedTensorMeter) -> Iterator[OperationCounter]:
        """Record while entered, and yield the counter. Enter it around the step.

        Args:
            meter: Knows the label of the current layer.

        Raises:
            ValueError: If this version of torch cannot count operations.
        """
        group = self._blocks[0].tensor_group if self._blocks else None
        self.counter = OperationCounter(lambda: meter.label, self._context_group, group)
        with self.counter(), self._recorded_layers():
            yield self.counter

    @contextmanager
    def _recorded_layers(self) -> Iterator[None]:
        """Record the inputs of each layer, and the bytes that it returns, while entered."""
        size = self._context_group.size() if self._context_group is not None else 1

        def begin(position: int) -> Callable[..., None]:
            def hook(layer: nn.Module, args: Any, kwargs: Any) -> None:
                tensors = _tensors((args, kwargs))
                hidden = [each.shape for each in tensors if each.is_floating_point() and each.ndim == 3]
                self.length = max(self.length, *(shape[sequence_dim_of(layer)] for shape in hidden[:1]), 0)
                self.counter.enter_layer(position, tensors)

            return hook

        def end(position: int) -> Callable[..., None]:
            def hook(layer: nn.Module, args: Any, output: Any) -> None:
                # Each rank sends its own sequence shard.
                bytes_of = [x.nbytes // size if isinstance(x, ShardedSequence) else x.nbytes for x in _tensors(output)]
                self.outputs[position] = sum(bytes_of)

            return hook

        def begin_block(layer: nn.Module, args: Any) -> None:
            self.counter.enter_block([to_local(p) for p in layer.parameters() if p.ndim == 1 and p.requires_grad])

        def begin_experts(layer: nn.Module, args: Any, kwargs: Any) -> None:
            self.counter.enter_experts(Tokens.of(layer, args, kwargs))

        with ExitStack() as hooks:
            for experts in self._experts:
                hooks.enter_context(experts.register_forward_pre_hook(begin_experts, with_kwargs=True))
            for block in self._blocks:
                assert isinstance(block, nn.Module)
                hooks.enter_context(block.register_forward_pre_hook(begin_block))
            for position, layer in enumerate(self._body.layers if self._body else ()):
                hooks.enter_context(layer.register_forward_pre_hook(begin(position), with_kwargs=True))
                hooks.enter_context(layer.register_forward_hook(end(position)))
            yield


def _tensors(tree: Any) -> list[Tensor]:
    return [leaf for leaf in flatten(tree)[0] if isinstance(leaf, Tensor)]


class StepTimer:
    """A timer of a step, by label. It measures between the beginnings and ends of all modules.

    Attributes:
        seconds: The times in seconds, by label.
    """

    def __init__(self) -> None:
        self.seconds: dict[Hashable, float] = defaultdict(float)

    @contextmanager
    def __call__(self, meter: SavedTensorMeter) -> Iterator[None]:
        """Measure times while entered. Enter it around the step.

        Args:
            meter: Knows the label of the current layer.
        """
        start = perf_counter()

        def note(*_: Any) -> None:
            nonlocal start
            now = perf_counter()
            self.seconds[meter.label] += now - start
            start = now

        # Global hooks run before the hooks of the layer, which change the label.
        before = register_module_forward_pre_hook(note)
        after = register_module_forward_hook(note, always_call=True)
        try:
            yield
            note()
        finally:
            before.remove()
            after.remove()
