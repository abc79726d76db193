"""Outside of steps: what steps stored on the last stage, and what hooks log, is the same on every rank."""

from __future__ import annotations

import math
from collections.abc import Iterator, Sequence
from contextlib import contextmanager
from numbers import Number, Real
from typing import Any

import torch
import torch.distributed as dist
from lightning.pytorch import LightningModule, Trainer
from lightning_utilities.core.rank_zero import rank_zero_warn
from torch import Tensor, nn
from torchmetrics import Metric

from lightning_hybrid.distributed.agreement import all_gather_values
from lightning_hybrid.distributed.dtensor import full_tensor
from lightning_hybrid.distributed.messages.tree_broadcast import broadcast_object
from lightning_hybrid.distributed.process_group import GroupRef
from lightning_hybrid.distributed.pytree import Message, encode
from lightning_hybrid.distributed.replaced import replaced_entries
from lightning_hybrid.pipeline_parallel.placeholders import without_value_text
from lightning_hybrid.trainer.lightning_internals import forward_value, replace_callback_log, set_forward_value
from lightning_hybrid.trainer.results.logging import log_arguments
from lightning_hybrid.trainer.results.module_attributes import (
    assign,
    attribute_versions,
    digest,
    pack_attribute,
    unpack,
)
from lightning_hybrid.trainer.run_callback import RunCallback

_WITHOUT_VALUE = Ellipsis  # instead of a value that was computed from placeholders
_MESSAGE = 288  # bytes: what a logged number needs, with its name
_COMPARED = 100  # values that hooks log, from the beginning of a run on, which are compared over the stages
_EQUAL = 1e-5  # relative difference of numbers that stages compute alike


