"""Synchronization outside of steps: attributes that steps stored on the last stage, and values that hooks log.

`Run.install` adds one :class:`EpochSync` to the callbacks, and enters :meth:`EpochSync.installed` for the whole run.
Only the last stage has the outputs of the model, but hooks run on every rank and expect the same attributes and values.
Attributes are sent at the start and end of epochs instead of after each step, because a step may append to long lists.
Numbers that a step assigns to attributes are sent with the results of the step, see :meth:`StepContext.share`.
"""

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

_WITHOUT_VALUE = Ellipsis  # replaces a value that was computed from placeholders
_MESSAGE = 288  # the size in bytes that a logged number needs, with its name
_COMPARED = 100  # the number of values logged by hooks, from the start of a run, that are compared over the stages
_EQUAL = 1e-5  # the relative difference up to which numbers that stages compute count as equal


class EpochSync(RunCallback):
    """A callback that runs before the user's callbacks, and the replacement of `self.log` outside of steps.

    Steps store results in plain attributes and buffers on the last stage, as with ``self.outputs.append(...)``. Before
    the user's hooks at the start and at the end of an epoch (of training or evaluation), all ranks receive the last
    stage's values of the attributes and buffers that changed since the last time, also in submodules outside the body.

    Values that hooks log are also replaced by the last stage's values, because only the last stage has the weights and
    outputs to compute them. So each call of `self.log` outside of steps is a collective of the model group, except with
    ``rank_zero_only=True`` and for metrics that are logged with ``on_step=False``. If stages log different numbers in
    the first calls of a run, a warning is shown.

    Args:
        module: The user's module.
        control_group: The gloo process group of the model group.
        source: The rank in this group that has the last stage, and is the first tensor-parallel rank there.
        layers: The layers of the body, whose attributes are not synchronized.
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
        """Replace `self.log` of the module and of callbacks outside of steps, inside the context."""
        module = self._module

        def log(name: str, value: Any, *args: Any, **kwargs: Any) -> None:
            if vars(module).get("log") is not log:  # called in a step, by an object that has stored this function
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
        """Return the value that the last stage logs; a collective of the model group.

        Args:
            name: The key.
            value: The value of this rank.
            compares: True to compare the values of all stages, if this is one of the first calls of the run.

        Raises:
            ValueError: If the last stage logs another key, or a value that was computed from placeholders.
        """
        self._num_logged += 1  # equal on all ranks
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
        """Send the value that the metric's `forward` returned in a step from the last stage to all ranks."""
        value = forward_value(metric)
        number = value if isinstance(value, Tensor) and value.numel() == 1 else None
        received = self._from_last_stage(name, number, compares=False)
        if not self._is_source and received is not None:
            set_forward_value(metric, received)

    def _gather(self, described: tuple[str, Any] | None) -> list[tuple[str, Any]]:
        """Return the descriptions of the other ranks, if they are short, and at the end the last stage's description.

        All ranks send one message of fixed size, because most logged values are short. No other code uses this
        collective in this group, so if only one rank logs, the mismatch is detected. With two gathers of different
        sizes, gloo would abort the process.

        Args:
            described: The name and the described value of this rank; ``None`` to send nothing.
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
        """Warn if a number that hooks computed from the values of their stage differs between stages.

        Args:
            name: The logged name.
            counted: The described value of the last stage, which is used.
            others: The names and described values of other ranks.
        """
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
        """Send the last stage's values of attributes that changed on any rank, and are not equal, to every rank.

        This is a collective of the model group. Attributes that only other stages have, or that cannot be pickled, keep
        their values.
        """
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
        """Record the attributes at the start of the first epoch of a run; at later starts, synchronize them.

        A validation starts in the middle of a training epoch, and its hooks may read values of training steps.
        """
        if self._versions is None:
            self._versions = attribute_versions(self._module, self._layers)
        else:
            self._sync_attributes()

    on_validation_epoch_start = on_test_epoch_start = on_predict_epoch_start = on_train_epoch_start

    def on_train_epoch_end(self, trainer: Trainer, pl_module: LightningModule) -> None:
        """Synchronize the attributes."""
        self._sync_attributes()

    on_validation_epoch_end = on_test_epoch_end = on_predict_epoch_end = on_train_epoch_end


def _described(value: Any) -> Any:
    """Return a tensor with one element as (number, dtype, shape), which is short; other values without a graph."""
    if not isinstance(value, Tensor):
        return value
    if value.is_meta:
        return _WITHOUT_VALUE
    return (value.item(), value.dtype, tuple(value.shape)) if value.numel() == 1 else value.detach().cpu()


def _number(described: Any) -> float | None:
    """Return the number in a result of :func:`_described`; ``None`` if it is not a number."""
    value = described[0] if isinstance(described, tuple) else described
    return float(value) if isinstance(value, Real) else None


def _is_equal(one: float, other: float) -> bool:
    return math.isclose(one, other, rel_tol=_EQUAL) or (math.isnan(one) and math.isnan(other))
