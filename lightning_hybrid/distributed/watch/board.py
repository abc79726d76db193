"""The board: entries in the store of all ranks, through which the watchers of a run exchange information.

The *store* is torch's key-value store, through which the process groups were made. The *watch* of a rank is the code in
`distributed.watch`, most of which runs on the *watcher*, a thread. `strategy.watch.start_watch` makes two boards for a
rank: one for the thread of the run, and one for the watcher. Collectives cannot carry this information, because the
watch must work while ranks wait in collectives.

A *record* is the description of a rank, see `record`. A *heartbeat* is a new version of a record. A *cause* is the
first failure of a run. A rank *calls* for answers by an entry, and every watcher answers. A *flag* is a yes-or-no fact
for all ranks. At a *meeting*, ranks compare their steps, see `desync`.
"""

from __future__ import annotations

import threading
from collections.abc import Collection, Iterable, Mapping
from contextlib import suppress
from dataclasses import dataclass, field, replace
from typing import Any

from torch.distributed.distributed_c10d import Store

from lightning_hybrid.distributed.watch.process_ends import describe_process, host_of, machine_of
from lightning_hybrid.distributed.watch.record import Answer, Record, Waiting, decode, encode

_ROOT = "lightning_hybrid/watch"

TERMINATE, REQUEUE = "terminate", "requeue"  # names of flags that a rank raises when it receives a signal
POSITIONS = "positions"  # the kind of a call whose answers show which rank stalls the run


_WAITS = ("waiting", "stamp", "renewals")  # the fields of a record about the wait of the rank


@dataclass
class _Shared:
    """The state of a rank's board, which is the same over all clients of the store.

    Attributes:
        run: The number of the run.
        record: The record of this rank.
        is_final: If True, this rank has finished the run, and its record keeps that state.
        hosts: The hosts of other ranks, as far as their records have been read.
        lock: Held while the record is written, because the thread of the run and the watcher both write it.
    """

    run: int = 0
    record: Record = field(default_factory=lambda: Record(""))
    is_final: bool = False
    hosts: dict[int, str] = field(default_factory=dict)
    lock: threading.Lock = field(default_factory=threading.Lock)


