"""A failure anywhere ends everything, quickly, with the first cause."""

from __future__ import annotations

import contextlib
import gc
import json
import os
import sys
import threading
import time
import traceback
from collections.abc import Callable, Sequence
from typing import Protocol

import torch.distributed as dist

from lightning_hybrid.distributed.process_group import abort_groups, has_nccl
from lightning_hybrid.distributed.watch.process_ends import describe_process, host_of, machine_of

_KEY = "lightning_hybrid/failure"
EVENT, CAUSE = "event", "cause"  # keys in the store: whether there is anything to look at; the first failure
_PATIENCE = 1.5  # seconds that watches of other ranks may take to answer
_LATE = 0.5  # seconds more, for those that have not answered then
_LINGER = 1.5
_MOST = 8  # ranks in one text
_DEADLINE = 10.0  # seconds in which NCCL has let go of its communicators
_KINDS: dict[str, type[Exception]] = {"ValueError": ValueError, "TypeError": TypeError}


class WrongUseError(ValueError):
    """The user's code does what cannot work in a pipeline. Becomes a `ValueError` of this text on every rank."""


class PeerFailedError(RuntimeError):
    """Another rank has failed, and has said so in the place of what this one waited for."""


def add_note(error: BaseException, note: str) -> None:
    """Add a note to an exception, which Python prints below its text, and other ranks see too.

    Before Python 3.11, which brought notes, it is added to the text itself if that is a plain one.

    Args:
        error: As it was raised.
        note: The note.
    """
    if sys.version_info >= (3, 11):
        error.add_note(note)
    elif len(error.args) == 1 and str(error) == error.args[0]:
        error.args = (f"{error}\n{note}",)
    else:
        error.__dict__["__notes__"] = [*notes_of(error), note]


def notes_of(error: BaseException) -> list[str]:
    """Return the notes of an exception."""
    return list(getattr(error, "__notes__", ()))


class Store(Protocol):
    """What is needed of `torch.distributed.Store`."""

    def add(self, key: str, amount: int) -> int:
        """Add to a number and return it."""

    def set(self, key: str, value: str) -> None:
        """Write."""

    def get(self, key: str) -> bytes:
        """Read."""

    def check(self, keys: list[str]) -> bool:
        """Whether all keys have been written."""

    def multi_get(self, keys: list[str]) -> list[bytes]:
        """Read keys that have been written."""

    def delete_key(self, key: str) -> bool:
        """Delete, and say whether it was there."""


