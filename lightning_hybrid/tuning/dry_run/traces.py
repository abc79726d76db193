"""One forward of a module, counted on shapes or timed, by the place where the step is."""

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
from lightning_hybrid.tensor_parallel.layers import ParallelLayer
from lightning_hybrid.tuning.dry_run.operations import Counts, OperationCounter
from lightning_hybrid.tuning.dry_run.saved_tensors import Saved


@dataclass(frozen=True)
class Trace:
    """One forward with a microbatch.

    Attributes:
        samples: Of the microbatch.
        counts: Operations and messages, by label of the place.
        saved: What it saves for backward, by what runs again of the layers of the body.
        outputs: The bytes that each layer of the body returns, by position.
        length: The positions of the longest sequence that a layer of the body is given; 0 if there are none.
    """

    samples: int
    counts: Counts
    saved: dict[bool | str, Saved]
    outputs: dict[Hashable, int]
    length: int

    @cached_property
    def first_alike(self) -> dict[Hashable, Hashable]:
        """Map each label to the first label with the same operations and messages.

        Layers that repeat what another one did share its records.
        """
        firsts: dict[Hashable, Hashable] = {}
        return {
            label: firsts.setdefault((isinstance(label, int), *map(tuple, self.counts.of(label))), label)
            for label in self.saved[False]
        }


@dataclass(frozen=True)
class Timing:
    """What forwards took here.

    Attributes:
        samples: Of the microbatch.
        seconds: By label of the place.
    """

    samples: int
    seconds: dict[Hashable, float]


def value_at(samples: int, traces: Sequence[Trace], values: Sequence[float]) -> float:
    """The value for so many samples, on the line through those of the traces; through zero, if there is one trace."""
    first = traces[0]
    if len(traces) == 1:
        return values[0] * samples / first.samples
    slope = (values[0] - values[1]) / (first.samples - traces[1].samples)
    return max(0.0, values[0] + slope * (samples - first.samples))


def value_between(samples: int, points: Sequence[tuple[int, float]]) -> float:
    """The value for so many samples, interpolated between points.

    Beyond the largest it grows with the samples; below the smallest it is the same.

    Args:
        samples: Of a microbatch.
        points: Samples and values, from the largest to the smallest.
    """
    if samples >= points[0][0]:
        return points[0][1] * samples / points[0][0]
    for (high, above), (low, below) in pairwise(points):
        if samples >= low:
            return below + (above - below) * (samples - low) / (high - low)
    return points[-1][1]


class Watch:
    """Counts what a step does; a step that is tried again is counted anew.

    Args:
        body: Whose inputs and outputs are noted.
        context_group: The ranks that share sequences; ``None`` if there are none.
        blocks: The layers that sum gradients of vectors, such as biases, over ranks.

    Attributes:
        counter: Operations and messages.
        outputs: The bytes that each layer returns, by position.
        length: The positions of the longest sequence that a layer is given; 0 if there are none.
    """

    counter: OperationCounter

    def __init__(
        self, body: Body | None, context_group: dist.ProcessGroup | None, blocks: Sequence[ParallelLayer] = ()
    ) -> None:
        self._body, self._context_group, self._blocks = body, context_group, blocks
        self.outputs: dict[Hashable, int] = {}
        self.length = 0

    @contextmanager
    def __call__(self, meter: SavedTensorMeter) -> Iterator[OperationCounter]:
        """Enter it around the step; it gives what counts."""
        group = self._blocks[0].tensor_group if self._blocks else None
        self.counter = OperationCounter(lambda: meter.label, self._context_group, group)
        with self.counter(), self._noted_layers():
            yield self.counter

    @contextmanager
    def _noted_layers(self) -> Iterator[None]:
        """While this is entered, what each layer of the body is given, and the bytes that it returns, are noted."""
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
                # Of a sequence in shares each rank sends its own.
                bytes_of = [x.nbytes // size if isinstance(x, ShardedSequence) else x.nbytes for x in _tensors(output)]
                self.outputs[position] = sum(bytes_of)

            return hook

        def begin_block(layer: nn.Module, args: Any) -> None:
            self.counter.enter_block([to_local(p) for p in layer.parameters() if p.ndim == 1 and p.requires_grad])

        with ExitStack() as hooks:
            for block in self._blocks:
                assert isinstance(block, nn.Module)
                hooks.enter_context(block.register_forward_pre_hook(begin_block))
            for position, layer in enumerate(self._body.layers if self._body else ()):
                hooks.enter_context(layer.register_forward_pre_hook(begin(position), with_kwargs=True))
                hooks.enter_context(layer.register_forward_hook(end(position)))
            yield


def _tensors(tree: Any) -> list[Tensor]:
    return [leaf for leaf in flatten(tree)[0] if isinstance(leaf, Tensor)]


class Stopwatch:
    """Times a step by the label of the place where it is.

    Attributes:
        seconds: By label.
    """

    def __init__(self) -> None:
        self.seconds: dict[Hashable, float] = defaultdict(float)

    @contextmanager
    def __call__(self, meter: SavedTensorMeter) -> Iterator[None]:
        """Enter it around the step.

        Args:
            meter: It knows where the step is.
        """
        start = perf_counter()

        def note(*_: Any) -> None:
            nonlocal start
            now = perf_counter()
            self.seconds[meter.label] += now - start
            start = now

        # Global hooks come before the layer's own, which say where the step will be from then on.
        before = register_module_forward_pre_hook(note)
        after = register_module_forward_hook(note, always_call=True)
        try:
            yield
            note()
        finally:
            before.remove()
            after.remove()
