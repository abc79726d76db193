"""A failure anywhere ends everything on every rank, quickly, with the first cause, and leaves processes usable."""

from __future__ import annotations

import contextlib
import gc
import io
import os
import platform
import signal
import socket
import subprocess
import sys
import threading
import time
import warnings
import weakref
from collections.abc import Callable, Collection, Mapping
from pathlib import Path
from typing import Any
from unittest import mock

import pytest
import torch
import torch.distributed as dist
from lightning.pytorch import Callback
from lightning.pytorch.callbacks import ModelCheckpoint, OnExceptionCheckpoint
from torch import Tensor, nn

from lightning_hybrid.distributed.failure import WrongUseError, close_groups, is_transport
from lightning_hybrid.distributed.watch import board as board_module
from lightning_hybrid.distributed.watch import rank_watch
from lightning_hybrid.distributed.watch.board import TERMINATE, Board
from lightning_hybrid.distributed.watch.failures import Failures
from lightning_hybrid.distributed.watch.process_ends import ProcessEnds, describe_process
from lightning_hybrid.distributed.watch.rank_watch import RankWatch
from lightning_hybrid.distributed.watch.record import Waiting, encode
from lightning_hybrid.distributed.watch.verdict.judge import DESYNCHRONIZED, Verdict
from lightning_hybrid.distributed.watch.verdict.waits import Meeting, Messages, Waits
from lightning_hybrid.distributed.watch.watched_thread import StackCall, WatchedThread, may_wait, seconds_of_sleep
from lightning_hybrid.distributed.watch.watcher import GUARD_NAME, THREAD_NAME, Watcher
from tests.pool import Pools
from tests.training_jobs import Regression, assert_same, loader, make_trainer, train

#: Seconds from the first exception to the last one.
QUICK = 5.0


class FailingFunction(torch.autograd.Function):
    @staticmethod
    def forward(ctx: Any, x: Tensor) -> Tensor:
        return x.clone()

    @staticmethod
    def backward(ctx: Any, gradient: Tensor) -> Tensor:
        raise ArithmeticError("broken backward")


class FailingLayer(nn.Module):
    """Fails at its sixth call: in the second batch."""

    def __init__(self, where: str) -> None:
        super().__init__()
        self.where = where
        self.calls = 0

    def forward(self, x: Tensor) -> Tensor:
        self.calls += 1
        if self.calls < 6:
            return x
        if self.where == "backward":
            return FailingFunction.apply(x)
        if self.where == "interrupt":
            raise KeyboardInterrupt("broken forward")
        raise ArithmeticError("broken forward")


class Failing(Regression):
    """Fails in one place.

    Args:
        where: ``forward``, ``backward``, or the name of a hook or step.
        layer: For the first two, the layer of the body.
        rank: For hooks, the rank.
    """

    def __init__(self, where: str, layer: int = 0, rank: int = 0) -> None:
        super().__init__()
        self.where = where
        self.rank = rank
        if where in ("forward", "backward"):
            self.body[layer] = nn.Sequential(FailingLayer(where), *self.body[layer])

    def fail(self, where: str) -> None:
        if where == self.where and self.trainer.global_rank == self.rank:
            raise ArithmeticError(f"broken {where}")

    def training_step(self, batch: Any, batch_idx: int) -> Tensor:
        if batch_idx == 1:
            self.fail("before the body")
        loss = self.loss(batch)
        if batch_idx == 1:
            self.fail("after the body")
        return loss

    def validation_step(self, batch: Any, batch_idx: int) -> None:
        self.loss(batch)
        self.fail("validation_step")

    def on_train_start(self) -> None:
        self.fail("on_train_start")

    def on_train_batch_start(self, *args: Any) -> None:
        self.fail("on_train_batch_start")

    def on_before_optimizer_step(self, optimizer: Any) -> None:
        self.fail("on_before_optimizer_step")

    def on_after_backward(self) -> None:
        self.fail("on_after_backward")

    def on_train_batch_end(self, *args: Any) -> None:
        self.fail("on_train_batch_end")

    def on_validation_epoch_end(self) -> None:
        self.fail("on_validation_epoch_end")

    def on_train_epoch_end(self) -> None:
        self.fail("on_train_epoch_end")

    def on_save_checkpoint(self, checkpoint: Any) -> None:
        self.fail("on_save_checkpoint")

    def configure_optimizers(self) -> Any:
        self.fail("configure_optimizers")
        return super().configure_optimizers()

    def on_fit_start(self) -> None:
        self.fail("on_fit_start")


def fail(layout: Mapping[str, Any], arguments: tuple[Any, ...]) -> tuple[str, str, float, bool, list[float]]:
    """What a rank raises, and when; then another Trainer trains in the same process while the exception is alive."""
    with pytest.raises(Exception) as error:  # noqa: PT011 - the text is looked at in the tests
        make_trainer(layout, max_epochs=2, num_sanity_val_steps=0).fit(Failing(*arguments), loader(), loader())
    when = time.time()
    left = dist.is_initialized()
    return type(error.value).__name__, str(error.value), when, left, train(Regression(), layout, loader()).losses


LAYOUT_OF_SIZE: dict[int, dict[str, Any]] = {
    2: {"pipeline_parallel_size": 2, "num_microbatches": 4},
    3: {"pipeline_parallel_size": 3, "num_microbatches": 4},
    4: {"pipeline_parallel_size": 2, "num_microbatches": 4},
}


def check_failure(ranks: Pools, size: int, *arguments: Any, **changes: Any) -> dict[int, str]:
    layout = {**LAYOUT_OF_SIZE[size], **changes}
    expected = train(Regression(), None, loader()).losses
    results = ranks(size, lightning=True).run(fail, layout, arguments, timeout=30)
    times = [result[2] for result in results]
    assert max(times) - min(times) < QUICK, times
    for rank, (_, text, _, left, losses) in enumerate(results):
        assert "broken" in text, (rank, text)
        assert not left, "every rank leaves its groups"
        if size < 4:
            assert_same(losses, expected)
    return {rank: result[1] for rank, result in enumerate(results)}


@pytest.mark.parametrize("where", ["forward", "backward"])
@pytest.mark.parametrize("layer", [1, 3, 5])
def test_a_failure_in_a_layer_is_told_to_every_rank_with_rank_stage_and_action(
    ranks: Pools, where: str, layer: int
) -> None:
    stage = layer // 2
    texts = check_failure(ranks, 3, where, layer)
    assert texts[stage] == f"broken {where}"
    kind = "F" if where == "forward" else "B"
    for rank in {0, 1, 2} - {stage}:
        for word in (f"Rank {stage} ", f"pipeline rank {stage}", f"stage {stage}", f"action {stage}{kind}"):
            assert word in texts[rank]
        assert f"ArithmeticError: broken {where}" in texts[rank]


