"""Where nothing finishes any more, the rank that the others wait for is named, with where every rank stands."""

from __future__ import annotations

import contextlib
import io
import re
import time
from collections.abc import Sequence
from datetime import timedelta
from functools import partial
from types import CodeType
from typing import Any
from unittest import mock

import pytest
import torch
import torch.distributed as dist

from lightning_hybrid.distributed.debug.stall import (
    COMPUTES,
    IDLES,
    SILENT,
    WAITS,
    Answer,
    Position,
    StallWatch,
    find_culprits,
    stall_text,
    table,
)
from lightning_hybrid.distributed.failure import CAUSE, FailureStore
from lightning_hybrid.distributed.watch.watcher import Watcher
from lightning_hybrid.strategy import run
from tests.pool import Pools
from tests.training_jobs import PP2, Regression, loader, make_trainer


def answer(rank: int, state: str = WAITS, **others: Any) -> Answer:
    return Answer(rank, f"host{rank // 2}", state, 100.0 + rank, **others)


#: Answers, and who is waited for.
SITUATIONS: dict[str, tuple[list[Answer], list[int]]] = {
    "one is silent": ([answer(0, waits_for=[1]), answer(1, waits_for=[2]), answer(2, SILENT)], [2]),
    "one idles, another one computes": ([answer(0), answer(1, IDLES), answer(2, COMPUTES)], [1]),
    "one computes": ([answer(0), answer(1, COMPUTES)], [1]),
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
        "Stalled: nothing has finished for 109 s. The other ranks wait for rank 10 (on host5), which has computed"
        " nothing for 110 s at training_step (train.py:7)."
    )
    lines = [re.split(r"\s{2,}", line) for line in table(answers, [10]).splitlines()]
    assert lines[0] == ["rank", "state", "for s", "batch", "action", "last actions", "messages under way", "at"]
    assert lines[1] == ["10", "idles", "110", "training_step (train.py:7)"]
    row = ["0, 1, 2, 3, 4, 5, 6, 7, ... (10)", "waits for 10", "109", "1F4", *sends, "wait (p2p.py:73)"]
    assert lines[2:] == [row]


TIMEOUT = 1.5


def chain() -> str:
    """Rank 0 waits for rank 1, and that for rank 2, which computes for a while and then neither does nor answers."""
    rank, size = dist.get_rank(), dist.get_world_size()
    assert dist.group.WORLD is not None
    own = dist.group.WORLD.get_group_store().clone()
    failures = FailureStore(own, "chain", rank=rank, size=size)
    failures.begin()

    def position(calls: Sequence[CodeType]) -> Position:
        return Position(batch="train 3", waits_for=[rank + 1])

    watch = StallWatch(
        failures, own, rank=rank, size=size, timeout=TIMEOUT, position=position, end=pytest.fail, patience=1.0
    )
    watcher, text, tensor = Watcher(lambda signals: watch.look(), interval=0.1), io.StringIO(), torch.zeros(1)
    with contextlib.redirect_stderr(text):
        watcher.start()
        if rank == 2:
            while not own.check([failures.key("stall/1/verdict")]) and not own.check([failures.key("stall/1/call")]):
                torch.randn(100, 100).sum()
            watcher.close()
            own.wait([failures.key(CAUSE)])
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
    computing = [line for line in lines if line.endswith("They wait until `timeout`.")]  # once for each look
    computes = r"\[rank 0\] Stalled: .* wait for rank 2 \(on .*\), which computes at .*chain \(test_stall"
    assert computing
    assert all(re.match(computes, line) for line in computing)
    second, *rows, cause = lines[len(computing) :]
    silent = r"\[rank 0\] (Stalled: .* wait for rank 2 \(on .*\), which does not answer: its process is stopped.*)"
    named = re.fullmatch(silent, second)
    assert named
    assert cause == f"cause: {named[1]}"
    assert [row.split()[0] for row in rows] == ["rank", "2", "0", "1"]
    assert re.search(r"waits for 2 .*train 3 .*recv \(distributed_c10d.py:\d+\) < chain \(test_stall.py:\d+\)", rows[3])
    assert others == [cause, cause], "the table is printed once"


class Stalling(Regression):
    """Rank 1 does nothing in a layer of its stage, until it is ended."""

    def __init__(self) -> None:
        super().__init__()
        self.ended: list[int] = []
        self.body[3].register_forward_hook(self.stall)

    def stall(self, *args: Any) -> None:
        while self.trainer.global_step == 2 and not self.ended:
            time.sleep(0.1)
        if self.ended:
            raise ArithmeticError("woken")


def stalled() -> tuple[str, str, list[int]]:
    module, printed = Stalling(), io.StringIO()
    layout = {**PP2, "stall_timeout": timedelta(seconds=2), "timeout": timedelta(seconds=30)}
    watch = partial(StallWatch, end=module.ended.append, patience=1.5)
    with (
        mock.patch.object(run, "StallWatch", watch),
        contextlib.redirect_stderr(printed),
        pytest.raises(Exception, match="Stalled") as error,
    ):
        make_trainer(layout).fit(module, loader())
    return str(error.value), printed.getvalue(), module.ended


@pytest.mark.rows(67)
def test_a_rank_that_stands_still_in_the_users_code_is_named_and_ended(ranks: Pools) -> None:
    (text, printed, ended), (of_sleeper, also_printed, also_ended) = ranks(2, lightning=True).run(stalled, timeout=50)
    assert text == of_sleeper
    assert re.search(r"wait for rank 1 \(on .*\), which has computed nothing for \d s at stall \(test_stall.py", text)
    assert (ended, also_ended) == ([], [1])
    assert f"[rank 0] {text}\n" in printed
    assert f"[rank 1] {text}\nIt is this rank, and it ends." in also_printed
    assert "last actions" not in also_printed
    row = next(line for line in printed.splitlines() if line.startswith("0 "))
    # One microbatch is forward on the last stage: the warm-up of the first one has two, and it waits for the first.
    found = re.search(r"waits for 1 .*train 2 +0B0 +0RECV_B0 0F1 0SEND_F1 .*0RECV_B0 from rank 1, .*0SEND_F1 to", row)
    assert found, row
