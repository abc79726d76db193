"""Ranks that must do the same in each step: what changes is noted, and compared beside training."""

from __future__ import annotations

import json
import time
import zlib
from collections import deque
from collections.abc import Callable, Hashable, Mapping, Sequence
from contextlib import suppress
from typing import Any, NamedTuple, NoReturn

from lightning_hybrid.distributed.agreement import unequal_text
from lightning_hybrid.distributed.failure import FailureStore, Store, WrongUseError
from lightning_hybrid.distributed.wait_watch import Meeting
from lightning_hybrid.distributed.watch.wait_graph import ADVICE, ranks_text

_MOST = 64  # changes that are remembered
_MOST_KNOWN = 4096  # keys that are remembered; what has an older one is new again
_LONGEST = 300  # characters of a value in a text
_EVERY = 10  # looks after which a rank tells how far it is, though nothing has changed


class Change(NamedTuple):
    """Something became what it was not before.

    Attributes:
        event: The number of the event at which it was noted.
        name: What it is.
        value: What it became, as text.
    """

    event: int
    name: str
    value: str


class Noted(NamedTuple):
    """What a rank has noted.

    Attributes:
        events: The number of the last event.
        since: The changes after this event are all here; older ones are forgotten.
        changes: In order.
    """

    events: int
    since: int
    changes: list[Change]

    def value(self, name: str, event: int) -> str | None:
        """What something was at an event; ``None`` if that is not known."""
        values = [change.value for change in self.changes if change.name == name and change.event <= event]
        return values[-1] if values and event <= self.events else None


def first_difference(mine: Noted, other: Noted) -> tuple[int, str] | None:
    """The event, and the name, at which two ranks first differ; ``None`` if they do not, as far as both have come."""
    after, last = max(mine.since, other.since), min(mine.events, other.events)
    values = [
        {(change.event, change.name): change.value for change in noted.changes if after < change.event <= last}
        for noted in (mine, other)
    ]
    different = [key for key in values[0].keys() | values[1].keys() if values[0].get(key) != values[1].get(key)]
    return min(different, default=None)


