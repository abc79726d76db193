"""The Trainer's loaders: the samples of each replica, and one batch for each model group."""

from __future__ import annotations

import copy
import os
import zlib
from collections.abc import Iterable, Iterator, Sized
from contextlib import suppress
from functools import partial
from itertools import count, cycle, islice
from typing import Any

import torch
import torch.distributed as dist
from lightning.fabric.utilities.data import sized_len
from lightning.fabric.utilities.seed import pl_worker_init_function
from lightning.pytorch import Trainer
from lightning.pytorch.trainer.states import RunningStage
from lightning_utilities.core.rank_zero import rank_zero_warn
from torch import Tensor
from torch.utils.data import BatchSampler, DataLoader, DistributedSampler, IterableDataset, Sampler

from lightning_hybrid.distributed.failure import is_transport
from lightning_hybrid.distributed.mesh import Mesh
from lightning_hybrid.distributed.messages.leaf_readers import LeafFetch, LeafReaders
from lightning_hybrid.distributed.messages.tree_broadcast import TreeBroadcast, broadcast_object
from lightning_hybrid.distributed.process_group import GroupRef
from lightning_hybrid.distributed.pytree import encode, flatten
from lightning_hybrid.distributed.tensor_bytes import as_bytes
from lightning_hybrid.torch_internals import set_persistent_iterator
from lightning_hybrid.trainer import lightning_internals as internals
from lightning_hybrid.trainer.batch_hooks import batch_reading_hooks
from lightning_hybrid.trainer.resume.replay import LoaderWrapper, ReplayableLoader, ReplicaOrder, is_stateful
from lightning_hybrid.trainer.resume.resume import ResumeCallback


class DataLoaderPreparer:
    """Prepares loaders instead of Lightning.

    Lightning's own sampler shuffles training data whether or not the user's loader does; ours keeps its order.

    Args:
        mesh: The ranks.
        device: Of this process.
        resume: Goes on where a checkpoint was written.
        share: Whether one rank of each model group loads for all.
        fetch: Gets what has not been sent to who does not read it; ``None`` if all is sent.
        predicts_alone: True if replicas predict independently, so that a replica may have no samples.
    """

    def __init__(
        self,
        mesh: Mesh,
        device: torch.device,
        resume: ResumeCallback,
        *,
        share: bool,
        fetch: LeafFetch | None,
        predicts_alone: bool,
    ) -> None:
        self._mesh, self._device, self._resume = mesh, device, resume
        self._share, self._fetch = share, fetch
        self._predicts_alone = predicts_alone
        self._requested: bool | None = None  # `use_distributed_sampler` of the user's Trainer

    def attach(self, trainer: Trainer) -> None:
        """Nobody else divides the data."""
        self._requested = internals.set_use_distributed_sampler(trainer, False)

    def detach(self, trainer: Trainer) -> None:
        """Undo :meth:`attach`."""
        if self._requested is not None:
            internals.set_use_distributed_sampler(trainer, self._requested)

    def __call__(self, loader: object, trainer: Trainer) -> object:
        """A loader of this replica's samples that gives the same batches to all ranks of the model group."""
        divide, stage = bool(self._requested), trainer.state.stage
        pins = self._device.type == "cuda"
        # What hooks read outside of steps is not noted; evaluation steps read whole batches on few stages.
        selects = trainer.training and not batch_reading_hooks(trainer.lightning_module)
        fetch = self._fetch if selects else None
        given = loader, self._mesh
        prepared = prepare_loader(*given, divide=divide, share=self._share, stage=stage, pin_memory=pins, fetch=fetch)
        if stage == RunningStage.PREDICTING:
            prepared = with_length(prepared, self._mesh, predicts_alone=self._predicts_alone)
        elif trainer.training:
            order = replica_order(loader, self._mesh.num_replicas, divide=divide)
            prepared = ReplayableLoader(prepared, self._device, order, waits=self._resume.is_loaded)
        if isinstance(loader, DataLoader) and not isinstance(prepared, DataLoader):
            internals.warn_of_few_workers(loader, trainer)  # Lightning checks the workers of a `DataLoader` only
        return prepared


