"""All that a run puts in, or changes, in the Trainer and in Lightning, torchmetrics and TensorBoard; and takes back.

What is replaced, and where:

===============================================  =====================================  ===============================
`trainer.callbacks`                              ours before the user's                 :func:`add_callbacks`
hooks of the module, once                        divided after `configure_model`        :class:`AfterHook`
`ThroughputMonitor`, inference mode, example     one process is not the whole model     :func:`patches`
input, TensorBoard's `SummaryWriter.add_*`
between closure and optimizer's step             gradients that are not finite          `trainer.debug`
a hook after an optimizer's first step           what half precision is too coarse for  `trainer.debug`
what replicas reduce of what is logged           replicas that log different keys       `trainer.debug`
the loop's automatic optimization                gradients zeroed before the step       `trainer.optimization`
`use_distributed_sampler`                        we divide the samples                  `trainer.dataloader`
`_on_before_batch_transfer`                      seeded                                 `trainer.batch_hooks`
signal handlers, the broadcast of SIGTERM        no collective in a handler             `strategy.watch.signals`
`self.log`, `self.print`, `trainer.loggers`      recorded during a step                 `trainer.results`
`_ResultMetric.to`                               moves what is not there yet            :func:`patches`
Lightning's console handlers, `showwarning`      lines beside progress bars             `trainer.results.terminal`
`Metric.sync`, `compute`, `update`               over the replicas, on the last stage   `trainer.results.metrics`
`torch.distributed.all_reduce`, ...              not in a step over stages              `strategy.collectives`
`clip_grad_norm_`, `get_total_norm`, `grad_norm` the gradients of the whole model       `trainer.gradient_functions`
numbers and arrays read from a `DTensor`         of the whole tensor, or refused        `distributed.dtensor`
`torch.save`, `DTensor.storage`, as long as the  no file without all values             `checkpoint.parts`
module is divided, also after the run
`body.forward`                                   the step is cut there                  `pipeline_parallel.body`
===============================================  =====================================  ===============================
"""

from __future__ import annotations

import functools
import sys
from collections.abc import Callable, Iterator
from contextlib import AbstractContextManager, ExitStack, contextmanager, nullcontext
from typing import Any

from lightning.pytorch import Callback, LightningModule, Trainer
from lightning.pytorch.callbacks import ThroughputMonitor
from lightning_utilities.core.rank_zero import WarningCache
from torch import Tensor, nn

from lightning_hybrid.distributed.mesh import Mesh
from lightning_hybrid.distributed.pytree import flatten
from lightning_hybrid.distributed.replaced import replaced_attributes
from lightning_hybrid.memory.report import MemoryReport
from lightning_hybrid.trainer.batch_hooks import SeededBatchHooks
from lightning_hybrid.trainer.debug.nonfinite_gradients import SkippedSteps
from lightning_hybrid.trainer.exceptions import ExceptionCallback
from lightning_hybrid.trainer.lightning_internals import (
    keep_results_in_place,
    throughputs,
    without_example_input,
)
from lightning_hybrid.trainer.optimization import GlobalBatch
from lightning_hybrid.trainer.results.epoch_sync import EpochSync
from lightning_hybrid.trainer.resume.resume import ResumeCallback

#: Our callbacks go before the user's, in this order: hooks of a batch are seeded before anything draws; what the last
#: stage has kept is shared before anybody reads it at an epoch's end; the place in the data is taken before one of them
#: saves a checkpoint; and an exception ends the run before one of them waits for other ranks.
CALLBACK_ORDER: tuple[type[Callback], ...] = (
    SeededBatchHooks,
    EpochSync,
    ResumeCallback,
    GlobalBatch,
    MemoryReport,
    SkippedSteps,
    ExceptionCallback,
)


