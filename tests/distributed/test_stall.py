"""Where nothing finishes any more, the rank that the others wait for is named, with where every rank stands."""

from __future__ import annotations

import contextlib
import io
import re
import time
from collections.abc import Callable
from datetime import timedelta
from functools import partial
from pathlib import Path
from typing import Any
from unittest import mock

import pytest
import torch
import torch.distributed as dist

from lightning_hybrid import Faults
from lightning_hybrid.distributed.watch import board as board_module
from lightning_hybrid.distributed.watch.board import POSITIONS, Board
from lightning_hybrid.distributed.watch.failures import Failures
from lightning_hybrid.distributed.watch.rank_watch import RankWatch
from lightning_hybrid.distributed.watch.record import IDLES, SILENT, WAITS, WORKS, Answer
from lightning_hybrid.distributed.watch.verdict import stall
from lightning_hybrid.distributed.watch.verdict.stall import Position, StallWatch
from lightning_hybrid.distributed.watch.verdict.stall_table import find_culprits, stall_text, table
from lightning_hybrid.distributed.watch.verdict.waits import Messages, Waits
from lightning_hybrid.distributed.watch.watched_thread import StackCall, WatchedThread
from lightning_hybrid.distributed.watch.watcher import Watcher
from lightning_hybrid.strategy import run
from lightning_hybrid.strategy.watch import run_watch
from tests.pool import Pools
from tests.training_jobs import PP2, Regression, loader, make_trainer


def answer(rank: int, state: str = WAITS, **others: Any) -> Answer:
    return Answer(rank, f"host{rank // 2}", state, 100.0 + rank, **others)


#: Answers, and who is waited for.
SITUATIONS: dict[str, tuple[list[Answer], list[int]]] = {
    "one is silent": ([answer(0, waits_for=[1]), answer(1, waits_for=[2]), answer(2, SILENT)], [2]),
    "one idles, another one works": ([answer(0), answer(1, IDLES), answer(2, WORKS)], [1]),
    "one works": ([answer(0), answer(1, WORKS)], [1]),
    "one has not come to a collective": (
        [
            answer(0, call="all_reduce over [0, 1, 2]", waits_for=[1, 2]),
            answer(1, call="broadcast over [0, 1, 2]", waits_for=[0, 2]),
            answer(2, call="all_reduce over [0, 1, 2]", waits_for=[0, 1]),
        ],
        [1],
    ),
    "all are in the same collective": ([answer(rank, call="all_reduce over [0, 1]") for rank in range(2)], []),
    "two wait for each other": ([answer(0, waits_for=[1]), answer(1, waits_for=[0])], []),
    "a circle, and one outside of it": (
        [answer(0, waits_for=[1]), answer(1, waits_for=[0]), answer(2, waits_for=[1])],
        [1],
    ),
}


@pytest.mark.parametrize("situation", SITUATIONS)
def test_who_does_not_come_is_whom_the_others_wait_for(situation: str) -> None:
    answers, expected = SITUATIONS[situation]
    assert find_culprits(answers) == expected


def test_the_table_begins_with_whom_the_others_wait_for_and_ranks_at_one_place_share_a_row() -> None:
    sends = ["1SEND_F3 to rank 10"]
    waiting = [
        answer(rank, waits_for=[10], action="1F4", pending=sends, place="wait (p2p.py:73)") for rank in range(10)
    ]
    answers = [*waiting, answer(10, IDLES, place="training_step (train.py:7)")]
    text = stall_text(answers, [10])
    assert text == (
        "Stalled: no rank has made progress for 109 s. The other ranks are waiting for rank 10 (on host5), which has"
        " been idle for 110 s at training_step (train.py:7). If the code there can take this long, increase"
        " `faults.stall_timeout` and `timeout`. [LH224]"
    )
    lines = [re.split(r"\s{2,}", line) for line in table(answers, [10]).splitlines()]
    assert lines[0] == ["rank", "state", "seconds", "batch", "action", "last actions", "pending messages", "at"]
    assert lines[1] == ["10", "idles", "110", "training_step (train.py:7)"]
    row = ["0, 1, 2, 3, 4, 5, 6, 7, ... (10)", "waits for 10", "109", "1F4", *sends, "wait (p2p.py:73)"]
    assert lines[2:] == [row]


TIMEOUT = 1.5


def watch_of(board: Board, stall_watch: StallWatch, thread: WatchedThread) -> tuple[RankWatch, Failures]:
    """The watch of a rank that knows nothing else of its run; it ends nothing."""
    failures = Failures(board)
    failures.begin()
    ends: dict[str, Any] = {"abort": list, "interrupt": lambda error: False, "end": list}
    watch = RankWatch(failures, board, thread=thread, heartbeats=None, **ends)
    waits = Waits(board, thread=thread, messages=lambda: Messages(None, {}), state=str)
    watch.open(waits, stall_watch, [])
    return watch, failures


