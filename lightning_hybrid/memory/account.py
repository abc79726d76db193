"""Numbers of bytes on one rank: parameters, gradients and optimizer states from shapes, activations from a forward.

:class:`~.estimate.MemoryEstimator` calls the functions for parameters and optimizer states. `DryRunStrategy`, the run
on fake tensors in the layout search and in the `memory` command, meters activations with :class:`SavedTensorMeter`, and
`tuning.schedule_cache` uses :func:`most_in_flight`. `MemoryReport` measures actual tensors with :func:`storage_bytes`.
torch's allocator statistics cannot replace this: they exist only for a layout that already runs on a GPU, and do not
tell parameters from activations.

A *microbatch in flight* has run its forward in a stage, but not yet its backward, so its activations are stored. A
*kind*, in :class:`SavedTensorMeter`, is a key of the caller for a way to recompute layers. A *label* is its key for a
layer, or for code outside the layers.
"""

from __future__ import annotations

from collections import OrderedDict, defaultdict
from collections.abc import Container, Hashable, Iterable, Iterator, Mapping
from contextlib import AbstractContextManager, contextmanager, nullcontext
from dataclasses import astuple, dataclass, field
from typing import Any
from weakref import WeakSet

import torch
from torch import Tensor, nn
from torch.autograd.graph import saved_tensors_hooks
from torch.distributed.tensor import DTensor
from torch.optim import Optimizer

from lightning_hybrid.data_parallel.zero.param import RowShards
from lightning_hybrid.distributed.dtensor import to_local
from lightning_hybrid.distributed.modes import OperatorMode
from lightning_hybrid.distributed.replaced import replaced_attributes
from lightning_hybrid.pipeline_parallel.schedules import Schedule
from lightning_hybrid.torch_internals import (
    OPTIMIZER_STEP_HOOKS,
    TO_COPY,
    sparse_indices,
    sparse_values,
    storage_identity,
)


@dataclass(frozen=True)
class MemoryUsage:
    """The bytes on a rank. Each number is the maximum over a training step.

    Attributes:
        parameters: The parameters of its stages. With ZeRO, these are its shards and the parameters that are unsharded
            at the same time. Master weights are included.
        gradients: The gradients of these parameters.
        optimizer: The optimizer states; ``None`` if they are unknown.
        activations: The tensors that autograd saves for the microbatches in flight; ``None`` if they are unknown, as
            they always are in the result of :class:`~.estimate.MemoryEstimator`.
        buffers: The buffers of its stages.
    """

    parameters: int
    gradients: int
    optimizer: int | None
    activations: int | None
    buffers: int

    @property
    def total(self) -> int | None:
        """The sum; ``None`` if a part is unknown."""
        parts = astuple(self)
        return None if None in parts else sum(parts)


@dataclass(frozen=True)
class LocalParameter:
    """A parameter on one rank.

    Attributes:
        shape: The local shape without ZeRO: of this rank's tensor-parallel shard, and of its experts.
        itemsize: The size in bytes of an element.
        grad_itemsize: The size in bytes of an element of its gradient; 0 if it has no gradient.
        layer: A key of the only layer that has the parameter; ``None`` if no layer or several layers have it.
        num_shards: The number of replicas over which ZeRO shards the parameter.
    """

    shape: torch.Size
    itemsize: int
    grad_itemsize: int
    layer: Hashable = None
    num_shards: int = 1


