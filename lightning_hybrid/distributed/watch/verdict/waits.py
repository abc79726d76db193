"""The collectives and messages that this rank waits for, as its watcher finds them."""

from __future__ import annotations

import time
from collections.abc import Callable, Sequence
from typing import NamedTuple

from lightning_hybrid.distributed.watch.board import Board
from lightning_hybrid.distributed.watch.flight_recorder import ranks_of, read_collectives, read_progress
from lightning_hybrid.distributed.watch.record import Waiting
from lightning_hybrid.distributed.watch.watched_thread import WatchedThread

_STILL = 1.0  # seconds after which a blocked rank writes what it waits for
_TERMINATED = 20.0  # seconds after SIGTERM in which something has to move: launchers give 30 or more before they kill


class Messages(NamedTuple):
    """The messages through the channels of this rank.

    Attributes:
        awaited: (channel, global rank of the sender, number) of the message that is waited for, if one is.
        sent: The number of messages that this rank has sent, by channel. A note that it is ready to receive counts too.
    """

    awaited: tuple[str, int, int] | None
    sent: dict[str, int]


class Meeting(NamedTuple):
    """Ranks that meet over the store, now and then.

    Attributes:
        name: The name of the comparison.
        ranks: The global ranks.
        number: The number of the event that this rank has come to.
        place: Where it waits for the others now; empty if it does not.
        since: The time since which it waits, by `time.monotonic`.
    """

    name: str
    ranks: list[int]
    number: int
    place: str = ""
    since: float = 0.0


class Waits:
    """Writes into the record of this rank what it waits for, once it has been blocked for a second.

    A rank without such a note may do anything, for any time. In a run without faults only ranks that wait for seconds
    write notes, so a step is never slower for it.

    After SIGTERM all ranks are to stop before the same batch. If one of them is blocked in the user's code, because it
    sleeps or waits for something that never comes, it writes that too, after a while, since it may upload a file. The
    end of a `time.sleep` is known: if the rank would sleep longer than that while, it writes so at once.

    Args:
        board: The board, over the store of the watcher.
        thread: The thread of the run.
        messages: Returns the messages that this rank has sent, and the one that it waits for.
        state: Returns the state of the Trainer.
        meetings: Returns where this rank meets others over the store.
        since: The last collective before the groups of this run were made.
    """

    def __init__(
        self,
        board: Board,
        *,
        thread: WatchedThread,
        messages: Callable[[], Messages],
        state: Callable[[], str],
        meetings: Callable[[], Sequence[Meeting]] = tuple,
        since: int = -1,
    ) -> None:
        self._board, self._thread, self._messages, self._state = board, thread, messages, state
        self._meetings, self._since = meetings, since
        self.begin()

    def begin(self) -> None:
        """Begin a run."""
        self._progress: object = None  # what had been started when the note was written

    def final(self) -> Waiting:
        """Return the note of a rank whose run is over."""
        started = read_collectives(self._since).started | _started(self._meetings())
        return Waiting(started=started, sent=self._messages().sent, state=self._state(), finished=True)

    def look(self, seconds_terminating: float | None) -> None:
        """Write what this rank waits for, if anything.

        Args:
            seconds_terminating: The seconds since a rank got SIGTERM; ``None`` if none has.
        """
        before, waiting = self._board.own.waiting, self._find(seconds_terminating)
        if before is not None and waiting is not None and _same(before, waiting):
            waiting = before
        elif waiting is not None:
            waiting.place, waiting.state = self._thread.place(), self._state()
        if before is not None or waiting is not None:
            self._board.wait(waiting)

    @property
    def knows_what(self) -> bool:
        """If True, this rank waits, and it is known for what."""
        waiting = self._board.own.waiting
        return waiting is not None and bool(waiting.collectives or waiting.message)

    def _find(self, seconds_terminating: float | None) -> Waiting | None:
        """Return what this rank waits for; ``None`` if it does not wait, or nothing is known of it."""
        thread, meetings = self._thread, self._meetings()
        awaited = [each for each in meetings if each.place and time.monotonic() > each.since + _STILL]
        if thread.seconds_still < _STILL and not awaited:
            return None
        waiting, before = Waiting(), self._board.own.waiting
        messages = self._messages()
        progress = read_progress(), messages.awaited, meetings
        if before is not None and progress[0] is not None and progress == self._progress:
            return before  # to read it all takes longer
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


def _started(meetings: Sequence[Meeting]) -> dict[str, tuple[int, list[str]]]:
    """Return the meetings that this rank has come to, as :attr:`Waiting.started` has them."""
    return {each.name: (each.number + 1, []) for each in meetings}


def _same(one: Waiting, other: Waiting) -> bool:
    """Return whether a rank still waits for the same."""
    return one.collectives == other.collectives and one.message == other.message and one.started == other.started