class Board:
    """The entries of the watch in the store. No other code of the watch reads or writes the store.

    Most methods raise an error of torch (`DistError`) if the store is lost, and wait if it does not respond.
    `LeafFetch` uses :meth:`key` for its own entries.

    ::

        record/RANK                     the record of a rank, which its watcher writes repeatedly
        begun, machine/M, finished      ranks that have begun the run (on node M), or finished it
        cause, read                     the first failure, written once; the ranks that have read it
        call/N, here/N                  the kind of call N; the ranks that have answered it in their records
        waiting                         the number of ranks whose records contain what they wait for
        flag/NAME, claim/NAME           signals; actions that only one rank takes
        changes/NAME/RANK, meeting/...  the comparison of steps, see `Desync`
        event                           exists if cause, call, finished or flag exists: an ordinary look reads
                                        only this key

    A look must be fast with thousands of ranks. Therefore each list of ranks is stored under one key, and one request
    reads all records. The keys contain the number of the run, so entries of former runs are never read.

    Args:
        store: A store that all ranks see.
        rank: This rank.
        size: The number of ranks.
        shared: The state of this rank's board over another client of the store; ``None`` for the first board.

    Attributes:
        rank: This rank.
        size: The number of ranks.
    """

    def __init__(self, store: Store, *, rank: int, size: int, shared: _Shared | None = None) -> None:
        self._store, self.rank, self.size = store, rank, size
        self._shared = _Shared() if shared is None else shared

    def over(self, store: Store) -> Board:
        """Return the same board over another client of the store, as a client is locked while it waits for a key."""
        return Board(store, rank=self.rank, size=self.size, shared=self._shared)

    def key(self, name: str) -> str:
        """Return the key of an entry of this run."""
        return f"{_ROOT}/{self._shared.run}/{name}"

    def _has(self, name: str) -> bool:
        return self._store.check([self.key(name)])

    def _append(self, name: str) -> None:
        """Add this rank to a list of ranks."""
        self._store.append(self.key(name), f"{self.rank} ")  # type: ignore[attr-defined]  # torch's stubs

    def _list(self, name: str) -> set[int]:
        return set(map(int, self._store.get(self.key(name)).split())) if self._has(name) else set()

    # -- records -------------------------------------------------------------------------------------------------------

    def begin(self) -> None:
        """Begin a run. Entries of former runs are ignored from now on. Errors of the store are ignored too."""
        shared = self._shared
        shared.run += 1
        shared.record, shared.is_final = Record(describe_process()), False
        with suppress(Exception):
            self.write()
            for name in ("begun", f"machine/{machine_of(shared.record.process)}"):
                self._append(name)

    @property
    def own(self) -> Record:
        """The last record of this rank that was written."""
        return self._shared.record

    def write(self, **changes: Any) -> None:
        """Write the record of this rank, which is also a heartbeat.

        Args:
            changes: The new values of attributes of the record, by name. After :meth:`finish`, changes of waits are
                ignored.
        """
        self._write(changes)

    def _write(self, changes: dict[str, Any], *, is_final: bool = False) -> None:
        shared = self._shared
        with shared.lock:
            if shared.is_final:  # ignore a wait that the watcher writes late
                changes = {name: value for name, value in changes.items() if name not in _WAITS}
            shared.is_final |= is_final
            shared.record = replace(shared.record, number=shared.record.number + 1, **changes)
            self._store.set(self.key(f"record/{self.rank}"), encode(shared.record))

    def wait(self, waiting: Waiting | None) -> None:
        """Write what this rank waits for, and update the number of waiting ranks. Does nothing after :meth:`finish`.

        Args:
            waiting: The collectives and messages. The same object as in the last call means that the rank waits for the
                same. ``None`` means that the rank does not wait.
        """
        before, stamp = self.own.waiting, self.own.stamp
        if self._shared.is_final:
            return
        if waiting is before:
            self.write(renewals=self.own.renewals + 1)
        else:
            self.write(waiting=waiting, stamp=stamp + 1, renewals=0)
        if (waiting is None) != (before is None):
            self._store.add(self.key("waiting"), 1 if before is None else -1)

    def num_waiting(self) -> int:
        """Return the number of waiting ranks."""
        return self._store.add(self.key("waiting"), 0)

    def finish(self, waiting: Waiting) -> None:
        """Write that this rank has finished the run, so that waiting for it is useless.

        Args:
            waiting: All collectives and messages that it has started, with ``finished=True``.
        """
        with suppress(Exception):  # if the store is lost, no rank reads the entry
            self._write({"waiting": waiting, "stamp": self.own.stamp + 1}, is_final=True)
            self._append("finished")
            self._tell()

    def begun(self) -> set[int]:
        """Return the ranks that have begun this run."""
        return self._list("begun")

    def finished(self) -> set[int]:
        """Return the ranks that have finished this run."""
        return self._list("finished")

    def neighbors(self) -> set[int]:
        """Return the ranks on this node that have begun this run.

        This rank has begun the run, so the entry exists.
        """
        return set(map(int, self._store.get(self.key(f"machine/{machine_of(self.own.process)}")).split()))

    def read(self, ranks: Iterable[int]) -> dict[int, Record]:
        """Return the records of ranks that have begun this run, by one request."""
        ranks = list(ranks)
        texts = self._store.multi_get([self.key(f"record/{rank}") for rank in ranks]) if ranks else []
        records = {rank: Record.decode(text) for rank, text in zip(ranks, texts, strict=True)}
        self._shared.hosts.update((rank, host_of(record.process)) for rank, record in records.items())
        return records

    def find(self, rank: int) -> Record | None:
        """Return the record of a rank; ``None`` if it has not begun this run."""
        return self.read([rank])[rank] if self._has(f"record/{rank}") else None

    def learn_host(self, rank: int, host: str | None) -> None:
        """Set the host of a rank whose record has not been read."""
        if host is not None:
            self._shared.hosts.setdefault(rank, host)

    @property
    def hosts(self) -> Mapping[int, str]:
        """The known hosts of other ranks."""
        return self._shared.hosts

    # -- events --------------------------------------------------------------------------------------------------------

    def _tell(self) -> None:
        self._store.set(self.key("event"), "")

    def has_event(self) -> bool:
        """Return True if there may be a cause, a call, a finished rank or a flag."""
        return self._has("event")

    def write_cause(self, kind: str, text: str) -> bool:
        """Write the first failure of the run, unless another rank has written one.

        Args:
            kind: The name of the exception that the ranks raise.
            text: The text of the exception.

        Returns:
            True if this rank is the first one.
        """
        own = encode([kind, text, self.rank])
        first = self._store.compare_set(self.key("cause"), "", own)
        self._tell()
        return bool(first == own.encode())

    def read_cause(self) -> tuple[str, str] | None:
        """Return the kind and the text of the first failure; ``None`` if no rank has written one.

        It also writes that this rank has read the failure.
        """
        if not self._has("cause"):
            return None
        kind, text, _ = decode(self._store.get(self.key("cause")))
        self.note_read()
        return kind, text

    def note_read(self) -> None:
        """Write that this rank knows the first failure, and no longer needs the store to read it."""
        with suppress(Exception):
            self._append("read")

    def have_read(self) -> set[int]:
        """Return the ranks that know the first failure."""
        return self._list("read")

    def call(self, kind: str = "") -> int:
        """Ask the watchers of all living ranks for answers. Ranks that notice the same problem make the same call.

        Args:
            kind: :data:`POSITIONS` if a judge must compare the answers to find a stall; empty if it only matters which
                ranks answer, and in which functions they are.

        Returns:
            The number of the call.
        """
        number = self.own.answered + 1
        self._store.set(self.key(f"call/{number}"), kind)
        self._tell()
        return number

    def next_call(self) -> str | None:
        """Return the kind of the first call that this rank has not answered; ``None`` if it has answered all."""
        name = f"call/{self.own.answered + 1}"
        return self._store.get(self.key(name)).decode() if self._has(name) else None

    def answer(self, calls: str, answer: Answer | None) -> None:
        """Answer the next call.

        Args:
            calls: The functions that this rank is in.
            answer: The position of this rank, if it is known.
        """
        self.write(answered=self.own.answered + 1, calls=calls, answer=answer)
        self._append(f"here/{self.own.answered}")

    def here(self, number: int) -> set[int]:
        """Return the ranks that have answered a call."""
        return self._list(f"here/{number}")

    def absent(self, number: int) -> list[int]:
        """Return the other ranks that have begun and not finished this run, and have not answered a call."""
        here = self.here(number)
        return sorted(self.begun() - here - self.finished() - {self.rank}) if len(here) < self.size else []

    def raise_flag(self, name: str) -> None:
        """Raise a flag that all ranks see."""
        self._store.set(self.key(f"flag/{name}"), "")
        self._tell()

    def has_flag(self, name: str) -> bool:
        """Return True if a rank has raised a flag."""
        return self._has(f"flag/{name}")

    def claim(self, name: str) -> bool:
        """Return True on the first rank that calls this with a name in this run, and only for its first call."""
        return self._store.add(self.key(f"claim/{name}"), 1) == 1

    # -- the comparison of steps ---------------------------------------------------------------------------------------

    def write_changes(self, name: str, changes: Any) -> None:
        """Write the values that this rank has noted for a comparison, as JSON."""
        self._store.set(self.key(f"changes/{name}/{self.rank}"), encode(changes))

    def read_changes(self, name: str, rank: int) -> Any:
        """Return the values that a rank has noted for a comparison; ``None`` if it has written none."""
        name = f"changes/{name}/{rank}"
        return decode(self._store.get(self.key(name))) if self._has(name) else None

    def arrive(self, meeting: str, ranks: Collection[int], told: Any, digest: int) -> bool:
        """Arrive at a meeting, at which ranks compare their calls.

        Args:
            meeting: The name of the meeting.
            ranks: The ranks that meet.
            told: The call that this rank makes, as JSON types, for the text about a difference.
            digest: A number that is the same on ranks that make the same call.

        Returns:
            True if all ranks have arrived with the same digest. If False, the result is found later by :meth:`outcome`.
        """
        self._store.set(self.key(f"meeting/{meeting}/of {self.rank}"), encode(told))
        alike = f"meeting/{meeting}/{digest}"
        is_last = self._store.add(self.key(alike), 1) == len(ranks)
        if is_last:
            self._store.set(self.key(f"{alike}/all"), "")
        # Each rank increases this counter after the other one, so the last rank knows if all digests are the same.
        if self._store.add(self.key(f"meeting/{meeting}/here"), 1) == len(ranks) and not self._has(f"{alike}/all"):
            self._store.set(self.key(f"meeting/{meeting}/different"), "")
        return is_last

    def outcome(self, meeting: str, digest: int) -> bool | None:
        """Return whether the ranks of a meeting make the same call; ``None`` while some have not arrived."""
        if self._has(f"meeting/{meeting}/{digest}/all"):
            return True
        return False if self._has(f"meeting/{meeting}/different") else None

    def told_at(self, meeting: str, ranks: Iterable[int]) -> Mapping[int, Any]:
        """Return the arguments `told` of :meth:`arrive` of the ranks that have arrived at a meeting, by rank."""
        names = {rank: f"meeting/{meeting}/of {rank}" for rank in ranks}
        return {rank: decode(self._store.get(self.key(name))) for rank, name in names.items() if self._has(name)}

    def forget(self, meeting: str, digest: int, *, shared: bool) -> None:
        """Delete the entries of a meeting that all ranks have left.

        Args:
            meeting: The name of the meeting.
            digest: The digest of all ranks.
            shared: If True, also delete the entries that all ranks share. Only one rank does that.
        """
        for name in (f"of {self.rank}", *((str(digest), f"{digest}/all", "here") if shared else ())):
            self._store.delete_key(self.key(f"meeting/{meeting}/{name}"))
