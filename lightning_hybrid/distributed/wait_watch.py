"""What a rank's watcher does about ranks that wait for each other: each tells what it waits for, one finds out."""

from __future__ import annotations

import time
from collections.abc import Callable, Sequence
from typing import NamedTuple

from lightning_hybrid.distributed.failure import FailureStore, Store
from lightning_hybrid.distributed.watch.flight_recorder import ranks_of, read_collectives, read_progress
from lightning_hybrid.distributed.watch.wait_graph import Waiting, find_deadlock, ranks_text
from lightning_hybrid.distributed.watch.watched_thread import WatchedThread

_STILL = 1.0  # seconds after which a rank that waits tells what it waits for
_TERMINATED = 20.0  # seconds after SIGTERM in which something has to move: launchers give 30 or more before they kill


class Messages(NamedTuple):
    """What goes through the channels of this rank.

    Attributes:
        awaited: (channel, global rank of the sender, number) of the message that is waited for, if one is.
        sent: How many messages this rank has sent, by channel. That one is ready to receive counts as a message, too.
    """

    awaited: tuple[str, int, int] | None
    sent: dict[str, int]


class Meeting(NamedTuple):
    """Ranks that meet over the store, now and then.

    Attributes:
        name: Of what meets.
        ranks: The global ranks.
        number: To which of its meetings, and what is between them, this rank has come.
        place: Where it waits for the others now; empty if it does not.
        since: Since when it does, by `time.monotonic`.
    """

    name: str
    ranks: list[int]
    number: int
    place: str = ""
    since: float = 0.0


class _Note(NamedTuple):
    """What is in the store about a rank that does not move."""

    stamp: int
    round: int
    waiting: Waiting


