"""Changes to the Trainer, Lightning, torchmetrics and TensorBoard during a run, all of which are undone after the run.

`World.open`, `Run.install` and `AttachedModule` make the changes in this file. They are needed because Lightning has no
hook at these places, or because its code assumes that each process has the full model.

The table lists the main changes that last for a run, with the modules that make them. Changes around a single step or
call are not in the table:

===============================================  =====================================  ===============================
`trainer.callbacks`                              ours before the user's                 :func:`add_callbacks`
hooks of the module, once                        parallelized after `configure_model`   :class:`AfterHook`
`ThroughputMonitor`, inference mode, example     a process has a part of the model      :func:`patches`
input, TensorBoard's `SummaryWriter.add_*`
between closure and optimizer's step             gradients that are not finite          `trainer.debug`
a hook after an optimizer's first step           warnings about half precision          `trainer.debug`
reduction of logged values over replicas         replicas that log different keys       `trainer.debug`
the loop's automatic optimization                gradients zeroed before the step       `trainer.optimization`
`use_distributed_sampler`                        we split the samples                   `trainer.dataloader`
`_on_before_batch_transfer`                      seeded                                 `trainer.batch_hooks`
signal handlers, the broadcast of SIGTERM        no collective in a handler             `strategy.watch.signals`
`self.log`, `self.print`, `trainer.loggers`      recorded during a step                 `trainer.results`
`_ResultMetric.to`                               copies only to another device          :func:`patches`
Lightning's console handlers, `showwarning`      lines above progress bars              `trainer.results.terminal`
`Metric.sync`, `compute`, `update`               over the replicas, on the last stage   `trainer.results.metrics`
`torch.distributed.all_reduce`, ...              no call over stages in a step          `strategy.collectives`
`clip_grad_norm_`, `get_total_norm`, `grad_norm` the gradients of the full model        `trainer.gradient_functions`
numbers and arrays read from a `DTensor`         of the full tensor, or an error        `distributed.dtensor`
`torch.save`, `DTensor.storage`, as long as the  no file without all values             `checkpoint.parts`
module is sharded, also after the run
`body.forward`                                   the step is split there                `pipeline_parallel.body`
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

#: Our callbacks run before the user's, in this order. Batch hooks are seeded before any of them draws random numbers.
#: Results of the last stage are sent to all ranks before callbacks read them at the end of an epoch. The position in
#: the data is recorded before a callback saves a checkpoint. An exception ends the run before a callback waits for
#: other ranks.
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
    """Add callbacks of this package before the user's callbacks, in the order of :data:`CALLBACK_ORDER`."""
    ours = [each for each in trainer.callbacks if type(each) in CALLBACK_ORDER]  # type: ignore[attr-defined]
    users = [each for each in trainer.callbacks if type(each) not in CALLBACK_ORDER]  # type: ignore[attr-defined]
    ours = sorted([*ours, *callbacks], key=lambda callback: CALLBACK_ORDER.index(type(callback)))
    trainer.callbacks = [*ours, *users]  # type: ignore[attr-defined]


def remove_callbacks(trainer: Trainer) -> None:
    """Remove all callbacks of this package. The Trainer may be iterating over its list, so the list is replaced."""
    users = [each for each in trainer.callbacks if type(each) not in CALLBACK_ORDER]  # type: ignore[attr-defined]
    trainer.callbacks = users  # type: ignore[attr-defined]


class AfterHook:
    """Replacement of a method of one module for one call, which calls a function after this call.

    Args:
        module: The module.
        name: The name of the method.
        then: The function to call after the method.
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
        """Restore the method."""
        vars(self._module).pop(self._name, None)


@contextmanager
def patches(trainer: Trainer, module: LightningModule, mesh: Mesh) -> Iterator[None]:
    """Change the Trainer, the module and TensorBoard inside the context.

    - `ThroughputMonitor` multiplies the counts of rank 0 by the number of processes. The ranks of a model group work on
      the same samples, so the monitor gets the number of replicas instead, and the peak FLOP/s of a model group instead
      of a device.
    - Evaluation does not use inference mode. Tensors that are created in inference mode, such as batches and states of
      metrics, cannot be changed in place outside of it, and autograd functions cannot run inside of it. Disabled
      gradients are enough.
    - `ModelSummary` runs the module on `example_input_array`. No rank has all layers, so the example is removed. The
      summary then has everything except the sizes of inputs and outputs.
    - `self.log` copies all attributes of a logged result at each call, to move the result to a device. Here, it does
      this only if the result is on another device.
    - TensorBoard's writer draws random numbers as the values of a tensor on the meta device. Calls with parameters of
      other stages are skipped, with a warning.

    Args:
        trainer: The Trainer.
        module: The user's module.
        mesh: The device mesh.
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
    """Make TensorBoard's writers skip placeholders inside the context."""
    tensorboard = sys.modules.get("torch.utils.tensorboard")  # loggers create their writers before a run
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