def chain() -> str:
    """Rank 0 waits for rank 1, and that for rank 2, which computes for a while and then neither does nor answers."""
    rank, size = dist.get_rank(), dist.get_world_size()
    assert dist.group.WORLD is not None
    own = dist.group.WORLD.get_group_store().clone()
    board = Board(own, rank=rank, size=size)

    def position() -> Position:
        return Position(batch="train 3", waits_for=[rank + 1])

    stall_watch = StallWatch(board, timeout=TIMEOUT, position=position, patience=1.0)
    watch, failures = watch_of(board, stall_watch, WatchedThread())
    watcher, text, tensor = Watcher(watch.look, interval=0.1), io.StringIO(), torch.zeros(1)
    with contextlib.redirect_stderr(text):
        watcher.start()
        if rank == 2:
            while not own.check([board.key("call/2")]):
                torch.randn(100, 100).sum()
            watcher.close()
            own.wait([board.key("cause")])
        else:
            dist.recv(tensor, src=rank + 1)
        if rank > 0:
            dist.send(tensor, dst=rank - 1)
        watcher.close()
    cause = failures.cause(patience=0.0)
    return f"{text.getvalue()}cause: {cause}"


def test_who_computes_is_let_go_on_and_who_does_not_answer_ends_the_run(ranks: Pools) -> None:
    judge, *others = ranks(3).run(chain, timeout=40)
    lines = judge.splitlines()
    last = "The other ranks keep waiting until `timeout` expires."
    computing = [line for line in lines if line.endswith(last)]  # once for each look
    computes = r"\[rank 0\] Stalled: .* waiting for rank 2 \(on .*\), which is busy at .*chain \(test_stall"
    assert computing
    assert all(re.match(computes, line) for line in computing)
    second, *rows, cause = lines[len(computing) :]
    silent = r"\[rank 0\] (Stalled: .* waiting for rank 2 \(on .*\), which does not respond: its process is stopped.*)"
    named = re.fullmatch(silent, second)
    assert named
    assert cause == f"cause: {named[1]}"
    assert [row.split()[0] for row in rows] == ["rank", "2", "0", "1"]
    assert re.search(r"waits for 2 .*train 3 .*recv \(distributed_c10d.py:\d+\) < chain \(test_stall.py:\d+\)", rows[3])
    assert others == [cause, cause], "the table is printed once"


class Clock:
    """In the place of `time`, in the module."""

    def __init__(self) -> None:
        self.now = 1000.0

    def monotonic(self) -> float:
        return self.now

    def clock_gettime(self, clock: int) -> float:
        return 0.0  # the thread computes nothing

    def pthread_getcpuclockid(self, thread: int) -> int:
        return 0


class Thread(WatchedThread):
    """That of the run, of which nothing is known."""

    def look(self) -> None:
        pass


def lonely_watch(store: Any, position: Position | None = None) -> tuple[StallWatch, RankWatch, Board]:
    """Of rank 0 of two; the other one never answers."""
    board = Board(store, rank=0, size=2)
    where = Position() if position is None else position
    stall_watch = StallWatch(board, timeout=100.0, position=lambda: where, patience=10.0)
    watch, _ = watch_of(board, stall_watch, Thread())
    return stall_watch, watch, board


def stack_in(*files: str) -> list[StackCall]:
    """Calls in these files, the innermost first."""
    return [StackCall(compile("0", file, "exec"), (0, 0), None) for file in files]


TORCH, HERE, USERS = str(Path(torch.__file__).parent), str(Path(run.__file__).parents[1]), "/home/me/train.py"
COLLECTIVE = f"{TORCH}/distributed/distributed_c10d.py"
IN_STORE = f"{HERE}/distributed/watch/desync.py"


@pytest.mark.parametrize(
    ("stack", "state"),
    [
        (stack_in(USERS), IDLES),
        (stack_in("/usr/lib/python3/threading.py", f"{TORCH}/utils/data/dataloader.py", USERS), WORKS),
        (stack_in("/usr/lib/python3/subprocess.py", f"{TORCH}/_inductor/cpp_builder.py", USERS), WORKS),
        (stack_in(f"{TORCH}/serialization.py", USERS), WORKS),
        (stack_in(f"{HERE}/checkpoint/storage/atomic.py", USERS), WORKS),
        (stack_in(COLLECTIVE, f"{HERE}/checkpoint/full.py", USERS), WAITS),
        (stack_in(COLLECTIVE, USERS), WAITS),
        (stack_in(f"{HERE}/pipeline_parallel/p2p.py", USERS), WAITS),
    ],
    ids=["user", "loader", "compiler", "torch.save", "fsync", "saving together", "collective", "message"],
)
def test_who_loads_saves_or_compiles_works_although_it_computes_nothing(stack: list[StackCall], state: str) -> None:
    stall_watch, watch, board = lonely_watch(dist.HashStore())
    with mock.patch.object(stall, "time", clock := Clock()), mock.patch.object(stall, "read_stack", return_value=stack):
        stall_watch.begin()
        for _ in range(21):
            clock.now += 3
            watch.look()
        board.call(POSITIONS)
        watch.look()
    record = board.find(0)
    assert record is not None
    assert record.answer is not None
    assert record.answer.state == state


