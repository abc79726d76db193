"""One forward of a module, counted on shapes or timed, by the place where the step is."""

from __future__ import annotations

from collections import defaultdict
from collections.abc import Callable, Hashable, Iterator, Sequence
from contextlib import ExitStack, contextmanager
from dataclasses import dataclass
from itertools import pairwise
from time import perf_counter
from typing import Any

from torch import Tensor, nn
from torch.nn.modules.module import register_module_forward_hook, register_module_forward_pre_hook

from lightning_hybrid.distributed.pytree import flatten
from lightning_hybrid.memory.account import SavedTensorMeter
from lightning_hybrid.pipeline_parallel.body import Body
from lightning_hybrid.strategy.auto_layout.dry_run.operations import OperationCounter
from lightning_hybrid.strategy.auto_layout.dry_run.saved_tensors import Saved


@dataclass(frozen=True)
class Trace:
    """One forward with a microbatch.

    Attributes:
        samples: Of the microbatch.
        counter: Operations and messages, by label of the place.
        saved: What it saves for backward.
        outputs: The bytes that each layer of the body returns, by position.
    """

    samples: int
    counter: OperationCounter
    saved: Saved
    outputs: dict[Hashable, int]


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
        body: Whose outputs are noted.

    Attributes:
        counter: Operations and messages.
        outputs: The bytes that each layer returns, by position.
    """

    counter: OperationCounter

    def __init__(self, body: Body | None) -> None:
        self._body = body
        self.outputs: dict[Hashable, int] = {}

    @contextmanager
    def __call__(self, meter: SavedTensorMeter) -> Iterator[None]:
        """Enter it around the step."""
        self.counter = OperationCounter(lambda: meter.label)
        with self.counter(), _measured_outputs(self._body, self.outputs):
            yield


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


@contextmanager
def _measured_outputs(body: Body | None, outputs: dict[Hashable, int]) -> Iterator[None]:
    """While this is entered, the bytes that each layer of the body returns are noted, by position."""

    def note(position: int) -> Callable[..., None]:
        def hook(layer: nn.Module, args: Any, output: Any) -> None:
            outputs[position] = sum(leaf.nbytes for leaf in flatten(output)[0] if isinstance(leaf, Tensor))

        return hook

    with ExitStack() as hooks:
        for position, layer in enumerate(body.layers if body else ()):
            hooks.enter_context(layer.register_forward_hook(note(position)))
        yield