@pytest.mark.parametrize(("where", "rank"), [("before the body", 0), ("after the body", 2), ("before the body", 2)])
def test_a_failure_in_the_users_step_is_told_to_every_rank(ranks: Pools, where: str, rank: int) -> None:
    texts = check_failure(ranks, 3, where, 0, rank)
    for other in {0, 1, 2} - {rank}:
        assert f"Rank {rank} " in texts[other]
        assert "ArithmeticError: broken" in texts[other]


@pytest.mark.parametrize("rank", [0, 1, 3])
def test_a_failure_in_one_replica_is_told_to_the_others(ranks: Pools, rank: int) -> None:
    where = "before the body" if rank < 2 else "after the body"
    texts = check_failure(ranks, 4, where, 0, rank)
    for other in {0, 1, 2, 3} - {rank}:
        assert f"Rank {rank} " in texts[other]


def test_a_failure_with_several_chunks_is_told_to_every_rank(ranks: Pools) -> None:
    texts = check_failure(ranks, 2, "forward", 3, schedule="interleaved_1f1b", num_chunks=2)
    assert "stage 2" in texts[1]


HOOKS = [
    "on_fit_start",
    "configure_optimizers",
    "on_train_start",
    "on_train_batch_start",
    "on_after_backward",
    "on_before_optimizer_step",
    "on_train_batch_end",
    "validation_step",
    "on_validation_epoch_end",
    "on_train_epoch_end",
]


@pytest.mark.rows(67)
@pytest.mark.parametrize("where", HOOKS)
@pytest.mark.parametrize("rank", [0, 1])
def test_a_failure_in_a_hook_of_one_rank_is_told_to_the_others(ranks: Pools, where: str, rank: int) -> None:
    if where == "validation_step":
        rank = 1  # it ends at the body on the others
    texts = check_failure(ranks, 2, where, 0, rank)
    assert texts[rank] == f"broken {where}"
    assert f"Rank {rank} " in texts[1 - rank]


def test_a_failure_in_a_hook_of_a_middle_rank_is_told_to_the_others(ranks: Pools) -> None:
    texts = check_failure(ranks, 3, "on_train_batch_end", 0, 1)
    assert all("Rank 1 " in texts[rank] for rank in (0, 2))


class SavingEachBatch(Callback):
    def on_train_batch_end(self, trainer: Any, *args: Any) -> None:
        trainer.save_checkpoint("each.ckpt")


def fail_saving(layout: Mapping[str, Any], rank: int) -> tuple[str, float]:
    with pytest.raises(Exception) as error:  # noqa: PT011 - the text is looked at in the test
        make_trainer(layout, callbacks=[SavingEachBatch()]).fit(Failing("on_save_checkpoint", 0, rank), loader())
    return str(error.value), time.time()


@pytest.mark.parametrize("rank", [0, 1])
@pytest.mark.parametrize("layout", [LAYOUT_OF_SIZE[2], {"zero_stage": 3}], ids=["pp2", "zero3"])
def test_a_failure_before_the_first_save_is_told_to_the_others(
    ranks: Pools, layout: Mapping[str, Any], rank: int
) -> None:
    """They were making the group of the first save, and waited in the store for a rank that never came."""
    results = ranks(2, lightning=True).run(fail_saving, layout, rank, timeout=30)
    assert abs(results[0][1] - results[1][1]) < QUICK
    assert results[rank][0] == "broken on_save_checkpoint"
    stage, replica = (0, rank) if "zero_stage" in layout else (rank, 0)
    where = f"Rank {rank} (pipeline rank {stage}, data rank {replica})"
    assert f"{where}, train batch 0, failed: ArithmeticError: broken on_save_checkpoint" in results[1 - rank][0]


def test_a_failure_while_another_rank_of_its_replica_loads_ends_all(ranks: Pools) -> None:
    """The loading rank announced to its model group that a peer had left, and waited for ranks that wait for it."""
    check_failure(ranks, 4, "on_validation_epoch_end", 0, 0)


def vanish(layout: Mapping[str, Any], rank: int) -> tuple[str, float]:
    """A rank closes its connections without a message, and its watch is silent, as if its process had been killed."""

    class Vanishing(Callback):
        def on_train_batch_end(self, trainer: Any, pl_module: Any, outputs: Any, batch: Any, batch_idx: int) -> None:
            if batch_idx == 1 and trainer.global_rank == rank:
                world = trainer.strategy.world
                world.watch._watcher.close()
                world.failures.failed = True  # it tells nothing
                world.abandon()
                close_groups()
                time.sleep(4)
                raise ArithmeticError("never heard")

    with pytest.raises(Exception) as error:  # noqa: PT011 - the text is looked at in the test
        make_trainer(layout, callbacks=[Vanishing()]).fit(Regression(), loader())
    return str(error.value), time.time()


@pytest.mark.rows(67)
@pytest.mark.parametrize("rank", [0, 1])
def test_a_rank_that_vanishes_is_named(ranks: Pools, rank: int) -> None:
    """Who noticed was blamed: "Rank 0 failed: Connection reset by peer"."""
    results = ranks(2, lightning=True).run(vanish, LAYOUT_OF_SIZE[2], rank, timeout=30)
    text = results[1 - rank][0]
    assert text.startswith(f"Killed or crashed without an error message: rank {rank} (on {socket.gethostname()})."), (
        text
    )
    assert f"Rank {1 - rank} " in text
    assert f" Rank {rank} was last seen at " in text


# -- what is left behind ----------------------------------------------------------------------------------------------


class NoCollectives(Callback):
    """Counts the collectives that run once an exception is being handled."""

    def __init__(self) -> None:
        self.calls: list[str] = []

    def on_exception(self, trainer: Any, pl_module: Any, exception: BaseException) -> None:
        for name in ("all_reduce", "broadcast", "barrier", "all_gather", "broadcast_object_list", "all_gather_object"):
            self._spy(name)

    def _spy(self, name: str) -> None:
        real = getattr(dist, name)

        def spied(*args: Any, **kwargs: Any) -> Any:
            self.calls.append(name)
            return real(*args, **kwargs)

        setattr(dist, name, spied)


def fail_counted(layout: Mapping[str, Any], arguments: tuple[Any, ...]) -> tuple[list[str], int]:
    names = ("all_reduce", "broadcast", "barrier", "all_gather", "broadcast_object_list", "all_gather_object")
    real = {name: getattr(dist, name) for name in names}
    counting = NoCollectives()
    groups: list[Any] = []

    class Watch(Callback):
        def on_train_start(self, trainer: Any, pl_module: Any) -> None:
            found = [value for value in gc.get_objects() if type(value) is dist.ProcessGroup]
            groups.extend(weakref.ref(group) for group in found)

    try:
        with pytest.raises(Exception, match="broken") as error:
            make_trainer(layout, callbacks=[Watch(), counting]).fit(Failing(*arguments), loader())
    finally:
        for name, function in real.items():
            setattr(dist, name, function)
    assert error.value is not None
    return counting.calls, sum(group() is not None for group in groups)