class FailureStore:
    """Where the first failure of a run is written, and read by every other rank.

    ::

        rank 2: exception in 2F1 --> leave(): text to the store, groups closed --> raises its exception
        rank 1: waits for rank 2 --> its receive fails --> leave(): groups closed --> raises the text of rank 2
        rank 0: waits for rank 1 --> its receive fails --> leave(): groups closed --> raises the text of rank 2

    A closed gloo group fails at once on its peers, so the chain takes milliseconds. Who waits for a rank that waits for
    another one is woken by nobody: see :class:`~lightning_hybrid.distributed.failure_watch.FailureWatch`.

    A rank whose peer has gone while nobody wrote a failure calls the roll: the watch of every living rank answers, also
    where the rank itself is stuck, and says where that is.

    Args:
        store: A store that all ranks see, and nobody before them has used.
        rank: This rank.
        size: The number of ranks.

    Attributes:
        failed: Whether this rank failed, or left because another one did.
        is_first: Whether this rank wrote the first failure.
        is_leaving: Whether this rank is on its way out after an exception.
        is_interrupted: Whether this rank's groups were closed to bring it to the handler of SIGINT.
        gone: The ranks whose processes are known to have ended.
        num_rolls: To how many roll calls this rank has answered.
        is_over: Whether all ranks have come to the end of this run together: then any of them may go.
        is_store_silent: Whether the store is there and does not answer: who asks it waits for ever.
    """

    def __init__(self, store: Store, *, rank: int, size: int) -> None:
        self._store, self._rank, self._size = store, rank, size
        self._run = 0
        self._known: str | None = None  # the first failure: the store may be gone when it is asked for
        self._hosts: dict[int, str] = {}
        self._machine = ""
        self.num_rolls = 0
        self.gone: set[int] = set()
        self.failed = self.is_first = self.is_leaving = self.is_over = False
        self.is_store_silent = self.is_interrupted = False

    @property
    def is_known(self) -> bool:
        """Whether the first failure is known here, so that :meth:`cause` need not wait for it."""
        return self._known is not None

    def key(self, name: str) -> str:
        """The key of something in the store that belongs to this run."""
        return f"{_KEY}/{self._run}/{name}"

    def is_first_to(self, say: str) -> bool:
        """Return whether no rank has asked this before in this run, so that one rank tells the user.

        Args:
            say: What is told.
        """
        with contextlib.suppress(Exception):  # the store may be gone, as the run is
            return not self.failed and self._store.add(self.key(f"said/{say}"), 1) == 1
        return False

    def begin(self) -> None:
        """The next run begins: what former ones wrote counts no longer."""
        self._run += 1
        self.is_leaving = self.is_over = self.is_interrupted = False
        self.num_rolls = 0
        self.gone.clear()
        description = describe_process()
        self._machine = machine_of(description)
        with contextlib.suppress(Exception):  # the store need not answer any of these: nobody waits
            self._store.set(self.key(f"process/{self._rank}"), description)
            self._store.set(self.key(f"heartbeat/{self._rank}"), "0")
            for name in ("begun", f"machine/{self._machine}"):
                self._store.append(self.key(name), f"{self._rank} ")  # type: ignore[attr-defined]  # torch's stubs

    def finish(self, note: str = "") -> None:
        """This rank has come to the end of its run: who waits for it now waits in vain.

        Args:
            note: What others may want to know of it then.
        """
        if not self.failed:
            self._tell(f"finished/{self._rank}", note)

    def description_of(self, rank: int, store: Store) -> str | None:
        """Where the process of another rank is; ``None`` before it has begun this run."""
        key = self.key(f"process/{rank}")
        if not store.check([key]):
            return None
        description = store.get(key).decode()
        self._hosts[rank] = host_of(description)
        return description

    def learn_host(self, rank: int, host: str | None) -> None:
        """Where another rank is, if nothing else is known of it."""
        if host is not None:
            self._hosts.setdefault(rank, host)

    def neighbours(self, store: Store) -> list[int]:
        """The ranks on this machine that have begun this run, in this order; with it this one.

        One request: with thousands of ranks nobody asks for all of them.

        Args:
            store: That of the watcher.
        """
        return [int(rank) for rank in store.get(self.key(f"machine/{self._machine}")).split()]

    def name_of(self, rank: int) -> str:
        """A rank and its host, as a text."""
        return f"rank {rank} (on {self._hosts.get(rank, 'an unknown host')})"

    def last_seen(self, ranks: Sequence[int], store: Store) -> str:
        """Return a sentence with the last place that the first of some ranks reported; empty if it reported none.

        Args:
            ranks: The ranks.
            store: The store of the calling thread.
        """
        key, place = self.key(f"seen/{ranks[0]}"), ""
        with contextlib.suppress(dist.DistError, OSError):  # what is known is told without it
            place = store.get(key).decode() if store.check([key]) else ""
        return f" Rank {ranks[0]} was last seen at {place}." if place else ""

    def _tell(self, name: str, value: str = "") -> None:
        """Write something that watches have to look at."""
        with contextlib.suppress(Exception):  # the store may be gone; then nobody reads it either
            self._store.set(self.key(name), value)
            self._store.set(self.key(EVENT), "")

    def report(self, error: BaseException, where: str, *, verbatim: bool = False) -> None:
        """Write a failure down, unless another rank was first.

        Args:
            error: What was raised.
            where: The rank, stage and action.
            verbatim: Whether the others raise the same text, because the error is about what every rank does.
        """
        if self.failed:
            return
        self.failed = True
        kind = next((name for name, kind in _KINDS.items() if isinstance(error, kind)), "RuntimeError")
        text = str(error) if verbatim else f"{where} failed: {type(error).__name__}: {error}"
        text += "".join(f" ({note})" for note in notes_of(error))
        with contextlib.suppress(Exception):
            self.is_first = self._store.add(self.key("count"), 1) == 1
            if self.is_first:
                self._tell(CAUSE, json.dumps([kind, text]))
            self._needs_no_store()

    def report_text(self, text: str, store: Store, kind: str = "RuntimeError") -> bool:
        """Write down what a watcher has found, unless another rank was first, and wait until that is to be read.

        Args:
            text: Why the run cannot go on.
            store: That of the watcher: this rank's own may be locked.
            kind: What the ranks raise.

        Returns:
            Whether it is: not if the rank that was first has ended before it had written.
        """
        if store.add(self.key("count"), 1) == 1:
            store.set(self.key(CAUSE), json.dumps([kind, text]))
            store.set(self.key(EVENT), "")
        deadline = time.monotonic() + _PATIENCE
        while not store.check([self.key(CAUSE)]):
            if time.monotonic() > deadline:
                return False
            time.sleep(0.02)
        return True

    def _needs_no_store(self) -> None:
        """This rank has what it tells its user: whose process holds the store need not wait for it."""
        self._store.set(self.key(f"read/{self._rank}"), "")

    def linger(self, store: Store) -> None:
        """The store often lives in the process of rank 0: the others read the first failure before that ends."""
        deadline = time.monotonic() + _LINGER
        others = set(range(1, self._size)) - self.gone if self._rank == 0 and not self.is_store_silent else set()
        keys = [self.key(f"read/{rank}") for rank in others]
        while keys and not store.check(keys) and time.monotonic() < deadline:
            time.sleep(0.02)

    def learn(self, text: str) -> None:
        """The watch has read the first failure."""
        self._known = text

    def learn_text(self, text: str) -> None:
        """The watch has found out why the run cannot go on, and nobody can be told."""
        self._known = json.dumps(["RuntimeError", text])

    def cause(self, patience: float = 2.0) -> Exception | None:
        """The first failure, as the exception to raise here; ``None`` if no rank has written one.

        Args:
            patience: Seconds to wait for one.
        """
        deadline = time.monotonic() + patience
        while True:
            try:
                if self._known is None and self._store.check([self.key(CAUSE)]):
                    self._known = self._store.get(self.key(CAUSE)).decode()
                    self._needs_no_store()
            except Exception:  # the store died with the rank that hosts it: nobody knows any more
                return None
            if self._known is not None:
                kind, text = json.loads(self._known)
                return _KINDS.get(kind, RuntimeError)(text)
            if time.monotonic() > deadline:
                return None
            time.sleep(0.02)

    def leave(
        self, error: BaseException, where: str, abandon: Callable[[], None], *, verbatim: bool = False
    ) -> BaseException | None:
        """Leave every process group after an exception, without a collective.

        ::

            error --> is there a cause? ----- no --> report error, or if it only --.
                      (transport errors              says that a rank has left,    +--> abandon --> close groups
                       wait for one)                 what the roll call gives      |
                                    `-- yes ---------------------------------------'

        Args:
            error: What was raised on this rank.
            where: The rank, stage and action.
            abandon: Drops all that is under way and would keep connections open.
            verbatim: As in :meth:`report`.

        Returns:
            The first failure, to be raised from ``error``; ``None`` if ``error`` is the first one.
        """
        self.is_leaving = True
        cause: BaseException | None
        roll = None
        if is_transport(error) and not self.is_store_silent and not self.is_known:
            roll = self.call_roll(self._store)  # they answer while this one waits for a cause
        if self.is_interrupted and is_transport(error):
            # In a backward the handler's exception may be lost: torch asks for signals while it describes this error.
            cause = KeyboardInterrupt()
            self.report(cause, where)
        else:
            cause = self.cause(patience=_PATIENCE if is_transport(error) else 0.0)
        if cause is None and is_transport(error):
            found = RuntimeError(self._hear_roll(roll, f"{where} failed: {type(error).__name__}: {error}"))
            self.report(found, where, verbatim=True)
            cause = self.cause(patience=0.0)  # another rank may have been first
            if cause is None:  # there is no store any more
                self.learn_text(str(found))
                cause = found
        elif cause is None:
            self.report(error, where, verbatim=verbatim)
        with contextlib.suppress(Exception):
            self.linger(self._store)
        abandon()
        close_groups(error)
        return cause

    def call_roll(self, store: Store) -> int:
        """Have the watch of every living rank answer; ranks that notice the same call the same roll.

        Args:
            store: That of the thread that calls.

        Returns:
            The number of the roll.
        """
        number = self.num_rolls + 1
        with contextlib.suppress(Exception):
            store.set(self.key(f"roll call/{number}"), "")
            store.set(self.key(EVENT), "")
        return number

    def answer_rolls(self, store: Store, place: Callable[[], str]) -> None:
        """Say that this rank is there, if somebody has asked.

        Args:
            store: That of the watcher.
            place: Says where this rank is.
        """
        while store.check([self.key(f"roll call/{self.num_rolls + 1}")]):
            self.num_rolls += 1
            store.set(self.key(f"here/{self.num_rolls}/{self._rank}"), place())

    def absent(self, roll: int, store: Store) -> list[int]:
        """The ranks that have not answered when the roll was called, though they are in this run.

        Args:
            roll: Its number.
            store: That of the thread that asks.
        """
        keys = {rank: [self.key(f"here/{roll}/{rank}"), self.key(f"finished/{rank}")] for rank in range(self._size)}
        del keys[self._rank]
        if not keys or store.check([here for here, _ in keys.values()]):
            return []
        silent = [rank for rank, own in keys.items() if not any(store.check([key]) for key in own)]
        return [rank for rank in silent if store.check([self.key(f"process/{rank}")])]

    def heartbeat_of(self, rank: int, store: Store) -> bytes | None:
        """Return the last heartbeat of a rank; ``None`` if it sent none.

        Args:
            rank: The rank.
            store: The store of the calling thread.
        """
        key = self.key(f"heartbeat/{rank}")
        return store.get(key) if store.check([key]) else None

    def _hear_roll(self, roll: int | None, text: str) -> str:
        """Find out who has gone, or who keeps the others waiting.

        Args:
            roll: The number of the roll that was called; ``None`` if none was, so that it is called now.
            text: What this rank noticed.
        """
        others = [rank for rank in range(self._size) if rank != self._rank]
        try:
            deadline = time.monotonic() + _LATE
            if roll is None:
                roll = self.call_roll(self._store)
                deadline += _PATIENCE
            while (silent := self.absent(roll, self._store)) and time.monotonic() < deadline:
                time.sleep(0.02)
            present = {rank: self._read(f"here/{roll}/{rank}") for rank in others}
            finished = [rank for rank in others if self._store.check([self.key(f"finished/{rank}")])]
            gone = [rank for rank in silent if rank in self.gone] or silent  # a busy machine answers late
            if gone:
                self.gone.update(gone)  # so nobody waits for them
                for rank in gone:
                    self.description_of(rank, self._store)
                return f"{gone_text(list(map(self.name_of, gone)))}{self.last_seen(gone, self._store)} {text}"
        except Exception:
            return f"{store_gone_text(self.name_of(0))} {text}"
        if finished:
            return f"{finished_text(finished)} {text}"
        if elsewhere := [self.name_of(rank) for rank, place in present.items() if place is None]:
            names = ", ".join(elsewhere[:_MOST])
            return f"These ranks have already ended this run or are running other code: {names}. {text}"
        places = "; ".join(f"rank {rank} at {present[rank]}" for rank in others[:_MOST])
        return f"{text} All other ranks are still running: {places}."

    def _read(self, name: str) -> str | None:
        key = self.key(name)
        return self._store.get(key).decode() if self._store.check([key]) else None


