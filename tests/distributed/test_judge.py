"""The judge finds from the records of the ranks why a run cannot continue: a table of situations."""

from __future__ import annotations

from typing import Any

import pytest
import torch.distributed as dist

from lightning_hybrid.distributed.watch.board import Board
from lightning_hybrid.distributed.watch.record import IDLES, WAITS, WORKS, Answer, Record, Waiting, encode
from lightning_hybrid.distributed.watch.verdict.judge import (
    BUSY,
    DEAD,
    DEADLOCKED,
    FINISHED,
    SILENT,
    STALLED,
    STUCK,
    SUSPECTED,
    Sight,
    judge,
)


def record(waiting: Waiting | None = None, *, stamp: int = 1, renewals: int = 1, place: str = "") -> Record:
    return Record("host machine 1", place=place, stamp=stamp, renewals=renewals, waiting=waiting)


def answers(state: str) -> list[Answer]:
    return [Answer(0, "host0", WAITS, 100.0, waits_for=[1]), Answer(1, "host1", state, 100.0, place="f (train.py:3)")]


FOR_1, FOR_0 = Waiting(message=("a", 1, 1)), Waiting(message=("b", 0, 1))
IN_USERS_CODE, AT_THE_END = Waiting(place="sleep (train.py:7)"), Waiting(finished=True)
CIRCLE = {0: record(FOR_1), 1: record(FOR_0)}
ONCE_BEFORE = {0: (1, 0), 1: (1, 0)}

#: What a rank sees, what it finds, and words of the text.
SITUATIONS: dict[str, tuple[dict[str, Any], str | None, str]] = {
    "nothing": ({}, None, ""),
    "a process has ended": (
        {"gone": {1}, "hosts": {1: "node7"}, "records": {1: record(place="step (train.py:3)")}},
        DEAD,
        "Killed or crashed without an error message: rank 1 (on node7). [LH221] Rank 1 was last seen at step",
    ),
    "a process has ended after its run": ({"gone": {1}, "finished": {1}}, None, ""),
    "an old heartbeat": ({"ages": {1: 61.0}, "heartbeat_timeout": 60.0}, SILENT, "No heartbeat for 60 s from rank 1"),
    "a young heartbeat": ({"ages": {1: 59.0}, "heartbeat_timeout": 60.0}, None, ""),
    "an old heartbeat after the end": (
        {"ages": {1: 61.0}, "heartbeat_timeout": 60.0, "finished": {1}},
        None,
        "",
    ),
    "a dead and a silent rank": (
        {"size": 3, "gone": {2}, "ages": {1: 61.0}, "heartbeat_timeout": 60.0},
        DEAD,
        "rank 2",
    ),
    "a circle, for the first time": ({"records": CIRCLE}, SUSPECTED, ""),
    "a circle, renewed": (
        {"records": CIRCLE, "suspects": ONCE_BEFORE},
        DEADLOCKED,
        "Deadlock: the ranks made different",
    ),
    "a circle, not renewed by one rank": (
        {"records": CIRCLE, "suspects": {0: (1, 0), 1: (1, 1)}},
        SUSPECTED,
        "",
    ),
    "a circle with another wait": ({"records": CIRCLE, "suspects": {0: (1, 0), 1: (0, 0)}}, SUSPECTED, ""),
    "a circle of other ranks": ({"size": 3, "records": CIRCLE, "suspects": {0: (1, 0), 2: (1, 0)}}, SUSPECTED, ""),
    "a rank waits for one that computes": ({"records": {0: record(FOR_1), 1: record()}}, None, ""),
    "a rank waits for one that has finished": (
        {"records": {0: record(FOR_1), 1: record(AT_THE_END, renewals=0)}, "suspects": ONCE_BEFORE, "finished": {1}},
        DEADLOCKED,
        "rank 1 reached the end of the run",
    ),
    "a rank waits, it is not known for what, and another one has finished": (
        {"finished": {1}, "waits_for_finished": True},
        FINISHED,
        "The run has ended on rank 1, but other ranks are still waiting.",
    ),
    "a rank waits, it is not known for what": ({"waits_for_finished": True}, None, ""),
    "no rank moves after SIGTERM": (
        {"records": {0: record(FOR_1), 1: record(IN_USERS_CODE)}, "suspects": ONCE_BEFORE, "is_terminating": True},
        STUCK,
        "The batch did not end after SIGTERM: rank 1 is stuck at sleep (train.py:7); rank 0 waits.",
    ),
    "one of three moves after SIGTERM": (
        {"size": 3, "records": {0: record(FOR_1), 1: record(IN_USERS_CODE), 2: record()}, "is_terminating": True},
        None,
        "",
    ),
    "no rank moves": ({"records": {0: record(FOR_1), 1: record(IN_USERS_CODE)}}, None, ""),
    "all wait for a rank that idles": (
        {"answers": answers(IDLES)},
        STALLED,
        "are waiting for rank 1 (on host1), which has been",
    ),
    "all wait for a rank that idles, and a circle is never renewed": (
        {"records": CIRCLE, "suspects": {0: (1, 1), 1: (1, 1)}, "answers": answers(IDLES)},
        STALLED,
        "are waiting for rank 1",
    ),
    "a rank has finished, and a circle is never renewed": (
        {"records": CIRCLE, "suspects": {0: (1, 1), 1: (1, 1)}, "finished": {2}, "waits_for_finished": True},
        FINISHED,
        "The run has ended on rank 2",
    ),
    "all wait for a rank that works": ({"answers": answers(WORKS)}, BUSY, "which is busy at f (train.py:3)"),
}


