"""A check that ranks do the same in each step: changes are noted, and compared while training continues.

`trainer.debug.desync` notes events on the thread of the run: batches, logged values and their reductions. `RankWatch`
calls :meth:`Desync.look` on the watcher. If ranks do different things, they would wait for each other, or train a wrong
model without an error. A collective in each step would find this too, but every step would wait for the slowest rank,
and the collective itself could be matched with another collective.

An *event* is a point in a step that all compared ranks must reach, such as the start of a batch. Its *key* changes if
any of its values changes, so an unchanged key costs nothing. A *meeting* is an event with a new key, at which the ranks
wait for each other.
"""

from __future__ import annotations

import time
import zlib
from collections import deque
from collections.abc import Callable, Hashable, Mapping, Sequence
from contextlib import suppress
from typing import Any, NamedTuple, NoReturn

from lightning_hybrid.distributed.agreement import by_rank, unequal_text
from lightning_hybrid.distributed.failure import WrongUseError
from lightning_hybrid.distributed.watch.board import Board
from lightning_hybrid.distributed.watch.failures import Failures
from lightning_hybrid.distributed.watch.verdict.judge import DESYNCHRONIZED, Verdict
from lightning_hybrid.distributed.watch.verdict.wait_graph import ADVICE, ranks_text
from lightning_hybrid.distributed.watch.verdict.waits import Meeting

_MOST = 64  # the number of changes that are remembered
_MOST_KNOWN = 4096  # the number of keys that are remembered; older keys count as new again
_LONGEST = 300  # the number of characters of a value in a text
_EVERY = 10  # looks after which a rank writes its progress, even if no value has changed


class Change(NamedTuple):
    """A change of a value.

    Attributes:
        event: The number of the event at which the change was noted.
        name: The name of the value.
        value: The new value, as text.
    """

    event: int
    name: str
    value: str


class Noted(NamedTuple):
    """The changes that a rank has noted.

    Attributes:
        events: The number of the last event.
        since: The list contains all changes after this event; older changes may be missing.
        changes: The changes in order.
    """

    events: int
    since: int
    changes: list[Change]

    def value(self, name: str, event: int) -> str | None:
        """Return a value at an event; ``None`` if it is not known."""
        values = [change.value for change in self.changes if change.name == name and change.event <= event]
        return values[-1] if values and event <= self.events else None


def first_difference(mine: Noted, other: Noted) -> tuple[int, str] | None:
    """Return the first event and name at which two ranks differ; ``None`` if no difference is known.

    Only events that both ranks have reached are compared.
    """
    after, last = max(mine.since, other.since), min(mine.events, other.events)
    values = [
        {(change.event, change.name): change.value for change in noted.changes if after < change.event <= last}
        for noted in (mine, other)
    ]
    different = [key for key in values[0].keys() | values[1].keys() if values[0].get(key) != values[1].get(key)]
    return min(different, default=None)


