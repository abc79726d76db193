"""The account of memory: what one rank holds, reckoned from shapes, and what autograd keeps, counted."""

from __future__ import annotations

from collections import OrderedDict, defaultdict
from collections.abc import Hashable, Iterable, Iterator, Mapping, Sequence
from contextlib import contextmanager
from dataclasses import dataclass
from typing import Any

import torch
from torch import Tensor, nn
from torch.autograd.graph import saved_tensors_hooks
from torch.optim import Optimizer

from lightning_hybrid.data_parallel.zero.param import RowShards
from lightning_hybrid.distributed.dtensor import to_local
from lightning_hybrid.pipeline_parallel.schedules import Kind, Schedule

__all__ = ["Held", "MemoryUsage", "SavedTensorMeter", "bytes_of", "held", "most_kept", "state_bytes"]


@dataclass(frozen=True)
class MemoryUsage:
    """Bytes that a rank holds, each at the moment of a step at which they are the most.

    Attributes:
        parameters: Of its stages; with ZeRO shares, and what is whole at a time.
        gradients: Of these.
        optimizer: States of the optimizers; ``None`` if nobody knows.
        activations: What autograd keeps of the micro-batches under way; ``None`` if nobody knows.
        buffers: Of its stages.
    """

    parameters: int
    gradients: int
    optimizer: int | None
    activations: int | None
    buffers: int

    @property
    def total(self) -> int | None:
        """The sum; ``None`` if a part of it is not known."""
        parts = (self.parameters, self.gradients, self.optimizer, self.activations, self.buffers)
        return None if None in parts else sum(part for part in parts if part is not None)


# -- reckoned ----------------------------------------------------------------------------------------------------------


@dataclass(frozen=True)
class Held:
    """A parameter on one rank.

    Attributes:
        shape: Its shape here; of a layer that ranks share, that of this rank's part.
        itemsize: Bytes of an element.
        gradient: Bytes of an element of its gradient; 0 if it gets none.
        layer: Which layer has it to itself; ``None`` if it is outside of layers, or in several.
    """

    shape: torch.Size
    itemsize: int
    gradient: int
    layer: Hashable = None


def held(
    members: Iterable[Held], *, num_replicas: int, zero_stage: int, frees_early: bool = False, once: bool = False
) -> tuple[int, int]:
    """The bytes of parameters, and of their gradients, at the worst moment of a step.

    The formulas are those of the table in ``docs/memory.md``, for the first replica: no other has more.

    Args:
        members: The parameters of a rank.
        num_replicas: The data-parallel size.
        zero_stage: What is divided over them.
        frees_early: Whether stage 3 lets go of a layer after each use.
        once: Whether a step has a single backward: then the last layer in it has no share of gradients yet.
    """
    divides = zero_stage if num_replicas > 1 else 0
    parameters = gradients = 0
    wholes: dict[Hashable, int] = defaultdict(int)  # by layer
    grown: dict[Hashable, int] = defaultdict(int)  # what whole gradients of a layer add to the shares
    for each in members:
        rows = RowShards.of(each.shape, num_replicas) if divides else None
        size = each.shape.numel()
        if rows is None:
            parameters += each.itemsize * size
            gradients += each.gradient * size
            continue
        share = rows.shard_shape(0).numel()
        wholes[each.layer] += each.itemsize * num_replicas * rows.padded_numel
        parameters += each.itemsize * share if divides == 3 else 0
        gradients += each.gradient * (share if divides > 1 else size)
        grown[each.layer] += each.gradient * (size - share if once else size)
    outside = wholes.pop(None, 0)
    largest = max(wholes.values(), default=0)
    if divides == 3 and frees_early:
        parameters += outside + sum(sorted(wholes.values())[-2:])
    elif divides:
        parameters += outside + sum(wholes.values()) + (largest if divides < 3 else 0)
    if divides > 1:
        gradients += grown.pop(None, 0) + max(grown.values(), default=0)
    return parameters, gradients


def state_bytes(optimizer: Optimizer, group: Mapping[str, Any], parameter: Tensor) -> int | None:
    """The bytes of an optimizer's state for one parameter, found out by stepping a placeholder that has no memory.

    Args:
        optimizer: Neither changed nor told.
        group: The parameter's group.
        parameter: What the optimizer would get: its shape and dtype matter.

    Returns:
        Bytes; ``None`` if the optimizer does not step for a single parameter, or asks for its numbers.
    """
    for device in ("meta", "cpu"):  # some ask for numbers
        placeholder = nn.Parameter(torch.zeros_like(parameter, device=device))
        placeholder.grad = torch.zeros_like(placeholder)
        twin = object.__new__(type(optimizer))
        vars(twin).update(vars(optimizer))
        vars(twin).pop("step", None)  # the schedulers', which counts
        twin.param_groups = [{**group, "params": [placeholder], "fused": None, "foreach": None}]
        twin.state = defaultdict(dict)
        for name in ("_optimizer_step_pre_hooks", "_optimizer_step_post_hooks"):
            setattr(twin, name, OrderedDict())
        try:
            twin.step()
        except Exception:  # it needs a closure, or looks at other parameters
            continue
        return sum(leaf.nbytes for leaf in twin.state[placeholder].values() if isinstance(leaf, Tensor))
    return None


