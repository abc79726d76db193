"""When nothing finishes any more: where every rank stands, as one table, and the rank that the others wait for."""

from __future__ import annotations

import json
import socket
import sysconfig
import threading
import time
from collections import Counter
from collections.abc import Callable, Hashable, Sequence
from contextlib import suppress
from dataclasses import asdict, dataclass, field
from pathlib import Path
from types import CodeType
from typing import Any

from lightning_hybrid.distributed.failure import FailureStore, Store, print_error
from lightning_hybrid.distributed.watch.process_ends import host_of
from lightning_hybrid.distributed.watch.watched_thread import StackCall, is_slow, may_wait, read_stack
from lightning_hybrid.error_codes.entry import without_code

WAITS, IDLES, WORKS, SILENT = "waits", "idles", "works", "does not answer"

_OURS = str(Path(__file__).parents[2])
_LIBRARIES = tuple({sysconfig.get_paths()[name] for name in ("stdlib", "platstdlib", "purelib", "platlib")})
_PATIENCE = 5.0  # seconds that other watchers may take to answer, at least
_SLEPT = 5.0  # seconds between two looks after which this process has been stopped in the meantime
_COMPUTES = 0.02  # a thread that a processor works for this share of the time does something
_MOST = 8  # ranks, or messages, in one text


@dataclass
class Position:
    """Where a rank is in its work.

    Attributes:
        progress: Changes when something finishes.
        batch: Which batch of which loop.
        action: Of the schedule, and its stage; empty outside of one.
        last: The actions before it, the latest one last.
        pending: Messages that are on their way, as ``"1RECV_F3 from rank 2"``.
        waits_for: The global ranks without which it cannot go on, as far as that is known.
    """

    progress: Hashable = None
    batch: str = ""
    action: str = ""
    last: list[str] = field(default_factory=list)
    pending: list[str] = field(default_factory=list)
    waits_for: list[int] = field(default_factory=list)


@dataclass
class Answer:
    """What a rank tells of itself.

    Attributes:
        rank: The rank.
        host: Its host.
        state: Whether it waits for other ranks, or else whether it works.
        seconds: How long nothing has finished; of a rank that idles, how long it has computed nothing.
        call: The collective in which it waits, if any.
        place: Where its code is: the innermost place, and the innermost one in the user's code.
        batch: As in :class:`Position`, and so are the others.
    """

    rank: int
    host: str
    state: str
    seconds: float
    call: str = ""
    place: str = ""
    batch: str = ""
    action: str = ""
    last: list[str] = field(default_factory=list)
    pending: list[str] = field(default_factory=list)
    waits_for: list[int] = field(default_factory=list)


