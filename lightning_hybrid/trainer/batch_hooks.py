"""Batches before their step: when they go to the device, and what the hooks on the way draw."""

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

# These tell random numbers of hooks from those of steps, 0 to 3.
_TRANSFER, _BATCH_START = 4, 5

_TRANSFER_HOOKS = ("on_before_batch_transfer", "transfer_batch_to_device", "on_after_batch_transfer")
_BATCH_HOOKS = ("on_train_batch_start", "on_train_batch_end")
_EVALUATION_HOOKS = tuple(
    f"on_{name}_batch_{moment}" for name in ("validation", "test", "predict") for moment in ("start", "end")
)


def batch_reading_hooks(module: LightningModule, *, training: bool = True) -> list[str]:
    """The hooks that get a batch outside of a step, and may expect it on the device as a whole.

    Lightning's own callbacks get the batch but do not read it, except for :class:`ThroughputMonitor`.

    Args:
        module: The user's module, attached to a Trainer with callbacks and perhaps a data module.
        training: Whether the batch is one of training, and not of evaluation.

    Returns:
        Names of hooks; without any, a batch may stay on the host until a step needs it.
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
    """The batch in page-locked memory of the host, from which it moves without making the host wait."""
    return map_leaves(lambda leaf: leaf if isinstance(leaf, LazyTensor) else tensor_bytes.pinned(leaf), batch)


class SeededBatchHooks(RunCallback):
    """Hooks of a batch that run before its step draw the same random numbers on every rank of a model group.

    A callback that mixes samples at the start of a batch (mix-up) does so on every rank: on the first stage it changes
    the inputs, on the last one the labels. It comes after this one. ::

        on_before_batch_transfer   isolated, seeded
        batch-transfer hooks       isolated, seeded
        on_*_batch_start of this   isolated, seeded --.
        of others, of the module                      | draw
        step, or the epoch's end   <------------------' closed: as if nothing had been drawn

    Args:
        streams: The random streams of this rank.
        alone: Whether this rank is its model group: then transfer hooks draw as they do in one process.
    """

    def __init__(self, streams: RandomStreams, *, alone: bool) -> None:
        self._streams = streams
        self._alone = alone
        self._draws: bool | None = None  # whether there are transfer hooks that might

    @contextmanager
    def installed(self, module: LightningModule) -> Iterator[None]:
        """While entered, seed for the hook before the transfer, which Lightning calls itself."""
        self._draws = None
        with wrap_before_batch_transfer(module, lambda: self.transfer(module, before=True)):
            try:
                yield
            finally:
                self.close()

    def close(self) -> None:
        """The hooks at the start of a batch are over."""
        self._streams.end_hooks()

    @contextmanager
    def transfer(self, module: LightningModule, *, before: bool = False) -> Iterator[None]:
        """Around the batch-transfer hooks.

        Args:
            module: The user's module.
            before: Whether this is for the hook that comes before the transfer.
        """
        trainer: Any = module.trainer
        if self._draws is None:  # hooks of a run's start may have put some in
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
        self.close()  # a hook may have said that its batch is to be skipped
        self._streams.begin_hooks(_BATCH_START, *coordinates)

    def on_train_batch_start(self, trainer: Trainer, pl_module: LightningModule, batch: Any, batch_idx: int) -> None:
        """Seed for this batch: a resumed run draws the same."""
        self._begin(1, trainer.fit_loop.epoch_loop.total_batch_idx)

    def on_validation_batch_start(
        self, trainer: Trainer, pl_module: LightningModule, batch: Any, batch_idx: int, dataloader_idx: int = 0
    ) -> None:
        """Seed for this batch."""
        self._begin(0, self._streams.next_number("starts of evaluation batches"))

    def on_train_epoch_end(self, trainer: Trainer, pl_module: LightningModule) -> None:
        """The epoch may have ended with a hook that skipped the rest of it; what comes now draws outside."""
        self.close()

    on_validation_epoch_end = on_test_epoch_end = on_predict_epoch_end = on_train_epoch_end
    on_test_batch_start = on_predict_batch_start = on_validation_batch_start
