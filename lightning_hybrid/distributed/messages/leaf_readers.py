"""Which ranks read which tensors of batches: the others need not get them."""

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

_LEAST = 1 << 14  # bytes of a tensor that are worth a question
_MOST_KEPT = 4  # batches whose tensors can be fetched: that before a step, its own, and what has been loaded since
_MOST_FORMS = 16  # whose readers are looked for: where shapes always differ, each would be a question
_CHUNK = 1 << 22  # bytes of an entry of the store, which takes no more than 8 MiB at a time
_PAUSE = 0.02  # seconds between two looks at the store


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
        is_over: Whether the run is over or a rank has failed, so that nobody may answer.
    """

    def __init__(self, store: _Store, watched: _Store, key: Callable[[str], str], is_over: Callable[[], bool]) -> None:
        self._store, self._watched, self._key, self._is_over = store, watched, key, is_over
        self._loaders: dict[int, ReferenceType[LeafReaders]] = {}
        self._num_loaders = self._num_answered = 0

    def begin(self) -> None:
        """A run begins."""
        self._loaders.clear()
        self._num_loaders = self._num_answered = 0

    def add(self, readers: LeafReaders) -> int:
        """A loader, of which each rank adds one at the same time; returns its number."""
        self._num_loaders += 1
        self._loaders[self._num_loaders] = ref(readers)
        return self._num_loaders

    def _living(self) -> list[LeafReaders]:
        """The loaders that are still used."""
        return [readers for readers in (reference() for reference in list(self._loaders.values())) if readers]

    def end(self) -> None:
        """Before the run ends, on all ranks: what somebody has kept is fetched while it is there."""
        for readers in self._living():
            readers.fetch_kept(before=None)

    def look(self) -> None:
        """On the watcher's thread: answer what has been asked since."""
        if not any(readers.keeps for readers in self._living()):
            return
        me = dist.get_rank()
        while self._num_answered < self._watched.add(self._key(f"leaf/{me}"), 0):
            question = self._key(f"leaf/{me}/{self._num_answered + 1}")
            if not self._watched.check([question]):
                return  # it is just being written
            loader, batch, leaf, reader = map(int, self._watched.get(question).split())
            self._watched.delete_key(question)
            self._num_answered += 1
            data = b""
            with suppress(Exception):  # whatever it is, who asks must not wait in vain
                readers = self._loaders[loader]()
                data = b"" if readers is None else readers.find(batch, leaf, reader)
            for number, begin in enumerate(range(0, max(1, len(data)), _CHUNK)):
                self._watched.set(f"{question}/{number}", data[begin : begin + _CHUNK])

    def ask(self, readers: LeafReaders, source: int, question: tuple[int, int, int, int], into: Tensor) -> bool:
        """Get a tensor.

        Args:
            readers: Of its loader.
            source: The global rank that has it.
            question: The number of the loader and that of the batch in it, the position of the leaf, and the rank in
                its group that asks.
            into: Where it is written.

        Returns:
            Whether it was still there.
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
        who keeps it for later       likewise, before the source lets go of it

    A form is what a batch is without its numbers: containers, shapes, dtypes.

    Args:
        group: The model group, over gloo.
        source: The rank in it that has the batches.
        fetch: Gets what has not been sent.
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
        self._unsent: deque[tuple[int, ReferenceType[LazyTensor]]] = deque()  # with the numbers of their batches

    @property
    def keeps(self) -> bool:
        """Whether this rank has tensors that others may ask for."""
        return len(self._kept) > 0

    def settle(self) -> None:
        """Before the next batch, on all ranks: compare notes on those of which a step has been made on each."""
        self.fetch_kept(before=self._number)
        while self._noted and self._noted[0].number < self._number:
            _, meta, is_read = self._noted.popleft()
            own, group = torch.tensor(is_read, dtype=torch.uint8), self._group()
            of_ranks = [torch.empty_like(own) for _ in range(group.size())]
            dist.all_gather(of_ranks, own, group=group)
            columns = zip(*(each.tolist() for each in of_ranks), strict=True)
            self._readers[meta] = tuple(map(self._readers_of, meta.leaves, columns))

    def fetch_kept(self, *, before: int | None) -> None:
        """Fetch what was not sent and is still held by somebody, of batches before one, or of all.

        Args:
            before: The number of that batch.
        """
        while self._unsent and (before is None or self._unsent[0][0] < before):
            tensor = self._unsent.popleft()[1]()
            if tensor is not None:
                with suppress(WrongUseError):  # who only keeps it need not be told that it cannot be read
                    tensor.materialize()

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
            versions = {index: (leaves[index], version_counter(leaves[index])) for index in unsent}
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
                leaves[index] = LazyTensor(like, host, partial(self._fetched, self._number, index, like), bool)
                self._unsent.append((self._number, ref(leaves[index])))
            elif is_read is not None and _num_bytes(leaf) >= _LEAST:
                leaves[index] = LazyTensor(came, host, partial(_given, came), partial(is_read.__setitem__, index, True))

    def _note(self, meta: TreeMeta) -> list[bool] | None:
        """Where to note what is read of a batch, if it is the first one of its form."""
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
                " it. Alternatively, set HybridStrategy(broadcast_batches=False). [LH703]"
            )
        return made

    def find(self, number: int, index: int, reader: int) -> bytes:
        """On the source, on the watcher's thread: a tensor that a rank of the group asks for, and gets from now on.

        Returns:
            Its bytes; nothing if it is gone, or has been changed since it was loaded.
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
    """The size of a tensor by its meta; 0 for what is none."""
    shape, dtype = getattr(leaf, "shape", None), getattr(leaf, "dtype", None)
    return 0 if shape is None or dtype is None else shape.numel() * dtype.itemsize
