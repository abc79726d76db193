"""Data loaders of the Trainer: samples are split over the replicas, and the ranks of a model group get equal batches.

A *model group* consists of the ranks that hold one replica. The Trainer passes each loader to
`HybridStrategy.process_dataloader`, which calls the :class:`DataLoaderPreparer` of the `World`. It wraps the user's
loader::

    user's loader -> samples of a replica -> equal numbers of batches -> equal batches in a model group -> exact resume
                     (ReplicaSampler)        (EndTogetherLoader)         (SharedLoader, ComparedLoader)    (.resume)

Not every loader needs all wrappers. Loaders for predictions get no :class:`EndTogetherLoader`, and only training
loaders are resumed.

Lightning would add a `DistributedSampler`, which changes the order of the samples, and each rank would load its batches
itself, with its own random augmentations.

Iterations of these loaders are collectives, so all ranks must iterate them together.
"""

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
from lightning_hybrid.distributed.messages.tree_broadcast import TreeBroadcast, broadcast_object, contiguous
from lightning_hybrid.distributed.process_group import GroupRef
from lightning_hybrid.distributed.pytree import encode, flatten
from lightning_hybrid.distributed.tensor_bytes import as_bytes
from lightning_hybrid.torch_internals import set_persistent_iterator
from lightning_hybrid.trainer import lightning_internals as internals
from lightning_hybrid.trainer.batch_hooks import batch_reading_hooks
from lightning_hybrid.trainer.resume.replay import LoaderWrapper, ReplayableLoader, ReplicaOrder, is_stateful
from lightning_hybrid.trainer.resume.resume import ResumeCallback