class EpochSync(RunCallback):
    """A callback before the user's, and what `self.log` is outside of steps.

    Before the first hook of an epoch's end, plain attributes and buffers of the module that changed during the epoch
    (the common ``self.outputs.append(...)``, which happens on the last stage) get the last stage's values on all ranks,
    also those of submodules outside the body. What hooks log gets the last stage's value too, since only that stage has
    the weights and outputs that it may be computed from; where stages log other numbers, a warning says so.

    Args:
        module: The user's module.
        control_group: The model group, over gloo.
        source: The rank inside it that has the last stage.
        layers: The layers of the body, whose attributes stay those of their own stage.
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
        self._group = GroupRef(control_group)
        self._source = source
        self._is_source = dist.get_rank(control_group) == source
        self._versions: dict[str, Any] | None = None
        self._num_logged = 0
        self._warned: set[str] = set()

    @contextmanager
    def installed(self, trainer: Trainer) -> Iterator[None]:
        """While entered, replace `self.log`, as it is outside of steps, of the module and of callbacks."""
        module = self._module

        def log(name: str, value: Any, *args: Any, **kwargs: Any) -> None:
            if vars(module).get("log") is not log:  # in a step, by something that has taken this function
                return module.log(name, value, *args, **kwargs)
            arguments = log_arguments(args, kwargs)
            value = full_tensor(value)
            if isinstance(value, (Tensor, Number)) and not arguments.get("rank_zero_only"):
                value = self._from_last_stage(name, value)
            elif isinstance(value, Metric) and arguments.get("on_step") is not False:
                self._sync_forward_value(name, value)
            return type(module).log(module, name, value, **arguments)

        with replaced_entries([(vars(module), {"log": log})]), replace_callback_log(trainer, log):
            yield

    def _from_last_stage(self, name: str, value: Any, *, compares: bool = True) -> Any:
        self._num_logged += 1  # on all ranks alike
        compares &= self._num_logged <= _COMPARED
        described = (name, _described(value)) if self._is_source or compares else None
        *others, (received_name, received) = self._gather(described)
        if received_name != name:
            raise ValueError(
                f"This rank logs {name!r}, but the last stage logs {received_name!r}. Log the same keys on every rank,"
                " or set `rank_zero_only=True`. To log the gradient norm, use"
                " `self.trainer.strategy.grad_norm()`. [LH723]"
            )
        if received is _WITHOUT_VALUE:
            raise ValueError(without_value_text(f"the value logged as {name!r}"))
        self._warn_of_differences(name, received, others)
        if not isinstance(received, tuple):
            return received
        number, dtype, shape = received
        return torch.tensor(number, dtype=dtype, device=self._module.device).reshape(shape)

    def _sync_forward_value(self, name: str, metric: Metric) -> None:
        """What the metric's `forward` returned in a step is known on the last stage; Lightning logs it."""
        value = forward_value(metric)
        number = value if isinstance(value, Tensor) and value.numel() == 1 else None
        received = self._from_last_stage(name, number, compares=False)
        if not self._is_source and received is not None:
            set_forward_value(metric, received)

    def _gather(self, described: tuple[str, Any] | None) -> list[tuple[str, Any]]:
        """Return what the other ranks have, where it is short; and as the last one what the last stage has.

        One message of fixed size, as the values of logs are short; by a collective that nothing else does in this
        group: where one rank logs alone, that is found. Of two gathers of different sizes gloo makes an end of the
        process.
        """
        group, message = self._group(), Message.make(b"" if described is None else encode(described), size=_MESSAGE)
        received = torch.empty(group.size() * _MESSAGE, dtype=torch.uint8)
        dist.all_to_all_single(received, message.parts[0].repeat(group.size()), group=group)
        messages = list(map(Message.read, received.chunk(group.size())))
        of_source = messages.pop(self._source)
        short = [each.value() for each in messages if each.encoded and each.num_bytes <= _MESSAGE]
        is_long = of_source.num_bytes > _MESSAGE
        return [*short, broadcast_object(described, self._source, group) if is_long else of_source.value()]

    def _warn_of_differences(self, name: str, counted: Any, others: Sequence[tuple[str, Any]]) -> None:
        """A number that hooks have computed from what a stage has, and that is another one on another stage."""
        numbers = [_number(described) for other, described in others if other == name]
        mine = _number(counted)
        different = [each for each in numbers if each is not None and mine is not None and not _is_equal(each, mine)]
        if different and name not in self._warned:
            self._warned.add(name)
            rank_zero_warn(
                f"A hook logs {name!r}, which is {mine:.6g} on the last stage but {different[0]:.6g} on another stage."
                " The value of the last stage is used. Each stage has only the gradients and parameters of its layers,"
                " so a number computed from them does not cover the full model. For the norm of all gradients, call"
                " `trainer.strategy.grad_norm()` on every rank."
            )

    def _sync_attributes(self) -> None:
        """Give every rank the last stage's value of what changed on any rank and is not equal everywhere."""
        module, group = self._module, self._group()
        before, now = self._versions or {}, attribute_versions(module, self._layers)
        packed = {name: pack_attribute(module, name) for name in now if before.get(name) != now[name]}
        everyone = all_gather_values({name: digest(data) for name, data in packed.items()}, group)
        changed = sorted(set().union(*everyone))
        different = [name for name in changed if len({digests.get(name) for digests in everyone}) > 1]
        self._versions = now
        if different:
            own = {name: pack_attribute(module, name, whole=True) for name in different if name in now}
            received = broadcast_object(own if self._is_source else None, self._source, group)
            for name, data in received.items():
                if not self._is_source and data is not None:
                    assign(module, name, unpack(data, module.device))
            self._versions = attribute_versions(module, self._layers)

    def on_train_epoch_start(self, trainer: Trainer, pl_module: LightningModule) -> None:
        """Remember the attributes; inside a training epoch, synchronise what training has stored so far."""
        if self._versions is None:
            self._versions = attribute_versions(self._module, self._layers)
        else:
            self._sync_attributes()

    on_validation_epoch_start = on_test_epoch_start = on_predict_epoch_start = on_train_epoch_start

    def on_train_epoch_end(self, trainer: Trainer, pl_module: LightningModule) -> None:
        """Synchronise the attributes."""
        self._sync_attributes()

    on_validation_epoch_end = on_test_epoch_end = on_predict_epoch_end = on_train_epoch_end


def _described(value: Any) -> Any:
    """A tensor with one element as (number, dtype, shape), which is short; anything else as it is, without a graph."""
    if not isinstance(value, Tensor):
        return value
    if value.is_meta:
        return _WITHOUT_VALUE
    return (value.item(), value.dtype, tuple(value.shape)) if value.numel() == 1 else value.detach().cpu()


def _number(described: Any) -> float | None:
    """What :func:`_described` has made of a number."""
    value = described[0] if isinstance(described, tuple) else described
    return float(value) if isinstance(value, Real) else None


def _is_equal(one: float, other: float) -> bool:
    return math.isclose(one, other, rel_tol=_EQUAL) or (math.isnan(one) and math.isnan(other))