def prepare_loader(
    loader: object,
    mesh: Mesh,
    *,
    divide: bool,
    share: bool,
    stage: RunningStage | None,
    pin_memory: bool = False,
    fetch: LeafFetch | None = None,
) -> object:
    """A loader of this replica's samples that gives the same batches to all ranks of its model group.

    Args:
        loader: The user's; anything that can be iterated.
        mesh: The ranks.
        divide: Whether the samples of a `DataLoader` are divided over the replicas.
        share: Whether one rank loads and the others receive; otherwise all load and compare.
        stage: What the Trainer is doing.
        pin_memory: Whether batches are received in page-locked memory.
        fetch: Gets what has not been sent to who does not read it; ``None`` if all is sent.
    """
    if divide and isinstance(loader, DataLoader):
        # Where one rank of each model group loads, these ranks are a data-parallel group; otherwise all ranks load.
        group = mesh.decision_group
        if share and mesh.num_replicas > 1:
            group = mesh.data_control_group
        loader = _shard(loader, mesh, group, stage)
    if isinstance(loader, DataLoader) and loader.worker_init_fn is None and int(os.environ.get("PL_SEED_WORKERS", "0")):
        loader.worker_init_fn = partial(pl_worker_init_function, rank=mesh.data_rank)
    if mesh.num_replicas > 1 and stage != RunningStage.PREDICTING and not _has_equal_lengths(loader):
        loader = EndTogetherLoader(loader, mesh)
    if mesh.model_group.size() == 1:
        return loader
    if not share:
        return ComparedLoader(loader, mesh.control_group)
    exchange = mesh.tree_broadcast("batches", 0, torch.device("cpu"), pin_memory=pin_memory)
    return SharedLoader(loader, exchange, None if fetch is None else LeafReaders(mesh.control_group, 0, fetch))


def replica_order(loader: object, num_replicas: int, *, divide: bool) -> ReplicaOrder | None:
    """How the replicas take their batches from one order of the samples, if they take them in turns.

    Args:
        loader: The user's.
        num_replicas: The data-parallel size.
        divide: Whether the samples of a `DataLoader` are divided over the replicas.

    Returns:
        ``None`` if it cannot be said which samples have been used up after so many batches.
    """
    if not isinstance(loader, DataLoader) or isinstance(loader.dataset, IterableDataset) or is_stateful(loader):
        return None
    if loader.batch_size is None or type(loader.batch_sampler) is not BatchSampler:
        return None
    sampler = loader.sampler
    is_divided = sampler.num_replicas == num_replicas if isinstance(sampler, DistributedSampler) else divide
    if num_replicas > 1 and not is_divided:
        return None
    return ReplicaOrder(type(sampler).__name__, loader.batch_size * num_replicas)