class DataLoaderPreparer:
    """A function object that prepares the user's loaders for the ranks, in place of Lightning.

    Lightning's sampler shuffles training data even if the user's loader does not. This class keeps the user's order.

    Args:
        mesh: The ranks.
        device: The device of this rank.
        resume: Knows whether a checkpoint was loaded, whose position is restored later.
        share: If True, one rank of each model group loads the batches for all of its ranks.
        fetch: Fetches tensors that were not sent to this rank because it did not read them before; ``None`` if all
            tensors are sent.
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
        self._requested: bool | None = None  # the user's `Trainer(use_distributed_sampler=...)`

    def attach(self, trainer: Trainer) -> None:
        """Prevent Lightning from adding its own samplers in a run, and note the user's `use_distributed_sampler`."""
        self._requested = internals.set_use_distributed_sampler(trainer, False)

    def detach(self, trainer: Trainer) -> None:
        """Undo :meth:`attach`."""
        if self._requested is not None:
            internals.set_use_distributed_sampler(trainer, self._requested)

    def __call__(self, loader: object, trainer: Trainer) -> object:
        """Return a loader with equal batches on all ranks of the model group; every rank calls this.

        With `Trainer(use_distributed_sampler=True)`, the samples of a `DataLoader` are split over the replicas.
        Otherwise, the user has split them.

        Args:
            loader: The user's loader, any iterable.
            trainer: The Trainer, in the stage for which the loader is used.

        Raises:
            ValueError: If a `DistributedSampler` is for another number of replicas, or if a replica without samples to
                predict has parameter shards that others need.
            TypeError: If the batch sampler has no attribute `sampler`.
        """
        divide, stage = bool(self._requested), trainer.state.stage
        pins = self._device.type == "cuda"
        # Reads in hooks are not recorded, and evaluation steps read whole batches on few stages: send all tensors.
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
            internals.warn_of_few_workers(loader, trainer)  # Lightning checks only instances of `DataLoader`
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
    """Return a loader with equal batches on all ranks of the model group; every rank calls this.

    With `PL_SEED_WORKERS`, the `worker_init_fn` of the loader is set if it has none, also if the user's loader itself
    is used.

    Args:
        loader: The user's loader, any iterable.
        mesh: The ranks.
        divide: If True, the samples of a `DataLoader` are split over the replicas.
        share: If True, one rank of the model group loads and sends each batch. If False, all ranks load, and compare
            checksums.
        stage: The Trainer's current stage. When predicting, replicas may have different numbers of batches.
        pin_memory: If True, batches are received in pinned memory.
        fetch: As for :class:`DataLoaderPreparer`.

    Raises:
        ValueError: If a `DistributedSampler` is for another number of replicas.
        TypeError: If the batch sampler has no attribute `sampler`.
    """
    if divide and isinstance(loader, DataLoader):
        # If one rank of each model group loads, the loading ranks are a data-parallel group; otherwise all ranks load.
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
    """Return the way in which replicas take their batches from one order of the samples.

    Args:
        loader: The user's loader.
        num_replicas: The data-parallel size.
        divide: If True, the samples of a `DataLoader` are split over the replicas.

    Returns:
        The order; ``None`` if it is unknown which samples have been used after a number of batches.
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
    """A sampler of every `num_replicas`-th sample of another sampler's order, which is the same on all replicas.

    torch's `DistributedSampler` draws its own order. This sampler keeps the order of a single process: with a batch of
    `b` samples on each of `n` replicas, a step uses the samples that a single process uses with batches of ``n b``.
    Creating an iterator is a collective over ``group``.

    Args:
        sampler: The user's sampler, of which only the order on the first rank of the group is used.
        num_replicas: The data-parallel size.
        rank: The data rank.
        group: The ranks that iterate together; its first rank broadcasts the order.
        repeat: If True, the first samples are repeated at the end, so that all replicas have equally many samples.
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
            raise TypeError(f"{type(self._sampler).__name__} has no length")  # the same error as for the user's loader
        total = len(self._sampler)
        return -(-total // self._num_replicas) if self._repeat else len(range(self._rank, total, self._num_replicas))

    def set_epoch(self, epoch: int) -> None:
        """Set the epoch of the user's sampler, if it has this method."""
        if callable(set_epoch := getattr(self._sampler, "set_epoch", None)):
            set_epoch(epoch)


def _shard(
    loader: DataLoader[Any], mesh: Mesh, group: dist.ProcessGroup, stage: RunningStage | None
) -> DataLoader[Any]:
    """Return a copy of a loader that loads only this replica's samples.

    Args:
        loader: The user's loader. It is returned unchanged if it has an iterable dataset or a `DistributedSampler`, or
            if there is one replica.
        mesh: The ranks.
        group: The ranks that iterate together.
        stage: The Trainer's current stage. When predicting, no samples are repeated.

    Raises:
        ValueError: If a `DistributedSampler` is for another number of replicas.
        TypeError: If the batch sampler has no attribute `sampler`.
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
            f"The batch sampler {type(batches).__name__} has no attribute `sampler`, which the strategy needs to shard"
            f" the samples over {num_replicas} replicas. Add this attribute, or shard the samples yourself and set"
            " `Trainer(use_distributed_sampler=False)`. [LH721]"
        )
    sampler = ReplicaSampler(order, num_replicas, mesh.data_rank, group, repeat=stage != RunningStage.PREDICTING)
    former, loader = loader.batch_sampler, copy.copy(loader)
    set_persistent_iterator(loader, None)  # the iterator of persistent workers loads the samples of all replicas
    object.__setattr__(loader, "sampler", sampler)  # `DataLoader` forbids this assignment, but this is a fresh copy
    if batches is not None:
        batches = copy.copy(batches)
        batches.sampler = sampler
        object.__setattr__(loader, "batch_sampler", internals.rewrap_batch_sampler(batches, former))
    return loader


def _has_equal_lengths(loader: object) -> bool:
    """Return True if a loader certainly has the same number of batches on every replica."""
    if not isinstance(loader, DataLoader) or isinstance(loader.dataset, IterableDataset):
        return False
    batches = internals.unwrap_batch_sampler(loader.batch_sampler)
    order = loader.sampler if batches is None else getattr(batches, "sampler", None)
    return isinstance(order, (ReplicaSampler, DistributedSampler)) and type(batches) in (BatchSampler, type(None))


class EndTogetherLoader(LoaderWrapper):
    """A loader that iterates the loader of each replica until the first replica has no more batches.

    Replicas take part in the same collectives in each step. If a replica had fewer batches, the others would wait for
    it. Therefore, each batch is fetched on all replicas before any replica yields it, which costs one small message
    between hosts.

    Args:
        loader: The loader of this replica.
        mesh: The ranks. All ranks must create this loader together; ranks that hold the same part of the model iterate
            together.
    """

    def __init__(self, loader: Any, mesh: Mesh) -> None:
        super().__init__(loader)
        self._group = GroupRef(mesh.data_control_group)
        length = sized_len(loader)
        self._length = mesh.data_parallel_min(-1 if length is None else length)
        self._has_warned = False

    def __len__(self) -> int:
        if self._length < 0:
            raise TypeError(f"{type(self._loader).__name__} has no length")  # the same error as for the user's loader
        return self._length

    def __iter__(self) -> Iterator[Any]:
        return self._until_first_end(iter(self._loader))

    def _until_first_end(self, batches: Iterator[Any]) -> Iterator[Any]:
        """Yield batches until a replica has no more batches; a collective over the replicas for each batch."""
        for number in count():
            found = list(islice(batches, 1))
            group, having = self._group(), torch.tensor(len(found))
            dist.all_reduce(having, group=group)
            if int(having) < group.size():
                self._warn(number, int(having), group.size())
                return
            yield found.pop()

    def _warn(self, number: int, having: int, num_replicas: int) -> None:
        """Warn once if the epoch ends after a number of batches although some replicas have another batch."""
        if having and not self._has_warned:
            self._has_warned = True
            rank_zero_warn(
                f"After {number} batches, {num_replicas - having} of {num_replicas} replicas have run out of batches."
                " The epoch ends now for all replicas, and the remaining batches of the other replicas are not used."
                " Shard the data so that all replicas have the same number of batches."
            )


def with_length(loader: object, mesh: Mesh, *, predicts_alone: bool) -> object:
    """Return a loader that Lightning iterates on every replica, even on one without samples.

    On a rank whose loader has the length 0, Lightning raises an error or skips hooks.

    Args:
        loader: The loader of this replica, for predictions. Each sample is predicted once, so a replica may have none.
        mesh: The ranks. All replicas must call this function together.
        predicts_alone: As for :class:`DataLoaderPreparer`.

    Raises:
        ValueError: On every rank, if a replica has no samples and other replicas need its parameter shards.
    """
    length = sized_len(loader)
    number = 1 if length is None else length
    shortest, longest = mesh.data_parallel_min(number), -mesh.data_parallel_min(-number)
    if shortest > 0 or longest == 0:
        return loader
    if not predicts_alone:
        raise ValueError(
            f"There are fewer samples to predict than replicas ({mesh.num_replicas}). With zero_stage > 0"
            " or expert_parallel_size > 1, replicas with samples would wait for replicas without samples. Predict at"
            " least one sample per replica, or use zero_stage=0 and expert_parallel_size=1. [LH722]"
        )
    return EmptyLoader(loader) if number == 0 else loader


class EmptyLoader(LoaderWrapper):
    """A loader without batches that reports a length of 1, so that Lightning does not refuse or skip it.

    Args:
        loader: The empty loader.
    """

    def __len__(self) -> int:
        return 1

    def __iter__(self) -> Iterator[Any]:
        return iter(self._loader)


class SharedLoader(LoaderWrapper):
    """A loader that is iterated on one rank of the model group, which sends each batch and the end to the other ranks.

    If each rank loaded its own batches, random augmentations and worker seeds could differ without an error. The first
    stage's inputs and the last stage's labels would then belong to different samples. An error of the loader is also
    sent, and becomes a `PeerFailedError` on the other ranks.

    Args:
        loader: The loader. Every rank creates it; one rank iterates it.
        exchange: Sends from the loading rank to its model group.
        readers: Determines which tensors each rank reads; ``None`` to send all tensors to all ranks.
    """

    def __init__(self, loader: Any, exchange: TreeBroadcast, readers: LeafReaders | None = None) -> None:
        super().__init__(loader)
        self._exchange, self._readers = exchange, readers

    def __iter__(self) -> Iterator[Any]:
        self._exchange.about += 1  # the number of the iteration
        if not self._exchange.is_source:
            return self._receive()
        try:  # not at the first batch, because a loader draws random numbers and starts its workers here
            batches, error = iter(self._loader), None
        except Exception as raised:
            batches, error = iter(()), raised
        return self._load(batches, error)

    def _load(self, batches: Iterator[Any], error: Exception | None) -> Iterator[Any]:
        """Yield the batches of the loader, or raise its error. Each batch is sent before it is yielded."""
        try:
            self._settle()
            if error is not None:
                raise error
            for number, batch in enumerate(batches):
                batch = contiguous(batch)
                recorded = internals.recorded_batch_indices(self._loader)
                self._exchange((batch, None if recorded is None else recorded[number]), self._readers)
                yield batch
                self._settle()
        except Exception as raised:
            if not is_transport(raised):  # if a rank has left, the other ranks may be waiting for it in another place
                self._exchange.fail(raised)
            raise
        self._exchange.end()

    def _settle(self) -> None:
        """Exchange which ranks have read the tensors of earlier batches; every rank calls this before each batch."""
        if self._readers is not None:
            self._readers.settle()

    def _receive(self) -> Iterator[Any]:
        """Yield the batches that the loading rank sends, and record the indices of their samples for predictions."""
        recorded: list[list[int]] = []
        internals.set_recorded_batch_indices(self._loader, recorded)
        with suppress(StopIteration):  # the loading rank has no more batches
            while True:
                self._settle()
                batch, indices = self._exchange.receive(self._readers)
                if indices is not None:
                    recorded.append(indices)
                yield batch


class ComparedLoader(LoaderWrapper):
    """A loader that is iterated on every rank, and compares checksums of the batches over the model group.

    An iterator raises a `ValueError` on all ranks of the model group if a batch differs, or a rank has fewer batches.

    Args:
        loader: The loader.
        group: The model group, with the backend gloo.
    """

    def __init__(self, loader: Any, group: dist.ProcessGroup) -> None:
        super().__init__(loader)
        self._group = GroupRef(group)

    def __iter__(self) -> Iterator[Any]:
        return self._compared(iter(self._loader))

    def _compared(self, iterator: Iterator[Any]) -> Iterator[Any]:
        """Yield batches that are equal on all ranks. After the last batch, a rank compares 0, which no batch has."""
        number = -1
        for number, batch in enumerate(iterator):
            self._compare(checksum(batch), number)
            yield batch
        self._compare(0, number + 1)

    def _compare(self, value: int, number: int) -> None:
        """Compare the checksum of a batch with the other ranks of the model group, and raise an error if it differs."""
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
    """Return a checksum of a batch: CRC-32 over the bytes of all leaves, plus 1, so that it is never 0.

    Shapes and dtypes of tensors count, too. `trainer.debug.desync` also uses this function.
    """
    value = 1
    for leaf in flatten(batch)[0]:
        if isinstance(leaf, Tensor):
            value = zlib.crc32(repr((leaf.shape, leaf.dtype)).encode(), value)
            value = zlib.crc32(as_bytes(leaf.cpu()).numpy().data, value)
        else:
            value = zlib.crc32(encode(leaf), value)  # the `repr` of an object may contain its address
    return value + 1
