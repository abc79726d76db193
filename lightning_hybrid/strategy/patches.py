"""Parts of Lightning that take this process for the whole model are told better, while a pipeline runs."""

from __future__ import annotations

import functools
import sys
from collections.abc import Callable
from typing import Any

from lightning.fabric.utilities.throughput import Throughput
from lightning.pytorch import LightningModule, Trainer
from lightning.pytorch.callbacks import ThroughputMonitor
from lightning_utilities.core.rank_zero import WarningCache
from torch import Tensor

from lightning_hybrid.distributed.mesh import Mesh
from lightning_hybrid.distributed.pytree import flatten

__all__ = ["Patches"]


class Patches:
    """What is changed at the start of a run and changed back at its end.

    - `ThroughputMonitor` multiplies what it counts on rank 0 by the number of processes. Ranks of one model group work
      on the same samples: the number of replicas is right, and a "device" of its peak is a model group.
    - Evaluation makes batches, and the state of metrics, in inference mode. Tensors made there may not be changed in
      place outside of it; autograd functions inside of it. Without gradients is enough.
    - `ModelSummary` runs the module on `example_input_array`. No rank has all layers; without the example it shows
      everything but the sizes of inputs and outputs.
    - TensorBoard's writer draws random numbers for a tensor on the meta device, as if those were its values. What it
      is given of parameters of other stages is left out, with a warning.

    Args:
        module: The user's module.
        mesh: The ranks.
    """

    def __init__(self, module: LightningModule, mesh: Mesh) -> None:
        self._module = module
        self._mesh = mesh
        self._example: Any = None
        self._inference_modes: list[tuple[Any, bool]] = []
        self._throughputs: list[tuple[Throughput, int, float | None]] = []
        self._writer_methods: dict[str, Any] = {}

    def install(self, trainer: Trainer) -> None:
        """Change what has to be changed."""
        for callback in trainer.callbacks:  # type: ignore[attr-defined]
            if isinstance(callback, ThroughputMonitor):
                for throughput in callback._throughputs.values():
                    self._throughputs.append((throughput, throughput.world_size, throughput.available_flops))
                    throughput.world_size = self._mesh.data_parallel_size
                    if throughput.available_flops is not None:
                        throughput.available_flops *= self._mesh.model_group.size()
        for loop in (trainer.validate_loop, trainer.test_loop, trainer.predict_loop):
            self._inference_modes.append((loop, loop.inference_mode))
            loop.inference_mode = False
        if self._mesh.pipeline_parallel_size > 1:
            self._example = self._module._example_input_array
            self._module._example_input_array = None
            self._leave_out_placeholders()

    def _leave_out_placeholders(self) -> None:
        tensorboard = sys.modules.get("torch.utils.tensorboard")  # loggers have made their writers before a run
        if tensorboard is None:
            return
        for name, method in vars(tensorboard.SummaryWriter).items():
            if name.startswith("add_"):
                self._writer_methods[name] = method
        warnings = WarningCache()
        for name, method in self._writer_methods.items():
            setattr(tensorboard.SummaryWriter, name, _with_values_only(method, warnings))

    def remove(self) -> None:
        """Change it back."""
        for loop, mode in self._inference_modes:
            loop.inference_mode = mode
        self._inference_modes.clear()
        for throughput, world_size, flops in self._throughputs:
            throughput.world_size, throughput.available_flops = world_size, flops
        self._throughputs.clear()
        for name, method in self._writer_methods.items():
            setattr(sys.modules["torch.utils.tensorboard"].SummaryWriter, name, method)
        self._writer_methods.clear()
        if self._example is not None:
            self._module._example_input_array, self._example = self._example, None


def _with_values_only(method: Callable[..., Any], warnings: WarningCache) -> Callable[..., Any]:
    @functools.wraps(method)
    def checked(self: Any, tag: Any, *args: Any, **kwargs: Any) -> Any:
        leaves, _ = flatten((args, kwargs))
        if any(isinstance(leaf, Tensor) and leaf.is_meta for leaf in leaves):
            warnings.warn(_LEFT_OUT)
            return None
        return method(self, tag, *args, **kwargs)

    return checked


_LEFT_OUT = (
    "TensorBoard gets nothing about parameters of other pipeline stages, which have no values on rank 0: ask"
    " `if not p.is_meta` before you draw or log something of a parameter."
)
