"""The ranks that read each tensor of a batch: other ranks need not receive the tensor.

Without a search, each rank of a pipeline would receive each batch in full, although only the first stage reads the
inputs, and only the last stage the labels. The user does not declare this, so the reads of the first batch decide.
`trainer.dataloader` makes a :class:`LeafReaders` for each loader of a pipeline whose shapes are not dynamic, and passes
it to `TreeBroadcast` as the selection. `World` makes one :class:`LeafFetch`, and `RunWatch` calls its
:meth:`LeafFetch.look` and :meth:`LeafFetch.end`.

A *leaf* is a value of a batch that is not a container. Its *readers* are the ranks that read it. The *source* is the
rank that loads the batches. The *store* is torch's store of all ranks.
"""

from __future__ import annotations

import time
from collections import deque
from collections.abc import Callable
from contextlib import suppress
from functools import partial
from typing import Any, NamedTuple, Protocol
from weakref import ReferenceType, ref

import torch
import torch.distributed as dist
from torch import Tensor

from lightning_hybrid.distributed.failure import WrongUseError
from lightning_hybrid.distributed.messages.lazy_tensor import LazyTensor
from lightning_hybrid.distributed.messages.tree_broadcast import SMALL, Readers
from lightning_hybrid.distributed.process_group import GroupRef
from lightning_hybrid.distributed.pytree import TreeMeta
from lightning_hybrid.distributed.tensor_bytes import as_bytes
from lightning_hybrid.torch_internals import version_counter

_LEAST = 1 << 14  # bytes of the smallest tensor whose readers are determined
_MOST_KEPT = 4  # batches whose tensors can be fetched: the previous batch, the current one, and prefetched ones
_MOST_FORMS = 16  # forms whose readers are determined; if shapes always differ, each form would take a collective
_CHUNK = 1 << 22  # bytes of an entry of the store, which accepts at most 8 MiB
_PAUSE = 0.02  # seconds between two reads of the store


class _Store(Protocol):
    """The methods of `torch.distributed.Store` that are used here."""

    def add(self, key: str, amount: int) -> int:
        """Increase a counter, and return its value."""

    def set(self, key: str, value: Any) -> None:
        """Write an entry."""

    def get(self, key: str) -> bytes:
        """Return an entry."""

    def check(self, keys: list[str]) -> bool:
        """Return True if all keys exist."""

    def delete_key(self, key: str) -> bool:
        """Delete an entry."""


class LeafFetch:
    """Requests for tensors of batches that were not sent, to the rank that loads the batches, through the store.

    ::

        a rank in its step      asks: loader, batch, leaf ---------.         .--> waits for the bytes
        the source's watcher                                       `--> answers

    The source may be waiting for the requesting rank in its own step. Therefore its watcher thread answers, within half
    a second.

    Args:
        store: A store that all ranks see.
        watched: Another client of the store, for the watcher.
        key: Returns the key in the store for the name of an entry of this run, as `Board.key` does.
        is_over: Returns True if the run is over or a rank has failed, so that no rank may answer.
    """

    def __init__(self, store: _Store, watched: _Store, key: Callable[[str], str], is_over: Callable[[], bool]) -> None:
        self._store, self._watched, self._key, self._is_over = store, watched, key, is_over
        self._loaders: dict[int, ReferenceType[LeafReaders]] = {}
        self._num_loaders = self._num_answered = 0

    def begin(self) -> None:
        """Begin a run."""
        self._loaders.clear()
        self._num_loaders = self._num_answered = 0

    def add(self, readers: LeafReaders) -> int:
        """Register a loader, and return its number, from 1. All ranks must register their loaders in the same order."""
        self._num_loaders += 1
        self._loaders[self._num_loaders] = ref(readers)
        return self._num_loaders

    def _living(self) -> list[LeafReaders]:
        """Return the loaders that still exist."""
        return [readers for readers in (reference() for reference in list(self._loaders.values())) if readers]

    def end(self) -> None:
        """Fetch all tensors that this rank still refers to. All ranks call this before the run ends."""
        for readers in self._living():
            readers.fetch_kept(before=None)

    def look(self) -> None:
        """Answer new requests, on the watcher's thread."""
        if not any(readers.keeps for readers in self._living()):
            return
        me = dist.get_rank()
        while self._num_answered < self._watched.add(self._key(f"leaf/{me}"), 0):
            question = self._key(f"leaf/{me}/{self._num_answered + 1}")
            if not self._watched.check([question]):
                return  # the request is being written
            loader, batch, leaf, reader = map(int, self._watched.get(question).split())
            self._watched.delete_key(question)
            self._num_answered += 1
            data = b""
            with suppress(Exception):  # answer after any error, because the other rank waits
                readers = self._loaders[loader]()
                data = b"" if readers is None else readers.find(batch, leaf, reader)
            for number, begin in enumerate(range(0, max(1, len(data)), _CHUNK)):
                self._watched.set(f"{question}/{number}", data[begin : begin + _CHUNK])

    def ask(self, readers: LeafReaders, source: int, question: tuple[int, int, int, int], into: Tensor) -> bool:
        """Request a tensor and wait for it.

        Args:
            readers: The loader of the batch.
            source: The global rank that has the tensor.
            question: The number of the loader, the number of the batch, the position of the leaf, and this rank in its
                group.
            into: A tensor that gets the values.

        Returns:
            True if the source still had the tensor. False also if the run is over, or the loader is of an earlier run.
        """
        if self._is_over() or not any(readers is each for each in self._living()):
            return False
        key = self._key(f"leaf/{source}/{self._store.add(self._key(f'leaf/{source}'), 1)}")
        self._store.set(key, " ".join(map(str, question)))
        target = as_bytes(into)
        for number, begin in enumerate(range(0, into.nbytes, _CHUNK)):
            while not self._store.check([f"{key}/{number}"]):
                if self._is_over():
                    return False
                time.sleep(_PAUSE)
            chunk = self._store.get(f"{key}/{number}")
            self._store.delete_key(f"{key}/{number}")
            if not chunk:
                return False
            target[begin : begin + len(chunk)] = torch.frombuffer(bytearray(chunk), dtype=torch.uint8)
        return True


