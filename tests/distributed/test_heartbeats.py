"""Ranks that send no heartbeat within the timeout are found, and no other rank."""

from __future__ import annotations

import os
import re
import signal
import time
from datetime import timedelta
from pathlib import Path
from typing import Any
from unittest import mock

import pytest
import torch.distributed as dist

from lightning_hybrid import Faults
from lightning_hybrid.distributed.watch.board import Board
from lightning_hybrid.distributed.watch.record import Waiting
from lightning_hybrid.distributed.watch.verdict import heartbeats as module
from lightning_hybrid.distributed.watch.verdict.heartbeats import Heartbeats
from lightning_hybrid.distributed.watch.verdict.judge import Sight, judge
from tests.pool import Pools
from tests.training_jobs import PP2, Regression, loader, make_trainer

SECONDS = 60.0


class Clock:
    """Stands still unless it is set."""

    now = 1000.0

    def monotonic(self) -> float:
        return self.now


class Ranks:
    """Some ranks whose watchers look every second."""

    def __init__(self, clock: Clock, size: int = 3, *, late: tuple[int, ...] = ()) -> None:
        self._clock, self._store = clock, dist.HashStore()
        self.boards = [Board(self._store, rank=rank, size=size) for rank in range(size)]
        for rank, each in enumerate(self.boards):
            if rank not in late:
                each.begin()
        self._heartbeats = [
            Heartbeats(board, seconds=SECONDS, place=lambda: "step (train.py:3)") for board in self.boards
        ]

    def pass_time(self, seconds: int, *, without: tuple[int, ...] = ()) -> dict[int, list[int]]:
        """What each rank has found when it first found something, and the rest have looked."""
        found: dict[int, list[int]] = {}
        for _ in range(seconds):
            self._clock.now += 1
            for rank, heartbeats in enumerate(self._heartbeats):
                ages = heartbeats.look() if rank not in without else {}
                finished = self.boards[rank].finished()
                verdict = judge(Sight(len(self.boards), ages=ages, finished=finished, heartbeat_timeout=SECONDS))
                if verdict is not None:
                    found.setdefault(rank, [int(each) for each in re.findall(r"rank (\d+) \(on", verdict.text)])
        return found


@pytest.fixture
def clock() -> Any:
    """The clock of the heartbeats."""
    with mock.patch.object(module, "time", clock := Clock()):
        yield clock


def test_who_gives_signs_is_never_silent(clock: Clock) -> None:
    assert Ranks(clock).pass_time(3600) == {}


def test_who_gives_none_is_found_within_seconds_of_the_end_of_its_lease(clock: Clock) -> None:
    ranks = Ranks(clock)
    ranks.pass_time(100)
    assert ranks.pass_time(int(SECONDS) - 11, without=(2,)) == {}
    assert ranks.pass_time(15, without=(2,)) == {0: [2]}


def test_who_works_for_nearly_a_lease_without_a_sign_is_not_silent(clock: Clock) -> None:
    """It was, wherever the last sign before the work was a few seconds old."""
    ranks = Ranks(clock)
    for _ in range(12):
        ranks.pass_time(7)
        assert ranks.pass_time(int(SECONDS) - 5, without=(1,)) == {}


def test_the_first_rank_is_missed_by_the_last(clock: Clock) -> None:
    ranks = Ranks(clock)
    ranks.pass_time(10)
    assert ranks.pass_time(int(SECONDS) + 4, without=(0,)) == {2: [0]}


def test_who_comes_back_in_time_has_missed_nothing(clock: Clock) -> None:
    ranks = Ranks(clock)
    ranks.pass_time(10)
    for _ in range(5):
        assert ranks.pass_time(45, without=(1, 2)) == {}
        assert ranks.pass_time(5) == {}


def test_who_was_stopped_itself_blames_nobody(clock: Clock) -> None:
    """A job that is suspended as a whole goes on; the others may do so a little later."""
    ranks = Ranks(clock)
    ranks.pass_time(10)
    clock.now += 3600
    assert ranks.pass_time(20, without=(1, 2)) == {}
    assert ranks.pass_time(100) == {}


def test_who_has_not_begun_is_not_silent(clock: Clock) -> None:
    ranks = Ranks(clock, late=(2,))
    assert ranks.pass_time(3600, without=(2,)) == {}


def test_who_has_only_said_that_it_is_there_is_missed(clock: Clock) -> None:
    """A rank whose cable was cut before its watcher looked was waited for, as one that has not been started."""
    ranks = Ranks(clock)
    assert ranks.pass_time(int(SECONDS) + 4, without=(2,)) == {0: [2]}


def test_who_has_begun_is_missed_while_others_have_not(clock: Clock) -> None:
    """A rank that is stopped in the set-up would be waited for as long as one that comes late."""
    ranks = Ranks(clock, late=(2,))
    ranks.pass_time(10, without=(2,))
    assert ranks.pass_time(int(SECONDS) + 4, without=(1, 2)) == {0: [1]}


def test_who_has_come_to_the_end_of_the_run_may_be_silent(clock: Clock) -> None:
    ranks = Ranks(clock)
    ranks.pass_time(10)
    ranks.boards[1].finish(Waiting(finished=True))
    assert ranks.pass_time(200, without=(1,)) == {}


class Stopping(Regression):
    """Rank 1 is stopped in a step; the rank that reads its heartbeat is not."""

    def __init__(self, folder: str) -> None:
        super().__init__()
        self.folder = folder

    def on_train_batch_start(self, *args: Any) -> None:
        if self.trainer.global_step == 2:
            if self.trainer.global_rank == 1:
                Path(self.folder, "pid").write_text(str(os.getpid()))
                time.sleep(60)
            else:
                deadline = time.monotonic() + 20
                while not Path(self.folder, "pid").exists() and time.monotonic() < deadline:
                    time.sleep(0.05)
                time.sleep(0.5)
                os.kill(int(Path(self.folder, "pid").read_text()), signal.SIGSTOP)


def stopped(folder: str) -> tuple[str, float]:
    start = time.monotonic()
    with pytest.raises(Exception, match=r".") as error:
        make_trainer({**PP2, "faults": Faults(heartbeat_timeout=timedelta(seconds=4))}).fit(Stopping(folder), loader())
    return str(error.value), time.monotonic() - start


def test_a_rank_whose_process_is_stopped_is_named(ranks: Pools, tmp_path: Path) -> None:
    """It is let go on then, and ends with the same text."""
    (text, seconds), (of_stopped, _) = ranks(2, lightning=True).run(stopped, str(tmp_path), timeout=60)
    assert "No heartbeat for 4 s from rank 1 (on " in text
    assert "Rank 1 was last seen at " in text
    assert of_stopped == text
    assert seconds < 30