def test_no_collective_runs_on_the_way_out_and_no_group_stays_open(ranks: Pools) -> None:
    for arguments in (("forward", 1), ("forward", 4), ("on_train_batch_end", 0, 1)):
        for calls, _ in ranks(2, lightning=True).run(fail_counted, LAYOUT_OF_SIZE[2], arguments):
            assert calls == []


def interrupted(layout: Mapping[str, Any], rank: int) -> tuple[str, float]:
    module = Failing("forward", 3 * rank + 1)
    layer = module.body[3 * rank + 1][0]
    assert isinstance(layer, FailingLayer)
    layer.where = "interrupt"
    kind = ""
    try:
        make_trainer(layout).fit(module, loader())
    except BaseException as error:
        kind = f"{type(error).__name__}: {error}"
    when = time.time()
    if dist.is_initialized():
        dist.destroy_process_group()
    return kind, when


@pytest.mark.rows(68)
@pytest.mark.parametrize("rank", [0, 1])
def test_an_interrupt_of_one_rank_ends_the_others(ranks: Pools, rank: int) -> None:
    results = ranks(2, lightning=True).run(interrupted, LAYOUT_OF_SIZE[2], rank, timeout=30)
    assert results[rank][0].startswith("SystemExit"), "Lightning ends the process"
    where = f"Rank {rank} (pipeline rank {rank}, data rank 0), stage {rank}, action {rank}F1,"
    assert f"{where} failed: KeyboardInterrupt: broken forward" in results[1 - rank][0]
    assert abs(results[0][1] - results[1][1]) < QUICK


class Saving(Callback):
    """A callback of the user that saves, too."""

    def __init__(self, path: str) -> None:
        self.path, self.text = path, ""

    def on_exception(self, trainer: Any, pl_module: Any, exception: BaseException) -> None:
        try:
            trainer.save_checkpoint(self.path)
        except Exception as error:
            self.text = str(error)


def fail_and_save(
    layout: Mapping[str, Any], directory: str, where: str
) -> tuple[str, float, list[str], str, list[str]]:
    """What a rank raises, when, and what it was told; callbacks save on an exception."""
    last = ModelCheckpoint(directory, every_n_train_steps=2, save_on_exception=True, save_last="link")
    own = Saving(f"{directory}/own.ckpt")
    callbacks = [last, own, OnExceptionCheckpoint(directory)]
    with warnings.catch_warnings(record=True) as caught:
        warnings.simplefilter("always")
        trainer = make_trainer(layout, max_epochs=2, enable_checkpointing=True, callbacks=callbacks)
        with pytest.raises(Exception, match="broken") as error:
            trainer.fit(Failing(where), loader())
    told = [str(each.message) for each in caught if "Not saved" in str(each.message)]
    left = [type(each).__name__ for each in trainer.callbacks if "on_exception" in vars(each)]
    return str(error.value), time.time(), told, own.text, left


@pytest.mark.rows(69)
@pytest.mark.parametrize("layout", [{}, LAYOUT_OF_SIZE[2]], ids=["dp2", "pp2"])
def test_nobody_waits_for_a_checkpoint_of_a_failure(ranks: Pools, tmp_path: Path, layout: Mapping[str, Any]) -> None:
    """Callbacks hear of an exception first, and the other ranks are where they do not hear of the checkpoint."""
    results = ranks(2, lightning=True).run(fail_and_save, layout, str(tmp_path), "before the body", timeout=30)
    assert abs(results[0][1] - results[1][1]) < QUICK
    assert results[0][0] == "broken before the body"
    assert "Rank 0" in results[1][0]
    for text, _, _, own, left in results:
        assert "broken" in text
        assert "cannot be saved" in own
        assert not left
    assert "Not saved: ModelCheckpoint, OnExceptionCheckpoint. A" in results[0][2][0]
    assert not list(tmp_path.iterdir())


# -- the store --------------------------------------------------------------------------------------------------------


def of_rank(store: Any, rank: int, size: int = 1) -> Failures:
    return Failures(Board(store, rank=rank, size=size))  # no other rank reads, if there is one


def test_the_first_failure_in_a_store_is_the_cause_for_all() -> None:
    store = dist.HashStore()
    first, second, reader = (of_rank(store, rank) for rank in range(3))
    assert reader.cause(patience=0.0) is None
    first.report(ValueError("one"), "Rank 2, stage 2")
    second.report(RuntimeError("two"), "Rank 0")
    cause = reader.cause(patience=0.0)
    assert isinstance(cause, ValueError)
    assert str(cause) == "Rank 2, stage 2 failed: ValueError: one"
    assert first.failed
    assert not reader.failed
    in_next_run = of_rank(store, 0)
    in_next_run.begin()
    assert in_next_run.cause(patience=0.0) is None


def wait_for(condition: Callable[[], Any]) -> bool:
    deadline = time.monotonic() + 5
    while not condition() and time.monotonic() < deadline:
        time.sleep(0.01)
    return bool(condition())


class Thread(WatchedThread):
    """That of the run, which stands where a test says."""

    def look(self) -> None:
        pass


WAITS_FOR: dict[str, Callable[[], Any]] = {"messages": lambda: Messages(None, {}), "meetings": list}  # nothing


class Switched:
    """A store in whose place another one can be put."""

    def __init__(self, store: Any) -> None:
        self.store = store

    def __getattr__(self, name: str) -> Any:
        return getattr(self.store, name)


def watched(store: Any, rank: int, size: int = 2, **arguments: Any) -> tuple[Failures, RankWatch, Board]:
    """The failures, the watch and the board of a rank; nothing ends the process of the tests."""
    board = Board(store, rank=rank, size=size)
    failures = Failures(board)
    failures.begin()
    thread = arguments.setdefault("thread", Thread())
    messages, meetings = (arguments.pop(name, default) for name, default in WAITS_FOR.items())
    waits = Waits(board, thread=thread, messages=messages, state=lambda: f"state {rank}", meetings=meetings)
    arguments = {"heartbeats": None, "abort": list, "interrupt": pytest.fail, "end": pytest.fail, **arguments}
    watch = RankWatch(failures, board, **arguments)
    watch.open(waits, None, [])
    return failures, watch, board


def test_a_watch_aborts_groups_once_when_another_rank_fails() -> None:
    store, called = dist.HashStore(), []
    failures, watch, _ = watched(store, 0, abort=lambda: called.append("aborted"))
    other, _, _ = watched(store, 1)
    watch.look()
    assert not called
    other.report(TypeError("broken"), "Rank 1", verbatim=True)
    watch.look()
    watch.look()
    assert called == ["aborted"]
    assert failures.failed
    assert str(failures.cause(patience=0.0)) == "broken"