class DesyncWatch:
    """Finds out whether some ranks do the same, without a message in an ordinary step.

    ::

        main thread   note     the same as before: nothing
                      note     it was so before, but not just now: kept
                      note     new: kept, and told; waits until all of the ranks tell the same
        watcher       changes --> store          when there are some, and how far this rank is when it stands still
                      store --> compare          with the first of the ranks; a difference is a failure of all ranks

    A rank that meets something new waits for ranks that may not: these are waiting for a message of it, or soon do. The
    watchers see that, and end the waiting. Who never comes is named when the time is over.

    Args:
        failures: Of this rank.
        store: What all ranks see.
        watched: A clone of it, for the watcher alone.
        name: Tells this comparison from others.
        rank: This rank.
        ranks: The ranks that are compared.
        advice: What to do about a difference.
        timeout: Seconds that a rank waits for the others.

    Attributes:
        events: How many things have happened: where nothing is new, whoever notes it only counts.
        keys: By what happens, the key of the last time.
    """

    def __init__(
        self,
        failures: FailureStore,
        store: Store,
        watched: Store,
        name: str,
        *,
        rank: int,
        ranks: Sequence[int],
        advice: str,
        timeout: float,
    ) -> None:
        self._failures, self._store, self._watched, self._name = failures, store, watched, name
        self._rank, self._ranks, self._advice, self._timeout = rank, list(ranks), advice, timeout
        self._takes_part = len(self._ranks) > 1 and rank in self._ranks
        self.begin()

    def begin(self) -> None:
        """A run begins."""
        self.events = 0
        self.keys: dict[str, Hashable] = {}
        self._waits_at, self._waits_since = "", 0.0
        self._former: list[str] = []  # what is yet to be deleted of the last meeting
        self._known: set[tuple[str, Any]] = set()
        self._values: dict[str, str] = {}
        self._changes: deque[Change] = deque(maxlen=_MOST)
        self._since = 0
        self._looks = self._told = self._seen = self._compared = 0

    def note(self, where: str, key: Hashable, describe: Callable[[], Mapping[str, str]]) -> None:
        """Something happens that must be the same on all of the ranks, at the same time. Called by the main thread.

        Args:
            where: What happens; values of one are compared with former ones of the same.
            key: Compares equal to the key of before if nothing has changed.
            describe: Gives what is compared, by names; only called if the key is another one.

        Raises:
            WrongUseError: If the ranks tell different things; on every rank, with one text.
            Exception: What another rank has failed of, if that is known already.
        """
        if self._failures.is_known:
            self._raise_cause()
        if not self._takes_part:
            self.keys[where] = key
            return
        event = self.events + 1
        is_new = False
        if where not in self.keys or self.keys[where] != key:
            self.keys[where] = key
            is_new = (where, key) not in self._known
            self._change(event, where, describe())
        self.events = event  # last: the watcher may read in between
        if is_new:
            if len(self._known) >= _MOST_KNOWN:  # on every rank at the same event
                self._known.clear()
            self._known.add((where, key))
            self._meet(event, where)

    def _change(self, event: int, where: str, values: Mapping[str, str]) -> None:
        for name, value in values.items():
            full = f"{name} of {where}"
            if self._values.get(full) != value:
                self._values[full] = value
                if len(self._changes) == _MOST:
                    self._since = self._changes[0].event
                self._changes.append(Change(event, full, value))

    def _meet(self, event: int, where: str) -> None:
        """Wait until all of the ranks have come to an event that is new to them, and compare."""
        store, key = self._store, self._failures.key(f"desync/{self._name}/{event}")
        noted = self._noted(event)
        store.set(f"{key}/at {self._rank}", where)
        store.set(f"{key}/of {self._rank}", json.dumps(noted))  # not where the watcher writes: it may be behind
        digest = zlib.crc32(repr((where, [change for change in noted.changes if change.event == event])).encode())
        alike, all_alike, all_here = f"{key}/{digest}", f"{key}/{digest}/all", f"{key}/all"
        is_last = store.add(alike, 1) == len(self._ranks)  # of ranks that all have the same, only this is waited for
        if is_last:
            store.set(all_alike, "")
        store.set(f"{key}/here {self._rank}", "")  # behind the other one: when all are here, it is known who is alike
        everyone = [f"{key}/here {rank}" for rank in self._ranks] if self._rank == self._ranks[0] else []
        pause, deadline = 0.0, time.monotonic() + self._timeout
        self._waits_at, self._waits_since = where, time.monotonic()
        while not is_last and not store.check([all_alike]):
            if self._failures.is_known:
                self._raise_cause()
            if time.monotonic() > deadline:
                raise RuntimeError(self._late_text(where, key))
            if everyone and store.check(everyone) and not store.check([all_alike]):
                store.set(all_here, "")
            if store.check([all_here]):
                raise WrongUseError(self._difference(event, where, key))
            time.sleep(pause)
            pause = min(pause + 0.001, 0.02)
        self._waits_at = ""
        self._forget_former([f"{key}/{what} {self._rank}" for what in ("at", "of", "here")], [alike, all_alike])

    def _forget_former(self, own: list[str], shared: list[str]) -> None:
        """Delete what the meeting before this one has left in the store: whoever has come here has left it.

        Args:
            own: The keys of this meeting that this rank alone has written.
            shared: Those that all write.
        """
        for key in self._former:
            self._store.delete_key(key)
        self._former = [*own, *shared] if self._rank == self._ranks[0] else own

    def _difference(self, event: int, where: str, key: str) -> str:
        """What is not the same at an event to which all of the ranks have come, and what to do about it."""
        places = {rank: self._store.get(f"{key}/at {rank}").decode() for rank in self._ranks}
        if len(set(places.values())) > 1:  # what they have noted of these is not to be compared
            return f"{unequal_text('next action', places)} {ADVICE} [LH207]"
        names = [name for name in self._values if name.endswith(f" of {where}")]
        everyone = {rank: _read(self._store, f"{key}/of {rank}") for rank in self._ranks}
        return f"{_text(everyone, event, names)} {self._advice} [LH207]"

    def _late_text(self, where: str, key: str) -> str:
        late = [rank for rank in self._ranks if not self._store.check([f"{key}/of {rank}"])]
        who = ranks_text(late) if late else f"one of {ranks_text(self._ranks)}"
        return f"Rank {self._rank} waited {self._timeout:.0f} s at {where}, but {who} did not reach this point. [LH208]"

    def meeting(self) -> Meeting:
        """Where this rank waits for the others. Called by the watcher."""
        return Meeting(f"desync of {self._name}", self._ranks, self.events, self._waits_at, self._waits_since)

    def _raise_cause(self) -> NoReturn:
        cause = self._failures.cause(patience=0.0)
        assert cause is not None
        raise cause

    def look(self) -> None:
        """Tell what is new, and compare. Called by the watcher."""
        if self._takes_part:
            with suppress(Exception):  # the store is gone: then the run ends for that reason
                self._look()

    def _look(self) -> None:
        events = self.events
        stands = events == self._seen
        self._seen, self._looks = events, self._looks + 1
        noted = self._noted(events)
        last = noted.changes[-1].event if noted.changes else 0
        if events > self._told and (stands or last > self._told or self._looks % _EVERY == 0):
            self._watched.set(self._key(self._rank), json.dumps(noted))
            self._told = events
        is_first = self._rank == self._ranks[0]
        if not is_first and (stands or last > self._compared or self._looks % _EVERY == 0):
            self._compare(noted)

    def _noted(self, events: int) -> Noted:
        changes = self._changes.copy()  # before `since`: meanwhile the main thread may forget one of them
        return Noted(events, self._since, [change for change in changes if change.event <= events])

    def _key(self, rank: int) -> str:
        return self._failures.key(f"desync/{self._name}/of {rank}")

    def _compare(self, mine: Noted) -> None:
        first = _read(self._watched, self._key(self._ranks[0]))
        if first is None:
            return
        found = first_difference(mine, first)
        self._compared = min(mine.events, first.events)
        if found is not None and not self._failures.is_known:
            event, name = found
            everyone = {rank: _read(self._watched, self._key(rank)) for rank in self._ranks} | {self._rank: mine}
            text = f"{_text(everyone, event, [name])} {self._advice}"
            self._failures.report_text(text, self._watched, "ValueError")


