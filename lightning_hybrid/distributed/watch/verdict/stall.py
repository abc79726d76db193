"""The search for a stall: if nothing finishes on a rank for long, the positions of all ranks are requested.

`RunWatch` makes a :class:`StallWatch` if the stall timeout is enabled, and `RankWatch` calls it at each look.
`find_deadlock` finds only waits that can never end, by records. A stall has other causes too, such as a data loader
that hangs on one rank, so the code of every rank must be inspected. The *position* of a rank in its work consists of
its batch, and of its action and pending messages in the schedule.
"""

from __future__ import annotations

import socket
import sysconfig
import threading
import time
from collections.abc import Callable, Hashable, Sequence
from contextlib import suppress
from dataclasses import asdict, dataclass, field
from pathlib import Path

from lightning_hybrid.distributed.watch.board import POSITIONS, Board
from lightning_hybrid.distributed.watch.process_ends import host_of
from lightning_hybrid.distributed.watch.record import IDLES, SILENT, WAITS, WORKS, Answer
from lightning_hybrid.distributed.watch.watched_thread import StackCall, is_slow, may_wait, read_stack

_OURS = str(Path(__file__).parents[3])
_LIBRARIES = tuple({sysconfig.get_paths()[name] for name in ("stdlib", "platstdlib", "purelib", "platlib")})
_PATIENCE = 5.0  # seconds for other watchers to answer, at least
_SLEPT = 5.0  # seconds between two looks; if more have passed, this process was stopped
_COMPUTES = 0.02  # a thread that uses a processor for this fraction of the time works


@dataclass
class Position:
    """The position of a rank in its work.

    Attributes:
        progress: A value that changes when something finishes; it is compared only by ``==``.
        batch: The loop and the number of the batch.
        action: The action of the schedule with its stage; empty outside of a schedule.
        last: The actions before it, the latest one last.
        pending: The pending messages, as ``"1RECV_F3 from rank 2"``.
        waits_for: The global ranks without which it cannot continue, as far as they are known.
    """

    progress: Hashable = None
    batch: str = ""
    action: str = ""
    last: list[str] = field(default_factory=list)
    pending: list[str] = field(default_factory=list)
    waits_for: list[int] = field(default_factory=list)