def test_an_interrupt_that_is_lost_while_its_rank_is_woken_is_told_all_the_same() -> None:
    """A backward ended with the error that woke it: who had noticed was blamed, and where Ctrl-C came was not said."""
    store, called = dist.HashStore(), []
    thread = mock.Mock(seconds_still=0.0, waits=True)
    failures, watch, _ = watched(store, 1, thread=thread, abort=lambda: called.append("aborted"))
    other, _, _ = watched(store, 0)
    former = signal.signal(signal.SIGINT, signal.default_int_handler)
    try:
        watch.look([signal.SIGINT])
    finally:
        signal.signal(signal.SIGINT, former)
    with mock.patch.object(rank_watch, "_INTERRUPTED", 0.0):
        watch.look()
    assert called == ["aborted"]
    cause = failures.leave(dist.DistError("gloo: Connection closed by peer"), "Rank 1, action 1B2,", lambda: None)
    assert isinstance(cause, KeyboardInterrupt)
    assert "Rank 1, action 1B2, failed: KeyboardInterrupt" in str(other.cause(patience=0.0))


def test_what_a_watch_has_read_is_known_when_the_store_is_gone() -> None:
    class Store:  # of rank 0, which is about to end
        def __getattr__(self, name: str) -> Any:
            raise dist.DistNetworkError("Connection reset by peer")

    store = dist.HashStore()
    reader, watch, _ = watched(switched := Switched(store), 1)
    failures, _, _ = watched(store, 0)
    thread = threading.Thread(target=failures.leave, args=(ArithmeticError("broken"), "Rank 0", lambda: None))
    thread.start()
    assert wait_for(lambda: watch.look() or reader.is_known)
    thread.join(timeout=20)
    assert not thread.is_alive(), "rank 0 waits until the others have read, and no longer"
    switched.store = Store()
    assert "Rank 0 failed: ArithmeticError: broken" in str(reader.cause(patience=0.0))


def test_rank_0_stays_until_the_others_have_read_the_cause() -> None:
    """The store may end with its process."""
    store = dist.HashStore()
    boards = {rank: Board(store, rank=rank, size=3) for rank in range(3)}
    failures = {rank: Failures(board) for rank, board in boards.items()}
    failures[0].report(ArithmeticError("broken"), "Rank 0")
    leaving = threading.Thread(target=failures[0].linger, args=[boards[0]])
    leaving.start()
    assert "broken" in str(failures[1].cause())
    leaving.join(timeout=0.2)
    assert leaving.is_alive(), "rank 2 has not read it"
    assert "broken" in str(failures[2].cause())
    leaving.join(timeout=1.0)
    assert not leaving.is_alive()
    begin = time.monotonic()
    failures[1].linger(boards[1])
    assert time.monotonic() - begin < 0.1, "only whose process has the store stays"


def test_the_rank_whose_watch_found_the_cause_prints_it() -> None:
    store = dist.HashStore()
    (first, watch, _), (second, other, _) = (watched(store, rank, size=3, abort=list) for rank in (0, 1))
    for failures, each in ((first, watch), (second, other)):
        failures.gone.add(2)
        each.look()
    assert (first.is_first, second.is_first) == (True, False)


def test_rank_0_stays_until_the_others_have_left_with_the_same_error() -> None:
    """The store may end with its process."""
    store = dist.HashStore()
    failures = {rank: Failures(Board(store, rank=rank, size=3)) for rank in range(3)}
    leaving = threading.Thread(target=failures[0].leave_together)
    leaving.start()
    failures[1].leave_together()
    leaving.join(timeout=0.2)
    assert leaving.is_alive(), "rank 2 has not left"
    failures[2].leave_together()
    leaving.join(timeout=1.0)
    assert not leaving.is_alive()


def test_a_rank_that_left_with_an_error_of_all_ranks_has_not_crashed() -> None:
    store = dist.HashStore()
    failures, watch, _ = watched(store, 0, abort=pytest.fail)
    other, _, _ = watched(store, 1)
    other.leave_together()
    failures.gone.add(1)
    watch.look()
    assert not failures.is_known


def test_a_rank_that_waits_for_a_rank_that_left_before_the_first_run_ends() -> None:
    """Nothing is known about the collectives of a rank before its first run."""
    store = dist.HashStore()
    board = Board(store, rank=0, size=2)
    failures, other = Failures(board), Failures(Board(store, rank=1, size=2))
    for each in (failures, other):
        each.begin()
    ends: dict[str, Any] = {"abort": list, "interrupt": pytest.fail, "end": pytest.fail}
    watch = RankWatch(failures, board, thread=Blocked(), heartbeats=None, **ends)
    for _ in range(5):  # the thread waits for a second more at each look
        watch.look()
    assert not failures.is_known
    other.leave_together()
    watch.look()
    assert "The run has ended on rank 1, but other ranks are still waiting." in str(failures.cause(patience=0.0))


def test_a_rank_that_has_gone_is_named_by_the_roll_call() -> None:
    store = dist.HashStore()
    failures, _, _ = watched(store, 0, size=3)
    other, _, _ = watched(store, 1, size=3)  # nobody looks
    _, healthy, _ = watched(store, 2, size=3)
    watcher = Watcher(healthy.look, interval=0.05)
    watcher.start()
    cause = failures.leave(dist.DistError("gloo: Connection reset by peer"), "Rank 0 (stage 0)", lambda: None)
    watcher.close()
    assert "Killed or crashed without an error message: rank 1 (on " in str(cause)
    assert "rank 2" not in str(cause)
    assert "Rank 0 (stage 0) failed: DistError: gloo: Connection reset by peer" in str(cause)
    assert str(other.cause(patience=0.0)) == str(cause)


def test_a_rank_that_has_gone_is_named_although_nobody_waits_for_it() -> None:
    """Of another machine no process is seen; who saves, or waits for the store, sees that a connection is closed."""
    store, lost, aborted = dist.HashStore(), [0], []
    failures, watch, _ = watched(store, 0, size=3, num_lost=lambda: lost[0], abort=lambda: aborted.append("aborted"))
    _, healthy, _ = watched(store, 1, size=3)
    _, going, _ = watched(store, 2, size=3)
    for own, is_gone in ((1, False), (2, True)):  # a group that is closed on purpose, and a process that ends
        lost[0] = own
        watch.look()
        for _ in range(2):  # rolls
            assert not aborted
            for each in (healthy, *([] if is_gone else [going])):
                each.look()
            with mock.patch.object(rank_watch, "_ANSWER", 0.0):
                watch.look()
    assert aborted
    assert failures.gone == {2}
    assert str(failures.cause(patience=0.0)).startswith("Killed or crashed without an error message: rank 2 (on ")


def test_a_rank_that_is_busy_or_not_in_the_run_has_not_gone() -> None:
    """A connection may be closed that says nothing about the ranks, while one of them lets no other thread run."""
    for late in ("answers the second call", "sends a heartbeat", "is between two runs"):
        store, lost = dist.HashStore(), [0]
        _, watch, board = watched(store, 0, num_lost=lambda lost=lost: lost[0], abort=pytest.fail)
        _, answers, other = watched(store, 1)
        if late == "is between two runs":
            store.set(board.key("begun"), "0 ")
        lost[0] = 1
        watch.look()
        with mock.patch.object(rank_watch, "_ANSWER", 0.0):
            watch.look()  # it has not answered
            if late == "answers the second call":
                answers.look()
            elif late == "sends a heartbeat":
                other.write()
            for _ in range(3):
                watch.look()