def _read(store: Store, key: str) -> Noted | None:
    if not store.check([key]):
        return None
    events, since, changes = json.loads(store.get(key))
    return Noted(events, since, [Change(*change) for change in changes])


def _text(everyone: Mapping[int, Noted | None], event: int, names: Sequence[str]) -> str:
    """What is not the same on all of the ranks."""
    texts = []
    for name in names:
        here = {rank: noted for rank, noted in everyone.items() if noted is not None and event <= noted.events}
        values = {rank: _shortened(noted.value(name, event) or "nothing new") for rank, noted in here.items()}
        if len(set(values.values())) > 1:
            texts.append(unequal_text(name, values))
    return " ".join(texts)


def _shortened(value: str) -> str:
    return value if len(value) <= _LONGEST else f"{value[:_LONGEST]}... ({zlib.crc32(value.encode())})"


class Desync:
    """What is compared beside training: in a model group all that decides its messages, over replicas what is logged.

    Args:
        failures: Of this rank.
        store: What all ranks see.
        watched: A clone of it, for the watcher alone.
        rank: This rank.
        model_groups: The global ranks of each replica.
        timeout: Seconds that ranks wait for each other.

    Attributes:
        model_group: Compares the ranks of one replica.
        replicas: Compares the first ranks of the replicas.
    """

    def __init__(
        self,
        failures: FailureStore,
        store: Store,
        watched: Store,
        *,
        rank: int,
        model_groups: Sequence[Sequence[int]],
        timeout: float,
    ) -> None:
        own = next(index for index, ranks in enumerate(model_groups) if rank in ranks)
        stores = failures, store, watched
        ranks, firsts = sorted(model_groups[own]), [min(ranks) for ranks in model_groups]
        self.model_group = DesyncWatch(
            *stores, f"model group {own}", rank=rank, ranks=ranks, advice=_SAME_STEPS, timeout=timeout
        )
        self.replicas = DesyncWatch(*stores, "replicas", rank=rank, ranks=firsts, advice=_SAME_LOGS, timeout=timeout)

    def begin(self) -> None:
        """A run begins."""
        self.model_group.begin()
        self.replicas.begin()

    def look(self) -> None:
        """Called by the watcher."""
        self.model_group.look()
        self.replicas.look()

    def meetings(self) -> list[Meeting]:
        """Where this rank waits for others. Called by the watcher."""
        return [self.model_group.meeting(), self.replicas.meeting()]


_SAME_STEPS = (
    "All ranks of a model group must receive the same batch and split it in the same way. Hooks and `split_batch` must"
    " behave the same on every rank. For example, a hook must not freeze parameters on only one rank."
)
_SAME_LOGS = (
    "If a logged value is reduced over replicas (`sync_dist=True`, or a metric), all replicas must log it, under the"
    " same name and in the same order. This also applies to a replica that has nothing to log for a batch."
)