class StallWatch:
    """Looks, on the watcher's thread, whether anything still finishes on this rank.

    ::

        rank 0  waits for rank 1 ......... answers, asks who else answered --> table, verdict: all end
        rank 1  sleeps in the user's code  answers: does nothing                              named, ends
        rank 2  waits for rank 1, too long --> calls; answers                                 ends
        rank 3  stopped                                                                       named

    A rank that has waited too long calls for answers, through the store. The watchers answer, each for its rank, also
    where that is stuck. The lowest rank that answers is the judge. It prints the table, and writes a failure that ends
    all ranks as any other does; unless the others wait for one that works. That one is let go on, until the time limit
    of a collective ends the waiting.

    Args:
        failures: Of this rank.
        store: What all ranks see, for the watcher alone.
        rank: This rank.
        size: The number of ranks.
        timeout: Seconds in which nothing finishes.
        position: Says where the rank is; called with the code of its main thread's calls, the innermost first.
        patience: Seconds that other watchers may take to answer; by default an eighth of ``timeout``, or a few.

    Attributes:
        timeout: As given.
    """

    def __init__(
        self,
        failures: FailureStore,
        store: Store,
        *,
        rank: int,
        size: int,
        timeout: float,
        position: Callable[[Sequence[CodeType]], Position],
        patience: float | None = None,
    ) -> None:
        self._failures, self._store, self._rank, self._size = failures, store, rank, size
        self.timeout, self._position = timeout, position
        self._patience = max(_PATIENCE, timeout / 8) if patience is None else patience
        self.begin()

    def begin(self) -> None:
        """A run begins, on the thread that is watched."""
        now = time.monotonic()
        self._watched = threading.get_ident()
        self._round = 0
        self._called: float | None = None  # when this rank has answered the call of this round
        self._next_call = now
        self._progress: Hashable = None
        self._since = self._computed_at = self._looked = now
        self._computed = self._seconds_computed()

    def look(self) -> None:
        """Follow what this rank does; call, answer, or judge."""
        with suppress(Exception):  # the store is gone: then the run ends for that reason
            self._look()

    def _look(self) -> None:
        now, stack = time.monotonic(), read_stack(self._watched)
        position = self._position([call.code for call in stack])
        self._follow(now, stack, position)
        is_waiting = may_wait(stack)
        if not self._store.check([self._key("call")]):
            if not is_waiting or now < max(self._since + self.timeout, self._next_call):
                return
            self._store.set(self._key("call"), "")
        if self._called is None:
            self._called = now
            answer = self._answer(now, stack, position, is_waiting=is_waiting)
            self._store.set(self._key(f"answer/{self._rank}"), json.dumps(asdict(answer)))
        elif self._store.check([self._key("continues")]):
            self._round += 1
            self._called, self._next_call = None, now + self.timeout / 4
        elif now > self._called + self._patience and self._is_judge():
            self._judge()

    def _key(self, name: str) -> str:
        return self._failures.key(f"stall/{self._round}/{name}")

    def _follow(self, now: float, stack: Sequence[StackCall], position: Position) -> None:
        """Note since when nothing has finished here, and when the thread has last computed."""
        slept = now - self._looked
        if slept > _SLEPT:
            self._since, self._computed_at = self._since + slept, self._computed_at + slept
        polls = bool(stack) and stack[0].file.startswith(_OURS)  # it may look again and again whether to go on
        progress = position.progress, tuple(call.position for call in stack[polls:])
        if progress != self._progress:
            self._progress, self._since = progress, now
        computed = self._seconds_computed()
        if computed - self._computed > _COMPUTES * (now - self._looked):
            self._computed_at = now
        self._computed, self._looked = computed, now

    def _seconds_computed(self) -> float:
        """The seconds that a processor has worked for the run's thread; where that is not told, for all of them."""
        clock_of = getattr(time, "pthread_getcpuclockid", None)
        return time.process_time() if clock_of is None else time.clock_gettime(clock_of(self._watched))

    def _answer(self, now: float, stack: Sequence[StackCall], position: Position, *, is_waiting: bool) -> Answer:
        told = {name: value for name, value in asdict(position).items() if name != "progress"}
        answer = Answer(self._rank, socket.gethostname(), WAITS, now - self._since, place=_place(stack), **told)
        if is_waiting:
            answer.call, ranks = _collective(read_stack(self._watched, groups=True))
            answer.waits_for = answer.waits_for or [rank for rank in ranks if rank != self._rank]
        else:
            idle = now - self._computed_at
            answer.state = IDLES if idle > self.timeout / 2 and not is_slow(stack) else WORKS
            answer.seconds = idle if answer.state == IDLES else answer.seconds
            answer.waits_for = []
        return answer

    def _is_judge(self) -> bool:
        lower = (self._key(f"answer/{rank}") for rank in range(self._rank))
        if any(self._store.check([key]) for key in lower):
            return False
        return self._store.add(self._key("judges"), 1) == 1

    def _judge(self) -> None:
        assert self._called is not None
        answers = [self._read(rank) for rank in range(self._size)]
        culprits = find_culprits(answers)
        text = stall_text(answers, culprits)
        if self._since > self._called:  # something has finished while the others answered
            self._store.set(self._key("continues"), "")
        elif culprits and all(answers[rank].state == WORKS for rank in culprits):
            print_error(
                f"[rank {self._rank}] {without_code(text)} The other ranks keep waiting until `timeout` expires."
            )
            self._store.set(self._key("continues"), "")
        else:
            print_error(f"[rank {self._rank}] {text}\n{table(answers, culprits)}")
            self._failures.report_text(text, self._store)

    def _read(self, rank: int) -> Answer:
        key = self._key(f"answer/{rank}")
        if self._store.check([key]):
            return Answer(**json.loads(self._store.get(key)))
        return Answer(rank, host_of(self._failures.description_of(rank, self._store)), SILENT, 0.0)