def peak_parameter_bytes(
    parameters: Iterable[LocalParameter],
    *,
    zero_stage: int,
    frees_early: bool = False,
    single_backward: bool = False,
) -> tuple[int, int]:
    """Return the maximum bytes of parameters and of their gradients during a training step.

    ``docs/concepts/data-parallel.md`` has the formulas. No replica needs more memory than the first.

    Args:
        parameters: The parameters of a rank.
        zero_stage: The ZeRO stage, 0 to 3.
        frees_early: If True, stage 3 reshards a layer after each use.
        single_backward: If True, a step has only one backward. The last layer in it then has no shard of gradients yet.

    Returns:
        The bytes of parameters, and the bytes of gradients.
    """
    parameter_bytes = grad_bytes = 0
    unsharded: dict[Hashable, int] = defaultdict(int)  # bytes by layer
    unsharded_grads: dict[Hashable, int] = defaultdict(int)  # bytes in addition to the shards of gradients
    for parameter in parameters:
        is_sharded = zero_stage > 0 and parameter.num_shards > 1
        rows = RowShards.of(parameter.shape, parameter.num_shards) if is_sharded else None
        size = parameter.shape.numel()
        if rows is None:
            parameter_bytes += parameter.itemsize * size
            grad_bytes += parameter.grad_itemsize * size
            continue
        shard = rows.shard_shape(0).numel()
        unsharded[parameter.layer] += parameter.itemsize * rows.num_ranks * rows.padded_numel
        parameter_bytes += parameter.itemsize * shard if zero_stage == 3 else 0
        grad_bytes += parameter.grad_itemsize * (shard if zero_stage > 1 else size)
        unsharded_grads[parameter.layer] += parameter.grad_itemsize * (size - shard if single_backward else size)
    outside = unsharded.pop(None, 0)
    if zero_stage == 3 and frees_early:
        parameter_bytes += outside + sum(sorted(unsharded.values())[-2:])
    elif zero_stage:
        in_flight = max(unsharded.values(), default=0) if zero_stage < 3 else 0
        parameter_bytes += outside + sum(unsharded.values()) + in_flight
    if zero_stage > 1:
        grad_bytes += unsharded_grads.pop(None, 0) + max(unsharded_grads.values(), default=0)
    return parameter_bytes, grad_bytes


def optimizer_state_bytes(optimizer: Optimizer, group: Mapping[str, Any], parameter: Tensor) -> int | None:
    """Return the bytes of an optimizer's state for one parameter, measured in a step of a copy of the optimizer.

    The caller must exclude optimizers whose step communicates with other ranks, because only this rank may call this.

    Args:
        optimizer: The optimizer, which is not changed.
        group: The parameter group.
        parameter: A tensor with the shape and dtype of the parameter.

    Returns:
        The bytes; ``None`` if the optimizer cannot step with a single parameter.
    """
    for device in ("meta", "cpu"):  # on the CPU if the optimizer reads values
        trial_parameter = nn.Parameter(torch.zeros_like(parameter, device=device))
        trial_parameter.grad = torch.zeros_like(trial_parameter)
        trial = object.__new__(type(optimizer))
        vars(trial).update(vars(optimizer))
        vars(trial).pop("step", None)  # the wrapper of a scheduler, which counts calls
        trial.param_groups = [{**group, "params": [trial_parameter], "fused": None, "foreach": None}]
        trial.state = defaultdict(dict)
        for name in OPTIMIZER_STEP_HOOKS:
            setattr(trial, name, OrderedDict())
        try:
            trial.step()
        except Exception:  # it needs a closure, or other parameters
            continue
        return sum(leaf.nbytes for leaf in trial.state[trial_parameter].values() if isinstance(leaf, Tensor))
    return None


_CAST = f"aten.{TO_COPY}.default"


def storage_bytes(tensors: Iterable[Any]) -> int:
    """Return the bytes of the local parts of tensors. A storage with several of these tensors counts once.

    Objects that are not tensors, and tensors on the meta device, such as placeholders, do not count.
    """
    present = (tensor for tensor in tensors if isinstance(tensor, Tensor) and not tensor.is_meta)
    storages = {storage_identity(storage): storage.nbytes() for tensor in present for storage in storages_of(tensor)}
    return sum(storages.values())


def storages_of(tensor: Tensor) -> list[Any]:
    """Return the storages of a tensor's local part. A sparse tensor has several, and some layouts have none."""
    # Local parts are read only for DTensors, because this is slow and called often.
    local = to_local(tensor) if isinstance(tensor, DTensor) else tensor
    if local.layout is torch.sparse_coo:
        return [*storages_of(sparse_indices(local)), *storages_of(sparse_values(local))]
    return [local.untyped_storage()] if local.layout is torch.strided else []