def test_who_polls_for_the_others_is_seen_to_wait() -> None:
    """Where it looks again and again whether to go on, its innermost call is now here, now there."""
    stall_watch, watch, board = lonely_watch(dist.HashStore())
    stacks = [stack_in(IN_STORE, USERS), [*(c._replace(position=(1, 2)) for c in stack_in(IN_STORE)), *stack_in(USERS)]]
    with mock.patch.object(stall, "time", clock := Clock()), mock.patch.object(stall, "read_stack") as read:
        stall_watch.begin()
        for number in range(40):
            read.return_value = stacks[number % 2]
            clock.now += 3
            watch.look()
    assert board.own.answered == 1


def judged(change: Callable[[Clock, Position], None]) -> tuple[str, list[str]]:
    """What a rank that waits comes to, where something happens before, or while, the others answer."""
    position = Position()
    stall_watch, watch, board = lonely_watch(store := dist.HashStore(), position)
    with mock.patch.object(board_module, "describe_process", return_value="node7 machine 1"):
        Board(store, rank=1, size=2).begin()
    printed = io.StringIO()
    with (
        contextlib.redirect_stderr(printed),
        mock.patch.object(stall, "time", clock := Clock()),
        mock.patch.object(stall, "read_stack", return_value=stack_in(COLLECTIVE, USERS)),
    ):
        stall_watch.begin()
        for number in range(50):
            clock.now += 3
            if number == 35:
                change(clock, position)
            watch.look()
    return str(Failures(board).cause(patience=0.0)), printed.getvalue().splitlines()


def test_who_does_not_answer_is_named_with_its_host() -> None:
    cause, printed = judged(lambda clock, position: None)
    assert "waiting for rank 1 (on node7), which does not respond" in cause
    assert printed[0] == f"[rank 0] {cause}"


def test_what_finishes_while_others_answer_ends_nothing() -> None:
    def finish(clock: Clock, position: Position) -> None:
        position.progress = "next"

    assert judged(finish) == ("None", [])


def test_a_process_that_was_stopped_and_goes_on_ends_nothing() -> None:
    """As where a scheduler suspends a job: what passes meanwhile is nobody's fault."""
    stall_watch, watch, board = lonely_watch(dist.HashStore())
    with (
        mock.patch.object(stall, "time", clock := Clock()),
        mock.patch.object(stall, "read_stack", return_value=stack_in(COLLECTIVE, USERS)),
    ):
        stall_watch.begin()
        watch.look()
        clock.now += 3600
        watch.look()
        assert board.next_call() is None


class Stalling(Regression):
    """Rank 1 does nothing in a layer of its stage."""

    def __init__(self) -> None:
        super().__init__()
        self.body[3].register_forward_hook(self.stall)

    def stall(self, *args: Any) -> None:
        if self.trainer.global_step == 2:
            time.sleep(90)


class Asleep(Regression):
    """Rank 0 does nothing between two batches."""

    def on_train_batch_end(self, *args: Any) -> None:
        if self.trainer.global_step == 2 and self.trainer.global_rank == 0:
            time.sleep(90)


def stalled(kind: type[Regression]) -> tuple[str, str, float]:
    module, printed = kind(), io.StringIO()
    # On a machine that does other things too, a step may stand still for seconds.
    layout = {**PP2, "faults": Faults(stall_timeout=timedelta(seconds=6)), "timeout": timedelta(seconds=60)}
    watch = partial(StallWatch, patience=3.0)
    with (
        mock.patch.object(run_watch, "StallWatch", watch),
        contextlib.redirect_stderr(printed),
        pytest.raises(Exception, match="Stalled") as error,
    ):
        make_trainer(layout).fit(module, loader())
    return str(error.value), printed.getvalue(), time.time()


@pytest.mark.rows(67)
def test_a_rank_that_stands_still_in_the_users_code_is_named_and_ended(ranks: Pools) -> None:
    (text, printed, at), (of_sleeper, also_printed, later) = ranks(2, lightning=True).run(
        stalled, Stalling, timeout=100
    )
    assert text == of_sleeper
    assert later - at < 20, "it hears of it where it sleeps"
    assert re.search(r"waiting for rank 1 \(on .*\), which has been idle for \d+ s at stall \(test_stall.py", text)
    assert f"[rank 0] {text}\n" in printed
    assert "last actions" not in also_printed
    row = next(line for line in printed.splitlines() if line.startswith("0 "))
    # One microbatch is forward on the last stage: the warm-up of the first one has two, and it waits for the first.
    found = re.search(r"waits for 1 .*train 2 +0B0 +0RECV_B0 0F1 0SEND_F1 .*0RECV_B0 from rank 1, .*0SEND_F1 to", row)
    assert found, row


def test_a_rank_that_waits_for_a_message_between_two_batches_says_so(ranks: Pools) -> None:
    (text, printed, _), (of_other, *_) = ranks(2, lightning=True).run(stalled, Asleep, timeout=100)
    assert text == of_other
    assert re.search(r"waiting for rank 0 \(on .*\), which has been idle for \d+ s at on_train_batch_end", text)
    row = next(line for line in printed.splitlines() if line.startswith("1 "))
    assert re.search(r"waits for 0 .*signals from rank 0 to rank 1 .*wait_any \(host_messages.py", row), row