def test_a_rank_that_goes_while_the_roll_is_called_is_missed() -> None:
    store, lost, aborted = dist.HashStore(), [1], []
    failures, watch, _ = watched(store, 0, num_lost=lambda: lost[0], abort=lambda: aborted.append("aborted"))
    _, going, _ = watched(store, 1)
    lost[0] = 2
    watch.look()
    going.look()
    lost[0] = 3
    watch.look()
    with mock.patch.object(rank_watch, "_ANSWER", 0.0):
        for _ in range(4):
            watch.look()
    assert aborted
    assert failures.gone == {1}


def test_a_roll_that_could_not_be_called_before_is_called_where_it_is_heard() -> None:
    """The store was silent, and answers again."""
    store = dist.HashStore()
    failures, _, _ = watched(store, 0)
    _, healthy, _ = watched(store, 1)
    failures.is_store_silent = True
    watcher = Watcher(healthy.look, interval=0.05)
    watcher.start()
    cause = failures.leave(dist.DistError("gloo: Connection reset by peer"), "Rank 0", lambda: None)
    watcher.close()
    assert "All other ranks are still running: rank 1 at " in str(cause)


def test_a_rank_that_has_not_begun_the_run_is_not_said_to_be_killed() -> None:
    failures, _, _ = watched(dist.HashStore(), 0)
    cause = failures.leave(dist.DistError("gloo: Timed out waiting 8000ms for recv"), "Rank 0", lambda: None)
    assert str(cause).startswith("These ranks have already ended this run or are running other code: rank 1 (on ")


def test_a_timeout_says_where_every_rank_is() -> None:
    store = dist.HashStore()
    failures, _, _ = watched(store, 0)
    _, sleeping, _ = watched(store, 1, thread=WatchedThread())
    watcher = Watcher(sleeping.look, interval=0.05)
    watcher.start()
    cause = failures.leave(dist.DistError("gloo: Timed out waiting 8000ms for recv"), "Rank 0", lambda: None)
    watcher.close()
    assert "All other ranks are still running: rank 1 at " in str(cause)
    assert "test_a_timeout_says_where_every_rank_is (test_failure.py:" in str(cause)


def stuck(how: str) -> tuple[int | None, float, str]:
    """Rank 0 waits for rank 1, which has failed or finished and keeps its connections open; until rank 0 is ended."""
    rank = dist.get_rank()
    assert dist.group.WORLD is not None
    store = dist.group.WORLD.get_group_store()
    began, text = time.monotonic(), io.StringIO()
    codes: list[int] = []
    own = store.clone()

    def end(code: int) -> None:
        codes.append(code)
        own.set("ended", "1")

    failures, watch, board = watched(own, rank, thread=WatchedThread(), interrupt=lambda error: False, end=end)
    if rank == 1:
        if how == "failed":
            failures.report(ArithmeticError("broken"), "Rank 1")
        else:
            board.finish(Waiting(finished=True))
        store.wait(["ended"])
        dist.send(torch.zeros(1), dst=0)
        return None, 0.0, ""
    watcher = Watcher(watch.look, interval=0.1)
    with contextlib.redirect_stderr(text):
        watcher.start()
        dist.recv(torch.zeros(1), src=1)
        watcher.close()
    return codes[0], time.monotonic() - began, text.getvalue()


@pytest.mark.rows(67)
@pytest.mark.parametrize("how", ["failed", "finished"])
def test_a_rank_that_waits_in_vain_is_ended_with_the_cause(ranks: Pools, how: str) -> None:
    """Where nothing else wakes a rank that waits in gloo while connections are open, its process ends.

    This takes 6 s, or a few more on a busy machine. The receive itself would time out after 30 minutes.
    """
    code, seconds, text = ranks(2).run(stuck, how)[0]
    assert code == 1
    assert seconds < 30
    assert ("Rank 1 failed: ArithmeticError: broken" if how == "failed" else "The run has ended on rank 1") in text
    assert "This rank exits now. It was at recv (distributed_c10d.py:" in text


def test_a_rank_that_talks_to_nobody_is_interrupted_and_one_that_saves_is_not() -> None:
    """It may stand in the user's code for hours; what is written is of use although the run has failed."""
    for is_saving in (False, True):
        store, told, codes = dist.HashStore(), [], []
        thread = type("Saves", (Thread,), {"is_saving": is_saving})()
        _, watch, _ = watched(store, 0, thread=thread, interrupt=told.append, end=codes.append)
        other, _, _ = watched(store, 1)
        other.report(ArithmeticError("broken"), "Rank 1")
        watch.look()
        assert not told
        watch._known_at -= 2
        watch.look()
        watch.look()
        assert [str(each) for each in told] == ([] if is_saving else ["Rank 1 failed: ArithmeticError: broken"])
        watch._known_at -= 2
        watch.look()
        assert codes == ([] if is_saving else [1]), "it has not come to the handler"


def register(store: Any, rank: int, pid: int, size: int = 2) -> None:
    """Write what a rank writes that begins a run in this process on this machine."""
    host, machine, _ = describe_process().split()
    with mock.patch.object(board_module, "describe_process", return_value=f"{host} {machine} {pid}"):
        Board(store, rank=rank, size=size).begin()


def test_the_process_of_a_rank_that_ends_without_a_word_is_noticed() -> None:
    store, aborted = dist.HashStore(), []
    failures, watch, _ = watched(store, 0, abort=lambda: aborted.append("aborted"))
    with subprocess.Popen([sys.executable, "-c", "input()"], stdin=subprocess.PIPE) as process:
        register(store, 1, process.pid)
        watch.look()
        assert watch.descriptors()
        assert not aborted
        process.kill()
        assert wait_for(lambda: watch.look() or aborted)
    text = f"Killed or crashed without an error message: rank 1 (on {socket.gethostname()}). [LH221]"
    assert str(failures.cause(patience=0.0)) == text
    other, _, _ = watched(store, 2)
    assert str(other.cause(patience=0.0)) == text, "it is written down for all"


class Process:
    """Another one on this machine, which is rank 1 of a run."""

    def __init__(self, store: Any) -> None:
        self.process = subprocess.Popen([sys.executable, "-c", "input()"], stdin=subprocess.PIPE)
        register(store, 1, self.process.pid)

    def state(self) -> str:
        """As the kernel names it: T if it is stopped."""
        return Path(f"/proc/{self.process.pid}/stat").read_text().rpartition(")")[2].split()[0]

    def end(self) -> None:
        self.process.kill()
        self.process.communicate()


def test_a_process_that_ends_when_the_cause_is_known_wakes_the_watch_once() -> None:
    """What can be read wakes it: it looked as often as it could, beside a rank that was saving."""
    store = dist.HashStore()
    failures, watch, _ = watched(store, 0)
    other = Process(store)
    watch.look()
    failures.report(ArithmeticError("broken"), "Rank 0")
    watch.look()
    assert watch.descriptors()
    other.end()
    assert wait_for(lambda: watch.look() or not watch.descriptors())
    assert failures.gone == {1}