def bytes_of(tensors: Iterable[Any]) -> int:
    """The bytes of this rank's parts of some tensors; what several of them have in common counts once."""
    storages: dict[int, int] = {}
    for tensor in tensors:
        if isinstance(tensor, Tensor) and not tensor.is_meta:
            storages |= {storage._cdata: storage.nbytes() for storage in _storages(tensor)}
    return sum(storages.values())


def _storages(tensor: Tensor) -> list[Any]:
    """Where the numbers of a tensor lie; sparse ones have them in parts, and some have none."""
    local = to_local(tensor)
    if local.layout is torch.sparse_coo:
        return [*_storages(local._indices()), *_storages(local._values())]
    return [local.untyped_storage()] if local.layout is torch.strided else []


def most_kept(schedule: Schedule, rank: int, kept: Mapping[int, int]) -> int:
    """The most bytes that a rank keeps at a time for backwards.

    Args:
        schedule: Of a training step.
        rank: Pipeline rank.
        kept: What it keeps for one micro-batch in each of its stages, by stage.
    """
    now = most = 0
    for action in schedule.actions[rank]:
        if action.kind is Kind.F:
            now += kept[action.stage]
            most = max(most, now)
        elif action.kind is Kind.B:
            now -= kept[action.stage]
    return most


# -- counted -----------------------------------------------------------------------------------------------------------


class SavedTensorMeter:
    """Counts what autograd keeps from forwards for backwards, while it is entered.

    ::

        forward     saves tensors    -> each storage counts once, however many tensors lie in it
        backward    lets them go     -> it counts until the last one of these goes

    What is recomputed does not count, as it is not kept.

    Args:
        most: The most that was counted before.

    Attributes:
        now: Bytes that are kept.
        most: The most that were, at a time.
        label: Where forwards are, for :attr:`kept_at`.
        kept_at: What has been kept, by label: the bytes of each storage.
    """

    def __init__(self, most: int = 0) -> None:
        self.now, self.most = 0, most
        self.label: Hashable = None
        self.kept_at: dict[Hashable, dict[int, int]] = defaultdict(dict)
        self._others: dict[int, Any] = {}  # alive, so that no other memory has their places
        self._times: dict[int, int] = defaultdict(int)

    def leave_out(self, tensors: Iterable[Tensor]) -> None:
        """Parameters and batches are no activations."""
        for tensor in tensors:
            for storage in _storages(tensor):
                self._others[storage._cdata] = storage

    @contextmanager
    def __call__(self) -> Iterator[None]:
        """Enter it around forwards; backwards may follow later."""
        with saved_tensors_hooks(self._keep, _Kept.give):
            yield

    def _keep(self, tensor: Tensor) -> _Kept:
        storages = [storage for storage in _storages(tensor) if storage._cdata not in self._others]
        for storage in storages:
            self._times[storage._cdata] += 1
            self.kept_at[self.label][storage._cdata] = storage.nbytes()
            if self._times[storage._cdata] == 1:
                self.now += storage.nbytes()
        self.most = max(self.most, self.now)
        return _Kept(tensor, self, storages)

    def let_go(self, storage: Any) -> None:
        """One of the tensors in a storage is not kept any more."""
        self._times[storage._cdata] -= 1
        if self._times[storage._cdata] == 0:
            del self._times[storage._cdata]
            self.now -= storage.nbytes()

    def together(self, labels: Sequence[Hashable]) -> int:
        """The bytes that were kept under any of these labels."""
        storages: dict[int, int] = {}
        for label in labels:
            storages |= self.kept_at.get(label, {})
        return sum(storages.values())


class _Kept:
    """What autograd gets in the place of a tensor that it keeps.

    Autograd itself no longer notices that the tensor was changed in place afterwards; so it is noticed here.
    """

    def __init__(self, tensor: Tensor, keeping: SavedTensorMeter, storages: Sequence[Any]) -> None:
        self._tensor, self._version = tensor.detach(), tensor._version
        self._keeping, self._storages = keeping, storages

    def give(self) -> Tensor:
        """The tensor.

        Raises:
            RuntimeError: If it was changed in place.
        """
        if self._tensor._version != self._version:
            raise RuntimeError(
                "one of the variables needed for gradient computation has been modified by an inplace operation: a"
                f" tensor of shape {tuple(self._tensor.shape)} is at version {self._tensor._version}; expected version"
                f" {self._version} instead."
            )
        return self._tensor

    def __del__(self) -> None:
        for storage in self._storages:
            self._keeping.let_go(storage)