class StallWatch:
    """A check, on the watcher's thread, whether anything still finishes on this rank.

    ::

        rank 0  waits for rank 1 ......... answers, reads the other answers --> judge --> verdict, table
        rank 1  sleeps in the user's code  answers: idles
        rank 2  waits for rank 1, too long --> calls; answers
        rank 3  stopped                    does not answer

    A rank that has waited too long calls for answers. Each watcher answers for its rank, even if the rank is blocked.
    The lowest rank that answers judges, see `judge`. If ranks wait for a rank that works, the run continues until the
    timeout of a collective ends the wait, and later calls check again.

    Args:
        board: The board, over the watcher's client of the store.
        timeout: The seconds without progress after which a run counts as stalled.
        position: Returns the position of this rank. It is called on the watcher's thread.
        patience: The seconds for other watchers to answer; by default an eighth of ``timeout``, but at least 5 s.

    Attributes:
        timeout: The seconds without progress after which a run counts as stalled.
    """

    def __init__(
        self, board: Board, *, timeout: float, position: Callable[[], Position], patience: float | None = None
    ) -> None:
        self._board, self.timeout, self._position = board, timeout, position
        self._patience = max(_PATIENCE, timeout / 8) if patience is None else patience
        self.begin()

    def begin(self) -> None:
        """Begin a run, on the thread that is watched."""
        now = time.monotonic()
        self._watched = threading.get_ident()
        self._called: tuple[int, float] | None = None  # the call that has no verdict yet, and the time of the answer
        self._next_call = now
        self._progress: Hashable = None
        self._since = self._computed_at = self._looked = now
        self._computed = self._seconds_computed()

    def look(self) -> None:
        """Track the progress of this rank, and call for answers if it has waited too long. The watcher calls this."""
        now, stack = time.monotonic(), read_stack(self._watched)
        position = self._read_position()
        if position is not None:
            self._follow(now, stack, position)
        is_late = now >= max(self._since + self.timeout, self._next_call)
        if is_late and self._called is None and may_wait(stack) and self._board.next_call() is None:
            self._board.call(POSITIONS)

    def _read_position(self) -> Position | None:
        with suppress(Exception):  # the thread of the run may change the position while it is read
            return self._position()
        return None

    def _follow(self, now: float, stack: Sequence[StackCall], position: Position) -> None:
        """Update the time since which nothing has finished, and the time when the thread last computed."""
        slept = now - self._looked
        if slept > _SLEPT:
            self._since, self._computed_at = self._since + slept, self._computed_at + slept
        polls = bool(stack) and stack[0].file.startswith(_OURS)  # the package may poll, so its position may change
        progress = position.progress, tuple(call.position for call in stack[polls:])
        if progress != self._progress:
            self._progress, self._since = progress, now
        computed = self._seconds_computed()
        if computed - self._computed > _COMPUTES * (now - self._looked):
            self._computed_at = now
        self._computed, self._looked = computed, now

    def _seconds_computed(self) -> float:
        """Return the processor time of the run's thread, or of the process if the system does not report the former."""
        clock_of = getattr(time, "pthread_getcpuclockid", None)
        return time.process_time() if clock_of is None else time.clock_gettime(clock_of(self._watched))

    def answer(self, kind: str) -> Answer:
        """Return the answer of this rank to the next call.

        Args:
            kind: The kind of the call. Answers to calls for positions are judged.
        """
        now, stack = time.monotonic(), read_stack(self._watched)
        if kind == POSITIONS:
            self._called = self._board.own.answered + 1, now
            self._next_call = now + self._patience + self.timeout / 4
        position = asdict(self._read_position() or Position())
        told = {name: value for name, value in position.items() if name != "progress"}
        answer = Answer(self._board.rank, socket.gethostname(), WAITS, now - self._since, place=_place(stack), **told)
        if may_wait(stack):
            answer.call, ranks = _collective(read_stack(self._watched, groups=True))
            answer.waits_for = answer.waits_for or [rank for rank in ranks if rank != self._board.rank]
        else:
            idle = now - self._computed_at
            answer.state = IDLES if idle > self.timeout / 2 and not is_slow(stack) else WORKS
            answer.seconds = idle if answer.state == IDLES else answer.seconds
            answer.waits_for = []
        return answer

    def answers(self) -> list[Answer]:
        """Return the answers of all ranks, once, on the lowest rank that has answered; otherwise an empty list."""
        board = self._board
        if self._called is None or time.monotonic() <= self._called[1] + self._patience:
            return []
        (number, answered), self._called = self._called, None
        has_finished_something = self._since >= answered
        if has_finished_something or min(board.here(number)) != board.rank or not board.claim(f"judge {number}"):
            return []
        records = board.read(board.begun())
        found = {rank: each.answer for rank, each in records.items() if each.answered >= number}
        return [
            found.get(rank) or Answer(rank, board.hosts.get(rank, host_of(None)), SILENT, 0.0)
            for rank in range(board.size)
        ]


def _place(stack: Sequence[StackCall]) -> str:
    """Return the innermost place, and the innermost place in the user's code."""
    places = list(stack[:1])
    user = next((call for call in stack if not call.file.startswith((*_LIBRARIES, _OURS, "<"))), None)
    places += [user] if user is not None and user not in places else []
    return " < ".join(map(str, places))


def _collective(stack: Sequence[StackCall]) -> tuple[str, list[int]]:
    """Return the collective in which a thread is, with its group as text, and the global ranks of the group."""
    for call in stack:
        if call.ranks is not None:
            return f"{call.code.co_name} over {call.ranks}", call.ranks
    return "", []