class ReplicaSampler(Sampler[Any]):
    """Every `num_replicas`-th sample of another sampler's order, which is the same on all replicas.

    torch's `DistributedSampler` draws an order of its own; this one keeps the order that one process would see: with a
    batch of `b` samples on each of `n` replicas, a step takes the samples that one process takes with batches of
    ``n b``.

    Args:
        sampler: The user's sampler.
        num_replicas: The data-parallel size.
        rank: The data rank.
        group: Over which the first rank's order is broadcast; its ranks iterate together.
        repeat: Whether the order is filled up with its own beginning, so that all replicas get equally many.
    """

    def __init__(
        self, sampler: Iterable[Any], num_replicas: int, rank: int, group: dist.ProcessGroup, *, repeat: bool
    ) -> None:
        self._sampler = sampler
        self._num_replicas = num_replicas
        self._rank = rank
        self._group = GroupRef(group)
        self._repeat = repeat

    def __iter__(self) -> Iterator[Any]:
        group = self._group()
        order = broadcast_object(list(self._sampler) if dist.get_rank(group) == 0 else None, 0, group)
        missing = -len(order) % self._num_replicas if self._repeat else 0
        order += list(islice(cycle(order), missing))
        return iter(order[self._rank :: self._num_replicas])

    def __len__(self) -> int:
        if not isinstance(self._sampler, Sized):
            raise TypeError(f"{type(self._sampler).__name__} has no length")  # as `len(loader)` says without us
        total = len(self._sampler)
        return -(-total // self._num_replicas) if self._repeat else len(range(self._rank, total, self._num_replicas))

    def set_epoch(self, epoch: int) -> None:
        """Set the epoch of the user's sampler, if it has one."""
        if callable(set_epoch := getattr(self._sampler, "set_epoch", None)):
            set_epoch(epoch)


def _shard(
    loader: DataLoader[Any], mesh: Mesh, group: dist.ProcessGroup, stage: RunningStage | None
) -> DataLoader[Any]:
    """The same loader over this replica's share of the samples.

    Args:
        loader: The user's loader. One over an iterable data set, or with a `DistributedSampler`, is left alone.
        mesh: The ranks.
        group: The ranks that iterate together.
        stage: What the Trainer is doing; predictions come once for each sample, without repetitions.
    """
    if isinstance(loader.dataset, IterableDataset):
        return loader
    batches, num_replicas = internals.unwrap_batch_sampler(loader.batch_sampler), mesh.num_replicas
    order = loader.sampler if batches is None else getattr(batches, "sampler", None)
    if isinstance(order, DistributedSampler) and order.num_replicas != num_replicas:
        raise ValueError(
            f"The loader's DistributedSampler shards the data over {order.num_replicas} processes, but there are"
            f" {num_replicas} replicas. All ranks of a replica must use the same data. Remove the sampler, or create it"
            " with `DistributedSampler(dataset, **trainer.distributed_sampler_kwargs)`. [LH720]"
        )
    if isinstance(order, DistributedSampler) or num_replicas == 1:
        return loader
    if order is None:
        raise TypeError(
            f"The batch sampler {type(batches).__name__} has no attribute `sampler`, which is needed to shard the"
            f" samples over {num_replicas} replicas. Add this attribute, or shard the samples yourself and set"
            " `Trainer(use_distributed_sampler=False)`. [LH721]"
        )
    sampler = ReplicaSampler(order, num_replicas, mesh.data_rank, group, repeat=stage != RunningStage.PREDICTING)
    former, loader = loader.batch_sampler, copy.copy(loader)
    set_persistent_iterator(loader, None)  # the former one is over the undivided samples
    object.__setattr__(loader, "sampler", sampler)  # a loader refuses to be changed, but this one is a copy
    if batches is not None:
        batches = copy.copy(batches)
        batches.sampler = sampler
        object.__setattr__(loader, "batch_sampler", internals.rewrap_batch_sampler(batches, former))
    return loader


def _has_equal_lengths(loader: object) -> bool:
    """Return whether the samplers of a loader give every replica as many batches."""
    if not isinstance(loader, DataLoader) or isinstance(loader.dataset, IterableDataset):
        return False
    batches = internals.unwrap_batch_sampler(loader.batch_sampler)
    order = loader.sampler if batches is None else getattr(batches, "sampler", None)
    return isinstance(order, (ReplicaSampler, DistributedSampler)) and type(batches) in (BatchSampler, type(None))


class EndTogetherLoader(LoaderWrapper):
    """Iterates a loader of each replica until the first of them has no more batches.

    Replicas take part in the same collectives in each step, so one with fewer batches than others would leave these
    waiting. Each batch is asked for everywhere before it is given anywhere, which costs one message of the hosts.

    Args:
        loader: The loader of this replica.
        mesh: The ranks. Those of the same place in each replica iterate together; all ranks make this together.
    """

    def __init__(self, loader: Any, mesh: Mesh) -> None:
        super().__init__(loader)
        self._group = GroupRef(mesh.data_control_group)
        length = sized_len(loader)
        self._length = mesh.data_parallel_min(-1 if length is None else length)
        self._has_warned = False

    def __len__(self) -> int:
        if self._length < 0:
            raise TypeError(f"{type(self._loader).__name__} has no length")  # as `len(loader)` says
        return self._length

    def __iter__(self) -> Iterator[Any]:
        return self._until_first_end(iter(self._loader))

    def _until_first_end(self, batches: Iterator[Any]) -> Iterator[Any]:
        for number in count():
            found = list(islice(batches, 1))
            group, having = self._group(), torch.tensor(len(found))
            dist.all_reduce(having, group=group)
            if int(having) < group.size():
                self._warn(number, int(having), group.size())
                return
            yield found.pop()

    def _warn(self, number: int, having: int, num_replicas: int) -> None:
        if having and not self._has_warned:
            self._has_warned = True
            rank_zero_warn(
                f"After {number} batches, {num_replicas - having} of {num_replicas} replicas have run out of batches."
                " The epoch ends now for all replicas, and the remaining batches of the other replicas are not used."
                " Shard the data so that all replicas have the same number of batches."
            )


def with_length(loader: object, mesh: Mesh, *, predicts_alone: bool) -> object:
    """Return a loader that Lightning iterates on every replica, even on one without samples.

    Lightning refuses a loader of length 0, or skips its hooks, on the ranks that have it.

    Args:
        loader: The loader of this replica. Each sample is predicted once, so a replica may have none.
        mesh: The ranks. All replicas call this together.
        predicts_alone: As of :class:`DataLoaderPreparer`.

    Raises:
        ValueError: If a replica has no samples and others need it to gather shards; on every rank.
    """
    length = sized_len(loader)
    number = 1 if length is None else length
    shortest, longest = mesh.data_parallel_min(number), -mesh.data_parallel_min(-number)
    if shortest > 0 or longest == 0:
        return loader
    if not predicts_alone:
        raise ValueError(
            f"There are fewer samples to predict than replicas ({mesh.num_replicas}). With zero_stage > 0, replicas"
            " with samples would wait for the parameter shards of replicas without samples. Predict at least one sample"
            " per replica, or use zero_stage=0. [LH722]"
        )
    return EmptyLoader(loader) if number == 0 else loader


class EmptyLoader(LoaderWrapper):
    """A loader without a batch that says it has one.

    Args:
        loader: The loader.
    """

    def __len__(self) -> int:
        return 1

    def __iter__(self) -> Iterator[Any]:
        return iter(self._loader)


class SharedLoader(LoaderWrapper):
    """Iterates the loader on one rank of the model group and gives its batches, and its end, to the others.

    Random augmentation, worker seeds and dropout make the loaders of several ranks diverge silently; then the first
    stage's inputs and the last stage's labels belong to different samples.

    Args:
        loader: The loader, made on every rank, iterated on one.
        exchange: From the loading rank to its model group.
        readers: Finds out who reads what; ``None`` if all is sent to all.
    """

    def __init__(self, loader: Any, exchange: TreeBroadcast, readers: LeafReaders | None = None) -> None:
        super().__init__(loader)
        self._exchange, self._readers = exchange, readers

    def __iter__(self) -> Iterator[Any]:
        self._exchange.about += 1  # another iteration
        if not self._exchange.is_source:
            return self._receive()
        try:  # now and not at the first batch: a loader draws random numbers and starts its workers here
            batches, error = iter(self._loader), None
        except Exception as raised:
            batches, error = iter(()), raised
        return self._load(batches, error)

    def _load(self, batches: Iterator[Any], error: Exception | None) -> Iterator[Any]:
        try:
            self._settle()
            if error is not None:
                raise error
            for number, batch in enumerate(batches):
                recorded = internals.recorded_batch_indices(self._loader)
                self._exchange((batch, None if recorded is None else recorded[number]), self._readers)
                yield batch
                self._settle()
        except Exception as raised:
            if not is_transport(raised):  # of a rank that has left: the others here may be waiting for it elsewhere
                self._exchange.fail(raised)
            raise
        self._exchange.end()

    def _settle(self) -> None:
        if self._readers is not None:
            self._readers.settle()

    def _receive(self) -> Iterator[Any]:
        recorded: list[list[int]] = []
        internals.set_recorded_batch_indices(self._loader, recorded)
        with suppress(StopIteration):  # the rank that loads has no more
            while True:
                self._settle()
                batch, indices = self._exchange.receive(self._readers)
                if indices is not None:
                    recorded.append(indices)
                yield batch


class ComparedLoader(LoaderWrapper):
    """Iterates the loader on every rank, and compares checksums of the batches over the model group.

    Args:
        loader: The loader.
        group: The model group, over gloo.
    """

    def __init__(self, loader: Any, group: dist.ProcessGroup) -> None:
        super().__init__(loader)
        self._group = GroupRef(group)

    def __iter__(self) -> Iterator[Any]:
        return self._compared(iter(self._loader))

    def _compared(self, iterator: Iterator[Any]) -> Iterator[Any]:
        number = -1
        for number, batch in enumerate(iterator):
            self._compare(checksum(batch), number)
            yield batch
        self._compare(0, number + 1)

    def _compare(self, value: int, number: int) -> None:
        group, own = self._group(), torch.tensor([value], dtype=torch.int64)
        all_values = [torch.empty_like(own) for _ in range(group.size())]
        dist.all_gather(all_values, own, group=group)
        if any(int(other) != value for other in all_values):
            raise ValueError(
                f"Batch {number} differs between the ranks of one model group, so inputs and labels would belong to"
                f" different samples. The checksums are {[int(other) for other in all_values]}. If you seed the loader,"
                " derive the seed only from the data-parallel rank. Alternatively, set"
                " HybridStrategy(broadcast_batches=True), so that one rank loads each batch. [LH701]"
            )


def checksum(batch: Any) -> int:
    """A number that differs where batches differ: CRC-32 over the bytes of all leaves, never 0."""
    value = 1
    for leaf in flatten(batch)[0]:
        if isinstance(leaf, Tensor):
            value = zlib.crc32(repr((leaf.shape, leaf.dtype)).encode(), value)
            value = zlib.crc32(as_bytes(leaf.cpu()).numpy().data, value)
        else:
            value = zlib.crc32(encode(leaf), value)  # not its `repr`, which may be an address
    return value + 1