def gone_text(names: Sequence[str]) -> str:
    """What is wrong if the processes of ranks have ended without a word."""
    return f"Killed or crashed without an error message: {', '.join(names)}. [LH221]"


def store_gone_text(name: str) -> str:
    """Return the error for a lost store, which the process of the first rank has, or that of its launcher."""
    return f"The store through which ranks exchange messages is gone, so {name} or the launcher has exited. [LH222]"


def silent_text(names: Sequence[str], seconds: float) -> str:
    """Return the error for ranks that sent no heartbeat within the timeout."""
    return (
        f"No heartbeat for {seconds:.0f} s from {', '.join(names[:_MOST])}. The process may be stopped, or its host may"
        " be disconnected or without power. If a rank can compute that long without releasing Python's GIL, increase"
        " `HybridStrategy(faults=Faults(heartbeat_timeout=...))`. [LH223]"
    )


def finished_text(ranks: Sequence[int]) -> str:
    """What is wrong if ranks have finished a run and others wait for them."""
    names = f"rank{'s' if len(ranks) > 1 else ''} {', '.join(map(str, ranks[:_MOST]))}"
    return (
        f"The run has ended on {names}, but other ranks are still waiting. Make sure that all ranks have the same"
        " number of batches, the same arguments and the same callbacks. [LH225]"
    )


