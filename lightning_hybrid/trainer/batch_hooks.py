"""Hooks that receive a batch before its step: which hooks read the batch, and the random numbers that hooks draw.

With DDP, each rank has its own batch, and runs the hooks for it alone. Here, all ranks of a model group (the ranks that
hold one replica) run the hooks for the same batch, also hooks at its end. This has two consequences:

- A batch can stay on the host, and be sent only to ranks that read it, unless a hook outside of the step reads it.
  `DataLoaderPreparer` and `Run.moves_batches` call :func:`batch_reading_hooks` to find such hooks.
- Hooks must draw equal random numbers on all ranks. `Run.install` installs :class:`SeededBatchHooks` for this.
"""

from __future__ import annotations

from collections.abc import Iterator
from contextlib import contextmanager
from typing import Any

from lightning.pytorch import LightningModule, Trainer
from lightning.pytorch.callbacks import ThroughputMonitor
from lightning.pytorch.utilities.model_helpers import is_overridden

from lightning_hybrid.distributed import tensor_bytes
from lightning_hybrid.distributed.messages.lazy_tensor import LazyTensor
from lightning_hybrid.distributed.pytree import map_leaves
from lightning_hybrid.distributed.random import RandomStreams
from lightning_hybrid.trainer.lightning_internals import wrap_before_batch_transfer
from lightning_hybrid.trainer.run_callback import RunCallback

# The first seed coordinates of hooks; steps have 0 to 3.
_TRANSFER, _BATCH_START = 4, 5

_TRANSFER_HOOKS = ("on_before_batch_transfer", "transfer_batch_to_device", "on_after_batch_transfer")
_BATCH_HOOKS = ("on_train_batch_start", "on_train_batch_end")
_EVALUATION_HOOKS = tuple(
    f"on_{name}_batch_{moment}" for name in ("validation", "test", "predict") for moment in ("start", "end")
)


def batch_reading_hooks(module: LightningModule, *, training: bool = True) -> list[str]:
    """Return the hooks that receive a batch outside of a step, and may expect all of it on the device.

    These are batch-transfer hooks, and hooks at the start or end of a batch. Callbacks of Lightning and of this package
    receive the batch but do not read it, except for :class:`ThroughputMonitor`.

    Args:
        module: The user's module, attached to a Trainer with callbacks and perhaps a data module.
        training: True for the hooks of training batches, False for the hooks of evaluation batches.

    Returns:
        The names of the hooks, such as ``"MyCallback.on_train_batch_start"``. If there are none, a batch may stay on
        the host until a step needs it, and a rank may receive only the tensors that its steps read.
    """
    trainer: Any = module.trainer
    of_batches = _BATCH_HOOKS if training else _EVALUATION_HOOKS
    candidates = [(module, _TRANSFER_HOOKS + of_batches), (trainer.datamodule, _TRANSFER_HOOKS)]
    for callback in trainer.callbacks:
        kind = type(callback)
        if kind is ThroughputMonitor or not kind.__module__.startswith(("lightning.pytorch.", "lightning_hybrid.")):
            candidates.append((callback, of_batches))
    return [
        f"{type(owner).__name__}.{hook}" for owner, hooks in candidates for hook in hooks if is_overridden(hook, owner)
    ]


def pinned(batch: Any) -> Any:
    """Return a batch with its tensors in pinned host memory, so that copies to the device are asynchronous.

    `HybridStrategy.batch_to_device` calls this for a CUDA device. Lazy tensors, whose values have not been received,
    and tensors on a device do not change.
    """
    return map_leaves(lambda leaf: leaf if isinstance(leaf, LazyTensor) else tensor_bytes.pinned(leaf), batch)