@pytest.mark.parametrize("situation", SITUATIONS)
def test_the_judge_finds(situation: str) -> None:
    seen, kind, words = SITUATIONS[situation]
    verdict = judge(Sight(**{"size": 2, **seen}))
    assert (None if verdict is None else verdict.kind) == kind
    if verdict is not None:
        assert words in verdict.text
        assert verdict.ends == (kind not in (SUSPECTED, BUSY))


def test_a_suspicion_lasts_until_all_have_renewed_it() -> None:
    first = judge(Sight(2, records=CIRCLE))
    assert first is not None
    assert first.suspects == {0: (1, 1), 1: (1, 1)}
    one_renewed = {0: record(FOR_1, renewals=2), 1: CIRCLE[1]}
    second = judge(Sight(2, records=one_renewed, suspects=first.suspects))
    assert second is not None
    assert second.suspects == first.suspects, "the moment at which all waited is the first one"
    third = judge(Sight(2, records=CIRCLE, suspects=first.suspects, answers=answers(WORKS)))
    assert third is not None
    assert (third.kind, third.suspects) == (BUSY, first.suspects), "it is kept while the ranks are asked for positions"


def test_a_record_is_read_as_it_was_written() -> None:
    waiting = Waiting([("g", [0, 1], 3, "barrier")], ("a", 1, 2), {"g": (1, ["broadcast"])}, {"b": 4}, "f", "training")
    own = Record("host machine 7", 3, "step", 1, "f < g", 2, 4, waiting, Answer(0, "host", WAITS, 1.5, pending=["1F0"]))
    again = Record.decode(encode(own).encode())
    assert encode(again) == encode(own)
    assert again.waiting is not None
    assert again.waiting.kind_of("g", 1) == "broadcast"
    assert again.answer == own.answer


def test_a_heartbeat_says_nothing_about_what_a_rank_waits_for() -> None:
    """A renewal says that the rank still waits, and is written by whatever has looked."""
    board = Board(dist.HashStore(), rank=0, size=1)
    board.begin()
    board.wait(FOR_1)
    board.wait(FOR_1)
    waited = board.own
    board.write(place="elsewhere")
    assert board.own.number > waited.number
    assert (board.own.stamp, board.own.renewals) == (waited.stamp, waited.renewals) == (1, 1)
    assert board.num_waiting() == 1
    board.wait(None)
    assert board.own.stamp == 2
    assert board.num_waiting() == 0


def test_a_rank_that_has_finished_keeps_saying_so() -> None:
    """Its watcher still answers, and may find out what the rank waits for."""
    board = Board(store := dist.HashStore(), rank=0, size=1)
    board.begin()
    board.finish(AT_THE_END)
    for _ in range(2):
        board.write(place="elsewhere")
        board.wait(None)
        board.call()
        board.answer("main", None)
    assert board.num_waiting() == 0
    assert board.next_call() is None
    record = Board.find(board.over(store), 0)
    assert record is not None
    assert record.waiting == AT_THE_END


def test_the_first_failure_stays() -> None:
    store = dist.HashStore()
    boards = [Board(store, rank=rank, size=3) for rank in range(3)]
    assert boards[2].read_cause() is None
    assert boards[1].write_cause("ValueError", "broken")
    assert not boards[0].write_cause("ValueError", "broken"), "another rank with the same text is not the first one"
    assert boards[2].read_cause() == ("ValueError", "broken")
    assert boards[0].have_read() == {2}
