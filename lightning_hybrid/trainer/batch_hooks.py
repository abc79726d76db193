"""When a batch goes to the device: as a whole, as Lightning promises its hooks, or micro-batch by micro-batch."""

from __future__ import annotations

import functools
from collections.abc import Iterator
from contextlib import contextmanager
from typing import Any

import torch
from lightning.fabric.utilities import move_data_to_device
from lightning.pytorch import Callback, LightningDataModule, LightningModule
from lightning.pytorch.callbacks import ThroughputMonitor
from lightning.pytorch.utilities.model_helpers import is_overridden
from torch import Tensor

from lightning_hybrid.distributed.pytree import map_leaves
from lightning_hybrid.distributed.random import RandomStreams

__all__ = ["SeededTransfer", "onlookers", "pinned", "to_device"]

_TRANSFER = 4  # tells the random numbers of batch-transfer hooks from those of steps

_TRANSFER_HOOKS = ("on_before_batch_transfer", "transfer_batch_to_device", "on_after_batch_transfer")
_BATCH_HOOKS = ("on_train_batch_start", "on_train_batch_end")


def onlookers(module: LightningModule) -> list[str]:
    """Who looks at a training batch outside of `training_step`, and may expect it on the device.

    Lightning's own callbacks get the batch but do not read it, except for :class:`ThroughputMonitor`.

    Args:
        module: The user's module, attached to a Trainer with callbacks and perhaps a data module.

    Returns:
        Names of hooks; without any, a batch may stay on the host until a micro-batch is needed.
    """
    found = [
        f"{type(module).__name__}.{hook}" for hook in (*_TRANSFER_HOOKS, *_BATCH_HOOKS) if is_overridden(hook, module)
    ]
    datamodule: LightningDataModule | None = module.trainer.datamodule  # type: ignore[attr-defined]
    callbacks: list[Callback] = module.trainer.callbacks  # type: ignore[attr-defined]
    if datamodule is not None:
        found += [f"{type(datamodule).__name__}.{hook}" for hook in _TRANSFER_HOOKS if is_overridden(hook, datamodule)]
    for callback in callbacks:
        kind = type(callback)
        if kind is ThroughputMonitor or not kind.__module__.startswith(("lightning.pytorch.", "lightning_hybrid.")):
            overridden = [hook for hook in _BATCH_HOOKS if getattr(kind, hook) is not getattr(Callback, hook)]
            found += [f"{kind.__name__}.{hook}" for hook in overridden]
    return found


def pinned(batch: Any) -> Any:
    """The batch in page-locked memory of the host, from which it moves without making the host wait."""
    return map_leaves(_pinned, batch)


def _pinned(leaf: Any) -> Any:
    on_host = isinstance(leaf, Tensor) and leaf.device.type == "cpu"
    return leaf.pin_memory() if on_host and not leaf.is_pinned() else leaf


def to_device(microbatch: Any, device: torch.device) -> Any:
    """The micro-batch on the device; what is there already is not copied."""
    return move_data_to_device(microbatch, device)


class SeededTransfer:
    """Batch-transfer hooks draw the same random numbers on every rank of a model group.

    Args:
        streams: The random streams of this rank.
        alone: Whether this rank is its model group: then hooks draw as they do in one process.
    """

    def __init__(self, streams: RandomStreams, *, alone: bool) -> None:
        self._streams = streams
        self._alone = alone

    @contextmanager
    def __call__(self, module: LightningModule, *, before: bool = False) -> Iterator[None]:
        """Around the hooks.

        Args:
            module: The user's module.
            before: Whether this is for the hook that comes before the transfer.
        """
        if self._alone:
            yield
            return
        with self._streams.isolated():
            trainer = module.trainer
            if trainer.training:
                batch = trainer.fit_loop.epoch_loop.total_batch_idx
            else:
                batch = self._streams.next_number("transfers of evaluation batches")
            self._streams.seed_user(_TRANSFER, before, trainer.training, batch)
            yield

    def install(self, module: LightningModule) -> None:
        """Around the hook before the transfer, which Lightning calls itself."""
        transfer = module._on_before_batch_transfer

        @functools.wraps(transfer)
        def seeded(*args: Any, **kwargs: Any) -> Any:
            with self(module, before=True):
                return transfer(*args, **kwargs)

        vars(module)["_on_before_batch_transfer"] = seeded

    def remove(self, module: LightningModule) -> None:
        """Undo :meth:`install`."""
        vars(module).pop("_on_before_batch_transfer", None)
