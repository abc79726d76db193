"""Measures what a training step holds: the oracle of the estimates in `lightning_hybrid.memory`."""

from __future__ import annotations

import ast
from collections import Counter, defaultdict
from collections.abc import Callable, Hashable, Iterable, Iterator, Mapping, Sequence
from contextlib import contextmanager
from dataclasses import astuple
from functools import partial
from typing import Any

import torch
import torch.distributed as dist
from lightning.pytorch import Callback, LightningModule, Trainer
from torch import Tensor
from torch.autograd.graph import saved_tensors_hooks

from lightning_hybrid.axes import DATA, PIPELINE
from lightning_hybrid.data_parallel.zero.zero import NoZero
from lightning_hybrid.distributed.dtensor import local_gradient
from lightning_hybrid.distributed.pytree import flatten
from lightning_hybrid.memory.account import MemoryUsage, peak_activation_bytes, storage_bytes, storages_of
from lightning_hybrid.pipeline_parallel.schedules import build
from lightning_hybrid.pipeline_parallel.stage import Stage
from lightning_hybrid.trainer.training_step import UncutTrainingStep


class LiveTensorMeter:
    """Counts what autograd holds from forwards for backwards, while it is entered.

    ::

        forward     saves tensors       -> each storage counts once, however many tensors lie in it
        backward    releases them       -> it counts until the last one of these is released

    What is recomputed does not count, as it is not saved.

    Args:
        peak: The most that was counted before.

    Attributes:
        current: Bytes that are held.
        peak: The most that were, at a time.
        label: Where forwards are, for :meth:`saved_bytes`.
    """

    def __init__(self, peak: int = 0) -> None:
        self.current, self.peak = 0, peak
        self.label: Hashable = None
        self._saved: dict[Hashable, dict[int, int]] = defaultdict(dict)
        self._excluded: dict[int, Any] = {}  # alive, so that no other memory has their addresses
        self._uses: Counter[int] = Counter()

    def exclude(self, tensors: Iterable[Tensor]) -> None:
        """Parameters and batches are no activations."""
        for tensor in tensors:
            self._excluded |= {storage._cdata: storage for storage in storages_of(tensor)}

    @contextmanager
    def __call__(self) -> Iterator[None]:
        """Enter it around forwards; backwards may follow later."""
        with saved_tensors_hooks(self._pack, SavedTensor.unpack):
            yield

    def _pack(self, tensor: Tensor) -> SavedTensor:
        storages = [storage for storage in storages_of(tensor) if storage._cdata not in self._excluded]
        for storage in storages:
            self._uses[storage._cdata] += 1
            self._saved[self.label][storage._cdata] = storage.nbytes()
            if self._uses[storage._cdata] == 1:
                self.current += storage.nbytes()
        self.peak = max(self.peak, self.current)
        return SavedTensor(tensor, self, storages)

    def release(self, storage: Any) -> None:
        """One of the tensors in a storage is not held any more."""
        self._uses[storage._cdata] -= 1
        if self._uses[storage._cdata] == 0:
            del self._uses[storage._cdata]
            self.current -= storage.nbytes()

    def saved_bytes(self, labels: Sequence[Hashable]) -> int:
        """The bytes that were saved under any of these labels."""
        storages: dict[int, int] = {}
        for label in labels:
            storages |= self._saved.get(label, {})
        return sum(storages.values())


class SavedTensor:
    """What autograd gets in the place of a tensor that it saves.

    Autograd itself no longer notices that the tensor was changed in place afterwards; so it is noticed here.
    """

    def __init__(self, tensor: Tensor, meter: LiveTensorMeter, storages: Sequence[Any]) -> None:
        self._tensor, self._version = tensor.detach(), tensor._version
        self._meter, self._storages = meter, storages

    def unpack(self) -> Tensor:
        """The tensor."""
        assert self._tensor._version == self._version, "changed in place after autograd had saved it"
        return self._tensor

    def __del__(self) -> None:
        for storage in self._storages:
            self._meter.release(storage)