class WaitWatch:
    """Finds ranks that wait for each other for ever, while none of them computes.

    ::

        every rank     stands in a wait for a second --> a note in the store: what it waits for, what it has started;
                       at every look: still there --> the note, with the next number
        lowest rank    somebody has a note? --> all notes: a circle? --> at a later look: the same notes, and all of
                       them renewed since? --> then all waited at one moment, and nobody can ever go on

    A rank without a note may do anything, for as long as it likes. In a run without faults only ranks that wait for
    seconds write notes, and a step is never slower for it.

    After SIGTERM all ranks are to stop before the same batch. Where one of them stands still in the user's code - it
    sleeps, or waits for something that never comes - and the others wait for it, nothing moves: that is told too, after
    a while, for it may upload a file. Of one that is in `time.sleep` it is known when that ends: where it is going to
    sleep through that while, it is told at once.

    Args:
        failures: Of this rank.
        store: A clone of its store.
        rank: This rank.
        size: The number of ranks.
        thread: That of the run.
        messages: What this rank sends, and waits for.
        meetings: Where this rank meets others over the store.
        state: Where the Trainer is.
        since: The last collective of before the groups of this run were made.
    """

    def __init__(
        self,
        failures: FailureStore,
        store: Store,
        *,
        rank: int,
        size: int,
        thread: WatchedThread,
        messages: Callable[[], Messages],
        state: Callable[[], str],
        meetings: Callable[[], Sequence[Meeting]] = tuple,
        since: int = -1,
    ) -> None:
        self._failures, self._store, self._rank, self._size = failures, store, rank, size
        self._thread, self._messages, self._state, self._since = thread, messages, state, since
        self._meetings = meetings
        self.begin()

    def begin(self) -> None:
        """A run begins."""
        self._note: _Note | None = None
        self._stamp = 0
        self._suspects: dict[int, tuple[int, int]] = {}
        self._progress: object = None  # what had been started when the note was written

    def final_note(self) -> str:
        """What the others have to know of this rank when its run is over."""
        started = read_collectives(self._since).started | _started(self._meetings())
        return Waiting(started=started, sent=self._messages().sent, state=self._state(), finished=True).dumps()

    def look(self, seconds_terminating: float | None, *, any_finished: bool) -> str | None:
        """Tell what this rank waits for; and if it is the one that finds out, why the run cannot go on.

        Args:
            seconds_terminating: How long ago a rank got SIGTERM; ``None`` if none has.
            any_finished: Whether the run of some rank is over.
        """
        self._tell(self._find(seconds_terminating))
        if any_finished:
            is_judge = all(self._store.check([self._failures.key(f"finished/{rank}")]) for rank in range(self._rank))
        else:
            is_judge = self._rank == 0
        if not is_judge or (not any_finished and self._store.add(self._failures.key("num waiting"), 0) == 0):
            return None
        return self._judge(terminates=seconds_terminating is not None)

    @property
    def knows_what(self) -> bool:
        """Whether this rank waits, and it is known for what."""
        note = self._note
        return note is not None and bool(note.waiting.collectives or note.waiting.message)

    def _find(self, seconds_terminating: float | None) -> Waiting | None:
        """What this rank waits for; ``None`` if it does not, or nothing is known of it."""
        thread, meetings = self._thread, self._meetings()
        awaited = [each for each in meetings if each.place and time.monotonic() > each.since + _STILL]
        if thread.seconds_still < _STILL and not awaited:
            return None
        waiting = Waiting()
        messages = self._messages()
        progress = read_progress(), messages.awaited, meetings
        if self._note is not None and progress[0] is not None and progress == self._progress:
            return self._note.waiting  # to read it all takes longer
        self._progress = progress
        if awaited or thread.in_collective or thread.awaits or messages.awaited is not None:
            recorded = read_collectives(self._since, thread.ident)
            pending = recorded.pending
            if awaited or messages.awaited is not None:
                pending = []  # those were started before, and are waited for later
            elif thread.in_collective:
                pending = pending[-1:]
            groups = [(group, ranks_of(group), number, kind) for group, number, kind in pending]
            collectives = [(group, list(ranks), number, kind) for group, ranks, number, kind in groups if ranks]
            waiting = Waiting(
                collectives=[*collectives, *((each.name, each.ranks, each.number, each.place) for each in awaited)],
                message=messages.awaited,
                started=recorded.started | _started(meetings),
                sent=messages.sent,
            )
        if waiting.collectives or waiting.message is not None:
            return waiting
        if seconds_terminating is None or thread.is_slow:
            return None
        seconds = min(thread.seconds_still, seconds_terminating) + thread.seconds_of_sleep()
        return waiting if seconds > _TERMINATED else None

    def _tell(self, waiting: Waiting | None) -> None:
        key = self._failures.key(f"waiting/{self._rank}")
        if waiting is None:
            if self._note is not None:
                self._note = None
                self._store.set(key, "")
                self._store.add(self._failures.key("num waiting"), -1)
            return
        before = self._note
        if before is not None and _same(before.waiting, waiting):
            self._note = before._replace(round=before.round + 1)
        else:
            self._stamp += 1
            waiting.place, waiting.state = self._thread.place(), self._state()
            self._note = _Note(self._stamp, 0, waiting)
        self._store.set(key, f"{self._note.stamp} {self._note.round} {self._note.waiting.dumps()}")
        if before is None:
            self._store.add(self._failures.key("num waiting"), 1)

    def _judge(self, *, terminates: bool) -> str | None:
        notes = {rank: note for rank in range(self._size) if (note := self._read(rank)) is not None}
        waiting = {rank: note.waiting for rank, note in notes.items()}
        found = find_deadlock(waiting)
        if found is None and terminates:
            found = self._all_stand(waiting)
        if found is None:
            self._suspects = {}
            return None
        now = {rank: (notes[rank].stamp, notes[rank].round) for rank in found[0]}
        before = self._suspects
        if before.keys() != now.keys() or any(before[rank][0] != stamp for rank, (stamp, _) in now.items()):
            self._suspects = now
            return None
        renewed = all(waiting[rank].finished or round_ > before[rank][1] for rank, (_, round_) in now.items())
        return found[1] if renewed else None

    def _all_stand(self, waiting: dict[int, Waiting]) -> tuple[set[int], str] | None:
        """After SIGTERM, if no rank moves because some stand in the user's code."""
        standing = [
            rank
            for rank, each in waiting.items()
            if not (each.finished or each.collectives or each.message is not None)
        ]
        if not standing or len(waiting) < self._size:
            return None
        places = "; ".join(f"rank {rank} is stuck at {waiting[rank].place}" for rank in standing[:8])
        others = sorted(set(waiting) - set(standing))
        waits = f"; {ranks_text(others)} wait{'' if len(others) > 1 else 's'}" if others else ""
        text = f"The batch did not end after SIGTERM: {places}{waits}. All ranks exit without saving a checkpoint."
        return set(waiting), text

    def _read(self, rank: int) -> _Note | None:
        for name in (f"finished/{rank}", f"waiting/{rank}"):
            key = self._failures.key(name)
            text = self._store.get(key).decode() if self._store.check([key]) else ""
            if text and name.startswith("finished"):
                return _Note(0, 0, Waiting.loads(text))
            if text:
                stamp, number, note = text.split(" ", 2)
                return _Note(int(stamp), int(number), Waiting.loads(note))
        return None


def _started(meetings: Sequence[Meeting]) -> dict[str, tuple[int, list[str]]]:
    """To which meetings this rank has come, as :attr:`Waiting.started` says it."""
    return {each.name: (each.number + 1, []) for each in meetings}


def _same(one: Waiting, other: Waiting) -> bool:
    """Whether a rank still waits for the same."""
    return one.collectives == other.collectives and one.message == other.message and one.started == other.started
