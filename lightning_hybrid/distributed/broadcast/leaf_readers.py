"""Which ranks read which tensors of batches: the others need not get them."""

from __future__ import annotations

import time
from collections import deque
from collections.abc import Callable
from functools import partial
from typing import Any, NamedTuple, Protocol

import torch
import torch.distributed as dist
from torch import Tensor

from lightning_hybrid.distributed.broadcast.lazy_tensor import LazyTensor
from lightning_hybrid.distributed.broadcast.tree_broadcast import SMALL, Readers
from lightning_hybrid.distributed.failure import PeerFailedError, WrongUseError
from lightning_hybrid.distributed.process_group import GroupRef
from lightning_hybrid.distributed.pytree import TreeMeta
from lightning_hybrid.distributed.tensor_bytes import as_bytes

_LEAST = 1 << 14  # bytes of a tensor that are worth a question
_MOST_KEPT = 3  # batches whose tensors can be fetched: the one of a step, and those that have been loaded since
_CHUNK = 1 << 22  # bytes of an entry of the store, which takes no more than 8 MiB at a time
_PAUSE = 0.02  # seconds between two looks at the store
_GONE = b"gone"


class _Store(Protocol):
    """What is needed of `torch.distributed.Store`."""

    def add(self, key: str, amount: int) -> int:
        """Count."""

    def set(self, key: str, value: Any) -> None:
        """Write."""

    def get(self, key: str) -> bytes:
        """Read."""

    def check(self, keys: list[str]) -> bool:
        """Whether all keys have been written."""

    def delete_key(self, key: str) -> bool:
        """Forget."""


class LeafFetch:
    """Gets tensors of batches that were not sent from the rank that has them, through the store of all ranks.

    ::

        a rank in its step      asks: which loader, batch, leaf --.         .--> waits for the bytes
        the source's watcher                                      `--> answers

    The source may be waiting for that rank in its own step, so it is its watcher that answers, within half a second.

    Args:
        store: What all ranks see.
        watched: A clone of it, for the watcher.
        key: The key of something in the store that belongs to this run.
        failed: Whether a rank has failed, so that nobody may answer.
    """

    def __init__(self, store: _Store, watched: _Store, key: Callable[[str], str], failed: Callable[[], bool]) -> None:
        self._store, self._watched, self._key, self._failed = store, watched, key, failed
        self._loaders: list[LeafReaders] = []
        self._num_answered = 0

    def begin(self) -> None:
        """A run begins."""
        self._loaders, self._num_answered = [], 0

    def add(self, readers: LeafReaders) -> int:
        """A loader, of which each rank adds one at the same time; returns its number."""
        self._loaders.append(readers)
        return len(self._loaders) - 1

    def look(self) -> None:
        """On the watcher's thread: answer what has been asked since."""
        if not any(each.keeps for each in self._loaders):
            return
        me = dist.get_rank()
        while self._num_answered < self._watched.add(self._key(f"leaf/{me}"), 0):
            question = self._key(f"leaf/{me}/{self._num_answered + 1}")
            if not self._watched.check([question]):
                return  # it is just being written
            loader, batch, leaf, reader = map(int, self._watched.get(question).split())
            self._num_answered += 1
            found = self._loaders[loader].find(batch, leaf, reader)
            data = _GONE if found is None else as_bytes(found).numpy().tobytes()
            for number, begin in enumerate(range(0, len(data), _CHUNK)):
                self._watched.set(f"{question}/{number}", data[begin : begin + _CHUNK])

    def ask(self, source: int, loader: int, batch: int, leaf: int, reader: int, into: Tensor) -> bool:
        """Get a tensor.

        Args:
            source: The global rank that has it.
            loader: The number of the loader.
            batch: The number of the batch among those of the loader.
            leaf: The position of the tensor among the leaves.
            reader: This rank, inside its group.
            into: Where it is written.

        Returns:
            Whether it was still there.
        """
        question = self._key(f"leaf/{source}/{self._store.add(self._key(f'leaf/{source}'), 1)}")
        self._store.set(question, f"{loader} {batch} {leaf} {reader}")
        target = as_bytes(into)
        for number, begin in enumerate(range(0, into.nbytes, _CHUNK)):
            while not self._store.check([f"{question}/{number}"]):
                if self._failed():
                    raise PeerFailedError("Another rank has failed.")
                time.sleep(_PAUSE)
            chunk = self._store.get(f"{question}/{number}")
            self._store.delete_key(f"{question}/{number}")
            if chunk == _GONE:
                return False
            target[begin : begin + len(chunk)] = torch.frombuffer(bytearray(chunk), dtype=torch.uint8)
        return True


class _Noted(NamedTuple):
    """A batch that all ranks have got, with what this one has read of it."""

    number: int
    meta: TreeMeta
    is_read: list[bool]


class _Kept(NamedTuple):
    """Tensors of a batch that have not been sent to all, by their positions, with their versions."""

    number: int
    meta: TreeMeta
    leaves: dict[int, tuple[Tensor, int]]