def test_a_process_that_is_stopped_goes_on_when_the_others_end() -> None:
    store = dist.HashStore()
    failures, watch, _ = watched(store, 0)
    other = Process(store)
    watch.look()
    other.process.send_signal(signal.SIGSTOP)
    assert wait_for(lambda: other.state() == "T")
    failures.report(ArithmeticError("broken"), "Rank 0")
    watch.look()
    assert wait_for(lambda: other.state() != "T"), "nobody else might end it"
    other.end()
    watch.close()


def test_a_store_that_does_not_answer_ends_who_waits() -> None:
    """The process that has it is stopped, or its host is gone: whoever asks waits for ever."""

    class Silent:
        def __getattr__(self, name: str) -> Any:
            pytest.fail("it would wait for ever")

    aborted, codes = [], []
    store = Switched(dist.HashStore())
    failures, watch, board = watched(store, 1, abort=lambda: aborted.append("aborted"), end=codes.append)
    board.learn_host(0, "node7")
    store.store = Silent()
    watch.end_without_store()
    assert not aborted, "who is stopped goes on first"
    assert failures.is_store_silent
    watch.end_without_store()
    assert aborted
    first = of_rank(Silent(), 0, size=2)  # of what launched the ranks
    first.is_store_silent = True
    first.linger(Board(Silent(), rank=0, size=2))
    text = "The store through which ranks exchange messages does not respond. Either rank 0 (on node7) or the launcher"
    assert str(failures.cause(patience=0.0)).startswith(text)
    cause = failures.leave(dist.DistError("gloo: Connection closed by peer"), "Rank 1", lambda: None)
    assert str(cause).startswith(text)
    failures.is_leaving = False
    watch._known_at -= 4
    watch.end_without_store()
    assert codes == [1]


def test_a_store_that_answers_again_has_why_all_end() -> None:
    """Its process was let go on: the others took the one that found out, and ended, for killed."""
    store = dist.HashStore()
    failures, watch, _ = watched(store, 1)
    watch.end_without_store()
    watch.look()
    assert not failures.is_store_silent
    other, _, _ = watched(store, 2)
    text = "The store through which ranks exchange messages does not respond. Either rank 0 (on "
    assert str(other.cause(patience=0.0)).startswith(text)


class Closed(io.StringIO):
    """The other end of the pipe is gone."""

    def write(self, text: str) -> int:
        raise BrokenPipeError


def test_a_rank_ends_although_nobody_can_read_why() -> None:
    """What launched the ranks has ended, and with it what read their output."""
    codes: list[int] = []
    store = dist.HashStore()
    _, watch, _ = watched(store, 0, end=codes.append)
    watched(store, 1)[0].report(ArithmeticError("broken"), "Rank 1")
    watch.look()
    watch._known_at -= 4
    with contextlib.redirect_stderr(Closed()):
        watch.look()
    assert codes == [1]


def test_who_is_known_to_have_ended_is_named_and_not_who_answers_late() -> None:
    store = dist.HashStore()
    failures, _, _ = watched(store, 0, size=3)
    watched(store, 1, size=3)
    watched(store, 2, size=3)  # a busy machine
    failures.gone.add(1)
    cause = failures.leave(dist.DistError("gloo: Connection reset by peer"), "Rank 0", lambda: None)
    assert "rank 1 (on " in str(cause)
    assert "rank 2" not in str(cause)


@pytest.mark.parametrize(
    ("error", "expected"),
    [
        (RuntimeError("[../gloo/transport/tcp/pair.cc:534] Connection closed by peer"), True),
        (dist.DistBackendError("NCCL communicator was aborted"), True),
        (FileNotFoundError("/data/gloo/images"), False),
        (KeyError("NCCL_SOCKET_IFNAME"), False),
    ],
)
def test_errors_of_the_user_do_not_say_that_another_rank_has_left(error: Exception, expected: bool) -> None:
    assert is_transport(error) == expected


def test_a_process_that_ends_after_its_run_is_no_failure() -> None:
    store = dist.HashStore()
    failures, watch, _ = watched(store, 0, abort=pytest.fail)
    _, _, other = watched(store, 1)
    with subprocess.Popen([sys.executable, "-c", "pass"]) as process:
        register(store, 1, process.pid)
        watch.look()
        other.finish(Waiting(finished=True))
    for _ in range(3):
        watch.look()
    assert failures.cause(patience=0.0) is None


@pytest.mark.parametrize("is_told", [False, True])
def test_rank_0_may_go_first_when_the_run_is_over(is_told: bool) -> None:
    """The store goes with it, at once: others, which take longer to tidy up, took it for killed."""

    class Gone:
        def __getattr__(self, name: str) -> Any:
            raise dist.DistNetworkError("Connection reset by peer")

    store = Switched(dist.HashStore())
    failures, watch, _ = watched(store, 1, abort=pytest.fail)
    _, _, first = watched(store, 0)
    if is_told:
        first.finish(Waiting(finished=True))
    else:
        failures.is_over = True
    watch.look()
    store.store = Gone()
    failures.gone.add(0)
    for _ in range(3):
        watch.look()
    assert not failures.failed


def test_processes_elsewhere_are_not_taken_for_ones_of_this_machine() -> None:
    ends = ProcessEnds()
    ends.add(3, "other-host 1234/pid:[5] 1")
    assert not ends.descriptors()
    ends.close()


class Counting:
    """A store that counts what it is asked."""

    def __init__(self, store: Any) -> None:
        self.store, self.requests = store, 0

    def __getattr__(self, name: str) -> Any:
        self.requests += 1
        return getattr(self.store, name)


def test_a_rank_that_ends_while_it_begins_hides_no_other() -> None:
    store = dist.HashStore()
    _, watch, board = watched(store, 0, size=4)
    store.set(board.key("record/1"), encode(board.own))  # it has written no more
    register(store, 2, os.getpid(), size=4)
    watch.look()
    assert len(watch.descriptors()) == 1
    watch.close()


@pytest.mark.parametrize("size", [64, 4096])
def test_a_look_asks_as_little_of_many_ranks_on_other_machines_as_of_few(size: int) -> None:
    store = Switched(dist.HashStore())
    _, watch, board = watched(store, 1, size=size)
    for rank in range(size):
        if rank != 1:
            with mock.patch.object(
                board_module, "describe_process", return_value=f"host{rank // 8} m{rank // 8} {rank}"
            ):
                Board(store, rank=rank, size=size).begin()
    register(store, 2, os.getpid(), size=size)
    store.store = counting = Counting(store.store)
    watch.look()
    assert len(watch.descriptors()) == 1
    first, counting.requests = counting.requests, 0
    board.over(counting.store).raise_flag("something")
    watch.look()
    assert first <= 16
    assert counting.requests <= 8