class _Noted(NamedTuple):
    """A batch that all ranks have received in full, with a record of the leaves that this rank has read.

    Attributes:
        number: The number of the batch of this loader, from 1.
        meta: The description of the batch, without plain values: its form.
        is_read: For each leaf, True if this rank has read it.
    """

    number: int
    meta: TreeMeta
    is_read: list[bool]


class _Kept(NamedTuple):
    """The tensors of a batch that were not sent to all ranks. The source keeps them for ranks that request them.

    Attributes:
        number: The number of the batch of this loader, from 1.
        meta: The description of the batch.
        leaves: For each position of such a tensor, the tensor and its version when the batch was sent.
    """

    number: int
    meta: TreeMeta
    leaves: dict[int, tuple[Tensor, int]]


class LeafReaders:
    """A search for the ranks that read each tensor of a loader's batches. Other ranks need not receive the tensor.

    ::

        first batch of a form          all ranks receive everything, and each rank records the tensors that it reads
        before the batch after next    an all-gather of the records, once for each form with large tensors
        later batches                  a tensor is sent to its readers; other ranks get a lazy tensor in its place
        if a rank reads it later       the rank fetches the tensor, and is a reader from the next batch on
        if a rank only keeps it        the same happens before the source drops the tensor

    The form of a batch consists of its containers, shapes and dtypes.

    Args:
        group: The model group, over gloo.
        source: The rank in the group that loads the batches.
        fetch: Fetches tensors that were not sent.
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
        self._unsent: deque[tuple[int, ReferenceType[LazyTensor]]] = deque()  # with the number of the batch

    @property
    def keeps(self) -> bool:
        """True if this rank keeps tensors that other ranks may request."""
        return len(self._kept) > 0

    def settle(self) -> None:
        """Exchange the records of batches whose steps have ended. All ranks of the group call this before each batch.

        This is a collective if a new form waits for its exchange; this rank also fetches tensors to which it refers.
        """
        self.fetch_kept(before=self._number)
        while self._noted and self._noted[0].number < self._number:
            _, meta, is_read = self._noted.popleft()
            own, group = torch.tensor(is_read, dtype=torch.uint8), self._group()
            of_ranks = [torch.empty_like(own) for _ in range(group.size())]
            dist.all_gather(of_ranks, own, group=group)
            columns = zip(*(each.tolist() for each in of_ranks), strict=True)
            self._readers[meta] = tuple(map(self._readers_of, meta.leaves, columns))

    def fetch_kept(self, *, before: int | None) -> None:
        """Fetch the tensors that were not sent and to which this rank still refers.

        Args:
            before: Only tensors of batches before this number are fetched; ``None`` for all batches.
        """
        while self._unsent and (before is None or self._unsent[0][0] < before):
            tensor = self._unsent.popleft()[1]()
            if tensor is not None:
                with suppress(WrongUseError):  # code that only keeps the tensor may never read it
                    tensor.materialize()

    def _readers_of(self, leaf: Any, is_read: tuple[int, ...]) -> frozenset[int] | None:
        """Return the ranks to which a tensor is sent; ``None`` for all ranks, for example if it is small.

        Args:
            leaf: The meta of the tensor.
            is_read: For each rank, 1 if the rank has read the tensor.
        """
        num_bytes, ranks = _num_bytes(leaf), frozenset(rank for rank, reads in enumerate(is_read) if reads)
        all_read = len(ranks) == len(is_read) - 1  # except the source, which has the tensor
        return None if num_bytes < _LEAST or all_read or (ranks and num_bytes <= SMALL) else ranks

    def choose(self, meta: TreeMeta, leaves: list[Any]) -> Readers | None:
        """Return the ranks that receive each leaf; ``None`` if all ranks receive all. The source calls this."""
        self._number += 1
        self._note(meta)
        readers = self._readers.get(meta)
        unsent = [index for index, to in enumerate(readers or ()) if to is not None]
        if unsent:
            versions = {index: (leaves[index], version_counter(leaves[index])) for index in unsent}
            self._kept.append(_Kept(self._number, meta, versions))
        return readers

    def fill(self, meta: TreeMeta, readers: Readers | None, leaves: list[Any]) -> None:
        """Put lazy tensors at the positions of large tensors. The other ranks call this.

        A lazy tensor fetches a tensor that was not sent, or records that a tensor of a first batch is read.
        """
        self._number += 1
        is_read = self._note(meta)
        for index, leaf in meta.tensors():
            came, host = leaves[index], torch.device("cpu")
            if came is None:
                like = torch.empty(leaf.shape, dtype=leaf.dtype, device="meta")
                leaves[index] = LazyTensor(like, host, partial(self._fetched, self._number, index, like), bool)
                self._unsent.append((self._number, ref(leaves[index])))
            elif is_read is not None and _num_bytes(leaf) >= _LEAST:
                leaves[index] = LazyTensor(came, host, partial(_given, came), partial(is_read.__setitem__, index, True))

    def _note(self, meta: TreeMeta) -> list[bool] | None:
        """Return the list in which reads of a batch are recorded; ``None`` if they are not recorded.

        Reads are recorded for the first batch of each form, if it has large tensors.
        """
        is_small = all(_num_bytes(leaf) < _LEAST for leaf in meta.leaves)
        if is_small or meta in self._seen or len(self._seen) == _MOST_FORMS:
            return None
        self._seen.add(meta)
        self._noted.append(_Noted(self._number, meta, [False] * len(meta.leaves)))
        return self._noted[-1].is_read

    def _fetched(self, number: int, index: int, like: Tensor) -> Tensor:
        made = torch.empty_like(like, device="cpu")
        question = self._loader, number, index, self._rank
        if made.numel() and not self._fetch.ask(self, self._source, question, made):
            raise WrongUseError(
                f"This rank reads a batch tensor of shape {tuple(like.shape)} that it did not read in earlier steps."
                " The rank that loads batches therefore did not send the tensor, and has already dropped or changed it."
                " Read the tensor on this rank in the first step with a batch of this structure, for example by copying"
                " the tensor. Alternatively, set HybridStrategy(broadcast_batches=False). [LH703]"
            )
        return made

    def find(self, number: int, index: int, reader: int) -> bytes:
        """Return the bytes of a tensor that a rank requests, and send the rank this tensor from now on.

        The watcher's thread of the source calls this.

        Args:
            number: The number of the batch.
            index: The position of the leaf.
            reader: The rank in the group that requests the tensor.

        Returns:
            The bytes; empty if the tensor has been dropped, or modified since it was loaded.
        """
        for kept in list(self._kept):
            if kept.number == number:
                readers = list(self._readers[kept.meta])
                before = readers[index]
                is_small = _num_bytes(kept.meta.leaves[index]) <= SMALL
                readers[index] = None if is_small or before is None else before | {reader}
                self._readers[kept.meta] = tuple(readers)
                tensor, version = kept.leaves[index]
                data = as_bytes(tensor).numpy().tobytes()
                return data if version_counter(tensor) == version else b""
        return b""


def _given(tensor: Tensor) -> Tensor:
    return tensor


def _num_bytes(leaf: Any) -> int:
    """Return the size of a tensor by its meta; 0 for other leaves."""
    shape, dtype = getattr(leaf, "shape", None), getattr(leaf, "dtype", None)
    return 0 if shape is None or dtype is None else shape.numel() * dtype.itemsize