class LeafReaders:
    """Finds out which ranks read which tensors of a loader's batches, so that the others need not get them.

    ::

        the first batch of a form    goes to all, and each rank notes what it reads of it
        before the next but one      an all-gather of these notes: once for each form, where there are large tensors
        from then on                 a tensor goes to its readers; the others have a lazy tensor in its place
        who reads that after all     fetches it, and is one of its readers from the next batch on

    A form is what a batch is without its numbers: containers, shapes, dtypes.

    Args:
        group: The model group, over gloo.
        source: The rank in it that has the batches.
        fetch: Gets what has not been sent.
        device: Where lazy tensors are said to be.
    """

    def __init__(self, group: dist.ProcessGroup, source: int, fetch: LeafFetch) -> None:
        self._group, self._fetch = GroupRef(group), fetch
        self._rank, self._source = dist.get_rank(group), dist.get_global_rank(group, source)
        self._loader = fetch.add(self)
        self._number = 0
        self._seen: set[TreeMeta] = set()
        self._noted: deque[_Noted] = deque()
        self._readers: dict[TreeMeta, Readers] = {}
        self._kept: deque[_Kept] = deque(maxlen=_MOST_KEPT)

    @property
    def keeps(self) -> bool:
        """Whether this rank has tensors that others may ask for."""
        return len(self._kept) > 0

    def settle(self) -> None:
        """Before the next batch, on all ranks: compare notes on those of which a step has been made on each."""
        while self._noted and self._noted[0].number < self._number:
            _, meta, is_read = self._noted.popleft()
            own, group = torch.tensor(is_read, dtype=torch.uint8), self._group()
            of_ranks = [torch.empty_like(own) for _ in range(group.size())]
            dist.all_gather(of_ranks, own, group=group)
            columns = zip(*(each.tolist() for each in of_ranks), strict=True)
            self._readers[meta] = tuple(map(self._readers_of, meta.leaves, columns))

    def _readers_of(self, leaf: Any, is_read: tuple[int, ...]) -> frozenset[int] | None:
        """The ranks that a tensor goes to; ``None`` for all, as for small ones that travel with others anyway."""
        num_bytes, ranks = _num_bytes(leaf), frozenset(rank for rank, reads in enumerate(is_read) if reads)
        all_read = len(ranks) == len(is_read) - 1  # the source has it
        return None if num_bytes < _LEAST or all_read or (ranks and num_bytes <= SMALL) else ranks

    def choose(self, meta: TreeMeta, leaves: list[Any]) -> Readers | None:
        """On the source: who gets what of a batch."""
        self._number += 1
        self._note(meta)
        readers = self._readers.get(meta)
        unsent = [index for index, to in enumerate(readers or ()) if to is not None]
        if unsent:
            versions = {index: (leaves[index], leaves[index]._version) for index in unsent}
            self._kept.append(_Kept(self._number, meta, versions))
        return readers

    def fill(self, meta: TreeMeta, readers: Readers | None, leaves: list[Any]) -> None:
        """On the others: what has come is noted when it is read, what has not come is fetched then."""
        self._number += 1
        is_read = self._note(meta)
        for index, leaf in meta.tensors():
            came, host = leaves[index], torch.device("cpu")
            if came is None:
                like = torch.empty(leaf.shape, dtype=leaf.dtype, device="meta")
                leaves[index] = LazyTensor(like, host, partial(self._fetched, self._number, index, like))
            elif is_read is not None and _num_bytes(leaf) >= _LEAST:
                leaves[index] = LazyTensor(came, host, partial(_noting, is_read, index, came))

    def _note(self, meta: TreeMeta) -> list[bool] | None:
        """Where to note what is read of a batch, if it is the first one of its form."""
        if meta in self._seen or all(_num_bytes(leaf) < _LEAST for leaf in meta.leaves):
            return None
        self._seen.add(meta)
        self._noted.append(_Noted(self._number, meta, [False] * len(meta.leaves)))
        return self._noted[-1].is_read

    def _fetched(self, number: int, index: int, like: Tensor, reads: bool) -> Tensor:
        made = torch.empty_like(like, device="cpu")
        if made.numel() and not self._fetch.ask(self._source, self._loader, number, index, self._rank, made):
            raise WrongUseError(
                f"A tensor of shape {tuple(like.shape)} in a batch is read on this rank, where no step has read it"
                " before, so it was not sent, and it is gone or has been changed where it was loaded. Read it in the"
                " first step with a batch of its form, such as by keeping a copy of it; or let every rank load its own"
                " batches, HybridStrategy(broadcast_batches=False)."
            )
        return made

    def find(self, number: int, index: int, reader: int) -> Tensor | None:
        """On the source, on the watcher's thread: a tensor that a rank of the group asks for, and gets from now on."""
        for kept in list(self._kept):
            if kept.number == number:
                readers = list(self._readers[kept.meta])
                readers[index] = (readers[index] or frozenset()) | {reader}
                if _num_bytes(kept.meta.leaves[index]) <= SMALL:
                    readers[index] = None
                self._readers[kept.meta] = tuple(readers)
                tensor, version = kept.leaves[index]
                return tensor if tensor._version == version else None
        return None


def _noting(is_read: list[bool], index: int, leaf: Tensor, reads: bool) -> Tensor:
    is_read[index] |= reads
    return leaf


def _num_bytes(leaf: Any) -> int:
    """The size of a tensor by its meta; 0 for what is none."""
    shape, dtype = getattr(leaf, "shape", None), getattr(leaf, "dtype", None)
    return 0 if shape is None or dtype is None else shape.numel() * dtype.itemsize