class Blocked(Thread):
    """Stands in a wait, for long."""

    def look(self) -> None:
        self.waits = self.awaits = True
        self.seconds_still += 1.0


def test_a_watch_writes_over_its_own_store() -> None:
    """The store of the run's thread is locked while that waits for a key."""

    class Locked:
        def __getattr__(self, name: str) -> Any:
            pytest.fail("the watcher would wait")

    store, aborted = dist.HashStore(), []
    board = Board(Locked(), rank=0, size=2)
    watched_board = board.over(store)
    watched_board.begin()
    failures = Failures(board)
    ends: dict[str, Any] = {"abort": lambda: aborted.append("aborted"), "interrupt": pytest.fail, "end": pytest.fail}
    watch = RankWatch(failures, watched_board, thread=Thread(), heartbeats=None, **ends)
    waits = Waits(watched_board, thread=Thread(), messages=lambda: Messages(None, {}), state=str)
    watch.open(waits, None, [mock.Mock(look=lambda: Verdict(DESYNCHRONIZED, "differs", exception="ValueError"))])
    watch.look()
    assert aborted
    assert isinstance(failures.cause(patience=0.0), ValueError)
    assert "cause" in str(store.list_keys()), "it is written down for all"


def test_ranks_that_wait_for_each_other_are_found_by_the_first_of_them_at_the_second_look() -> None:
    store = dist.HashStore()
    moved = [1, 2]
    awaited = [lambda: Messages(("a", 1, moved[0]), {"b": 0}), lambda: Messages(("b", 0, 1), {"a": 0})]
    each = [watched(store, rank, thread=Blocked(), messages=awaited[rank], abort=list) for rank in (0, 1)]

    def look() -> list[str]:
        for _, watch, _ in each:
            watch.look()
        return [str(failures.cause(patience=0.0)) for failures, *_ in each]

    assert look() == ["None", "None"], "rank 0 has not heard of rank 1"
    assert look() == ["None", "None"], "a suspicion"
    moved[0] = 2  # rank 0 has come to another wait in the meantime
    assert look() == ["None", "None"], "a suspicion again"
    texts = look()
    assert texts[0] == texts[1]
    assert "rank 0 waits for rank 1 in message 2 (a), at" in texts[0]
    assert "(state 1)" in texts[0]


@pytest.mark.parametrize("sleep", [0.0, 4.0, 600.0])
def test_after_sigterm_a_rank_that_stands_still_ends_all(sleep: float) -> None:
    store = dist.HashStore()

    class Sleeps(Thread):
        seconds_still = 100.0

        def look(self) -> None:
            self.seconds_still = 100.0

        def seconds_of_sleep(self) -> float:
            return sleep

    told: list[Exception] = []
    each = [
        watched(store, 0, thread=Blocked(), messages=lambda: Messages(("a", 1, 1), {})),
        watched(store, 1, thread=Sleeps(), interrupt=told.append),
    ]

    def look() -> list[str]:
        for _, watch, _ in each:
            watch.look()
        return [str(failures.cause(patience=0.0)) for failures, *_ in each]

    def wait(seconds: float) -> None:
        for _, watch, _ in each:
            assert watch._sigterm_at is not None
            watch._sigterm_at -= seconds

    for _ in range(5):
        assert look() == ["None", "None"], "it may compute"
    each[0][2].raise_flag(TERMINATE)
    assert look() == ["None", "None"]
    if sleep < 20:
        wait(15)
        assert [look() for _ in range(3)] == [["None", "None"]] * 3, "it may upload a file"
        wait(30)
    look()
    look()
    text = "The batch did not end after SIGTERM: rank 1 is stuck at"
    assert text in look()[0]
    assert text in str(told[0]), "it hears of it where it stands"


@pytest.mark.skipif(
    sys.version_info < (3, 11) or platform.machine() not in ("x86_64", "aarch64") or sys.platform != "linux",
    reason="it is not told how long a thread sleeps",
)
def test_how_long_a_thread_sleeps_is_read_from_the_kernel() -> None:
    does = {
        "sleeps": lambda: time.sleep(3.0),
        "waits": lambda: released.wait(3.0),
        "computes": lambda: [sum(range(1000)) for _ in iter(released.is_set, True)],
    }
    released, numbers = threading.Event(), dict.fromkeys(does, 0)

    def run(name: str) -> None:
        numbers[name] = threading.get_native_id()
        does[name]()

    threads = [threading.Thread(target=run, args=(name,), daemon=True) for name in does]
    for thread in threads:
        thread.start()
    assert wait_for(lambda: all(numbers.values()) and seconds_of_sleep(numbers["sleeps"]) > 0.0)
    time.sleep(0.2)
    assert 2.0 < seconds_of_sleep(numbers["sleeps"]) < 2.9
    assert seconds_of_sleep(numbers["waits"]) == seconds_of_sleep(numbers["computes"]) == 0.0
    released.set()
    for thread in threads[1:]:
        thread.join()
    assert seconds_of_sleep(numbers["waits"]) == 0.0, "it has ended"


def test_a_rank_that_meets_others_over_the_store_is_part_of_a_circle() -> None:
    """One waits for all to come to a step that is new to it, the other one is in a barrier that nobody comes to."""
    store = dist.HashStore()
    messages = [lambda: Messages(None, {}), lambda: Messages(("a", 0, 1), {})]
    meetings = [lambda: [Meeting("both", [0, 1], 1, "training_step")], lambda: [Meeting("both", [0, 1], 0)]]
    each = [
        watched(store, rank, thread=thread, messages=messages[rank], meetings=meetings[rank])
        for rank, thread in enumerate((Thread(), Blocked()))
    ]
    for _ in range(4):
        for _, watch, _ in each:
            watch.look()
    text = str(each[0][0].cause(patience=0.0))
    assert "rank 0 waits for rank 1 in `training_step` of ranks 0, 1, at" in text
    assert "rank 1 waits for rank 0 in message 1 (a)" in text


def threads_of(*names: str) -> set[threading.Thread]:
    return {thread for thread in threading.enumerate() if thread.name in names}


def watchers() -> set[threading.Thread]:
    return threads_of(THREAD_NAME)


def test_a_watcher_goes_on_after_an_error(capsys: pytest.CaptureFixture[str]) -> None:
    looks = []

    def look(signals: object) -> None:
        looks.append("look")
        raise ValueError("no process group")

    watcher = Watcher(look, interval=0.01)
    watcher.start()
    assert wait_for(lambda: len(looks) > 3)
    watcher.close()
    assert capsys.readouterr().err.count("ValueError: no process group") == 1


def test_a_look_that_does_not_end_is_noticed_by_another_thread() -> None:
    go_on, noticed = threading.Event(), []
    before = threads_of(GUARD_NAME)
    watcher = Watcher(
        lambda signals: go_on.wait(10), interval=0.02, patience=0.1, stuck=lambda: noticed.append(time.monotonic())
    )
    began = time.monotonic()
    watcher.start()
    assert wait_for(lambda: len(noticed) > 1)
    assert noticed[0] - began >= 0.1
    go_on.set()
    watcher.close()
    assert wait_for(lambda: threads_of(GUARD_NAME) == before)
    noticed.clear()
    quick = Watcher(lambda signals: None, interval=0.01, patience=2.0, stuck=lambda: noticed.append(0.0))
    quick.start()
    time.sleep(0.3)
    quick.close()
    assert not noticed