class DesyncWatch:
    """A comparison of some ranks that normally needs no message in a step.

    ::

        main thread   note     the key is unchanged: nothing
                      note     the key is known, but has changed: the change is stored
                      note     the key is new: the change is stored, and the rank meets the other ranks
        watcher       changes --> board          if there are changes; also the progress of a rank that does not move
                      board --> compare          with the first of the ranks; a difference ends all ranks

    A rank with a new key waits for ranks that may do something else, such as wait for a message of this rank. The
    watchers detect that, and end the wait. A rank that never comes is named when the timeout has passed.

    Args:
        failures: The first failure.
        board: The board, over the store client of the run's thread.
        watched: The board, over the watcher's client of the store.
        name: The name of this comparison.
        ranks: The ranks that are compared.
        advice: The remedy for a difference.
        timeout: The seconds that a rank waits for the others.

    Attributes:
        events: The number of events. If nothing has changed, the caller only increases it.
        keys: The last key of each kind of event.
    """

    def __init__(
        self,
        failures: Failures,
        board: Board,
        watched: Board,
        name: str,
        *,
        ranks: Sequence[int],
        advice: str,
        timeout: float,
    ) -> None:
        self._failures, self._board, self._watched, self._name = failures, board, watched, name
        self._rank, self._ranks, self._advice, self._timeout = board.rank, list(ranks), advice, timeout
        self._takes_part = len(self._ranks) > 1 and self._rank in self._ranks
        self.begin()

    def begin(self) -> None:
        """Begin a run."""
        self.events = 0
        self.keys: dict[str, Hashable] = {}
        self._waits_at, self._waits_since = "", 0.0
        self._former: tuple[str, int] | None = None  # the last meeting, whose entries must still be deleted
        self._known: set[tuple[str, Any]] = set()
        self._values: dict[str, str] = {}
        self._changes: deque[Change] = deque(maxlen=_MOST)
        self._since = 0
        self._looks = self._told = self._seen = self._compared = 0

    def note(self, where: str, key: Hashable, describe: Callable[[], Mapping[str, str]]) -> None:
        """Note an event that must be the same on all of the ranks. The main thread calls this.

        Args:
            where: The kind of the event. Its values are compared with the values of earlier events of this kind.
            key: A key that equals the previous key if the values have not changed.
            describe: Returns the values to compare, by name. It is called only if the key has changed.

        Raises:
            WrongUseError: If the ranks note different values for a new key. All ranks raise it, with the same text. If
                the key is known, the watcher finds the difference later, and ends all ranks.
            RuntimeError: If a rank does not come to a meeting within the timeout.
            Exception: The failure of another rank, if it is known.
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
        self.events = event  # set last, because the watcher may read at any time
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
        """Wait until all of the ranks have reached an event with a new key, and compare their values."""
        board, meeting = self._board, f"{self._name}/{event}"
        noted = self._noted(event)
        digest = zlib.crc32(repr((where, [change for change in noted.changes if change.event == event])).encode())
        is_alike: bool | None = board.arrive(meeting, self._ranks, [where, noted], digest) or None
        pause, deadline = 0.0, time.monotonic() + self._timeout
        self._waits_at, self._waits_since = where, time.monotonic()
        while is_alike is None and (is_alike := board.outcome(meeting, digest)) is None:
            if self._failures.is_known:
                self._raise_cause()
            if time.monotonic() > deadline:
                raise RuntimeError(self._late_text(where, meeting))
            time.sleep(pause)
            pause = min(pause + 0.001, 0.02)
        if not is_alike:
            raise WrongUseError(self._difference(event, where, meeting))
        self._waits_at = ""
        if self._former is not None:  # all ranks have left the meeting before this one
            board.forget(*self._former, shared=self._rank == self._ranks[0])
        self._former = meeting, digest

    def _difference(self, event: int, where: str, meeting: str) -> str:
        """Return the text of a difference at an event that all of the ranks have reached."""
        told = self._board.told_at(meeting, self._ranks)
        places = {rank: place for rank, (place, _) in told.items()}
        if len(set(places.values())) > 1:  # their values cannot be compared
            return f"`next action` is not the same on every rank: {by_rank(places)}. {ADVICE} [LH207]"
        names = [name for name in self._values if name.endswith(f" of {where}")]
        everyone = {rank: _read(noted) for rank, (_, noted) in told.items()}
        return f"{_text(everyone, event, names)} {self._advice} [LH207]"

    def _late_text(self, where: str, meeting: str) -> str:
        told = self._board.told_at(meeting, self._ranks)
        late = [rank for rank in self._ranks if rank not in told]
        who = ranks_text(late) if late else f"one of {ranks_text(self._ranks)}"
        return f"Rank {self._rank} waited {self._timeout:.0f} s at {where}, but {who} did not reach this point. [LH208]"

    def meeting(self) -> Meeting:
        """Return the meeting of this rank; its place is empty if this rank does not wait. The watcher calls this."""
        return Meeting(f"desync of {self._name}", self._ranks, self.events, self._waits_at, self._waits_since)

    def _raise_cause(self) -> NoReturn:
        cause = self._failures.cause(patience=0.0)
        assert cause is not None
        raise cause

    def look(self) -> Verdict | None:
        """Write new changes, and compare with the first of the ranks. The watcher calls this.

        Returns:
            The verdict about the first difference; ``None`` if no difference is known.
        """
        if self._takes_part:
            with suppress(Exception):  # if the store is lost, the run ends for that reason
                return self._look()
        return None

    def _look(self) -> Verdict | None:
        events = self.events
        is_still = events == self._seen
        self._seen, self._looks = events, self._looks + 1
        noted = self._noted(events)
        last = noted.changes[-1].event if noted.changes else 0
        if events > self._told and (is_still or last > self._told or self._looks % _EVERY == 0):
            self._watched.write_changes(self._name, noted)
            self._told = events
        is_first = self._rank == self._ranks[0]
        is_due = is_still or last > self._compared or self._looks % _EVERY == 0
        return self._compare(noted) if is_due and not is_first else None

    def _noted(self, events: int) -> Noted:
        changes = self._changes.copy()  # copied before `since` is read, as the main thread may drop a change meanwhile
        return Noted(events, self._since, [change for change in changes if change.event <= events])

    def _compare(self, mine: Noted) -> Verdict | None:
        first = _read(self._watched.read_changes(self._name, self._ranks[0]))
        if first is None:
            return None
        found = first_difference(mine, first)
        self._compared = min(mine.events, first.events)
        if found is None:
            return None
        event, name = found
        everyone = {rank: _read(self._watched.read_changes(self._name, rank)) for rank in self._ranks}
        text = f"{_text(everyone | {self._rank: mine}, event, [name])} {self._advice}"
        return Verdict(DESYNCHRONIZED, text, exception="ValueError")


def _read(noted: Any) -> Noted | None:
    """Return the changes that a rank has noted, from JSON."""
    if noted is None:
        return None
    events, since, changes = noted
    return Noted(events, since, [Change(*change) for change in changes])


def _text(everyone: Mapping[int, Noted | None], event: int, names: Sequence[str]) -> str:
    """Return the text about values that differ."""
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
    """The two comparisons: of calls within a model group, and of logged values over replicas.

    In a model group, all values that determine messages between its ranks are compared.

    Args:
        failures: The first failure.
        board: The board, over the store client of the run's thread.
        watched: The board, over the watcher's client of the store.
        model_groups: The global ranks of each replica, by data rank.
        timeout: The seconds that ranks wait for each other.

    Attributes:
        model_group: Compares the ranks of one replica.
        replicas: Compares the first ranks of the replicas.
    """

    def __init__(
        self,
        failures: Failures,
        board: Board,
        watched: Board,
        *,
        model_groups: Sequence[Sequence[int]],
        timeout: float,
    ) -> None:
        own = next(index for index, ranks in enumerate(model_groups) if board.rank in ranks)
        ranks, firsts = sorted(model_groups[own]), [min(ranks) for ranks in model_groups]
        self.model_group = DesyncWatch(
            failures, board, watched, f"model group {own}", ranks=ranks, advice=_SAME_STEPS, timeout=timeout
        )
        self.replicas = DesyncWatch(
            failures, board, watched, "replicas", ranks=firsts, advice=_SAME_LOGS, timeout=timeout
        )

    def begin(self) -> None:
        """Begin a run."""
        self.model_group.begin()
        self.replicas.begin()

    def look(self) -> Verdict | None:
        """Return a difference, if there is one. The watcher calls this."""
        verdicts = [each.look() for each in (self.model_group, self.replicas)]
        return next((each for each in verdicts if each is not None), None)

    def meetings(self) -> list[Meeting]:
        """Return the last meetings of this rank, at which it may wait for others. The watcher calls this."""
        return [self.model_group.meeting(), self.replicas.meeting()]


_SAME_STEPS = (
    "All ranks of a model group must receive the same batch and split it in the same way. Hooks and `split_batch` must"
    " behave the same on every rank. For example, a hook must not freeze parameters on only one rank."
)
_SAME_LOGS = (
    "If a logged value is reduced over replicas (`sync_dist=True`, or a metric), all replicas must log it, under the"
    " same name and in the same order. This also applies to a replica that has nothing to log for a batch."
)