def find_culprits(answers: Sequence[Answer]) -> list[int]:
    """The ranks that the others wait for.

    Args:
        answers: Of all ranks, in their order.

    Returns:
        Those that do not wait themselves, those that can never go on first: without any that is silent or idles, those
        that work. Where all wait, the one that most of the others wait for; nobody, if that is everyone alike.
    """
    for states in ((SILENT, IDLES), (WORKS,)):
        found = [answer.rank for answer in answers if answer.state in states]
        if found:
            return found
    votes: Counter[int] = Counter()
    for answer in answers:
        others = answer.waits_for or [other.rank for other in answers if other.rank != answer.rank]
        # Who is in the same call has come: the others have not.
        votes.update(rank for rank in others if not answer.call or answers[rank].call != answer.call)
    most = [rank for rank, count in votes.items() if count == max(votes.values())]
    return sorted(most) if len(most) < len(answers) else []


def stall_text(answers: Sequence[Answer], culprits: Sequence[int]) -> str:
    """The first line: who is waited for, and what it does."""
    longest = max((answer.seconds for answer in answers if answer.state == WAITS), default=0.0)
    if not culprits:
        return (
            f"Stalled: no rank has made progress for {longest:.0f} s. All ranks are waiting at the same point in the"
            " code, so the cause may be the network: check the connections between the nodes. [LH224]"
        )
    parts = []
    for rank in culprits[:_MOST]:
        answer = answers[rank]
        does = {
            SILENT: "does not respond: its process is stopped, or its host is down",
            IDLES: f"has been idle for {answer.seconds:.0f} s at {answer.place}",
            WORKS: f"is busy at {answer.place}",
            WAITS: f"is waiting at a different point: {answer.place}",
        }[answer.state]
        parts.append(f"rank {rank} (on {answer.host}), which {does}")
    more = f", and {len(culprits) - _MOST} more" if len(culprits) > _MOST else ""
    may_idle = any(answers[rank].state == IDLES for rank in culprits)
    advice = " If the code there can take this long, increase `faults.stall_timeout` and `timeout`." if may_idle else ""
    return (
        f"Stalled: no rank has made progress for {longest:.0f} s. The other ranks are waiting for"
        f" {'; for '.join(parts)}{more}.{advice} [LH224]"
    )


def table(answers: Sequence[Answer], culprits: Sequence[int]) -> str:
    """Where every rank stands; ranks at the same place share a row, and who is waited for stands first."""
    rows: dict[tuple[Any, ...], list[Answer]] = {}
    for answer in sorted(answers, key=lambda answer: (answer.rank not in culprits, answer.rank)):
        rows.setdefault(_row(answer), []).append(answer)
    cells = [["rank", "state", "seconds", "batch", "action", "last actions", "pending messages", "at"]]
    for alike in rows.values():
        first = alike[0]
        ranks = ", ".join(str(answer.rank) for answer in alike[:_MOST])
        more = f", ... ({len(alike)})" if len(alike) > _MOST else ""
        state = first.state
        if state == WAITS and first.waits_for:
            state += f" for {', '.join(map(str, first.waits_for[:_MOST]))}"
        longest = max(answer.seconds for answer in alike)
        seconds = "" if first.state == SILENT else f"{longest:.0f}"
        pending = ", ".join(first.pending[:_MOST])
        cells.append(
            [f"{ranks}{more}", state, seconds, first.batch, first.action, " ".join(first.last), pending, first.place]
        )
    widths = [max(len(row[column]) for row in cells) for column in range(len(cells[0]))]
    lines = ("  ".join(cell.ljust(width) for cell, width in zip(row, widths, strict=True)) for row in cells)
    return "\n".join(line.rstrip() for line in lines)


def _row(answer: Answer) -> tuple[Any, ...]:
    lists = tuple(answer.last), tuple(answer.pending), tuple(answer.waits_for)
    return answer.state, answer.batch, answer.action, answer.place, *lists


def _place(stack: Sequence[StackCall]) -> str:
    """The innermost place, and the innermost one in the user's code."""
    places = list(stack[:1])
    user = next((call for call in stack if not call.file.startswith((*_LIBRARIES, _OURS, "<"))), None)
    places += [user] if user is not None and user not in places else []
    return " < ".join(map(str, places))


def _collective(stack: Sequence[StackCall]) -> tuple[str, list[int]]:
    """The collective that a thread is in, with its group as text, and the group's global ranks."""
    for call in stack:
        if call.ranks is not None:
            return f"{call.code.co_name} over {call.ranks}", call.ranks
    return "", []