def test_a_thread_that_writes_a_checkpoint_does_not_wait_for_other_ranks() -> None:
    """A disk may take its time to have the bytes: whose run fails meanwhile was ended in the middle."""
    package = Path(rank_watch.__file__).parents[2]
    where = {
        "checkpoint/storage/atomic.py": False,
        "pipeline_parallel/stage.py": False,
        "pipeline_parallel/p2p.py": True,
    }
    for file, expected in where.items():
        stack = [StackCall(compile("0", str(package / file), "exec"), (0, 0), None)]
        assert may_wait(stack) == expected


def test_a_watcher_that_is_closed_looks_no_more_and_can_be_started_again() -> None:
    before, looks = watchers(), []
    watcher = Watcher(lambda signals: looks.append("look"), interval=60.0)
    watcher.close()  # without a thread
    watcher.wake()
    watcher.start()
    watcher.wake()
    assert wait_for(lambda: looks), "it is woken at once, not after the interval"
    watcher.close()
    assert watchers() <= before, "and so it ends"
    looks.clear()
    watcher.wake()
    watcher.start()
    assert not looks
    watcher.close()


def test_a_watcher_hears_of_a_signal_while_the_main_thread_waits_and_not_of_those_of_children() -> None:
    heard: list[int] = []

    def look(numbers: Collection[int]) -> None:
        """Note the signal of this test only. Data loaders of torch install a handler of SIGCHLD in the process."""
        heard.extend(number for number in numbers if number == signal.SIGUSR2)

    watcher = Watcher(look, interval=0.05)
    handled: list[int] = []
    former = signal.signal(signal.SIGUSR2, lambda number, _: handled.append(number))
    watcher.start()
    try:
        child = os.fork()
        if child == 0:
            os.kill(os.getpid(), signal.SIGUSR2)
            os._exit(0)
        os.waitpid(child, 0)
        time.sleep(0.2)
        assert not heard
        os.kill(os.getpid(), signal.SIGUSR2)
        assert wait_for(lambda: heard and handled)  # the watcher may be faster than the handler
        assert heard == handled == [signal.SIGUSR2]
    finally:
        watcher.close()
        signal.signal(signal.SIGUSR2, former)
    assert signal.set_wakeup_fd(-1) == -1


def test_leaving_reports_the_first_failure_and_returns_it_to_the_others() -> None:
    store = dist.HashStore()
    first, second, third = (of_rank(store, rank) for rank in range(3))
    seen: list[str] = []

    def abandon() -> None:
        seen.append(str(of_rank(store, 0).cause(patience=0.0)))

    assert first.leave(ArithmeticError("broken"), "Rank 1, stage 1", abandon) is None
    for failures, error in ((second, dist.DistError("connection closed")), (third, KeyError("late"))):
        cause = failures.leave(error, "Rank 0", abandon)
        assert type(cause) is RuntimeError
        assert str(cause) == "Rank 1, stage 1 failed: ArithmeticError: broken"
        assert not failures.failed
    assert seen == ["Rank 1, stage 1 failed: ArithmeticError: broken"] * 3, "reported before anything is closed"


def test_who_leaves_twice_without_a_store_tells_the_same() -> None:
    """The text stood in itself: the error of the step is raised again as that of the run."""

    class Gone:
        def __getattr__(self, name: str) -> Any:
            raise dist.DistNetworkError("Broken pipe")

    board = Board(Gone(), rank=1, size=2)
    failures = Failures(board)
    board.learn_host(0, "node7")
    first = failures.leave(dist.DistError("gloo: Connection closed by peer"), "Rank 1, action 0F1", lambda: None)
    assert first is not None
    assert str(first).startswith(
        "The store through which ranks exchange messages is gone. Either rank 0 (on node7) or the launcher has exited."
    )
    again = failures.leave(first, "Rank 1", lambda: None)
    assert str(again) == str(first)


def test_leaving_waits_for_the_cause_of_a_transport_error_only() -> None:
    store = dist.HashStore()
    with mock.patch.object(time, "sleep") as slept:
        assert of_rank(dist.HashStore(), 0).leave(KeyError("own"), "Rank 0", lambda: None) is None
    assert not slept.called, "an error of this rank's own is reported at once"
    late = threading.Timer(0.3, of_rank(store, 1).report, (ValueError("broken"), "Rank 1"))
    late.start()
    cause = of_rank(store, 0).leave(RuntimeError("[gloo] closed"), "Rank 0", lambda: None)
    late.join()
    assert isinstance(cause, ValueError)


def test_leaving_with_an_error_of_every_rank_passes_on_its_text() -> None:
    store = dist.HashStore()
    first, second = (of_rank(store, rank) for rank in range(2))
    assert first.leave(WrongUseError("do not"), "Rank 0", lambda: None, verbatim=True) is None
    cause = second.leave(dist.DistError("closed"), "Rank 1", lambda: None)
    assert type(cause) is ValueError
    assert str(cause) == "do not"


def left() -> tuple[bool, str]:
    """A rank that waits for one that has left fails at once."""
    dist.init_process_group("gloo")
    assert dist.group.WORLD is not None
    failures = of_rank(dist.group.WORLD.get_group_store(), dist.get_rank())
    tensor = torch.zeros(1)
    dist.barrier()  # everyone is connected
    cause: Exception | None = None
    try:
        if dist.get_rank() == 1:
            raise ArithmeticError("broken")
        dist.recv(tensor, src=1)
    except Exception as error:
        cause = failures.leave(error, f"Rank {dist.get_rank()}", lambda: None)
    return dist.is_initialized(), str(cause)


def test_leaving_closes_the_groups_of_those_who_wait(ranks: Pools) -> None:
    assert ranks(2, lightning=True).run(left, timeout=30) == [
        (False, "Rank 1 failed: ArithmeticError: broken"),
        (False, "None"),
    ]


SLOW_LOOK = """
import datetime, threading, torch.distributed as dist
from lightning_hybrid.distributed.watch.watcher import Watcher
store, looks = dist.TCPStore("127.0.0.1", 0, is_master=True, wait_for_workers=False), threading.Event()
def look(signals):
    looks.set()
    store.wait(["never"], datetime.timedelta(seconds=2.5))
watcher = Watcher(look)
watcher.start()
watcher.wake()
looks.wait()
watcher.close()
"""


def test_a_process_ends_well_whose_watcher_still_waits_for_the_store() -> None:
    """Over a link with delay a look takes a second: "terminate called without an active exception", and SIGABRT."""
    done = subprocess.run([sys.executable, "-c", SLOW_LOOK], capture_output=True, text=True, check=False)
    assert done.returncode == 0, done.stderr
