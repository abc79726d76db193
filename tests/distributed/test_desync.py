"""Ranks that do not do the same are told what differs, and on which ranks, all with one text."""

from __future__ import annotations

import sys
import threading
import time
from collections import deque
from collections.abc import Callable, Mapping
from typing import Any

import pytest
import torch
import torch.distributed as dist
from lightning.pytorch import Callback

from lightning_hybrid import Faults
from lightning_hybrid.distributed.failure import WrongUseError
from lightning_hybrid.distributed.watch.board import Board
from lightning_hybrid.distributed.watch.desync import Change, DesyncWatch, Noted, first_difference
from lightning_hybrid.distributed.watch.failures import Failures
from tests.pool import Pools
from tests.training_jobs import PP2, Regression, Result, assert_same, loader, make_trainer, together, train

A, B, C = Change(1, "batch", "a"), Change(3, "batch", "b"), Change(4, "mode", "c")


@pytest.mark.parametrize(
    ("mine", "other", "expected"),
    [
        (Noted(5, 0, [A, B]), Noted(5, 0, [A, B]), None),
        (Noted(5, 0, [A, B]), Noted(2, 0, [A]), None),  # the other one has not come so far
        (Noted(5, 0, [A, B]), Noted(3, 0, [A]), (3, "batch")),
        (Noted(5, 0, [A]), Noted(5, 0, [A, B, C]), (3, "batch")),
        (Noted(5, 0, [A, C]), Noted(5, 0, [A, C._replace(value="d")]), (4, "mode")),
        (Noted(5, 0, [A, B, C]), Noted(5, 3, [C]), None),  # one has forgotten
    ],
)
def test_the_first_difference_counts_as_far_as_both_have_come(mine: Noted, other: Noted, expected: Any) -> None:
    assert first_difference(mine, other) == first_difference(other, mine) == expected


class Interleaved:
    """A store of one of two ranks; the other one says all it has to say between two calls of this one.

    Args:
        store: The store.
        other: Called after the first `add` of this rank.
    """

    def __init__(self, store: Any, other: Callable[[], None]) -> None:
        self._store, self._other = store, other
        self._calls = 0

    def add(self, key: str, amount: int) -> int:
        number: int = self._store.add(key, amount)
        self._calls += 1
        if self._calls == 1:
            self._other()
        return number

    def __getattr__(self, name: str) -> Any:
        return getattr(self._store, name)


def desync_watch(store: Any, rank: int, timeout: float = 30.0) -> DesyncWatch:
    board = Board(store, rank=rank, size=2)
    return DesyncWatch(Failures(board), board, board, "both", ranks=[0, 1], advice="Do the same.", timeout=timeout)


@pytest.mark.parametrize(
    ("steps", "expected"),
    [
        ((("step", "a"), ("step", "a")), ""),
        (
            (("step", "a"), ("step", "b")),
            "`shape of step` is not the same on every rank: a on rank 0; b on rank 1. Do the same.",
        ),
        (
            (("step", "a"), ("epoch", "a")),
            "`next action` is not the same on every rank: step on rank 0; epoch on rank 1. All ranks must communicate",
        ),
    ],
    ids=["alike", "another value", "another place"],
)
def test_ranks_that_meet_tell_alike_from_different_in_any_order(
    steps: tuple[tuple[str, str], tuple[str, str]], expected: str
) -> None:
    """Who comes last has not always said last what it has."""
    store, outcomes = dist.HashStore(), ["", ""]

    def meet(rank: int, watch: DesyncWatch) -> None:
        try:
            watch.note(*steps[rank], lambda: {"shape": steps[rank][1]})
        except WrongUseError as error:
            outcomes[rank] = str(error)

    other = threading.Thread(target=meet, args=(1, desync_watch(store, 1)))

    def until_it_waits() -> None:
        other.start()
        while not store.check([Board(store, rank=0, size=2).key("meeting/both/1/here")]):
            time.sleep(0.01)

    meet(0, desync_watch(Interleaved(store, until_it_waits), 0))
    other.join()
    assert outcomes[0] == outcomes[1]
    assert outcomes[0].startswith(expected)
    assert bool(outcomes[0]) == bool(expected)


def test_who_does_not_come_is_named_when_the_time_is_over() -> None:
    watch = desync_watch(dist.HashStore(), 0, timeout=0.2)
    with pytest.raises(
        RuntimeError, match=r"Rank 0 waited 0 s at training_step, but rank 1 did not reach this point\."
    ):
        watch.note("training_step", "a", lambda: {"shape": "a"})
    assert watch.meeting().number == 1