def peak_activation_bytes(schedule: Schedule, rank: int, per_microbatch: Mapping[int, int]) -> int:
    """Return the maximum bytes of activations that a rank stores at the same time. Only tests call this.

    Args:
        schedule: The schedule of a training step.
        rank: The pipeline rank.
        per_microbatch: The bytes of one microbatch in each stage of the rank, by stage.
    """
    current = peak = 0
    for action in schedule.actions[rank]:
        current += action.kind.kept * per_microbatch[action.stage]
        peak = max(peak, current)
    return peak


def most_in_flight(schedule: Schedule, rank: int) -> list[dict[int, int]]:
    """Return the numbers of microbatches per stage that a rank stores, at all times that may have the maximum memory.

    A time is included if no other time has at least as many microbatches in each stage. The maximum memory is at one of
    these times, independent of the bytes per microbatch in each stage.

    Args:
        schedule: The schedule of a training step.
        rank: The pipeline rank.

    Returns:
        For each of these times, the number of microbatches by stage.
    """
    current: dict[int, int] = defaultdict(int)
    peaks: dict[tuple[tuple[int, int], ...], dict[int, int]] = {}
    grows = False
    for action in schedule.actions[rank]:
        if action.kind.kept > 0:
            current[action.stage] += 1
            grows = True
        elif action.kind.kept < 0:
            if grows:  # the number before this action is a local maximum
                peaks[tuple(current.items())] = dict(current)
            current[action.stage] -= 1
            grows = False
    if grows:
        peaks[tuple(current.items())] = dict(current)
    found: list[dict[int, int]] = []
    for peak in sorted(peaks.values(), key=lambda each: -sum(each.values())):
        if not any(all(other.get(stage, 0) >= count for stage, count in peak.items()) for other in found):
            found.append(peak)
    return found


