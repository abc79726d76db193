"""Outside of steps: what steps kept on the last stage, and what hooks log, is the same on every rank."""

from __future__ import annotations

import pickle
import weakref
from collections.abc import Callable, Sequence
from numbers import Number
from typing import Any

import torch
import torch.distributed as dist
from lightning.pytorch import Callback, LightningModule, Trainer
from torch import Tensor, nn
from torchmetrics import Metric

from lightning_hybrid.distributed.dtensor import full_tensor
from lightning_hybrid.distributed.tree_broadcast import broadcast_object
from lightning_hybrid.pipeline_parallel.placeholders import without_value_text
from lightning_hybrid.trainer.results.logging import log_arguments
from lightning_hybrid.trainer.results.module_attributes import assign, attribute, digest, mark_attributes, pack, unpack

__all__ = ["EpochSync"]

_WITHOUT_VALUE = Ellipsis  # in the place of a value that was computed from placeholders
_MESSAGE, _HEAD = 256, 4  # bytes: what a logged number needs, with its name, and how its length is written


class EpochSync(Callback):
    """Goes before all other callbacks of the Trainer.

    Before the first hook of an epoch's end, plain attributes and buffers of the module that changed during the epoch
    (the common ``self.outputs.append(...)``, which happens on the last stage) get the last stage's values on all ranks,
    also those of submodules outside the body. What hooks log gets the last stage's value too, since only that stage has
    the weights and outputs that it may be computed from.

    Args:
        module: The user's module.
        control_group: The model group, over gloo.
        source: The rank inside it that has the last stage.
        layers: The layers of the body, which keep what they have on their own stage.
    """

    def __init__(
        self,
        module: LightningModule,
        control_group: dist.ProcessGroup,
        *,
        source: int,
        layers: Sequence[nn.Module] = (),
    ) -> None:
        self._module = module
        self._layers = layers
        self._reference = weakref.ref(control_group)
        self._source = source
        self._is_source = dist.get_rank(control_group) == source
        self._before: dict[str, Any] | None = None

    @property
    def _group(self) -> dist.ProcessGroup:
        group = self._reference()
        assert group is not None, "the process groups have been destroyed"
        return group

    def install(self, trainer: Trainer) -> None:
        """Put this before the other callbacks, and in the place of `self.log` outside of steps."""
        callbacks: list[Callback] = trainer.callbacks  # type: ignore[attr-defined]
        callbacks.insert(0, self)
        module = self._module

        def log(name: str, value: Any, *args: Any, **kwargs: Any) -> None:
            if vars(module).get("log") is not log:  # in a step, by something that has kept this function
                return module.log(name, value, *args, **kwargs)
            arguments = log_arguments(args, kwargs)
            value = full_tensor(value)
            if isinstance(value, (Tensor, Number)) and not arguments.get("rank_zero_only"):
                value = self._from_last_stage(name, value)
            elif isinstance(value, Metric) and arguments.get("on_step") is not False:
                self._share_value_of_batch(name, value)
            return type(module).log(module, name, value, **arguments)

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
        described = pickle.dumps((name, _described(value))) if self._is_source else b""
        received_name, received = pickle.loads(self._broadcast(described))
        if received_name != name:
            raise ValueError(
                f"This rank logs {name!r} where the last stage logs {received_name!r}. Log the same keys on every rank,"
                " or with `rank_zero_only=True`. For the norm of the gradients log `self.trainer.strategy.grad_norm()`."
            )
        if received is _WITHOUT_VALUE:
            raise ValueError(without_value_text(f"the value logged as {name!r}"))
        if not isinstance(received, tuple):
            return received
        number, dtype, shape = received
        return torch.tensor(number, dtype=dtype, device=self._module.device).reshape(shape)

    def _share_value_of_batch(self, name: str, metric: Metric) -> None:
        """What the metric's `forward` said in a step is known on the last stage; Lightning reads it there."""
        value: Any = metric._forward_cache
        known = value if isinstance(value, Tensor) and value.numel() == 1 else None
        received = self._from_last_stage(name, known)
        if not self._is_source and received is not None:
            metric._forward_cache = received

    def _broadcast(self, payload: bytes) -> bytes:
        """The last stage's bytes: in one message of fixed size if they are few, as the values of logs are."""
        message = torch.zeros(_MESSAGE, dtype=torch.uint8)
        if self._is_source:
            head = len(payload).to_bytes(_HEAD, "big") + payload[: _MESSAGE - _HEAD]
            message[: len(head)] = torch.frombuffer(bytearray(head), dtype=torch.uint8)
        dist.broadcast(message, group_src=self._source, group=self._group)
        received = message.numpy().tobytes()
        size = int.from_bytes(received[:_HEAD], "big")
        if size <= _MESSAGE - _HEAD:
            return received[_HEAD : _HEAD + size]
        whole: bytes = broadcast_object(payload, self._source, self._group)
        return whole

    def _begin(self) -> None:
        if self._before is not None:  # validation inside a training epoch: what training has kept is not forgotten
            self._share()
        else:
            self._before = self._marks()

    def _share(self) -> None:
        """Give every rank the last stage's value of what changed on any rank and is not equal everywhere."""
        before, now = self._before or {}, self._marks()
        packed = {name: pack(attribute(self._module, name)) for name, mark in now.items() if before.get(name) != mark}
        everyone: list[Any] = [None] * self._group.size()
        dist.all_gather_object(everyone, {name: digest(data) for name, data in packed.items()}, group=self._group)
        changed = sorted(set().union(*everyone))
        wanted = [name for name in changed if len({digests.get(name) for digests in everyone}) > 1]
        if wanted:
            mine = {name: packed.get(name) or pack(attribute(self._module, name)) for name in wanted if name in now}
            received = broadcast_object(mine if self._is_source else None, self._source, self._group)
            for name, data in received.items():
                if not self._is_source and data is not None:
                    assign(self._module, name, unpack(data, self._module.device))
        self._before = self._marks()

    def _marks(self) -> dict[str, Any]:
        return mark_attributes(self._module, self._layers)

    def on_train_epoch_start(self, trainer: Trainer, pl_module: LightningModule) -> None:
        """Remember the attributes."""
        self._begin()

    on_validation_epoch_start = on_test_epoch_start = on_predict_epoch_start = on_train_epoch_start

    def on_train_epoch_end(self, trainer: Trainer, pl_module: LightningModule) -> None:
        """Share the attributes."""
        self._share()

    on_validation_epoch_end = on_test_epoch_end = on_predict_epoch_end = on_train_epoch_end


def _described(value: Any) -> Any:
    """A tensor with one element as (number, dtype, shape), which is short; anything else as it is, without a graph."""
    if not isinstance(value, Tensor):
        return value
    if value.is_meta:
        return _WITHOUT_VALUE
    return (value.item(), value.dtype, tuple(value.shape)) if value.numel() == 1 else value.detach().cpu()