def test_who_takes_no_part_is_not_asked_again() -> None:
    board = Board(dist.HashStore(), rank=2, size=3)
    watch = DesyncWatch(Failures(board), board, board, "both", ranks=[0, 1], advice="", timeout=0.0)
    watch.note("step", "a", dict)
    assert watch.keys == {"step": "a"}


def test_who_meets_others_tells_the_watcher_so() -> None:
    store = dist.HashStore()
    waiting, other = desync_watch(store, 0), desync_watch(store, 1)
    assert waiting.meeting()._replace(since=0.0) == ("desync of both", [0, 1], 0, "", 0.0)
    thread = threading.Thread(target=waiting.note, args=("step", "a", lambda: {"shape": "a"}))
    thread.start()
    while not waiting.meeting().place:
        time.sleep(0.01)
    assert waiting.meeting()._replace(since=0.0) == ("desync of both", [0, 1], 1, "step", 0.0)
    other.note("step", "a", lambda: {"shape": "a"})
    thread.join()
    assert not waiting.meeting().place


def test_meetings_leave_nothing_in_the_store() -> None:
    """It has the memory of one process, and each new shape of a batch is a meeting."""
    store = dist.HashStore()
    watches = [desync_watch(store, rank) for rank in range(2)]

    def meet(watch: DesyncWatch) -> None:
        for number in range(20):
            watch.note("step", number, lambda: {"shape": str(number)})  # noqa: B023 - it is called at once

    other = threading.Thread(target=meet, args=(watches[1],))
    other.start()
    meet(watches[0])
    other.join()
    assert store.num_keys() <= 2 * 7, "those of the last meeting, and of one that a rank has yet to leave"


def test_what_is_forgotten_between_two_looks_at_it_is_no_difference() -> None:
    """The main thread may note something new while the watcher copies what there is."""

    class Interrupted(deque[Change]):
        def copy(self) -> Interrupted:
            watch._change(1000, "step", {"shape": "new"})
            return Interrupted(self, self.maxlen)

    watch, other = desync_watch(dist.HashStore(), 0), desync_watch(dist.HashStore(), 0)
    for event in range(1, 65):
        for each in (watch, other):
            each._change(event, "step", {"shape": str(event)})
            each.events = event
    watch._changes = Interrupted(watch._changes, watch._changes.maxlen)
    assert first_difference(watch._noted(64), other._noted(64)) is None


@pytest.mark.parametrize(
    ("steps", "expected"),
    [(("step", "step"), "a on rank 0; b on rank 1"), (("step", "epoch"), "nothing new on rank")],
    ids=["value", "place"],
)
def test_a_watcher_writes_what_differs_over_its_own_store(steps: tuple[str, str], expected: str) -> None:
    class Locked:
        def __getattr__(self, name: str) -> Any:
            pytest.fail("the watcher would wait")

    store = dist.HashStore()
    verdicts = []
    for rank, step, value in zip(range(2), steps, "ab", strict=True):
        board = Board(Locked(), rank=rank, size=2)
        watched = board.over(store)
        watch = DesyncWatch(Failures(board), board, watched, "both", ranks=[0, 1], advice="", timeout=30.0)
        watch._change(1, step, {"shape": value})
        watch.events = 1
        verdicts += [watch.look(), watch.look()]
    assert verdicts[0] is verdicts[1] is None, "the first of the ranks compares with no other"
    assert verdicts[-1] is not None
    assert verdicts[-1].exception == "ValueError"
    assert expected in verdicts[-1].text


def files_of_steps() -> list[set[str]]:
    """The files of the package that the batches of an epoch enter."""
    entered: list[set[str]] = []

    class Profiled(Callback):
        def on_train_batch_start(self, *args: Any) -> None:
            entered.append(set())
            sys.setprofile(lambda frame, event, argument: entered[-1].add(frame.f_code.co_filename))

        def on_train_batch_end(self, *args: Any) -> None:
            sys.setprofile(None)

    make_trainer(PP2, callbacks=[Profiled()]).fit(Regression(), loader())
    return [{file.rpartition("lightning_hybrid/")[2] for file in files} for files in entered]


def test_an_ordinary_step_only_counts(ranks: Pools) -> None:
    for first, second, *_ in ranks(2, lightning=True).run(files_of_steps):
        assert "distributed/watch/desync.py" in first
        assert not {"distributed/watch/desync.py", "distributed/watch/failures.py"} & second


