"""A training step with manual optimization, with tensor or context parallelism.

Each `Run` makes one step object when it starts. `HybridStrategy.training_step` calls the object for each batch. The
user's step calls `LightningModule.manual_backward`, which calls :meth:`ManualTrainingStep.backward` through
`HybridStrategy.backward`.

`TrainingStep` cannot run such a step, because its schedule calls backward itself. `UncutTrainingStep` runs the step as
it is, but with tensor or context parallelism, random numbers, logs and results have to be equal on all ranks of a model
group (the ranks of one replica), and activations may be sharded. Pipelines do not support manual optimization.
"""

from __future__ import annotations

from collections.abc import Callable, Iterator
from contextlib import AbstractContextManager, ExitStack, contextmanager
from typing import Any

from torch import Tensor

from lightning_hybrid.data_parallel.grad_sync import GradientSync
from lightning_hybrid.distributed.factories import sharded_factories
from lightning_hybrid.pipeline_parallel.splitting.microbatch import signature
from lightning_hybrid.trainer.debug.anomaly_detection import AnomalyDetector
from lightning_hybrid.trainer.losses.repeated_writes import ParameterWrites
from lightning_hybrid.trainer.program.program import StepCall
from lightning_hybrid.trainer.program.step_context import StepContext
from lightning_hybrid.trainer.results.logging import merge_logs

_TRAINING = 0  # the first seed coordinate of training steps


class ManualTrainingStep:
    """A training step with manual optimization, without stages and microbatches.

    ::

        training_step    forward   manual_backward             optimizer.step()    ...    any number of times
        this class                 backward, then gradients
                                   summed and averaged

    After each backward, ``.grad`` contains the gradients of a single process, so the step can read, clip, accumulate
    and use them. While `HybridStrategy.block_backward_sync` is entered, gradients are only accumulated on each rank.

    Args:
        context: The state that steps share.
        grad_sync: The gradient synchronization.

    Attributes:
        has_gradients: False, because the user's step calls backward.
        anomaly: Detects values that are not finite; set by the `Run`. ``None`` without `Trainer(detect_anomaly=True)`.
    """

    has_gradients = False

    def __init__(self, context: StepContext, grad_sync: GradientSync) -> None:
        self._context, self._grad_sync = context, grad_sync
        self.anomaly: AnomalyDetector | None = None
        self._writes = ParameterWrites(context.module, grad_sync)

    def __call__(
        self, *arguments: Any, step: int, precision: Callable[[], AbstractContextManager[None]], **others: Any
    ) -> Any:
        """Run one batch, and log the values that the step logs; every rank calls this.

        Args:
            arguments: The arguments of the user's `training_step`; the first one is the batch.
            step: The number of this batch since training began; random numbers depend on it.
            precision: Returns the precision plugin's context for a forward.
            others: Arguments of other kinds of steps; unused.

        Returns:
            The result of `training_step`, the same on every rank of a model group. On ranks that receive it, its
            tensors have no autograd graph; on the first rank, they keep the graph.
        """
        context, zero = self._context, self._grad_sync.zero
        version = context.version(gradients=True)
        context.desync.note_batch("training_step", version, [signature(arguments[0])])
        with context.guard(), self._grad_sync.step():
            with context.step(num_microbatches=1) as records, precision(), self._around_code():
                if zero.is_active:
                    zero.forward_begins(0)
                call = StepCall(
                    context.module.training_step, arguments[0], arguments[1:], (_TRAINING, step, 0), version
                )
                value = context.plain(call.step(*context.enter_user_code(call, keep=True)))
            return context.share(lambda: (value, merge_logs(records, [1])))

    def backward(self, loss: Tensor | None, run: Callable[[Tensor], None] | None = None, *, reduce: bool) -> bool:
        """Run a backward and, if requested, sum and average the gradients; every rank calls this.

        Args:
            loss: The loss that the user passed to `manual_backward`; never ``None``.
            run: Lightning's backward of a loss; never ``None``.
            reduce: True to reduce gradients now, False to accumulate them on each rank.

        Returns:
            True, because there is a loss.
        """
        assert loss is not None
        assert run is not None
        grad_sync = self._grad_sync
        grad_sync.reduces = reduce
        grad_sync.keep_sums()
        grad_sync.backward_begins(0, is_last=True)
        run(self._context.plain(loss))
        grad_sync.backward_ends(0, is_last=True)
        if reduce:
            grad_sync.finish()
        return True

    @contextmanager
    def _around_code(self) -> Iterator[None]:
        """Enter the context of the user's step, in which optimizers create their states as outside of a step."""
        optimizers = self._context.module.trainer.optimizers
        with ExitStack() as undo:
            if self.anomaly is not None:
                undo.enter_context(self.anomaly.batch())
            # With ZeRO, optimizers update shards, so writes into gathered parameters are lost (documented as a limit).
            if self._writes.watches and not self._grad_sync.zero.is_active:
                undo.enter_context(self._writes.around(0, 1, optimizers))
            stepping = undo.enter_context(ExitStack())
            for optimizer in optimizers:
                begin = optimizer.register_step_pre_hook(lambda *_: stepping.enter_context(sharded_factories()))
                undo.callback(begin.remove)
                undo.callback(optimizer.register_step_post_hook(lambda *_: stepping.close()).remove)
            yield
