"""The record of a rank: everything that its watcher tells the watchers of the other ranks.

A :class:`~.board.Board` stores one record for each rank. The watcher of the rank writes it (heartbeats, waits,
answers), and other watchers read it to judge the run. Records are JSON and not pickles, so data of other ranks cannot
run code.

A *channel* is a sequence of messages from one rank to another for one use. A *call* is a request of a rank to all
watchers for an answer.
"""

from __future__ import annotations

import json
from collections.abc import Mapping
from dataclasses import asdict, dataclass, field
from typing import Any

#: The states of a rank in an :class:`Answer`: it may wait for other ranks; it does not, and has not computed for long;
#: it computes, loads or saves; its watcher has not answered.
WAITS, IDLES, WORKS, SILENT = "waits", "idles", "works", "does not answer"


@dataclass
class Waiting:
    """The collectives and messages for which a blocked rank waits, and the ones that it has started.

    A number identifies a collective of a group or a message of a channel, counted from the first one.

    Attributes:
        collectives: (group, its global ranks, number, kind) of each collective that has not ended.
        message: (channel, global rank that must act, number) of a message that has not arrived. That rank is the
            sender; or the receiver, if this rank waits until the receiver is ready.
        started: For each group, the number of the first listed collective, and the kinds of the listed ones in order.
        sent: The number of messages that have been sent, by channel. Posted receives count too, in a channel of their
            own.
        place: The line of the user's code at which the rank waits, or else the innermost calls.
        state: The state of its Trainer.
        finished: If True, the run of the rank is over, and the rank never starts anything again.
    """

    collectives: list[tuple[str, list[int], int, str]] = field(default_factory=list)
    message: tuple[str, int, int] | None = None
    started: dict[str, tuple[int, list[str]]] = field(default_factory=dict)
    sent: dict[str, int] = field(default_factory=dict)
    place: str = ""
    state: str = ""
    finished: bool = False

    def has_started(self, group: str, number: int) -> bool:
        """Return True if the rank has started a collective of a group."""
        first, kinds = self.started.get(group, (0, []))
        return number < first + len(kinds)

    def kind_of(self, group: str, number: int) -> str | None:
        """Return the kind of a collective that the rank has started; ``None`` if it is not listed."""
        first, kinds = self.started.get(group, (0, []))
        return kinds[number - first] if 0 <= number - first < len(kinds) else None


@dataclass
class Answer:
    """The answer of a rank to a call for positions, which a rank makes when nothing has finished for long.

    Attributes:
        rank: The rank.
        host: Its host.
        state: ``"waits"`` (for other ranks), ``"idles"``, ``"works"`` or ``"does not answer"``.
        seconds: The time in which nothing has finished; for a rank that idles, the time in which it has computed
            nothing.
        call: The collective in which it waits, if any.
        place: The innermost line of its code, and the innermost line of the user's code.
        batch: The loop and the number of the batch.
        action: The action of the schedule with its stage; empty outside of a schedule.
        last: The actions before it, the latest one last.
        pending: The pending messages, as ``"1RECV_F3 from rank 2"``.
        waits_for: The global ranks without which it cannot continue, as far as they are known.
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


@dataclass
class Record:
    """The description of a rank by its watcher.

    Attributes:
        process: Its host, its node and its process, as :func:`~.process_ends.describe_process` writes them.
        number: The heartbeat: it grows whenever the record is written.
        place: The line of the user's code at which the rank was, or else the innermost calls. Only `Heartbeats` writes
            it.
        answered: The number of the last call that it has answered.
        calls: The functions in which it was when it answered, as text, the innermost first.
        stamp: A number that changes whenever `waiting` changes.
        renewals: The number of looks since then at which the rank was still waiting for the same.
        waiting: The collectives and messages for which it waits; ``None`` while it may do anything.
        answer: Its answer to the last call for positions.
    """

    process: str
    number: int = 0
    place: str = ""
    answered: int = 0
    calls: str = ""
    stamp: int = 0
    renewals: int = 0
    waiting: Waiting | None = None
    answer: Answer | None = None

    @classmethod
    def decode(cls, text: bytes) -> Record:
        """Return a record from its text."""
        record = cls(**decode(text))
        record.waiting = None if record.waiting is None else Waiting(**record.waiting)  # type: ignore[arg-type]
        record.answer = None if record.answer is None else Answer(**record.answer)  # type: ignore[arg-type]
        return record


def encode(value: Any) -> str:
    """Return a record, or a value of plain types, as JSON, so that data of other ranks cannot run code."""
    return json.dumps(asdict(value) if isinstance(value, Record) else value)


def decode(text: bytes) -> Any:
    """Return the value that was passed to :func:`encode`. Tuples become lists, and records become dictionaries."""
    return json.loads(text)


def name_of(rank: int, hosts: Mapping[int, str]) -> str:
    """Return a rank and its host as text."""
    return f"rank {rank} (on {hosts.get(rank, 'an unknown host')})"