def add_callbacks(trainer: Trainer, *callbacks: Callback) -> None:
    """Put callbacks of ours before the user's, in the order of :data:`CALLBACK_ORDER`."""
    ours = [each for each in trainer.callbacks if type(each) in CALLBACK_ORDER]  # type: ignore[attr-defined]
    users = [each for each in trainer.callbacks if type(each) not in CALLBACK_ORDER]  # type: ignore[attr-defined]
    ours = sorted([*ours, *callbacks], key=lambda callback: CALLBACK_ORDER.index(type(callback)))
    trainer.callbacks = [*ours, *users]  # type: ignore[attr-defined]


def remove_callbacks(trainer: Trainer) -> None:
    """Take all of ours out again. The Trainer may be calling them just now, so its list is replaced, not changed."""
    users = [each for each in trainer.callbacks if type(each) not in CALLBACK_ORDER]  # type: ignore[attr-defined]
    trainer.callbacks = users  # type: ignore[attr-defined]


class AfterHook:
    """Takes the place of a method of one module until it has been called once.

    Args:
        module: The module.
        name: Of the method.
        then: What is done after it.
    """

    def __init__(self, module: nn.Module, name: str, then: Callable[[], None]) -> None:
        self._module, self._name = module, name
        hook = getattr(module, name)

        @functools.wraps(hook)
        def called(*args: Any, **kwargs: Any) -> None:
            self.remove()
            hook(*args, **kwargs)
            then()

        vars(module)[name] = called

    def remove(self) -> None:
        """Give the method its place back."""
        vars(self._module).pop(self._name, None)


@contextmanager
def patches(trainer: Trainer, module: LightningModule, mesh: Mesh) -> Iterator[None]:
    """While entered, some things in the Trainer, the module and TensorBoard are others.

    - `ThroughputMonitor` multiplies what it counts on rank 0 by the number of processes. Ranks of one model group work
      on the same samples: the number of replicas is right, and a "device" of its peak is a model group.
    - Evaluation makes batches, and the state of metrics, in inference mode. Tensors made there may not be changed in
      place outside of it; autograd functions inside of it. Without gradients is enough.
    - `ModelSummary` runs the module on `example_input_array`. No rank has all layers; without the example it shows
      everything but the sizes of inputs and outputs.
    - `self.log` copies all that belongs to a value at each call, to move it to where it is.
    - TensorBoard's writer draws random numbers for a tensor on the meta device, as if those were its values. What it
      is given of parameters of other stages is left out, with a warning.

    Args:
        trainer: The Trainer.
        module: The user's module.
        mesh: The ranks.
    """
    with ExitStack() as undo:
        for callback in trainer.callbacks:  # type: ignore[attr-defined]
            for throughput in throughputs(callback) if isinstance(callback, ThroughputMonitor) else ():
                flops = throughput.available_flops and throughput.available_flops * mesh.model_group.size()
                values = {"world_size": mesh.num_replicas, "available_flops": flops}
                undo.enter_context(replaced_attributes(throughput, **values))
        undo.enter_context(keep_results_in_place())
        for loop in (trainer.validate_loop, trainer.test_loop, trainer.predict_loop):
            undo.enter_context(replaced_attributes(loop, inference_mode=False))
        if mesh.sizes.pipeline > 1:
            undo.enter_context(without_example_input(module))
            undo.enter_context(_without_placeholders())
        yield


def _without_placeholders() -> AbstractContextManager[None]:
    """While entered, writers of TensorBoard leave placeholders out."""
    tensorboard = sys.modules.get("torch.utils.tensorboard")  # loggers have made their writers before a run
    if tensorboard is None:
        return nullcontext()
    methods = {name: method for name, method in vars(tensorboard.SummaryWriter).items() if name.startswith("add_")}
    warnings = WarningCache()
    checked = {name: _with_values_only(method, warnings) for name, method in methods.items()}
    return replaced_attributes(tensorboard.SummaryWriter, **checked)


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
    "TensorBoard skips parameters of other pipeline stages, because they have no values on rank 0. Check `if not"
    " p.is_meta` before you plot or log a parameter."
)