class Differing(Regression):
    """Rank 1 does something else.

    Args:
        how: What, from the third batch on.
    """

    def __init__(self, how: str = "") -> None:
        super().__init__()
        self.how = how

    @property
    def differs(self) -> bool:
        return self.trainer.global_rank == 1 and self.trainer.global_step >= 2

    def split_batch(self, batch: Any, number: int) -> Any:
        parts = 2 if self.how == "microbatches" and self.trainer.global_rank == 1 else number
        return list(zip(*(tensor.chunk(parts) for tensor in batch), strict=True))

    def on_train_batch_start(self, batch: Any, batch_idx: int) -> None:
        if self.how == "frozen" and self.differs:
            self.head.bias.requires_grad_(False)
        if self.how == "changed" and self.differs:
            with torch.no_grad():
                self.embed.bias[3] += 1e-9
        if self.how == "random" and self.differs:
            self.trainer.strategy.world.streams.next_number("evaluation batches")

    def training_step(self, batch: Any, batch_idx: int) -> Any:
        loss = self.loss(batch)
        name = "mine" if self.how == "logged" and self.differs else "loss"
        self.log(name, loss, sync_dist=True, on_step=True)
        return loss

    def validation_step(self, batch: Any, batch_idx: int) -> None:
        loss = self.loss(batch)
        self.log("val_loss", loss, sync_dist=True)
        if self.how == "epoch" and self.trainer.global_rank == 1:
            self.log("mine", loss, sync_dist=True)


def trained(layout: Mapping[str, Any] | None, how: str) -> str | Result:
    """Train; return the result, or the text of the error that ends the run."""
    try:
        return train(Differing(how), layout, loader(), loader(), max_epochs=2, num_sanity_val_steps=0)
    except ValueError as error:
        return str(error)


TWO = {"num_microbatches": 2}  # replicas, each with microbatches
CASES = {
    "microbatches": (
        PP2,
        "`microbatches of training_step` is not the same on every rank: 4 of [2, 2, 2, 2] samples on rank 0; 2 of"
        " [4, 4] samples on rank 1.",
    ),
    "frozen": (PP2, "`number of trainable parameters of training_step` is not the same on every rank: 16 (checksum"),
    "logged": (
        TWO,
        "`logged keys of training_step` is not the same on every rank: ['loss'] on rank 0; ['mine'] on rank 1.",
    ),
    "epoch": (
        TWO,
        "`logged keys of an epoch of validate` is not the same on every rank: ['validation_step.val_loss'] on rank"
        " 0; ['validation_step.val_loss', 'validation_step.mine'] on rank 1.",
    ),
    "changed": (
        {**PP2, "faults": Faults(detect_desync=True)},
        "Before training batch 2, checksums differ between ranks that must have the same values. `parameter embed.bias`"
        " is not the same on every rank: ",
    ),
    "random": (
        {**TWO, "faults": Faults(detect_desync=True)},
        "Before training batch 2, checksums differ between ranks that must have the same values. `random state` is not"
        " the same on every rank: ",
    ),
}


@pytest.mark.rows(67)
@pytest.mark.parametrize("how", CASES)
def test_what_differs_is_named_with_its_ranks_on_every_rank(ranks: Pools, how: str) -> None:
    """Some of these wait for each other for ever, some end inside gloo, and some train something else."""
    layout, expected = CASES[how]
    texts = ranks(2, lightning=True).run(trained, layout, how, timeout=40)
    assert texts[0] == texts[1]
    assert texts[0].startswith(expected), texts[0]


@pytest.mark.parametrize("layout", [PP2, {"tensor_parallel_size": 2}, {"zero_stage": 3}], ids=["pp2", "tp2", "zero3"])
def test_ranks_that_do_the_same_train_as_ever(ranks: Pools, layout: Mapping[str, Any]) -> None:
    """The last batch of an epoch is shorter, and evaluation comes in between."""
    replicas = 2 if "zero_stage" in layout else 1
    layout = {**layout, "num_microbatches": 2, "faults": Faults(detect_desync=True)}
    results = ranks(2, lightning=True).run(trained, layout, "")
    assert all(isinstance(result, Result) for result in results), results
    if replicas == 1:
        expected = trained(None, "")
        assert isinstance(expected, Result)
        assert_same([result.losses for result in results], [expected.losses] * 2)
        assert_same(together([result.weights for result in results]), expected.weights)