def close_groups(error: BaseException | None = None, *, end: Callable[[int], object] = os._exit) -> None:
    """Leave every process group without a collective, so that peers that wait for this rank fail at once.

    A gloo group closes its connections when nothing refers to it any more: the package holds groups by weak references,
    and pending work must have been abandoned before.

    NCCL's groups are aborted: to destroy them would be to wait for what peers that are gone never send. Should even
    that not come back, the process ends; so what went wrong is printed first.

    Args:
        error: What is being raised: the local variables of the calls that it came through refer to groups and to work.
        end: Ends the process.
    """
    text = f"{type(error).__name__}: {error}" if error is not None else "another rank has left the run"
    while error is not None:
        traceback.clear_frames(error.__traceback__)
        error = error.__cause__ or error.__context__
    with contextlib.suppress(Exception):
        if has_nccl():
            print_error(f"[rank {dist.get_rank()}] {text}\nThis rank now aborts its process groups.")
            deadline = threading.Timer(_DEADLINE, end, (1,))
            deadline.daemon = True
            deadline.start()
            try:
                abort_groups()
            finally:
                deadline.cancel()
        dist.destroy_process_group()
    gc.collect()


def print_error(text: str) -> None:
    """Print where errors go, if that is still open: what launched the ranks may have ended."""
    with contextlib.suppress(OSError, ValueError):
        print(text, file=sys.stderr, flush=True)


def is_transport(error: BaseException) -> bool:
    """Whether an error only says that another rank has left."""
    if isinstance(error, (dist.DistError, PeerFailedError)):
        return True
    return isinstance(error, RuntimeError) and ("gloo" in str(error) or "NCCL" in str(error))
