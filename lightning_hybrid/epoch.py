"""The ends of epochs: what steps kept on the last stage, and what hooks log, reaches every rank."""

from __future__ import annotations

import functools
import hashlib
import io
import pickle
from collections.abc import Callable
from typing import Any

import torch
from lightning.pytorch import Callback, LightningModule, Trainer
from torch import Tensor

from lightning_hybrid.exchange import broadcast_object
from lightning_hybrid.logging import Log, LogRecorder, merge_logs, pack_logs, replay, unpack_logs
from lightning_hybrid.pytree import map_leaves

__all__ = ["EpochBoundary"]

_PHASES = ("train", "validation", "test", "predict")
_PLAIN = (bool, int, float, complex, str, bytes, type(None), Tensor, list, tuple, dict, set)


class EpochBoundary(Callback):
    """Goes before all other callbacks of the Trainer.

    Before the first hook of an epoch's end, plain attributes of the module that changed on the last stage during the
    epoch (the common ``self.outputs.append(...)``) are given to the other ranks. What hooks log from there until the
    module's own hook is over is recorded, and the last stage's record is replayed on every rank.

    Args:
        module: The user's module.
        control_group: The model group, over gloo.
        source: The rank inside it that has the last stage.
        is_source: Whether this is that rank.
        alone: Whether there is one replica.
    """

    def __init__(
        self, module: LightningModule, control_group: Any, *, source: int, is_source: bool, alone: bool
    ) -> None:
        self._module = module
        self._group = control_group
        self._source = source
        self._is_source = is_source
        self._alone = alone
        self._running = False
        self._digests: dict[str, bytes] = {}
        self._recorder = LogRecorder(module)
        self._recording: Any = None
        self._records: list[list[Log]] = []

    def install(self, trainer: Trainer) -> None:
        """Put this before the other callbacks, and around the module's hooks."""
        _callbacks(trainer).insert(0, self)
        for phase in _PHASES:
            name = f"on_{phase}_epoch_end"
            vars(self._module)[name] = self._ending(getattr(self._module, name))

    def remove(self, trainer: Trainer) -> None:
        """Undo :meth:`install`."""
        if self in _callbacks(trainer):
            _callbacks(trainer).remove(self)
        for phase in _PHASES:
            vars(self._module).pop(f"on_{phase}_epoch_end", None)

    def _ending(self, hook: Callable[..., Any]) -> Callable[..., Any]:
        @functools.wraps(hook)
        def hook_then_replay(*args: Any, **kwargs: Any) -> Any:
            value = hook(*args, **kwargs)
            self._replay()
            return value

        return hook_then_replay

    def _begin(self) -> None:
        if self._running:  # validation inside a training epoch: what training has kept must not be forgotten
            self._share_attributes()
        self._running = True
        self._digests = _digests(self._module) if self._is_source else {}

    def _end(self, *, logs: bool = True) -> None:
        self._share_attributes()
        if logs:
            self._recording = self._recorder()
            self._records = self._recording.__enter__()
            self._recorder.next_microbatch(keep=True)

    def _replay(self) -> None:
        if self._recording is None:
            return
        self._recording.__exit__(None, None, None)
        self._recording = None
        mine = {**pack_logs(merge_logs(self._records, [1]))} if self._is_source else None
        replay(self._module, unpack_logs(broadcast_object(mine, self._source, self._group)), alone=self._alone)

    def _share_attributes(self) -> None:
        changed = None
        if self._is_source:
            now = _digests(self._module)
            names = [name for name, digest in now.items() if self._digests.get(name) != digest]
            changed = {name: map_leaves(_to_host, vars(self._module)[name]) for name in names}
        changed = broadcast_object(changed, self._source, self._group)
        if not self._is_source:
            device = self._module.device
            for name, value in changed.items():
                vars(self._module)[name] = map_leaves(lambda x: x.to(device) if isinstance(x, Tensor) else x, value)

    def on_train_epoch_start(self, trainer: Trainer, pl_module: LightningModule) -> None:
        """Remember the attributes."""
        self._begin()

    def on_validation_epoch_start(self, trainer: Trainer, pl_module: LightningModule) -> None:
        """Remember the attributes."""
        self._begin()

    def on_test_epoch_start(self, trainer: Trainer, pl_module: LightningModule) -> None:
        """Remember the attributes."""
        self._begin()

    def on_predict_epoch_start(self, trainer: Trainer, pl_module: LightningModule) -> None:
        """Remember the attributes."""
        self._begin()

    def on_train_epoch_end(self, trainer: Trainer, pl_module: LightningModule) -> None:
        """Share the attributes, record logs."""
        self._end()

    def on_validation_epoch_end(self, trainer: Trainer, pl_module: LightningModule) -> None:
        """Share the attributes, record logs."""
        self._end()

    def on_test_epoch_end(self, trainer: Trainer, pl_module: LightningModule) -> None:
        """Share the attributes, record logs."""
        self._end()

    def on_predict_epoch_end(self, trainer: Trainer, pl_module: LightningModule) -> None:
        """Share the attributes; nothing can be logged here."""
        self._end(logs=False)


def _callbacks(trainer: Trainer) -> list[Callback]:
    callbacks: list[Callback] = trainer.callbacks  # type: ignore[attr-defined]
    return callbacks


def _to_host(leaf: Any) -> Any:
    return leaf.detach().cpu() if isinstance(leaf, Tensor) else leaf


def _digests(module: LightningModule) -> dict[str, bytes]:
    """A fingerprint of each plain public attribute."""
    found = {}
    for name, value in vars(module).items():
        if not name.startswith("_") and isinstance(value, _PLAIN):
            try:
                buffer = io.BytesIO()
                torch.save(map_leaves(_to_host, value), buffer)
            except (pickle.PicklingError, TypeError, AttributeError):
                continue  # it cannot travel
            found[name] = hashlib.blake2b(buffer.getvalue(), digest_size=16).digest()
    return found