class SavedTensorMeter:
    """Counts the tensors that autograd saves in a forward for backward.

    A storage counts once, even if several saved tensors use it. Tensors that are recomputed in backward are not saved.
    Results of casts of parameters, such as autocast makes, are counted separately: the caller counts them once for a
    step, and not for each microbatch.

    Args:
        excluded: Parameters, buffers and batches, which do not count as activations.

    Attributes:
        label: The label of tensors that are saved from now on, for :meth:`storages` and :meth:`casts`. The caller sets
            it.
    """

    def __init__(self, excluded: Iterable[Tensor]) -> None:
        self.label: Hashable = None
        self._kind: Hashable = None
        self._keeps: Any = None
        storages = (storage for tensor in excluded for storage in storages_of(tensor))
        # The storages are kept alive, so that no other storage gets their address.
        self._excluded = {storage_identity(storage): storage for storage in storages}
        self._saved: dict[Hashable, WeakSet[_Saved]] = defaultdict(WeakSet)
        self._casts: dict[Hashable, dict[int, Any]] = defaultdict(dict)
        self._repeated: dict[Hashable, list[_Repeated]] = defaultdict(list)

    @contextmanager
    def __call__(self) -> Iterator[None]:
        """Count saved tensors inside the context, which the caller enters around a forward."""
        # Without this mode, casts of weights would count for each microbatch.
        casts = nullcontext() if OperatorMode is None else OperatorMode(self._call_operator)
        with casts, saved_tensors_hooks(self._pack, lambda saved: saved.tensor):
            yield

    def noting(self, kind: Hashable, keeps: Any = None) -> AbstractContextManager[None]:
        """Mark tensors that are saved inside the context with a kind, which :meth:`storages` can exclude.

        Args:
            kind: The kind.
            keeps: An object that must live as long as one of these tensors.
        """
        return replaced_attributes(self, _kind=kind, _keeps=keeps)

    def _call_operator(self, func: Any, args: Any, kwargs: Any) -> Any:
        """Call an operator. Record its result if it casts an excluded, trained tensor, as autocast does."""
        result = func(*args, **kwargs)
        is_cast = str(func) == _CAST and isinstance(result, Tensor)
        if is_cast and result.dtype != args[0].dtype and args[0].requires_grad:
            self._note_cast(args[0], result)
        return result

    def _note_cast(self, source: Tensor, copy: Tensor) -> None:
        if all(storage_identity(storage) in self._excluded for storage in storages_of(source)):
            self._casts[self.label] |= {storage_identity(storage): storage for storage in storages_of(copy)}

    @contextmanager
    def recorded(self) -> Iterator[Repetition]:
        """Record the tensors that are saved under the current label, to count them again later."""
        saved, casts = set(self._saved[self.label]), set(self._casts[self.label])
        repetition = Repetition()
        yield repetition
        repetition.saved = WeakSet(each for each in self._saved[self.label] if each not in saved)
        of_label = self._casts[self.label]
        repetition.casts = {key: storage.nbytes() for key, storage in of_label.items() if key not in casts}

    def repeat(self, repetition: Repetition, same: Mapping[Hashable, Hashable], alive: Any) -> None:
        """Count a record again, under the current label.

        Args:
            repetition: The record.
            same: The key of the current storage, by the key of the recorded storage, for inputs and outputs.
            alive: Keeps the recorded storages alive, so that no other storage gets their address.
        """
        number = len(self._repeated[self.label])
        self._repeated[self.label].append(_Repeated(repetition, dict(same), (self.label, number), alive))

    def casts(self, label: Hashable) -> dict[Hashable, int]:
        """Return the bytes of casts of parameters under a label, by storage."""
        found: dict[Hashable, int] = {key: storage.nbytes() for key, storage in self._casts.get(label, {}).items()}
        for each in self._repeated.get(label, ()):
            found |= {each.key(key): size for key, size in each.repetition.casts.items()}
        return found

    def _pack(self, tensor: Tensor) -> _Saved:
        saved = _Saved(tensor, self._kind, self._keeps)
        self._saved[self.label].add(saved)
        return saved

    def storages(self, label: Hashable, without: Container[Hashable] = ()) -> dict[Hashable, int]:
        """Return the bytes of storages that were saved under a label and are still needed, by storage.

        Args:
            label: The label.
            without: The kinds that do not count.
        """
        storages: dict[Hashable, int] = _sizes(self._saved.get(label, ()), without)
        for each in self._repeated.get(label, ()):
            sizes = _sizes(each.repetition.saved, without).items()
            storages |= {each.key(key): size for key, size in sizes if key not in self._excluded}
        return {key: size for key, size in storages.items() if key not in self._excluded}


@dataclass
class Repetition:
    """The tensors that were saved while a layer ran. They are counted again for similar layers.

    Attributes:
        saved: The saved tensors that are still needed.
        casts: The bytes of casts of parameters, by storage.
        made: The storages that were created meanwhile; set by the caller of :meth:`SavedTensorMeter.recorded`.
    """

    saved: WeakSet[_Saved] = field(default_factory=WeakSet)
    casts: dict[int, int] = field(default_factory=dict)
    made: Container[Hashable] = ()


@dataclass
class _Repeated:
    """A repetition under another label. New storages get new keys, and input storages are mapped by `same`."""

    repetition: Repetition
    same: Mapping[Hashable, Hashable]
    tag: Hashable
    alive: Any

    def key(self, key: Hashable) -> Hashable:
        if key in self.same:
            return self.same[key]
        return (self.tag, key) if key in self.repetition.made else key


def _sizes(saved: Iterable[_Saved], without: Container[Hashable]) -> dict[Hashable, int]:
    counted = (each.tensor for each in saved if each.kind not in without)
    return {storage_identity(storage): storage.nbytes() for tensor in counted for storage in storages_of(tensor)}


class _Saved:
    """A saved tensor, detached from its graph. Otherwise, the graph and the tensor would keep each other alive."""

    def __init__(self, tensor: Tensor, kind: Hashable, keeps: Any) -> None:
        self.tensor, self.kind, self.keeps = tensor.detach(), kind, keeps