class SeededBatchHooks(RunCallback):
    """A callback with which hooks before a step draw the same random numbers on every rank of a model group.

    For example, a callback that mixes samples at the start of a batch (mix-up) must draw equal numbers on the first
    stage, where it changes the inputs, and on the last stage, where it changes the labels. This callback runs before
    the user's callbacks. Outside code sees the generators as if the hooks had drawn nothing::

        on_before_batch_transfer           isolated, seeded
        batch-transfer hooks               isolated, seeded
        on_*_batch_start of this class     isolated, seeded --.
        on_*_batch_start of other classes                     | draw
        step, or the end of the epoch      <------------------' generators restored

    The Trainer calls the hooks of this class, but only if the model group has several ranks.
    `HybridStrategy.batch_to_device` enters :meth:`transfer`. The steps of `HybridStrategy` restore the generators
    before the user's step.

    Args:
        streams: The random streams of this rank.
        alone: True if the model group has only this rank; transfer hooks then draw as in a single process.
    """

    def __init__(self, streams: RandomStreams, *, alone: bool) -> None:
        self._streams = streams
        self._alone = alone
        self._draws: bool | None = None  # True if there are transfer hooks, which may draw; `None` until looked up

    @contextmanager
    def installed(self, module: LightningModule) -> Iterator[None]:
        """While entered, seed before `on_before_batch_transfer`, which Lightning calls without the strategy.

        Entered for a whole run. At the end, the generators are restored.
        """
        self._draws = None
        with wrap_before_batch_transfer(module, lambda: self.transfer(module, before=True)):
            try:
                yield
            finally:
                self.close()

    def close(self) -> None:
        """Restore the generators after the hooks at the start of a batch. A second call does nothing."""
        self._streams.end_hooks()

    @contextmanager
    def transfer(self, module: LightningModule, *, before: bool = False) -> Iterator[None]:
        """Seed the generators for the batch-transfer hooks, and restore the generators afterward.

        If the model group has only this rank, or there are no such hooks, do nothing. In evaluation, each call
        increases a counter, so all ranks of a model group must enter this equally often.

        Args:
            module: The user's module.
            before: True for `on_before_batch_transfer`, False for the other transfer hooks.
        """
        trainer: Any = module.trainer
        if self._draws is None:  # looked up late, because hooks at the start of a run may add transfer hooks
            owners = (module, trainer.datamodule)
            self._draws = any(is_overridden(hook, owner) for owner in owners for hook in _TRANSFER_HOOKS)
        if self._alone or not self._draws:
            yield
            return
        with self._streams.isolated():
            if trainer.training:
                batch = trainer.fit_loop.epoch_loop.total_batch_idx
            else:
                batch = self._streams.next_number("transfers of evaluation batches")
            self._streams.seed_user(_TRANSFER, before, trainer.training, batch)
            yield

    def _begin(self, *coordinates: int) -> None:
        """Seed the generators for the hooks at the start of a batch.

        Args:
            coordinates: 1 for training and 0 for evaluation, and the number of the batch.
        """
        self.close()  # a hook may have skipped the previous batch, so no step has closed it
        self._streams.begin_hooks(_BATCH_START, *coordinates)

    def on_train_batch_start(self, trainer: Trainer, pl_module: LightningModule, batch: Any, batch_idx: int) -> None:
        """Seed by the number of the batch, so that a resumed run draws the same numbers."""
        self._begin(1, trainer.fit_loop.epoch_loop.total_batch_idx)

    def on_validation_batch_start(
        self, trainer: Trainer, pl_module: LightningModule, batch: Any, batch_idx: int, dataloader_idx: int = 0
    ) -> None:
        """Seed by a counter of evaluation batches, which checkpoints contain; tests and predictions use it, too."""
        self._begin(0, self._streams.next_number("starts of evaluation batches"))

    def on_train_epoch_end(self, trainer: Trainer, pl_module: LightningModule) -> None:
        """Restore the generators, because a hook may have skipped the rest of the epoch."""
        self.close()

    on_validation_epoch_end = on_test_epoch_end = on_predict_epoch_end = on_train_epoch_end
    on_test_batch_start = on_predict_batch_start = on_validation_batch_start