class MemoryMeter(Callback):
    """Measures the steps of a run with `HybridStrategy` until the first one in which optimizers step.

    Tensors are counted by their storages at the points of a step at which there is the most of them: before and after
    each forward of a layer, before gradients are sent, and at the end of each backward.

    Args:
        prints: Whether global rank 0 prints a line that :func:`printed_usages` reads.

    Attributes:
        usages: By pipeline rank, of the first replica the tensor-parallel rank that holds the most: what it held; and
            the activations that the schedule lets expect from those of the first microbatch. On every rank.
    """

    def __init__(self, prints: bool = False) -> None:
        self._prints = prints
        self.usages: list[tuple[MemoryUsage, int]] = []
        self._undo: list[Callable[[], None]] = []
        self._meter = LiveTensorMeter()
        self._visits: Counter[int] = Counter()
        self._parameters = self._gradients = 0

    def on_train_start(self, trainer: Trainer, pl_module: LightningModule) -> None:
        """Begin to measure."""
        self._module, self._first_step = pl_module, trainer.global_step
        self._grad_sync = grad_sync = trainer.strategy.run.grad_sync
        self._is_uncut = isinstance(trainer.strategy.run.training_step, UncutTrainingStep)
        self._around(trainer.strategy, "training_step", around=self._training_step)
        self._around(Stage, "enter", before=lambda stage, *_: self._forward_begins(stage.index))
        self._around(Stage, "backward", after=self._look)
        self._around(grad_sync, "backward_ends", before=self._look)
        self._around(grad_sync, "finish", after=self._look)
        for buckets in grad_sync._all:
            self._around(buckets, "_launch", before=self._look)
        for part in pl_module.modules():  # after the hooks that unshard parameters
            self._undo.append(part.register_forward_pre_hook(self._look).remove)

    def _around(
        self,
        owner: Any,
        name: str,
        *,
        before: Callable[..., Any] | None = None,
        after: Callable[..., Any] | None = None,
        around: Callable[..., Any] | None = None,
    ) -> None:
        """Wrap a method of one object, or of all of a class."""
        method = getattr(owner, name)
        undo = partial(setattr, owner, name, method) if name in vars(owner) else partial(delattr, owner, name)

        def wrapped(*args: Any, **kwargs: Any) -> Any:
            if before is not None:
                before(*args)
            result = method(*args, **kwargs)
            if after is not None:
                after(*args)
            return result

        setattr(owner, name, wrapped if around is None else partial(around, method))
        self._undo.append(undo)

    def _training_step(self, step: Callable[..., Any], batch: Any, *args: Any, **kwargs: Any) -> Any:
        self._visits.clear()
        self._meter = LiveTensorMeter(self._meter.peak)
        excluded = (*self._grad_sync.local_parameters(), *self._module.buffers(), *flatten(batch)[0])
        self._meter.exclude(leaf for leaf in excluded if isinstance(leaf, Tensor))
        with self._meter():
            if self._is_uncut:
                self._forward_begins(0)
            return step(batch, *args, **kwargs)

    def _forward_begins(self, stage: int) -> None:
        self._meter.label = stage, self._visits[stage]
        self._visits[stage] += 1
        self._look()

    def _look(self, *_: Any) -> None:
        with torch._C.DisableTorchFunction():  # it is no part of the step, whose calls may be followed
            self._look_at_all()

    def _look_at_all(self) -> None:
        grad_sync = self._grad_sync
        parameters = grad_sync.local_parameters()
        groups = () if isinstance(grad_sync.zero, NoZero) else grad_sync.zero._all
        gathered = [shards for group in groups for _, shards, _ in group._in_flight]
        reduced = [bucket._flat for buckets in grad_sync._all for bucket in buckets._buckets]
        self._parameters = max(self._parameters, storage_bytes([*parameters, *gathered]))
        self._gradients = max(self._gradients, storage_bytes([*map(local_gradient, parameters), *reduced]))

    def on_train_batch_end(self, trainer: Trainer, pl_module: LightningModule, *_: Any) -> None:
        """Gather what was measured once all that a step needs has been there, and end."""
        if not self._undo or trainer.global_step == self._first_step:
            return
        usage, expected = self._measured(trainer), self._expected(trainer)
        while self._undo:
            self._undo.pop()()
        mesh = pl_module.device_mesh
        data_rank, pipeline_rank = (mesh[axis.name].get_local_rank() for axis in (DATA, PIPELINE))
        gathered: list[Any] = [None] * dist.get_world_size()
        dist.all_gather_object(gathered, (data_rank, pipeline_rank, usage, expected))
        first = [found for found in gathered if found[0] == 0]
        for rank in range(mesh[PIPELINE.name].size()):
            of_rank = [(usage, expected) for _, at, usage, expected in first if at == rank]
            self.usages.append(max(of_rank, key=lambda found: found[0].total))
        if self._prints and trainer.is_global_zero:
            print(f"MEASURED {[astuple(usage) for usage, _ in self.usages]}")

    def _expected(self, trainer: Trainer) -> int:
        """The activations that the schedule holds, from those of the first microbatch."""
        config, sizes = trainer.strategy.settings, trainer.strategy.sizes
        saved = {stage: self._meter.saved_bytes([(stage, 0)]) for stage in self._visits}
        num_chunks = config.num_chunks if sizes.pipeline > 1 else 1
        schedule = build(config.schedule, sizes.pipeline, max(self._visits.values()), num_chunks)
        return peak_activation_bytes(schedule, min(saved) % sizes.pipeline, saved)

    def _measured(self, trainer: Trainer) -> MemoryUsage:
        states = [state for optimizer in trainer.optimizers for state in optimizer.state.values()]
        values = [value for state in states if isinstance(state, Mapping) for value in state.values()]
        held, buffers = storage_bytes(flatten(values)[0]), storage_bytes(self._module.buffers())
        return MemoryUsage(self._parameters, self._gradients, held, self._meter.peak, buffers)


def printed_usages(output: str) -> list[MemoryUsage]:
    """What :class:`MemoryMeter` measured in another process, from what that printed."""
    (line,) = [line for line in output.splitlines() if line.startswith("MEASURED ")]
    return [MemoryUsage(*parts) for parts in ast.literal_eval(line.removeprefix("MEASURED "))]
