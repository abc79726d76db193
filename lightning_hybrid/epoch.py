"""Outside of steps: what steps kept on the last stage, and what hooks log, is the same on every rank."""

from __future__ import annotations

import hashlib
import io
import pickle
import weakref
from collections.abc import Callable
from typing import Any

import torch
import torch.distributed as dist
from lightning.pytorch import Callback, LightningModule, Trainer
from torch import Tensor, nn

from lightning_hybrid.exchange import broadcast_object
from lightning_hybrid.logging import log_arguments
from lightning_hybrid.pytree import flatten, map_leaves

__all__ = ["EpochBoundary"]

_PLAIN = (bool, int, float, complex, str, bytes, type(None), Tensor, list, tuple, dict, set)


class EpochBoundary(Callback):
    """Goes before all other callbacks of the Trainer.

    Before the first hook of an epoch's end, plain attributes of the module that changed during the epoch (the common
    ``self.outputs.append(...)``, which happens on the last stage) get the last stage's values on all ranks. What hooks
    log gets the last stage's value too, since only that stage has the weights and outputs that it may be computed from.

    Args:
        module: The user's module.
        control_group: The model group, over gloo.
        source: The rank inside it that has the last stage.
    """

    def __init__(self, module: LightningModule, control_group: dist.ProcessGroup, *, source: int) -> None:
        self._module = module
        self._group = weakref.ref(control_group)
        self._source = source
        self._is_source = dist.get_rank(control_group) == source
        self._before: dict[str, bytes] | None = None

    def install(self, trainer: Trainer) -> None:
        """Put this before the other callbacks, and in the place of `self.log` outside of steps."""
        callbacks: list[Callback] = trainer.callbacks  # type: ignore[attr-defined]
        callbacks.insert(0, self)
        module = self._module

        def log(name: str, value: Any, *args: Any, **kwargs: Any) -> None:
            arguments = log_arguments(args, kwargs)
            if isinstance(value, (Tensor, float, int)) and not arguments.get("rank_zero_only"):
                value = self._from_last_stage(name, value)
            type(module).log(module, name, value, **arguments)

        vars(module)["log"] = log
        self._set_callback_logs(trainer, log)

    def remove(self, trainer: Trainer) -> None:
        """Undo :meth:`install`."""
        callbacks: list[Callback] = trainer.callbacks  # type: ignore[attr-defined]
        if self in callbacks:
            callbacks.remove(self)
        vars(self._module).pop("log", None)
        self._set_callback_logs(trainer, self._module.log)

    def _set_callback_logs(self, trainer: Trainer, log: Callable[..., None]) -> None:
        """Callbacks log through the module too: Lightning has given them its method."""
        for callback in trainer.callbacks:  # type: ignore[attr-defined]
            callback.log = log

    def _from_last_stage(self, name: str, value: Any) -> Any:
        group = self._group()
        assert group is not None
        sent = (name, _to_host(value)) if self._is_source else None
        received_name, received = broadcast_object(sent, self._source, group)
        if received_name != name:
            raise ValueError(
                f"This rank logs {name!r} where the last stage logs {received_name!r}. Log the same keys on every rank,"
                " or with `rank_zero_only=True`."
            )
        return received.to(self._module.device) if isinstance(received, Tensor) else received

    def _begin(self) -> None:
        if self._before is not None:  # validation inside a training epoch: what training has kept is not forgotten
            self._share()
        else:
            self._before = _digests(self._module)

    def _share(self) -> None:
        """Give every rank the last stage's value of what changed on any rank and is not equal everywhere."""
        group, before = self._group(), self._before or {}
        assert group is not None
        now = _digests(self._module)
        changed = {name for name, digest in now.items() if before.get(name) != digest}
        everyone: list[Any] = [None] * group.size()
        dist.all_gather_object(everyone, (changed, now), group=group)
        wanted = sorted(set().union(*(names for names, _ in everyone)) & everyone[self._source][1].keys())
        wanted = [name for name in wanted if len({digests.get(name) for _, digests in everyone}) > 1]
        if wanted:
            mine = (
                {name: map_leaves(_to_host, vars(self._module)[name]) for name in wanted} if self._is_source else None
            )
            values = broadcast_object(mine, self._source, group)
            if not self._is_source:
                device = self._module.device
                for name, value in values.items():
                    value = map_leaves(lambda leaf: leaf.to(device) if isinstance(leaf, Tensor) else leaf, value)
                    vars(self._module)[name] = value
        self._before = _digests(self._module)

    def on_train_epoch_start(self, trainer: Trainer, pl_module: LightningModule) -> None:
        """Remember the attributes."""
        self._begin()

    on_validation_epoch_start = on_test_epoch_start = on_predict_epoch_start = on_train_epoch_start

    def on_train_epoch_end(self, trainer: Trainer, pl_module: LightningModule) -> None:
        """Share the attributes."""
        self._share()

    on_validation_epoch_end = on_test_epoch_end = on_predict_epoch_end = on_train_epoch_end


def _to_host(leaf: Any) -> Any:
    # A copy: a view would take all of its storage along.
    return leaf.detach().to("cpu", copy=True) if isinstance(leaf, Tensor) and not leaf.is_meta else leaf


def _digests(module: LightningModule) -> dict[str, bytes]:
    """A fingerprint of each plain public attribute.

    Attributes that refer to parts of the module (a list of layers, of parameters) are no data of their own.
    """
    parts = {id(tensor) for tensor in (*module.parameters(), *module.buffers())}
    found = {}
    for name, value in vars(module).items():
        if name.startswith("_") or not isinstance(value, _PLAIN):
            continue
        leaves, _ = flatten(value)
        if any(isinstance(leaf, (nn.Module, nn.Parameter)) or id(leaf) in parts for leaf in leaves):
            continue
        try:
            buffer = io.BytesIO()
            torch.save(map_leaves(_to_host, value), buffer)
        except (pickle.PicklingError, TypeError, AttributeError, NotImplementedError, RuntimeError):
            continue  # it cannot travel
        found[name] = hashlib.blake2b(buffer.getvalue(), digest_size=16).digest()
    return found
